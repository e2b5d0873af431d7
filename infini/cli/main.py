"""The `infini` command: reads the verb, composes the configuration, and calls that verb's function only."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from infini.cli.keys import is_read_by, refuse_unread, refuse_unread_of_report
from infini.commands import Verb, verbs
from infini.config.schema import OPTIONAL_GROUPS, groups, root_defaults
from infini.config.words import bracketed, check_lengths, key_of
from infini.errors import InputError, did_you_mean, nearest, too_large
from infini.system.plotting import drawing_without_a_screen
from infini.system.streams import OUTPUT, Streams, robust_streams

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from infini.cli.sweep import SweepProgress
    from infini.config.schema import Config

USAGE_ERROR = 2
INTERRUPTED = 130
UNUSABLE_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
)
"""Errors of a disk that is full or not writable, or of an impossible path: the user can fix them."""
SIZE_ERRORS = (MemoryError, RuntimeError, ValueError, TypeError)
"""What torch and numpy raise for a tensor that fits no memory, besides much else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit code; 2 for what the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = verbs().get(arguments[0]) if arguments else None
    # Work continues when nobody reads its output any more; a command that only prints stops.
    with robust_streams(patient=verb is not None and not verb.needs_reader) as streams, drawing_without_a_screen():
        return _answer(arguments, streams)


