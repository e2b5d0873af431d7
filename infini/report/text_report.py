"""A table of running text as its file declares it: rows, columns, and which runs are of which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, TypeGuard

import yaml

from infini.errors import InputError, did_you_mean
from infini.records import RunRecord, value_at
from infini.report.declared import trained_otherwise
from infini.report.selection import AGGREGATES, IRRELEVANT_SETTINGS, Selection, checked


@dataclass(frozen=True)
class Variant:
    """A row that is a model with settings other than its usual ones."""

    model: str
    settings: Mapping[str, Sequence[str]]
    """Scale -> the settings, as the command line takes them; at a scale that is not named there is no such row."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Task -> its learning rate (optimizer.lr), where that of the model's usual sizes is not the best of these."""

    def fits(self, run: RunRecord, trained: Mapping[str, Any]) -> bool:
        """Whether the run is of this model and was trained with these settings."""
        wanted = [text.partition("=") for text in self.settings.get(run.scale, ())]
        decides = [(key, yaml.safe_load(value)) for key, _, value in wanted if key not in IRRELEVANT_SETTINGS]
        same = all(value_at(trained, key) == value for key, value in decides)
        return bool(wanted) and run.model == self.model and same


@dataclass(frozen=True)
class Report:
    """A table of running text, as `conf/report/<name>.yaml` declares it."""

    name: str
    title: str
    task: str
    """The task that `infini reproduce` takes where none is named."""
    split: str
    models: dict[str, str]
    """Model name -> title of its row, in the order of the rows."""
    benchmarks: dict[str, str]
    """Task name -> title of its columns."""
    variants: dict[str, Variant] = field(default_factory=dict)
    """Name of a row -> its Variant; the rows that are not named here are models with their usual settings."""
    paper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> what the paper prints: memory, xl_cache, segment_length and one value a benchmark."""
    aggregate: str | None = None
    """What several runs of one model, scale and seed are: null (an error), newest or mean."""
    baseline: str | None = None
    """Row whose loss the others are compared with."""
    baselines: dict[str, str] = field(default_factory=dict)
    """Row -> the row that it is compared with instead."""
    whole_documents: bool = False
    """Whether documents are read to their end in evaluations, also at a scale that otherwise stops earlier
    (scale.eval_max_tokens); runs that stopped are then none of the table's, and nothing is knocked out."""
    note: str = ""

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise InputError(f"report.aggregate={self.aggregate!r}: null, newest or mean")
        for model in self.paper:
            if model not in self.models:
                raise InputError(f"report.paper: no row {model!r} in report.models{did_you_mean(model, self.models)}")
        for key in ("models", "benchmarks", "paper", "variants", "baselines"):
            if not isinstance(getattr(self, key), Mapping):
                raise InputError(
                    f"report.{key}={getattr(self, key)!r}: names with what belongs to each, {{a: ..., b: ...}}"
                )
        for name in self.variants:
            if name not in self.models:
                raise InputError(f"report.variants: no row {name!r} in report.models{did_you_mean(name, self.models)}")
        if not isinstance(self.whole_documents, bool):
            raise InputError(f"report.whole_documents={self.whole_documents!r}: true or false")
        if self.task not in self.benchmarks:
            hint = did_you_mean(self.task, self.benchmarks)
            raise InputError(f"report.task={self.task!r}: a task of report.benchmarks{hint}")
        if self.baseline is not None and self.baseline not in self.models:
            hint = did_you_mean(self.baseline, self.models)
            raise InputError(f"report.baseline={self.baseline!r}: a model of report.models{hint}")
        if self.baselines and self.baseline is None:
            raise InputError(
                f"report.baselines={self.baselines!r}: needs report.baseline, for the rows it does not name"
            )
        for name in (*self.baselines, *self.baselines.values()):
            if name not in self.models:
                raise InputError(f"report.baselines: no row {name!r} in report.models{did_you_mean(name, self.models)}")

    @property
    def titles(self) -> Mapping[str, str]:
        return self.models

    @property
    def parts(self) -> tuple[Report, ...]:
        """The report of each task by itself: its runs are chosen, and its figures drawn, apart from the others'."""
        return tuple(
            replace(self, task=task, name=self.name if task == self.task else f"{self.name}_{task}")
            for task in self.benchmarks
        )

    @property
    def one_corpus(self) -> bool:
        return True

    @property
    def ways_to_choose(self) -> tuple[str, ...]:
        return ("newest", "mean")

    def row_of(self, run: RunRecord, known: Selection) -> str | None:
        if run.task != self.task or run.data.get("split") != self.split or not self._reads_as_far_as(run):
            return None
        trained = known.training_config(run)
        of = trained.get("variant")
        # What another report's row sets besides may be no matter to this one's, and is another model.
        if of and self.name not in (of, f"{of}_{self.task}"):
            return None
        for name, variant in self.variants.items():
            if variant.fits(run, trained):
                return name
        # However it was evaluated: what was trained as a variant is not the model as it is.
        usual = run.model in self.models and run.model not in self.variants and not trained.get("variant")
        return run.model if usual else None

    def _reads_as_far_as(self, run: RunRecord) -> bool:
        stopped = value_at(run.config, "scale.eval_max_tokens") is not None
        if self.whole_documents:
            return not stopped
        return stopped or not _stops_early(run.scale)

    def evaluation_settings(self) -> list[str]:
        """What is set for the evaluations of every row."""
        # What the memory is worth is measured at the beginnings of documents, once.
        return ["scale.eval_max_tokens=null", "scale.knockouts=false"] if self.whole_documents else []

    def model_of(self, row: str) -> str:
        """The model of a row."""
        return self.variants[row].model if row in self.variants else row

    def baseline_of(self, row: str) -> str | None:
        """The row that a row is compared with, if there is one."""
        return self.baselines.get(row, None if row == self.baseline else self.baseline)

    def settings_of(self, row: str, scale: str, task: str | None = None) -> list[str] | None:
        """What is set for a row beside its model, in a task (None: the report's own); None where it has no place at
        this scale."""
        if row not in self.variants:
            return []
        variant, task = self.variants[row], task or self.task
        if scale not in variant.settings:
            return None
        rate = [f"optimizer.lr={variant.rates[task]:g}"] if task in variant.rates else []
        return [*variant.settings[scale], *rate, f"variant={self.name}"]

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        return frozenset({"all"})

    def as_declared(self, runs: list[RunRecord], row: str, known: Selection) -> list[RunRecord]:
        """A model that was trained otherwise than the row declares steps back for one of its seed that was trained so:
        what was tried beside it is no rival. Not where the report says how to choose among several."""
        if self.aggregate is not None or len({run.seed for run in runs}) == len(runs):
            return runs
        others = trained_otherwise(self, row, runs, known)
        seeds = {run.seed for run in runs if run.run_id not in others}
        return [run for run in runs if run.seed not in seeds or run.run_id not in others]

    @classmethod
    def from_config(cls, config: Any) -> Report:
        """A report from the `report` group of a configuration, a mapping or a dataclass.

        Raises:
            InputError: a key is missing, unknown or has a value that is not allowed.
        """
        report: Report = checked(cls, config, "title", "task", "split", "models", "benchmarks")
        return replace(report, variants={name: _variant(name, given) for name, given in report.variants.items()})


