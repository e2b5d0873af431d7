"""`infini reproduce report=lr_search`: train every model at the same learning rates and write files for conf/tuned."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from infini import records
from infini.config.compose import compose, config_hash
from infini.config.schema import Config
from infini.errors import DivergedError, InputError
from infini.records import RunRecord, write_atomically
from infini.report.render import write_report
from infini.report.search import (
    LEARNING_RATE,
    Outcome,
    SearchReport,
    at_the_edge,
    best_rate,
    build_search,
    next_rate,
    tuned_yaml,
)
from infini.report.tables import RenderedReport
from infini.runs.claims import declared_report
from infini.runs.common import describe_divergence, names_a_task, newest_on_the_data
from infini.runs.publish import check_publishable, copy_runs
from infini.runs.workers import Worker
from infini.system.progress import progress_bar

Found = dict[str, dict[float, Outcome]]
"""Model -> rate -> its training."""


def reproduce(
    report: SearchReport, cfg: Config, overrides: list[str], seeds: list[int], worker: Worker, models: Sequence[str]
) -> None:
    """Train what is missing, extend the grid while a model's best rate is at its edge, write files for conf/tuned.

    All tasks of the report are searched, unless one is named. A plan has the report's rates; the others depend on
    their losses. The report is already limited to `models`. A training that diverges is a result of the search.
    """
    if len(seeds) > 1:
        raise InputError(f"seed={','.join(map(str, seeds))}: a search uses one seed")
    search = _Search(report, cfg, overrides, records.load_records(cfg.results_dir))
    for task in search.tasks():
        found = search.grid(task, worker)
        for model, losses in found.items() if not worker.planning else ():
            name = [task, cfg.scale.name, model, cfg.optimizer.name, *([report.name] if report.settings else [])]
            path = Path(cfg.results_dir) / "tuned" / f"{'_'.join(name)}.yaml"
            text = tuned_yaml(losses)
            if text is None and best_rate(losses) is not None:
                # The file of an earlier, narrower search is not the best rate any more.
                path.unlink(missing_ok=True)
                worker.console.print(
                    f"{task}, {model}: the best of {len(losses)} rates is still at the edge: no file for conf/tuned; "
                    f"more rates with report.most above {report.most}",
                    style="yellow",
                )
            if text is not None:
                write_atomically(path, text.encode())
                use = "the rate of rows with these settings" if report.settings else "copy it to conf/tuned"
                worker.console.print(f"{path}: {use}")


def found_by_search(
    report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]
) -> tuple[dict[str, Found], int]:
    """Task -> the trainings among the known records, as far as the grid has been extended, and the number of those that
    are left out because they read other texts. Nothing is trained."""
    search = _Search(report, cfg, overrides, known)
    tasks = search.tasks()
    with progress_bar(
        "looking up runs", len(tasks) * len(report.models) * len(report.rates), sys.stderr.isatty()
    ) as advance:
        return {task: search.grid(task, None, advance) for task in tasks}, len(search.left_out)


def table(
    report: SearchReport,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord],
    yours: Sequence[RunRecord] | None,
) -> RenderedReport:
    """The losses of the published trainings and of yours."""
    own = yours or ()
    found, left_out = found_by_search(report, cfg, overrides, [*published, *own])
    ids = {run.run_id for run in published} - {run.run_id for run in own}
    return build_search(report, cfg.scale.name, found, ids, left_out)


def publish(report: SearchReport, cfg: Config, overrides: list[str], published_dir: Path) -> list[Path]:
    """Copy the trainings of a search that are in results_dir, as far as its grid was extended, and write its table.

    Raises InputError as infini.runs.publish.publish does, and if there are no trainings.
    """
    results_dir, before = Path(cfg.results_dir), {run.run_id: run for run in records.load_records(published_dir)}
    found, _ = found_by_search(report, cfg, overrides, records.load_records(results_dir))
    runs = [run for models in found.values() for losses in models.values() for run in losses.values()]
    chosen = {run.run_id: run for run in runs if run is not None}
    if not chosen:
        raise InputError(f"{results_dir}: no runs of {report.name} at scale {cfg.scale.name} to publish")
    for record in chosen.values():
        check_publishable(record, results_dir, before)
    # The table shows all tasks, also if one of them was named.
    every_task = [text for text in overrides if not text.startswith(("task=", "report."))]
    shown = cast(SearchReport, declared_report(report.name))
    tables = table(shown, cfg, every_task, list({**before, **chosen}.values()), None)
    written = copy_runs(chosen, results_dir, published_dir)
    return written + write_report(tables, published_dir / "tables", links={"published": "../runs"})


class _Search:
    """The trainings of a search. Records are grouped by configuration once."""

    def __init__(self, report: SearchReport, cfg: Config, overrides: list[str], known: Iterable[RunRecord]) -> None:
        if cfg.task.name not in report.benchmarks:
            of = " or ".join(report.benchmarks)
            raise InputError(f"task={cfg.task.name}: report={report.name} is about task={of}")
        if report.settings and cfg.scale.name not in report.settings:
            raise InputError(f"scale={cfg.scale.name}: report={report.name} is of scale={' or '.join(report.settings)}")
        self.report, self.cfg, self.overrides = report, cfg, overrides
        self.cells: dict[tuple[str, str, float], tuple[list[str], Config]] = {}
        self.texts: dict[str, str | None] = {}
        self.left_out: set[str] = set()
        """Ids of trainings on other texts than those shown."""
        self.known: dict[str, list[RunRecord]] = {}
        for run in known:
            if run.verb == "train":
                self.known.setdefault(config_hash(run.config), []).append(run)

    def tasks(self) -> list[str]:
        """The task that is named, or whose data is set; otherwise all tasks of the report."""
        return [self.cfg.task.name] if names_a_task(self.overrides) else list(self.report.benchmarks)

    def grid(self, task: str, worker: Worker | None, advance: Callable[[int], None] = lambda _: None) -> Found:
        """Every model at the report's rates, and at more rates until no best rate is at the edge of its model's grid.
        All models get the same number of rates.

        worker: makes missing trainings; None only looks up records. advance: called with 1 after each of the report's
        rates.
        """

        def one(model: str, rate: float) -> Outcome:
            outcome = self._run(task, model, rate, worker)
            advance(1)
            return outcome

        cells = [(model, rate) for model in self.report.models for rate in self.report.rates]
        jobs = [(f"{task}, {model}, {LEARNING_RATE}={rate:g}", partial(one, model, rate)) for model, rate in cells]
        outcomes = [job() for _, job in jobs] if worker is None else worker.do_all(jobs)
        found: Found = {model: {} for model in self.report.models}
        for (model, rate), outcome in zip(cells, outcomes, strict=True):
            found[model][rate] = outcome
        if worker is not None and worker.planning:
            return found
        while True:
            for model, losses in found.items():
                while at_the_edge(losses) and self._widen(task, model, losses, worker):
                    pass
            most = max(map(len, found.values()))
            # Models whose best rate was inside a smaller grid get as many rates.
            short = [model for model, losses in found.items() if len(losses) < most]
            widened = [self._widen(task, model, found[model], worker) for model in short]
            if not any(widened):
                return found

    def _widen(self, task: str, model: str, losses: dict[float, Outcome], worker: Worker | None) -> bool:
        """Add one rate; False if the grid is full, or if the training has no record and nothing is trained."""
        rate = next_rate(losses, self.report.factor)
        if rate is None or len(losses) >= self.report.most:
            return False
        if worker is None:
            outcome = self._run(task, model, rate, None)
        else:
            where = f"{task}, {model}, {LEARNING_RATE}={rate:g}"
            (outcome,) = worker.do_all([(where, partial(self._run, task, model, rate, worker))])
        if worker is None and outcome is None:
            return False
        losses[rate] = outcome
        return True

    def _texts(self, task: str) -> str | None:
        """Content hash of the texts with trainings at most of the report's rates, of several the newest. Losses on
        different texts cannot be compared."""
        if task not in self.texts:
            cells = [self._cell(task, model, rate) for model in self.report.models for rate in self.report.rates]
            filled, newest = Counter[str | None](), dict[str | None, str]()
            for _, cfg in cells:
                runs = self.known.get(config_hash(cfg), [])
                filled.update({run.data.get("revision") for run in runs})
                for run in runs:
                    texts = run.data.get("revision")
                    newest[texts] = max(newest.get(texts, ""), run.started)
            self.texts[task] = max(filled, key=lambda texts: (filled[texts], newest[texts]), default=None)
        return self.texts[task]

    def _cell(self, task: str, model: str, rate: float) -> tuple[list[str], Config]:
        """The command line of a training, and its configuration."""
        cell = task, model, rate
        if cell not in self.cells:
            set_here = ("task=", "model=", "seed=", f"{LEARNING_RATE}=")
            others = [text for text in self.overrides if not text.startswith(set_here)]
            ours = [*self.report.settings.get(self.cfg.scale.name, ()), *self.report.model_settings.get(model, ())]
            # The last of two settings counts, so the command line overrides the report.
            chosen = [f"task={task}", f"model={model}", *ours, *others]
            words = [*chosen, f"seed={self.cfg.seed}", f"{LEARNING_RATE}={rate:g}"]
            self.cells[cell] = words, compose(words)
        return self.cells[cell]

    def _run(self, task: str, model: str, rate: float, worker: Worker | None) -> Outcome:
        words, cfg = self._cell(task, model, rate)
        key = config_hash(cfg)
        # A completed training is preferred to one that diverged.

        def runs() -> list[RunRecord]:
            return sorted(self.known.get(key, []), key=lambda run: run.diverged is None)

        if worker is None:
            # Without training, the data need not exist here.
            texts = self._texts(task)
            on_record = [run for run in runs() if run.data.get("revision") == texts]
            self.left_out |= {run.run_id for run in runs()} - {run.run_id for run in on_record}
            return on_record[-1] if on_record else None
        console = worker.console
        if (done := newest_on_the_data(cfg, runs(), "train")) is not None:
            if done.diverged is not None:
                console.print(describe_divergence(done, self.cfg.results_dir), style="yellow")
            return done

        def find() -> RunRecord | None:
            found = (run for run in records.load_records(self.cfg.results_dir) if run.verb == "train")
            self.known[key] = [run for run in found if config_hash(run.config) == key]
            return newest_on_the_data(cfg, runs(), "train")

        def make() -> RunRecord:
            console.rule(f"{task}, {model}, {LEARNING_RATE}={rate:g}")
            from infini.runs.train import train

            try:
                made = train(cfg, words)
            except DivergedError as error:
                console.print(str(error), style="yellow")
                made = error.record
            assert made is not None
            self.known.setdefault(key, []).append(made)
            return made

        return worker.make("train", cfg, cfg.init_from, find, make)
