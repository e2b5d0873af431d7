"""`infini reproduce report=lr_search`: every model at the same learning rates, and files for conf/tuned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from infini import records
from infini.commands.common import names_a_task, newest_on_the_data
from infini.commands.train import train
from infini.config import Config, compose, config_hash
from infini.errors import InputError
from infini.records import RunRecord, write_atomically
from infini.report.search import KEY, Outcome, SearchReport, best_rate, build_search, extended, tuned_yaml
from infini.report.tables import RenderedReport

T = TypeVar("T")
Found = dict[str, dict[float, Outcome]]
"""Model -> rate -> what became of it."""


def run_search(report: SearchReport, cfg: Config, overrides: list[str], seeds: list[int], console: Console) -> None:
    """Train what is missing, extend the grid while a model's best rate is at its edge, write files for conf/tuned.

    Of the tasks of the report all are searched, unless one is named.
    """
    if len(seeds) > 1:
        raise InputError(f"seed={','.join(map(str, seeds))}: a search takes one")
    search = _Search(report, cfg, overrides)
    for task in search.tasks():
        found = search.grid(task, console)
        edges = {min(next(iter(found.values()))), max(next(iter(found.values())))}
        for model, losses in found.items():
            if best_rate(losses) in edges:
                console.print(f"{task}, {model}: the best of {len(losses)} rates is still at the edge", style="yellow")
            text = tuned_yaml(losses)
            if text is not None:
                path = Path(cfg.results_dir) / "tuned" / f"{task}_{cfg.scale.name}_{model}_{cfg.optimizer.name}.yaml"
                write_atomically(path, text.encode())
                console.print(f"{path}: copy it to conf/tuned", markup=False, highlight=False, soft_wrap=True)


def table_of_search(report: SearchReport, cfg: Config, overrides: list[str]) -> RenderedReport:
    """The losses that are on record, as far as the grid has been extended; nothing is trained."""
    search = _Search(report, cfg, overrides)
    return build_search(report, cfg.scale.name, {task: search.grid(task, None) for task in search.tasks()})


class _Search:
    """The trainings of a search; those on record are looked up once."""

    def __init__(self, report: SearchReport, cfg: Config, overrides: list[str]) -> None:
        if cfg.task.name not in report.benchmarks:
            of = " or ".join(report.benchmarks)
            raise InputError(f"task={cfg.task.name}: report={report.name} is about task={of}")
        self.report, self.cfg, self.overrides = report, cfg, overrides
        self.cells: dict[tuple[str, str, float], tuple[list[str], Config]] = {}
        self.failed: dict[str, str] = {}
        self.known: dict[str, list[RunRecord]] = {}
        for run in records.load_records(cfg.results_dir):
            if run.verb == "train":
                self.known.setdefault(config_hash(run.config), []).append(run)

    def tasks(self) -> list[str]:
        """The task that is named, or of which something is set; else all of the report."""
        return [self.cfg.task.name] if names_a_task(self.overrides) else list(self.report.benchmarks)

    def grid(self, task: str, console: Console | None) -> Found:
        """Every model at every rate, the grid extended while a best rate is at its edge.

        console: what is missing is trained, and announced there; None looks up only what is on record.
        """
        rates = list(self.report.rates)
        while True:
            found = self._all(task, rates, console)
            wider = extended(rates, [best_rate(losses) for losses in found.values()], self.report.factor)
            new = set(wider) - set(rates)
            if not new or len(wider) > self.report.most:
                return found
            if console is None and not any(
                any(losses.values()) for losses in self._all(task, sorted(new), None).values()
            ):
                return found
            rates = wider

    def _all(self, task: str, rates: list[float], console: Console | None) -> Found:
        found: Found = {
            model: {rate: self._run(task, model, rate, console) for rate in rates} for model in self.report.models
        }
        runs = [run for losses in found.values() for run in losses.values() if isinstance(run, RunRecord)]
        if runs:
            # Losses on other texts are no losses of one search.
            newest = max(runs, key=lambda run: (run.started, run.run_id)).data.get("revision")
            for losses in found.values():
                for rate, run in losses.items():
                    if isinstance(run, RunRecord) and run.data.get("revision") != newest:
                        losses[rate] = None
        return found

    def _run(self, task: str, model: str, rate: float, console: Console | None) -> Outcome:
        cell = task, model, rate
        if cell not in self.cells:
            set_here = ("task=", "model=", "seed=", f"{KEY}=")
            others = [text for text in self.overrides if not text.startswith(set_here)]
            words = [f"task={task}", f"model={model}", *others, f"seed={self.cfg.seed}", f"{KEY}={rate:g}"]
            self.cells[cell] = words, compose(words)
        words, cfg = self.cells[cell]
        key = config_hash(cfg)
        runs = self.known.get(key, [])
        # Where nothing is to be trained, the data need not be here.
        done = newest_on_the_data(cfg, runs, "train") if console is not None else next(reversed(runs), None)
        if done is None and key not in self.failed and console is not None:
            console.rule(f"{task}, {model}, {KEY}={rate:g}")
            made = _unless_it_diverges(lambda: train(cfg, words))
            if isinstance(made, str):
                console.print(made, style="yellow", markup=False)
                self.failed[key] = made
            else:
                self.known.setdefault(key, []).append(made)
                return made
        return done or self.failed.get(key)


def _unless_it_diverges(make: Callable[[], T]) -> T | str:
    """What `make` gives; what is wrong with the rate where the training diverged."""
    try:
        return make()
    except InputError as error:
        if not str(error).startswith(f"{KEY}="):
            raise
        return str(error)
