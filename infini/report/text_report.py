"""A table of running text as its YAML declares it: rows, columns, and the row of each run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

from infini.config.schema import groups, settings_in
from infini.errors import InputError, did_you_mean, one_of, require
from infini.records import RunRecord, value_at
from infini.report.declared import find_mismatches
from infini.report.kind import REPRODUCED, OwnVerb, make_row, values_of
from infini.report.selection import IRRELEVANT_SETTINGS, Drawings, RunReport, Selection
from infini.report.stats import BY_PLACE, BY_POSITION
from infini.report.tables import RenderedReport


@dataclass(frozen=True)
class Variant:
    """A row with a model whose settings differ from the defaults."""

    model: str
    settings: Mapping[str, Sequence[str]]
    """Scale -> the settings, as the command line takes them. At other scales the row does not exist."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Task -> its learning rate (optimizer.lr), if it differs from that of the model with its default settings."""

    def fits(self, run: RunRecord, trained: Mapping[str, Any]) -> bool:
        """Whether the run is of this model and was trained with these settings."""
        wanted = values_of(self.settings.get(run.scale, ()))
        same = all(value_at(trained, key) == wanted[key] for key in wanted.keys() - IRRELEVANT_SETTINGS)
        return bool(wanted) and run.model == self.model and same


@dataclass(frozen=True)
class Report(RunReport):
    """A table of running text, as `conf/report/<name>.yaml` declares it."""

    figure_kinds = (
        *("gap_by_position", "gap_by_place", "gates"),
        *("perplexity_by_memory", "perplexity_by_seconds", "perplexity_by_tokens", "training"),
    )
    choices = ("newest", "mean")
    one_corpus = True
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "reproduce": OwnVerb(REPRODUCED, ("init_from",), "infini.runs.reproduce_text")
    }

    split: str
    models: dict[str, str]
    """Model name -> title of its row, in the order of the rows."""
    benchmarks: dict[str, str]
    """Task name -> title of its columns."""
    variants: dict[str, Variant] = field(default_factory=dict)
    """Row name -> its Variant. The other rows are models with their default settings."""
    variants_of: str | None = None
    """The report whose runs fill the rows of `variants`, which are declared alike there; null: this one."""
    former_names: list[str] = field(default_factory=list)
    """Reports that were merged into this one: runs on record name them as the report of their variant."""
    paper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> the paper's values: memory, xl_cache, segment_length and one for each benchmark."""
    baseline: str | None = None
    """Row with which the losses of the others are compared."""
    baselines: dict[str, str] = field(default_factory=dict)
    """Row -> the row that it is compared with instead of `baseline`."""
    compared_in_paper: dict[str, str] = field(default_factory=dict)
    """Row of a baseline -> the row with the tokens that the paper gave its own model. The figure of perplexity by
    training tokens marks the two."""
    whole_documents: bool = field(default=False, metadata={"allowed": "true or false"})
    """Whether evaluations read documents to their end, also at a scale that otherwise stops earlier
    (scale.eval_max_tokens). The table then has only such runs, and no knock-outs."""
    untrained: bool | list[str] = False
    """Whether the rows are pretrained models that are evaluated without a training, or which rows are. No other run
    fills a cell of theirs."""
    trained_on: str | None = None
    """Task that the rows are trained on, if it is not the one that evaluates them."""

    def __post_init__(self) -> None:
        self.check_choices()
        if not isinstance(self.untrained, bool):
            known = set(self.untrained) <= set(self.models)
            require(known, "report.untrained", self.untrained, "true, false or a list of rows of report.models")
        names = self.former_names
        require(isinstance(names, list), "report.former_names", names, "a list of names")
        if self.trained_on is not None:
            one_of("report.trained_on", self.trained_on, groups()["task"])
        hint = did_you_mean(self.task, self.benchmarks)
        require(self.task in self.benchmarks, "report.task", self.task, f"a task of report.benchmarks{hint}")
        if self.baseline is not None:
            hint = did_you_mean(self.baseline, self.models)
            require(self.baseline in self.models, "report.baseline", self.baseline, f"a model of report.models{hint}")
        alone = bool(self.baselines) and self.baseline is None
        require(not alone, "report.baselines", self.baselines, "needs report.baseline, for the rows it does not name")
        for key in ("paper", "variants", "baselines", "compared_in_paper"):
            rows: list[str] = list(getattr(self, key))
            if key in ("baselines", "compared_in_paper"):
                rows += getattr(self, key).values()
            for row in rows:
                if row not in self.models:
                    raise InputError(f"report.{key}: no row {row!r} in report.models{did_you_mean(row, self.models)}")
        variants = {name: _variant(f"report.variants.{name}", given) for name, given in self.variants.items()}
        object.__setattr__(self, "variants", variants)

    @property
    def titles(self) -> Mapping[str, str]:
        return self.models

    @property
    def parts(self) -> tuple[Report, ...]:
        return tuple(
            replace(self, task=task, name=self.name if task == self.task else f"{self.name}_{task}")
            for task in self.benchmarks
        )

    def row_of(self, run: RunRecord, known: Selection) -> str | None:
        if run.task != self.task or run.data.get("split") != self.split:
            return None
        whole = value_at(run.config, "scale.eval_max_tokens") is None
        if whole != self.whole_documents and not (whole and not _stops_early(run.scale)):
            return None
        trained = known.training_config(run)
        of = trained.get("variant")
        # A variant of another report is another model, even if this report's rows do not set what it sets.
        if of and not {of, f"{of}_{self.task}"} & {self.variants_of or self.name, *self.former_names}:
            return None
        for name, variant in self.variants.items():
            if self.is_untrained(name) == (run.parent is None) and variant.fits(run, trained):
                return name
        if self.is_untrained(run.model) != (run.parent is None):
            return None
        # A model that was trained as a variant is not the model with its default settings.
        usual = run.model in self.models and run.model not in self.variants and not trained.get("variant")
        return run.model if usual else None

    def is_untrained(self, row: str) -> bool:
        """Whether a row is a pretrained model as it is."""
        return self.untrained if isinstance(self.untrained, bool) else row in self.untrained

    def evaluation_settings(self) -> list[str]:
        """Settings of the evaluations of every row."""
        # Knock-outs are measured once, at the beginnings of documents.
        return ["scale.eval_max_tokens=null", "scale.knockouts=false"] if self.whole_documents else []

    def model_of(self, row: str) -> str:
        """The model of a row."""
        return self.variants[row].model if row in self.variants else row

    def baseline_of(self, row: str) -> str | None:
        """The row that a row is compared with, or None."""
        return self.baselines.get(row, None if row == self.baseline else self.baseline)

    def settings_of(self, row: str, scale: str, task: str | None = None) -> list[str] | None:
        """Settings of a row in addition to its model, or None if the row does not exist at this scale. task: None is
        the report's own."""
        if row not in self.variants:
            return []
        variant, task = self.variants[row], task or self.task
        if scale not in variant.settings:
            return None
        rate = [f"optimizer.lr={variant.rates[task]:g}"] if task in variant.rates else []
        return [*variant.settings[scale], *rate, f"variant={self.variants_of or self.name}"]

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        return frozenset({"all"})

    def find_mismatches(self, row: str, runs: Sequence[RunRecord], known: Selection) -> dict[str, list[str]]:
        found = find_mismatches(self, row, runs, known, self.trained_on)
        wanted = self._reads_up_to(row, runs[0].scale)
        for run in runs:
            read = value_at(run.config, "scale.eval_max_tokens")
            if read != wanted:
                way = f"reads up to {read or 'all'} tokens of a document instead of {wanted or 'all'}"
                found.setdefault(run.run_id, []).append(way)
        return found

    def _reads_up_to(self, row: str, scale: str) -> int | None:
        """Tokens of a document that the evaluations of a row read at most; None: all."""
        if self.whole_documents:
            return None
        of_scale = {"scale.eval_max_tokens": settings_in("scale", scale).get("eval_max_tokens")}
        limit: int | None = (of_scale | values_of(self.settings_of(row, scale) or ()))["scale.eval_max_tokens"]
        return limit

    def render(
        self, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
    ) -> RenderedReport:
        from infini.report.text_tables import build_report

        return build_report(self, scale, published, yours)

    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        from infini.report.costs import by_seconds, draw_costs, memory_points, token_points
        from infini.report.figures import draw_curves, draw_gap, draw_gates
        from infini.report.suites import newest

        if self.variants and not self.variants.keys() & selection.runs.keys():
            # Another report draws the models with their default settings.
            return {}
        gaps: Drawings = {
            "gap_by_position": partial(draw_gap, self, selection, BY_POSITION),
            "gap_by_place": partial(draw_gap, self, selection, BY_PLACE),
        }
        if self.untrained is True:
            # Their gates are where they were put, and no training cost anything.
            return gaps
        held = "numbers carried from segment to segment (0: none)"
        of_models = (run for run in known if "models" in run.series.get("train", {}))
        seconds, where = by_seconds(self, selection, newest(of_models, scale, "train"))
        corpus = self.benchmarks[self.task]
        return {
            **gaps,
            "gates": partial(draw_gates, selection, titles=self.models, what=corpus),
            "perplexity_by_memory": partial(
                draw_costs, self, selection, points=memory_points(selection), label=held, unit="numbers carried"
            ),
            "perplexity_by_seconds": partial(
                draw_costs, self, selection, points=seconds, label=where, unit="seconds of training"
            ),
            "perplexity_by_tokens": partial(
                draw_costs,
                self,
                selection,
                points=token_points(selection),
                label="training tokens",
                unit="training tokens",
                logarithmic=True,
                marked=self.compared_in_paper,
            ),
            "training": partial(draw_curves, selection, self.models, f"{self.title}: {corpus}, scale {scale}"),
        }


def _variant(where: str, given: Any) -> Variant:
    allowed = "{model: name, settings: {scale: [key=value, ...]}}, with rates: {task: number above 0} or without"
    try:
        made: Variant = make_row(Variant, where, given)
        fits = all(texts and all("=" in text for text in texts) for texts in made.settings.values())
        fits = fits and all(rate > 0 for rate in made.rates.values())
    except InputError:
        fits = False
    require(fits, where, given, f"must be {allowed}")
    return made


@cache
def _stops_early(scale: str) -> bool:
    """Whether evaluations at a scale read only the beginning of a document."""
    return settings_in("scale", scale).get("eval_max_tokens") is not None
