"""The `infini` command: reads the verb, composes the configuration, and imports that verb's command only."""

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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from infini.cli.keys import is_read_by, key_of, reads_key, refuse_unread, refuse_unread_of_report
from infini.config.schema import LISTS, OPTIONAL_GROUPS, TEXTS, groups, root_defaults
from infini.config.schema_running import check_made_for
from infini.errors import InputError, did_you_mean, nearest, one_of, too_large
from infini.system.plotting import drawing_without_a_screen
from infini.system.streams import OUTPUT, Streams, robust_streams

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from infini.cli.sweep import SweepProgress
    from infini.config.schema import Config

USAGE_ERROR = 2
INTERRUPTED = 130
LENGTHS = ("length", "task.input_length")
"""Keys whose values are lengths in tokens."""
SUMMARIZE = ["task=booksum"]
"""What summarize is about: what a model was trained for, and how summaries are drawn."""
UNUSABLE_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
)
"""Errors of a disk that is full or may not be written, or of a path that cannot be: the user's to mend."""
SIZE_ERRORS = (MemoryError, RuntimeError, ValueError, TypeError)
"""What torch and numpy raise for a tensor that no memory holds, besides much else."""


@dataclass(frozen=True)
class Verb:
    """A command: where it lives, what it does, and one line that runs as it stands."""

    module: str
    description: str
    example: str
    sweeps: bool = False
    """Whether `-m` makes sense: one job for each combination of values."""
    again: str = "the same command starts from the beginning"
    """What is true of a command that was stopped before it could say so itself."""
    works: bool = True
    """Whether it does more than print: then it goes on to its end without a reader."""
    computes: bool = False
    """Whether a scale that is made for a GPU needs one here."""


