"""`infini reproduce report=lr_search`: every model at the same learning rates, and files for conf/tuned."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from infini import records
from infini.commands.common import data_revision, names_a_task, newest_on_the_data, unless_it_diverges
from infini.commands.train import train
from infini.config import Config, compose, config_hash
from infini.errors import InputError
from infini.records import RunRecord, write_atomically
from infini.report.search import KEY, Outcome, SearchReport, best_rate, build_search, extended, tuned_yaml
from infini.report.tables import RenderedReport

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
            path = Path(cfg.results_dir) / "tuned" / f"{task}_{cfg.scale.name}_{model}_{cfg.optimizer.name}.yaml"
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
                console.print(f"{path}: copy it to conf/tuned", markup=False, highlight=False, soft_wrap=True)


def found_by_search(
    report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]
) -> dict[str, Found]:
    """Task -> what is among the known records, as far as the grid has been extended; nothing is trained."""
    search = _Search(report, cfg, overrides, known)
    return {task: search.grid(task, None) for task in search.tasks()}


def table_of_search(report: SearchReport, cfg: Config, overrides: list[str]) -> RenderedReport:
    """The losses that are on record, yours and the published ones."""
    known = [*records.load_records(records.published_dir()), *records.load_records(cfg.results_dir)]
    return build_search(report, cfg.scale.name, found_by_search(report, cfg, overrides, known))


class _Search:
    """The trainings of a search; those on record are looked up once."""

    def __init__(self, report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]) -> None:
        if cfg.task.name not in report.benchmarks:
            of = " or ".join(report.benchmarks)
            raise InputError(f"task={cfg.task.name}: report={report.name} is about task={of}")
        self.report, self.cfg, self.overrides = report, cfg, overrides
        self.cells: dict[tuple[str, str, float], tuple[list[str], Config]] = {}
        self.diverged = _Diverged(Path(cfg.results_dir))
        self.known: dict[str, list[RunRecord]] = {}
        for run in known:
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
            if console is None and not any(self._run(task, model, rate, None) for model in found for rate in new):
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
            for model, losses in found.items():
                losses |= {rate: None for rate in rates if self._revision(task, model, rate, losses[rate]) != newest}
        return found

    def _revision(self, task: str, model: str, rate: float, outcome: Outcome) -> str | None:
        """Which texts an outcome is of."""
        if isinstance(outcome, RunRecord):
            return outcome.data.get("revision")
        kept = self.diverged.of(config_hash(self.cells[task, model, rate][1]))
        return None if kept is None else kept["revision"]

    def _run(self, task: str, model: str, rate: float, console: Console | None) -> Outcome:
        cell = task, model, rate
        if cell not in self.cells:
            set_here = ("task=", "model=", "seed=", f"{KEY}=")
            others = [text for text in self.overrides if not text.startswith(set_here)]
            chosen = [f"task={task}", f"model={model}", *self.report.settings, *others]
            words = [*chosen, f"seed={self.cfg.seed}", f"{KEY}={rate:g}"]
            self.cells[cell] = words, compose(words)
        words, cfg = self.cells[cell]
        key = config_hash(cfg)
        runs = self.known.get(key, [])
        diverged = self.diverged.of(key)
        if console is None:
            # Where nothing is to be trained, the data need not be here.
            return next(reversed(runs), None) or (None if diverged is None else diverged["message"])
        if (done := newest_on_the_data(cfg, runs, "train")) is not None:
            return done
        if diverged is not None and diverged["revision"] == data_revision(cfg, "train"):
            console.print(f"{diverged['message']} (remove {self.diverged.path(key)} to try again)", **_PLAIN)
            return str(diverged["message"])
        console.rule(f"{task}, {model}, {KEY}={rate:g}")
        made = unless_it_diverges(lambda: train(cfg, words))
        if isinstance(made, str):
            console.print(made, **_PLAIN)
            self.diverged.keep(key, made, data_revision(cfg, "train"))
        else:
            self.known.setdefault(key, []).append(made)
        return made


_PLAIN: dict[str, Any] = {"style": "yellow", "markup": False, "soft_wrap": True}


class _Diverged:
    """Trainings of a search that went wrong, a file each: they leave no record, and are known again by this."""

    def __init__(self, results_dir: Path) -> None:
        self.folder = results_dir / "diverged"

    def path(self, key: str) -> Path:
        """Where it is said of the configuration with this hash."""
        return self.folder / f"{key}.json"

    def of(self, key: str) -> dict[str, str] | None:
        """message: what went wrong; revision: of the texts. None where nothing did, InputError for a damaged file."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {name: str(kept[name]) for name in ("message", "revision")}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged; remove it to try that rate again") from error

    def keep(self, key: str, message: str, revision: str) -> None:
        """Write it down, with the commit that it is of."""
        commit = records.environment().get("git_revision")
        kept = {"message": message, "revision": revision, "git_revision": commit, "started": records.utc_now()}
        write_atomically(self.path(key), json.dumps(kept, indent=1).encode())