def _answer(arguments: list[str], streams: Streams) -> int:
    """Runs a command line, and says in one line what the user can fix."""
    try:
        with _termination_as_interrupt():
            code = _dispatch(arguments)
            streams.finish()
            return code
    except InputError as error:
        print(f"infini: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except SIZE_ERRORS as error:
        if (said := too_large(error)) is None:
            raise
        print(f"infini: error: {said}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:
            return 0
        if (said := describe_os_error(error)) is None:
            raise
        print(f"infini: error: {said}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt as stopped:
        verb = verbs().get(arguments[0]) if arguments else None
        said = str(stopped) or (verb.if_stopped if verb is not None else "")
        print(f"infini: interrupted{'; ' * bool(said)}{said}", file=sys.stderr)
        return INTERRUPTED


def describe_os_error(error: OSError) -> str | None:
    """One line for a disk or a path that cannot be used; None where the error is a defect of ours."""
    if error.filename == OUTPUT:
        return f"{OUTPUT}: {error.strerror}; what was printed is not complete"
    # A folder that the system refuses to make, as one in /proc, is the user's; any other missing file is a defect.
    refused = traceback.extract_tb(error.__traceback__)[-1].name in ("mkdir", "makedirs")
    if error.errno not in UNUSABLE_DISK and not refused:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; nothing that was there before is lost"


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM, which a scheduler sends before it kills, stops a run like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _completion(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print('infini completion bash (or zsh): a script for the shell; eval "$(infini completion bash)" in ~/.bashrc')
        return 0
    from infini.cli.completion import script

    print(script(" ".join(arguments)), end="")
    return 0


def _dispatch(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] == "help":
        # `infini help train` is `infini train --help`.
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments == ["--version"]:
        from infini import __version__

        print(f"infini {__version__}")
        return 0
    if arguments[0] == "completion":
        return _completion(arguments[1:])
    for word in arguments:
        # Records and checkpoints are UTF-8, and hold the command line.
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in word):
            raise InputError(f"{word.encode(errors='replace').decode()!r}: is not UTF-8 text")
        if "\0" in word:
            raise InputError(f"{word!r}: holds a zero byte")
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"the working folder is not there any more ({error.strerror}); change to another") from error
    name, rest = arguments[0], arguments[1:]
    if name not in verbs():
        known = [*verbs(), "completion", "help"]
        raise InputError(f"{name!r}: no such verb; allowed: {', '.join(known)}{did_you_mean(name, known)}")
    verb = verbs()[name]
    if {"-h", "--help"} & set(rest):
        from infini.cli.help import verb_help

        print(verb_help(verb, [*verb.fixed, *(bracketed(word) for word in rest if "=" in word)]))
        return 0
    multirun = bool({"-m", "--multirun"} & set(rest))
    words = [word for word in rest if word not in ("-m", "--multirun")]
    for word in words:
        if word.startswith("-"):
            options = ("-m", "--multirun", "-h", "--help")
            hint = _without_dashes(word, words) or did_you_mean(word, options)
            raise InputError(f"{word!r}: no such option; allowed: {', '.join(options)}{hint}")
    _refuse_bare_words(verb, words)
    refuse_unread(name, words)
    check_lengths(words)
    if multirun:
        return _sweep(verb, words)
    return _run(verb, words)


def _without_dashes(word: str, words: Sequence[str]) -> str:
    """`; did you mean task=pg19?` for `--task pg19` and for `--task=pg19`."""
    key, separator, value = word.lstrip("-").partition("=")
    following = words[words.index(word) + 1 :][:1]
    if not separator and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    known = (*groups(), *OPTIONAL_GROUPS, *root_defaults())
    if value and key in known:
        return f"; did you mean {key}={value}?"
    return "; keys are written without dashes, as task=pg19" if separator or key in known else ""


def _refuse_bare_words(verb: Verb, words: Sequence[str]) -> None:
    """Raise InputError for a word that is no setting where there must be settings, with what was likely meant."""
    for place, word in enumerate(words):
        # No key has a space in it: what has one before its first `=` is text.
        if word.startswith("~") or ("=" in word and not re.search(r"\S\s", word.partition("=")[0])):
            continue
        meant = _meant(verb, word, words[place + 1 :])
        if verb.takes_words and not (meant and "report" in verb.groups):
            continue
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"{word!r}: not a setting; write key=value{hint}")


def _meant(verb: Verb, word: str, following: Sequence[str]) -> str:
    """The setting that a word without `=` stands for: `report=table3_passkey` for `table3`. "" where none is near."""
    if "prompt" in verb.keys:
        return f"prompt={shlex.quote(word)}"
    choices = groups()
    if word in (*choices, *OPTIONAL_GROUPS, *root_defaults()) and following and "=" not in following[0]:
        return f"{word}={following[0]}"
    if verb.takes_words:
        first, others = ["report", "experiment"], []
    else:
        known = ("report", "experiment", "suite", "task", "model", "scale")
        # Training and evaluation read a report, too, which nobody types there.
        shown = (*verb.groups, *verb.choices, *(["experiment"] if "report" in verb.groups else []))
        first = [group for group in known if group in shown]
        others = list(choices)
    for group in (*first, *others):
        begins = [option for option in choices.get(group, []) if len(word) > 2 and option.startswith(word)]
        if verb.reads(group) and (word in begins or len(begins) == 1):
            return f"{group}={word if word in begins else begins[0]}"
    near = None if verb.takes_words else nearest(word, choices[first[0]])
    return f"{first[0]}={near}" if near else ""


def _note_replaced(words: Sequence[str]) -> None:
    """Says which settings another one of the same key replaces: of several the last holds."""
    last = {key: word for word in words if (key := key_of(word))}
    for word in dict.fromkeys(words):
        if (key := key_of(word)) and last[key] != word and not word.startswith("~"):
            print(f"{word}: given again as {last[key]}, which holds", file=sys.stderr)


def _function(verb: Verb) -> Callable[..., int | None]:
    run: Callable[..., int | None] = importlib.import_module(verb.module).run
    return run


def _run(verb: Verb, words: Sequence[str]) -> int:
    """Run a verb on the words behind it."""
    from infini.config.compose import compose

    taken = verb.read([bracketed(word) for word in words])
    overrides, extra = [*verb.fixed, *taken.overrides], dict(taken.extra)
    cfg = compose([*overrides, *taken.first])
    _check(verb, cfg, overrides)
    for word in overrides:
        if key_of(word).startswith("hydra"):
            raise InputError(f"{word}: Hydra runs sweeps alone; add -m")
    if "seeds" in extra and not extra["seeds"]:
        extra["seeds"] = [cfg.seed]
    _note_replaced(overrides)
    return _function(verb)(cfg, overrides, **extra) or 0


def _check(verb: Verb, cfg: Config, overrides: Sequence[str]) -> None:
    """Raise InputError for what can be known to be wrong before any work."""
    name = verb.name
    if "report" in verb.groups:
        from infini.report.load import load_report

        report = load_report(cfg.report)
        if is_read_by(name, report):
            refuse_unread_of_report(name, report, overrides)
        elif name == "reproduce":
            return
        if cfg.scale.name not in (getattr(report, "settings", None) or [cfg.scale.name]):
            # The search is of other scales, which is its own to say.
            return
    named = [word for word in overrides if key_of(word) == "model"]
    if name == "bench" and named and not any(key_of(word).startswith("model.") for word in overrides):
        raise InputError(f"{named[-1]}: infini bench measures suite.models; set that, as suite.models=[local,full]")
    if verb.computes and getattr(cfg.task, "reference", None) is None:
        from infini.system.devices import check_made_for

        check_made_for("scale", cfg.scale.name, cfg.parallel.accelerator)
        if name == "bench":
            check_made_for("suite", cfg.suite.name, cfg.parallel.accelerator)


def _sweep(verb: Verb, words: Sequence[str]) -> int:
    """Run the command once for each combination of values, by Hydra's sweeper and launcher."""
    if not verb.sweeps:
        sweeping = ", ".join(name for name, other in verbs().items() if other.sweeps)
        raise InputError(f"{verb.name} -m: no sweeps over this verb; verbs that sweep: {sweeping}")
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from infini.cli.sweep import SweepProgress
    from infini.config.compose import compose, expand_sweep, normalise

    overrides = normalise(words)
    # Every job is checked before the first one starts: the last may otherwise fail after hours.
    jobs_of_sweep = expand_sweep(overrides)
    if not jobs_of_sweep and not any(word.startswith("hydra/sweeper=") for word in words):
        sampled = next(word for word in words if "interval(" in word)
        raise InputError(f"{sampled}: an interval takes a hydra/sweeper that samples; give values, as 1,2,3 or range()")
    checked = [compose(job) for job in jobs_of_sweep]
    for cfg, job_overrides in zip(checked, jobs_of_sweep, strict=True):
        _check(verb, cfg, job_overrides)
    _note_replaced(overrides)
    progress = SweepProgress(checked[0].results_dir, verb.name, overrides) if checked else None
    with hydra.initialize_config_module("infini.conf", version_base="1.3", job_name="infini"):
        engine = GlobalHydra.instance().hydra
        assert engine is not None
        try:
            batches = engine.multirun(
                config_name="config", task_function=partial(_job, verb.name, progress), overrides=overrides
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError(str(error)) from error
        except KeyboardInterrupt as stopped:
            others = "all jobs run again" if progress is None else "jobs that had finished are passed over"
            raise KeyboardInterrupt(f"{str(stopped) or verb.if_stopped}; {others}") from stopped
    jobs = [job for batch in batches or () for job in batch]
    failures = [f"{' '.join(job.overrides)}: {job.return_value}" for job in jobs if job.return_value]
    if failures:
        raise InputError(f"{len(failures)} of {len(jobs)} jobs failed; the first, {failures[0]}")
    if progress is not None:
        progress.clear()
    return 0


def _job(name: str, progress: SweepProgress | None, cfg: DictConfig) -> str | None:
    """One job of a sweep, maybe in a process of its own; returns what the user did wrong, for Hydra reports no more."""
    from hydra.core.hydra_config import HydraConfig

    overrides = [str(text) for text in HydraConfig.get().overrides.task]
    # A launcher may also have put this job into a process with streams of its own.
    with robust_streams(patient=True):
        return _job_here(name, progress, cfg, overrides)


def _job_here(name: str, progress: SweepProgress | None, cfg: DictConfig, overrides: list[str]) -> str | None:
    from infini.config.compose import load

    # A launcher of several processes runs this command line again: it must be the job's, not the sweep's.
    sweep_argv, sys.argv = sys.argv, [sys.argv[0], name, *overrides]
    try:
        job = load(cfg, overrides)
        if progress is not None and progress.is_done(job):
            print(f"infini {' '.join(sys.argv[1:])}: done before", flush=True)
            return None
        print(f"infini {' '.join(sys.argv[1:])}", flush=True)
        code = _function(verbs()[name])(job, overrides)
        if progress is not None and not code:
            progress.done(job)
    except InputError as error:
        return str(error)
    except SIZE_ERRORS as error:
        if (said := too_large(error)) is None:
            raise
        return said
    except OSError as error:
        if (said := describe_os_error(error)) is None:
            raise
        return said
    finally:
        sys.argv = sweep_argv
    return f"exit code {code}" if code else None


def _overview() -> str:
    lines = ["infini <verb> [key=value ...] [-m]", ""]
    lines += [f"  {name:<10} {verb.summary}\n  {'':<10}   {verb.example}" for name, verb in verbs().items()]
    lines += [
        "",
        "-m runs one job a combination of values: infini train -m model=infini_linear,local seed=1,2,3",
    ]
    lines += ["infini <verb> --help lists the keys; infini completion bash (or zsh) prints a script for the shell."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