VERBS = {
    "train": Verb(
        "train",
        "train a model and write its record",
        "infini train task=pg19 model=infini_linear",
        True,
        "the same command goes on from the last checkpoint of this training, or starts it where there is none",
        computes=True,
    ),
    "eval": Verb(
        "evaluate",
        "ask a trained model for a pass key, or for the test documents",
        "infini eval task=pg19",
        True,
        "what had been measured is kept, and the same command goes on behind it",
        computes=True,
    ),
    "generate": Verb(
        "generate",
        "go on from a prompt of any length",
        "infini generate prompt=@book.txt decoding.temperature=0",
        works=False,
    ),
    "summarize": Verb(
        "summarize", "sum up a book of any length, text or EPUB", "infini summarize book.txt output=summary.txt"
    ),
    "table": Verb("table", "print a table from the records, the paper's numbers beside ours", "infini table"),
    "figure": Verb(
        "figure",
        "draw the figures of all reports, or of one, from the records",
        "infini figure",
        again="figures that were drawn are whole, and the same command draws all of them again",
    ),
    "reproduce": Verb(
        "reproduce",
        "run what a table still needs, then print it",
        "infini reproduce seed=1,2,3",
        again="runs that had finished kept their records, and the same command goes on behind them",
        computes=True,
    ),
    "publish": Verb(
        "publish", "copy finished records into results/, for others to see", "infini publish report=table2_lm"
    ),
    "bench": Verb(
        "bench",
        "measure what the memory costs in time and space",
        "infini bench",
        True,
        "nothing is recorded of what was being measured, and the same command measures it again",
        computes=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit code; 2 for what the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = VERBS.get(arguments[0]) if arguments else None
    # Who reads a text has enough when they close the pipe; a training nobody watches is still wanted.
    with robust_streams(patient=verb is not None and verb.works) as streams, drawing_without_a_screen():
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
        if (said := _users_to_mend(error)) is None:
            raise
        print(f"infini: error: {said}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt as stopped:
        said = str(stopped) or (VERBS[arguments[0]].again if arguments[:1] and arguments[0] in VERBS else "")
        print(f"infini: interrupted{'; ' * bool(said)}{said}", file=sys.stderr)
        return INTERRUPTED


def _users_to_mend(error: OSError) -> str | None:
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
    if name not in VERBS:
        known = [*VERBS, "completion", "help"]
        raise InputError(f"{name!r}: no such verb; allowed: {', '.join(known)}{did_you_mean(name, known)}")
    if {"-h", "--help"} & set(rest):
        from infini.cli.help import verb_help

        settings = [_bracketed(word) for word in rest if "=" in word]
        settings = SUMMARIZE + settings if name == "summarize" else settings
        print(verb_help(name, VERBS[name].description, VERBS[name].example, settings))
        return 0
    multirun = bool({"-m", "--multirun"} & set(rest))
    words = [word for word in rest if word not in ("-m", "--multirun")]
    for word in words:
        if word.startswith("-"):
            options = ("-m", "--multirun", "-h", "--help")
            hint = _without_dashes(word, words) or did_you_mean(word, options)
            raise InputError(f"{word!r}: no such option; allowed: {', '.join(options)}{hint}")
    _refuse_bare_words(name, words)
    refuse_unread(name, words)
    _check_lengths(words)
    if multirun:
        return _sweep(name, words)
    if name == "generate":
        texts, words = _take_texts(words)
        return _run(name, words, texts=texts)
    if name == "summarize":
        paths = [word for word in words if _is_book(word)]
        texts, settings = _take_texts([word for word in words if not _is_book(word)])
        return _run(name, SUMMARIZE + settings, texts=texts, paths=paths)
    words = [_bracketed(word) for word in words]
    if name == "publish":
        ids = [word for word in words if "=" not in word]
        return _run(name, [word for word in words if "=" in word], ids=ids)
    if name == "reproduce":
        seeds, words = _take_seeds(words)
        models, words = _take_models(words)
        first = [*(f"model={model}" for model in models[:1]), *(f"seed={seed}" for seed in seeds[:1])]
        return _run(name, words, first, seeds=seeds, **({"models": models} if models else {}))
    return _run(name, words)


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


def _refuse_bare_words(name: str, words: Sequence[str]) -> None:
    """Raises InputError for a word that is no setting where there must be settings, with what was likely meant."""
    if name == "summarize":
        return
    for place, word in enumerate(words):
        # No key has a space in it: what has one before its first `=` is text.
        if word.startswith("~") or ("=" in word and not re.search(r"\S\s", word.partition("=")[0])):
            continue
        meant = _meant(name, word, words[place + 1 :])
        # The others are ids of runs.
        if name == "publish" and not meant:
            continue
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"{word!r}: not a setting; write key=value{hint}")


def _meant(name: str, word: str, following: Sequence[str]) -> str:
    """The setting that a word without `=` stands for: `report=table3_passkey` for `table3`. "" where none is near."""
    if name == "generate":
        return f"prompt={shlex.quote(word)}"
    choices = groups()
    if word in (*choices, *OPTIONAL_GROUPS, *root_defaults()) and following and "=" not in following[0]:
        return f"{word}={following[0]}"
    first = [group for group in ("report", "experiment", "suite", "task", "model", "scale") if reads_key(name, group)]
    if name in ("train", "eval"):
        first = ["task", "model", "scale"]
    if name == "publish":
        first = ["report", "experiment"]
    for group in (*first, *(choices if name != "publish" else ())):
        begins = [option for option in choices.get(group, []) if len(word) > 2 and option.startswith(word)]
        if reads_key(name, group) and (word in begins or len(begins) == 1):
            return f"{group}={word if word in begins else begins[0]}"
    near = nearest(word, choices[first[0]]) if name != "publish" else None
    return f"{first[0]}={near}" if near else ""


def _note_replaced(words: Sequence[str]) -> None:
    """Says which settings another one of the same key replaces: of several the last holds."""
    last = {key: word for word in words if (key := key_of(word))}
    for word in dict.fromkeys(words):
        if (key := key_of(word)) and last[key] != word and not word.startswith("~"):
            print(f"{word}: given again as {last[key]}, which holds", file=sys.stderr)


def _command(name: str) -> Callable[..., int | None]:
    command: Callable[..., int | None] = importlib.import_module(f"infini.commands.{VERBS[name].module}").run
    return command


def _run(name: str, overrides: list[str], first: Sequence[str] = (), **extra: Any) -> int:
    """Runs a verb. first: the first of several values of a key, in the grammar of one."""
    from infini.config.compose import compose

    cfg = compose([*overrides, *first])
    _check(name, cfg, overrides)
    for word in overrides:
        if key_of(word).startswith("hydra"):
            raise InputError(f"{word}: Hydra runs sweeps alone; add -m")
    if "seeds" in extra and not extra["seeds"]:
        extra["seeds"] = [cfg.seed]
    _note_replaced(overrides)
    return _command(name)(cfg, overrides, **extra) or 0


def _check(name: str, cfg: Config, overrides: Sequence[str]) -> None:
    """What can be said against a command before any work. Raises InputError."""
    if name in ("table", "figure", "reproduce", "publish"):
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
    if VERBS[name].computes and getattr(cfg.task, "reference", None) is None:
        check_made_for("scale", cfg.scale.name, cfg.parallel.accelerator)
        if name == "bench":
            check_made_for("suite", cfg.suite.name, cfg.parallel.accelerator)


def _bracketed(word: str) -> str:
    """`length=32K,1M` as the list it means; without -m several lengths or depths are one run."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and "," in value and not value.startswith("[") else word


def _check_lengths(words: Sequence[str]) -> None:
    """Raises InputError for a length that is none, as it was typed: by Hydra's grammar 1e6 is 1000000.0."""
    from infini.config.lengths import parse_length

    for word in words:
        key, _, value = word.partition("=")
        if key in LENGTHS and re.fullmatch(r"[\[\]\w.,+ -]+", value) and value != "null":
            for text in re.sub(r"[\[\]]", "", value).split(","):
                parse_length(text.strip(), key)


def _is_book(word: str) -> bool:
    """Whether a word of `infini summarize` is a book and no setting: it has no `=`, or a folder before it, or is the
    name of a file and begins with no key."""
    from infini.config.schema import groups, root_defaults
    from infini.system.paths import is_file

    key, separator, _ = word.partition("=")
    if not separator or ("/" in key and not key.startswith("hydra/")):
        return True
    known = {*groups(), *root_defaults(), *OPTIONAL_GROUPS, "hydra"}
    return key.lstrip("+~").partition(".")[0] not in known and is_file(word)


def _take_texts(words: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Prompt and names of state files as they were typed, and the other words: what a text says is no grammar."""
    texts: dict[str, str | None] = {}
    others = []
    for word in words:
        key, separator, value = word.partition("=")
        if key not in TEXTS or not separator:
            others.append(word)
            continue
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        texts[key] = None if value == "null" else value[1:-1] if quoted else value
    return texts, others


def _several(words: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """The values of the last `key=a,b` or `key=[a,b]`, and the words of other keys; no values where there is none."""
    texts = [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")]
    others = [word for word in words if not word.startswith(f"{key}=")]
    values = [text.strip() for text in texts[-1].strip("[]").split(",")] if texts else []
    return list(dict.fromkeys(values)), others


def _take_seeds(words: Sequence[str]) -> tuple[list[int], list[str]]:
    """Seeds of `seed=1,2,3`, and the other words; no seeds when the default is meant."""
    texts, others = _several(words, "seed")
    for text in texts:
        # All of them now: the last may otherwise fail after hours.
        if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= 2**32:
            raise InputError(
                f"seed={text!r}: must be an integer, at least 0 and below 2**32, or several separated by commas"
            )
    return list(dict.fromkeys(map(int, texts))), others


def _take_models(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Models of `model=local,full`, and the other words; none when all are meant."""
    models, others = _several(words, "model")
    for model in models:
        one_of("model", model, groups()["model"])
    return models, others


def _sweep(name: str, words: Sequence[str]) -> int:
    """Runs the command once for each combination of values, by Hydra's sweeper and launcher."""
    if not VERBS[name].sweeps:
        sweeping = ", ".join(verb for verb, entry in VERBS.items() if entry.sweeps)
        raise InputError(f"{name} -m: no sweeps over this verb; verbs that sweep: {sweeping}")
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
        _check(name, cfg, job_overrides)
    _note_replaced(overrides)
    progress = SweepProgress(checked[0].results_dir, name, overrides) if checked else None
    with hydra.initialize_config_module("infini.conf", version_base="1.3", job_name="infini"):
        engine = GlobalHydra.instance().hydra
        assert engine is not None
        try:
            batches = engine.multirun(
                config_name="config", task_function=partial(_job, name, progress), overrides=overrides
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError(str(error)) from error
        except KeyboardInterrupt as stopped:
            others = "all jobs run again" if progress is None else "jobs that had finished are passed over"
            raise KeyboardInterrupt(f"{str(stopped) or VERBS[name].again}; {others}") from stopped
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
        code = _command(name)(job, overrides)
        if progress is not None and not code:
            progress.done(job)
    except InputError as error:
        return str(error)
    except SIZE_ERRORS as error:
        if (said := too_large(error)) is None:
            raise
        return said
    except OSError as error:
        if (said := _users_to_mend(error)) is None:
            raise
        return said
    finally:
        sys.argv = sweep_argv
    return f"exit code {code}" if code else None


def _overview() -> str:
    lines = ["infini <verb> [key=value ...] [-m]", ""]
    lines += [f"  {name:<10} {verb.description}\n  {'':<10}   {verb.example}" for name, verb in VERBS.items()]
    lines += [
        "",
        "-m runs one job a combination of values: infini train -m model=infini_linear,local seed=1,2,3",
    ]
    lines += ["infini <verb> --help lists the keys; infini completion bash (or zsh) prints a script for the shell."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
