"""`infini <verb> -m`: one job for each combination of values. A sweep that was stopped resumes with the jobs left.

`infini reproduce -m`: several processes, which share the runs of a table.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini.cli.arguments import check, note_replaced, prepare, with_keys_of
from infini.cli.messages import one_line
from infini.commands import Verb, verbs
from infini.config.schema import key_of
from infini.config.typed import NoSuchKeyError
from infini.errors import InputError
from infini.records import write_atomically, written_records
from infini.report.tables import counted
from infini.system.process import robust_streams

if TYPE_CHECKING:
    from omegaconf import DictConfig


def sweep(verb: Verb, words: Sequence[str]) -> int:
    """Run the command once for each combination of values, by Hydra's sweeper and launcher."""
    if not verb.sweeps:
        sweeping = ", ".join(name for name, other in verbs().items() if other.sweeps)
        raise InputError(f"{verb.name} -m: no sweeps over this verb; verbs that sweep: {sweeping}")
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from infini.config.compose import compose, expand_sweep, normalise

    overrides = normalise(words)
    # Check every job before the first one starts: otherwise the last could fail after hours.
    jobs_of_sweep = expand_sweep(overrides)
    if not jobs_of_sweep and not any(word.startswith("hydra/sweeper=") for word in words):
        # Hydra allows a space before the bracket, and other ways of sampling may come.
        sampled = next((word for word in words if re.search(r"interval\s*\(", word)), " ".join(words))
        raise InputError(
            f"{sampled}: an interval needs a hydra/sweeper that samples; give values, for example 1,2,3 or range()"
        )
    try:
        checked = [compose(job) for job in jobs_of_sweep]
    except NoSuchKeyError as error:
        raise with_keys_of(verb, error) from error
    for cfg, job_overrides in zip(checked, jobs_of_sweep, strict=True):
        check(verb, cfg, job_overrides, _runs_elsewhere(words))
    if "model" in verb.groups:
        # Imports torch, so that a single command does this later.
        from infini.models import check_options

        for cfg in checked:
            check_options(cfg.model)
    note_replaced(overrides)
    # A file for each finished job, with the run ids of its records, a line each; jobs may run in several processes.
    # When all jobs have finished, the files are removed, and the same command runs all jobs again.
    name = f"sweep-{_digest(verb.name, *overrides)}"
    marks = Path(checked[0].results_dir) / "unfinished" / name if checked else None
    launcher = _launcher(words)
    if launcher is not None and checked:
        print(f"{counted(len(checked), 'job')} by {launcher}; their output lies below outputs/sweeps", file=sys.stderr)
    try:
        jobs = _multirun(partial(_job, verb.name, marks), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(str(error)) from error
    except Exception as error:
        if launcher is None:
            raise
        advice = "run the same command again for the remaining jobs"
        raise InputError(f"{launcher}: {_said_by_launcher(error)}; {advice}") from error
    except KeyboardInterrupt as stopped:
        others = "all jobs run again" if marks is None else "finished jobs are skipped"
        raise KeyboardInterrupt(f"{str(stopped) or verb.if_stopped}; {others}") from stopped
    failures = [f"{' '.join(job.overrides)}: {job.return_value}" for job in jobs if job.return_value]
    if failures:
        raise InputError(f"{len(failures)} of {len(jobs)} jobs failed; the first, {failures[0]}")
    if marks is not None:
        shutil.rmtree(marks, ignore_errors=True)
    if launcher is not None and checked:
        print(f"{len(jobs)} of {len(jobs)} done; records in {Path(checked[0].results_dir) / 'runs'}", file=sys.stderr)
    return 0


def share(verb: Verb, words: Sequence[str]) -> int:
    """Run the command in several processes at once, by Hydra's launcher; they share its runs (infini.runs.workers)."""
    of_hydra = [word for word in words if key_of(word).startswith("hydra")]
    others = [word for word in words if word not in of_hydra]
    cfg, _, _ = prepare(verb, others, _runs_elsewhere(of_hydra))
    if cfg.plan:
        raise InputError("plan=true: starts nothing; leave out -m")
    if _launcher(of_hydra) is None:
        raise InputError(
            f"{verb.name} -m: name a launcher, for example hydra/launcher=joblib (see docs/how-to/cluster.md)"
        )
    numbers = ",".join(str(number) for number in range(1, cfg.workers + 1))
    try:
        jobs = _multirun(partial(_worker, verb.name, others), [*of_hydra, f"workers={numbers}"])
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(str(stopped) or verb.if_stopped) from stopped
    except Exception as error:
        # The launcher reports a process that was killed or that it could not start.
        ended = f"a process of {verb.name} -m has ended: {_said_by_launcher(error)}"
        raise InputError(f"{ended}; run the same command again to continue") from error
    failed = [str(job.return_value) for job in jobs if job.return_value]
    if failed:
        raise InputError(f"{len(failed)} of {cfg.workers} processes failed; the first: {failed[0]}")
    return 0


def _launcher(words: Sequence[str]) -> str | None:
    """The word that names a launcher; None where there is none, and jobs run in this process."""
    return next((word for word in words if word.startswith("hydra/launcher=")), None)


def _runs_elsewhere(words: Sequence[str]) -> bool:
    """Whether the jobs run on machines of Slurm, which may have the GPU that this one lacks."""
    return _launcher(words) == "hydra/launcher=submitit_slurm"


def _said_by_launcher(error: Exception) -> str:
    """The first sentence of an error of a launcher.

    submitit begins a new line inside it, after the name of the job. Of a job that failed before its command began it
    shows the traceback, whose last line is the cause.
    """
    said = str(error).strip().replace("\nhas not produced", " has not produced") or type(error).__name__
    sentence, traced, rest = said.partition(" with trace:\n")
    if traced:
        trace = rest.rpartition("\n---")[0].rstrip(" \n") or rest
        return f"{sentence}: {trace.splitlines()[-1]}".rstrip(".")
    return said.splitlines()[0].rstrip(".")


def _multirun(task: Callable[[DictConfig], str | None], overrides: Sequence[str]) -> list[Any]:
    """Run the task once for each combination of values, by Hydra's sweeper and launcher. Returns Hydra's jobs."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_module("infini.conf", version_base="1.3", job_name="infini"):
        engine = GlobalHydra.instance().hydra
        assert engine is not None
        batches = engine.multirun(config_name="config", task_function=task, overrides=list(overrides))
    return [job for batch in batches or () for job in batch]


# A launcher may have started these two in a process with its own streams.
@robust_streams(patient=True)
def _worker(name: str, words: Sequence[str], cfg: DictConfig) -> str | None:
    """One process of a command that several share."""

    def run() -> int | None:
        verb = verbs()[name]
        made, overrides, extra = prepare(verb, words)
        return verb.run(made, overrides, **extra)

    return _outcome([name, *words], run)


@robust_streams(patient=True)
def _job(name: str, marks: Path | None, cfg: DictConfig) -> str | None:
    """One job of a sweep. It is skipped if it has finished, its results and the data that it read are there, and an
    evaluation would take the same model."""
    from hydra.core.hydra_config import HydraConfig

    from infini.config.compose import load

    overrides = [str(text) for text in HydraConfig.get().overrides.task]

    def run() -> int | None:
        job, command = load(cfg, overrides), f"infini {' '.join(sys.argv[1:])}"
        mark = None if marks is None else marks / _digest(json.dumps(asdict(job), sort_keys=True, default=str))
        finished: list[str] = []
        if mark is not None:
            # Another process of the same sweep removes the marks when all jobs have finished.
            with suppress(FileNotFoundError):
                finished = mark.read_text(encoding="utf-8").split()
        if finished:
            from infini.runs.common import is_up_to_date

            if all(is_up_to_date(job, overrides, run_id) for run_id in finished):
                print(f"{command}: done before", flush=True)
                return 0
        print(command, flush=True)
        code: int | None = None
        with written_records() as run_ids:
            try:
                code = verbs()[name].run(job, overrides)
            finally:
                # A training writes its record last. A scheduler's signal after that, as while curves are sent, must
                # not train once more. A job without a record, as of a part of an evaluation, is run again: it reads
                # its results from a cache.
                done = name == "train" if code is None else not code
                if mark is not None and done and run_ids:
                    write_atomically(mark, "".join(f"{run_id}\n" for run_id in run_ids).encode())
        return code

    return _outcome([name, *overrides], run)


def _outcome(words: Sequence[str], run: Callable[[], int | None]) -> str | None:
    """Run a command, maybe in a process of its own. Returns the user's error, which Hydra would not print."""
    # Launchers of several processes run sys.argv again: it must be the command of the job, not of the sweep.
    command, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        code = run()
    except Exception as error:
        if (line := one_line(error)) is None:
            raise
        return line
    finally:
        sys.argv = command
    return f"exit code {code}" if code else None


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