def _variant(name: str, given: Any) -> Variant:
    whole = isinstance(given, Mapping) and {"model", "settings"} <= set(given) <= {"model", "settings", "rates"}
    read: Mapping[str, Any] = given if whole else {}
    settings, rates = read.get("settings"), read.get("rates", {})
    if not _lists_settings(settings) or not _rates(rates):
        allowed = "{model: name, settings: {scale: [key=value, ...]}}, with rates: {task: number above 0} or without"
        raise InputError(f"report.variants.{name}={given!r}: must be {allowed}")
    return Variant(str(read["model"]), {scale: list(map(str, settings[scale])) for scale in settings}, dict(rates))


def _lists_settings(settings: Any) -> TypeGuard[Mapping[str, Sequence[Any]]]:
    return isinstance(settings, Mapping) and all(
        isinstance(texts, list) and texts and all("=" in str(text) for text in texts) for texts in settings.values()
    )


def _rates(rates: Any) -> bool:
    return isinstance(rates, Mapping) and all(type(rate) in (int, float) and rate > 0 for rate in rates.values())


@cache
def _stops_early(scale: str) -> bool:
    """Whether evaluations at a scale read only the beginning of a document."""
    path = resources.files("infini.conf").joinpath("scale", f"{scale}.yaml")
    return path.is_file() and yaml.safe_load(path.read_text(encoding="utf-8")).get("eval_max_tokens") is not None
