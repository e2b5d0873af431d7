"""`infini reproduce report=lr_search`: every model at the same learning rates, and files for conf/tuned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from infini import records
from infini.config.compose import compose, config_hash
from infini.config.schema import Config
from infini.errors import DivergedError, InputError
from infini.records import RunRecord, write_atomically
from infini.report.search import (
    KEY,
    Outcome,
    SearchReport,
    at_the_edge,
    best_rate,
    build_search,
    next_rate,
    tuned_yaml,
)
from infini.report.tables import RenderedReport
from infini.runs.common import catch_divergence, describe_divergence, names_a_task, newest_on_the_data
from infini.runs.train import train
from infini.system.progress import progress_bar

Found = dict[str, dict[float, Outcome]]
"""Model -> rate -> what became of it."""


def run_search(report: SearchReport, cfg: Config, overrides: list[str], seeds: list[int], console: Console) -> None:
    """Train what is missing, extend the grid while a model's best rate is at its edge, write files for conf/tuned.

    Of the tasks of the report all are searched, unless one is named.
    """
    if len(seeds) > 1:
        raise InputError(f"seed={','.join(map(str, seeds))}: a search takes one")
    search = _Search(report, cfg, overrides, records.load_records(cfg.results_dir))
    for task in search.tasks():
        found = search.grid(task, console)
        for model, losses in found.items():
            name = [task, cfg.scale.name, model, cfg.optimizer.name, *([report.name] if report.settings else [])]
            path = Path(cfg.results_dir) / "tuned" / f"{'_'.join(name)}.yaml"
            text = tuned_yaml(losses)
            if text is None and best_rate(losses) is not None:
                # One that is not the best is no longer that of an earlier, narrower search either.
                path.unlink(missing_ok=True)
                console.print(
                    f"{task}, {model}: the best of {len(losses)} rates is still at the edge: no file for conf/tuned; "
                    f"more rates with report.most above {report.most}",
                    **_PLAIN,
                )
            if text is not None:
                write_atomically(path, text.encode())
                use = "the rate of rows with these settings" if report.settings else "copy it to conf/tuned"
                console.print(f"{path}: {use}", markup=False, highlight=False, soft_wrap=True)


def found_by_search(
    report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]
) -> dict[str, Found]:
    """Task -> what is among the known records, as far as the grid has been extended; nothing is trained."""
    search = _Search(report, cfg, overrides, known)
    tasks = search.tasks()
    with progress_bar("looking up runs", len(tasks) * len(report.models), sys.stderr.isatty()) as advance:
        return {task: search.grid(task, None, advance) for task in tasks}


def table_of_search(report: SearchReport, cfg: Config, overrides: list[str]) -> RenderedReport:
    """The losses that are on record, yours and the published ones."""
    published, own = records.load_records(records.published_dir()), records.load_records(cfg.results_dir)
    found = found_by_search(report, cfg, overrides, [*published, *own])
    return build_search(report, cfg.scale.name, found, {run.run_id for run in published} - {run.run_id for run in own})


class _Search:
    """The trainings of a search; those on record are looked up once."""

    def __init__(self, report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]) -> None:
        if cfg.task.name not in report.benchmarks:
            of = " or ".join(report.benchmarks)
            raise InputError(f"task={cfg.task.name}: report={report.name} is about task={of}")
        if report.settings and cfg.scale.name not in report.settings:
            raise InputError(f"scale={cfg.scale.name}: report={report.name} is of scale={' or '.join(report.settings)}")
        self.report, self.cfg, self.overrides = report, cfg, overrides
        self.cells: dict[tuple[str, str, float], tuple[list[str], Config]] = {}
        self.known: dict[str, list[RunRecord]] = {}
        self.texts: dict[str, str | None] = {}
        for run in known:
            if run.verb == "train":
                self.known.setdefault(config_hash(run.config), []).append(run)

    def tasks(self) -> list[str]:
        """The task that is named, or of which something is set; else all of the report."""
        return [self.cfg.task.name] if names_a_task(self.overrides) else list(self.report.benchmarks)

    def grid(self, task: str, console: Console | None, advance: Callable[[int], None] = lambda _: None) -> Found:
        """Every model at the report's rates and at as many more as it takes until no best rate is at the edge of its
        model's grid; all models at as many.

        console: what is missing is trained, and announced there; None looks up only what is on record. advance: called
        with 1 after each model.
        """
        found: Found = {model: {} for model in self.report.models}
        for model in found:
            found[model] = {rate: self._run(task, model, rate, console) for rate in self.report.rates}
            advance(1)
        while True:
            for model, losses in found.items():
                while at_the_edge(losses) and self._widen(task, model, losses, console):
                    pass
            most = max(map(len, found.values()))
            # As many for those whose best was inside their grid before.
            short = [model for model, losses in found.items() if len(losses) < most]
            widened = [self._widen(task, model, found[model], console) for model in short]
            if not any(widened):
                return found

    def _widen(self, task: str, model: str, losses: dict[float, Outcome], console: Console | None) -> bool:
        """One more rate; whether there is one: it may be one too many, or not on record where nothing is trained."""
        rate = next_rate(losses, self.report.factor)
        if rate is None or len(losses) >= self.report.most:
            return False
        outcome = self._run(task, model, rate, console)
        if console is None and outcome is None:
            return False
        losses[rate] = outcome
        return True

    def _newest_texts(self, task: str) -> str | None:
        """Content hash of what the newest training at the report's rates read: losses on other texts are no losses of
        one search."""
        if task not in self.texts:
            cells = [self._cell(task, model, rate) for model in self.report.models for rate in self.report.rates]
            runs = [run for _, cfg in cells for run in self.known.get(config_hash(cfg), [])]
            newest = max(runs, key=lambda run: (run.started, run.run_id), default=None)
            self.texts[task] = None if newest is None else newest.data.get("revision")
        return self.texts[task]

    def _cell(self, task: str, model: str, rate: float) -> tuple[list[str], Config]:
        """The command line of a training, and its configuration."""
        cell = task, model, rate
        if cell not in self.cells:
            set_here = ("task=", "model=", "seed=", f"{KEY}=")
            others = [text for text in self.overrides if not text.startswith(set_here)]
            ours = [*self.report.settings.get(self.cfg.scale.name, ()), *self.report.model_settings.get(model, ())]
            # The last of two settings holds: the command line's over the report's.
            chosen = [f"task={task}", f"model={model}", *ours, *others]
            words = [*chosen, f"seed={self.cfg.seed}", f"{KEY}={rate:g}"]
            self.cells[cell] = words, compose(words)
        return self.cells[cell]

    def _run(self, task: str, model: str, rate: float, console: Console | None) -> Outcome:
        words, cfg = self._cell(task, model, rate)
        key = config_hash(cfg)
        # One that came to its end is preferred to one that diverged.
        runs = sorted(self.known.get(key, []), key=lambda run: run.diverged is None)
        if console is None:
            # Where nothing is to be trained, the data need not be here.
            texts = self._newest_texts(task)
            on_record = [run for run in runs if run.data.get("revision") == texts]
            return on_record[-1] if on_record else None
        if (done := newest_on_the_data(cfg, runs, "train")) is not None:
            if done.diverged is not None:
                console.print(describe_divergence(done, self.cfg.results_dir), **_PLAIN)
            return done
        console.rule(f"{task}, {model}, {KEY}={rate:g}")
        found = catch_divergence(lambda: train(cfg, words))
        if isinstance(found, DivergedError):
            console.print(str(found), **_PLAIN)
        made = found.record if isinstance(found, DivergedError) else found
        assert made is not None
        self.known.setdefault(key, []).append(made)
        return made


_PLAIN: dict[str, Any] = {"style": "yellow", "markup": False, "soft_wrap": True}
