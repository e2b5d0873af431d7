"""The table of running text: perplexities, the paper's and ours, and the tables of the other measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, ClassVar, get_args

from infini.config.lengths import format_length
from infini.config.schema import evaluation_keys, groups, settings_in
from infini.config.typed import build
from infini.errors import InputError, did_you_mean, one_of, require
from infini.records import RunRecord, carried_floats, value_at, xl_cache
from infini.report.budgets import draw_gains, growth_table
from infini.report.declared import find_mismatches, report_mismatches
from infini.report.intervals import holm, p_value
from infini.report.kind import REPRODUCED, OwnVerb, values_of
from infini.report.selection import IRRELEVANT_SETTINGS, Drawings, RunReport, Selection, select_sources
from infini.report.stats import BY_PLACE, BY_POSITION, Effect, Knockout, gap, knockout_cost, paired_difference
from infini.report.tables import (
    CLUSTERED,
    DASH,
    DASH_MEANS,
    DISPUTED,
    MISSING,
    OTHER_DATA_MARK,
    PLUS_MINUS,
    Cell,
    RenderedReport,
    Row,
    Table,
    disputes,
    distinct,
    effect_cell,
    in_words,
    left_out,
    marked,
    measured_cell,
    not_shown,
    over_seeds,
    products,
    provenance,
    quoted,
    source_label,
)
from infini.report.text_measures import (
    Counts,
    bits_per_byte,
    compression,
    counted,
    described_tokens,
    word_perplexity,
)

BIN_GROWTH = 4.0
"""Each column of a table of positions ends at this many times its first position."""
SIZES = "Floats carried from segment to segment{}, and tokens of the XL cache and of a segment"
COMPARED = " (in brackets how many times less than Memorizing Transformers)"


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
        # The training may be another report's, whose evaluations read otherwise.
        of_training = wanted.keys() - IRRELEVANT_SETTINGS - {f"scale.{key}" for key in evaluation_keys("scale")}
        same = all(value_at(trained, key) == wanted[key] for key in of_training)
        return bool(wanted) and run.model == self.model and same


@dataclass(frozen=True)
class Report(RunReport):
    """A table of running text, as `conf/report/<name>.yaml` declares it."""

    figure_kinds = (
        *("gap_by_position", "gap_by_place", "gates"),
        *("perplexity_by_memory", "perplexity_by_seconds", "perplexity_by_tokens", "gain_by_tokens", "training"),
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
    variants: dict[str, Any] = field(default_factory=dict)
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
    memory_baseline: str | None = None
    """Row whose memory is divided by that of the others, which is their compression."""
    log_gaps: bool = field(default=False, metadata={"allowed": "true or false"})
    """Whether the figures of gaps have an axis that is logarithmic on both sides of 0: where some rows differ from the
    baseline a hundred times as much as others, which would look flat."""
    compared_in_paper: dict[str, str] = field(default_factory=dict)
    """Row of a baseline -> the row with the tokens that the paper gave its own model. The figure of perplexity by
    training tokens marks the two."""
    budgets: dict[str, list[str]] = field(default_factory=dict)
    """Row of a model -> the rows of this model with more and more training tokens, itself first."""
    budgets_over: list[str] = field(default_factory=list)
    """Rows of `budgets` with whose models the others are compared at each budget."""
    whole_documents: bool = field(default=False, metadata={"allowed": "true or false"})
    """Whether evaluations read documents to their end, also at a scale that otherwise stops earlier
    (scale.eval_max_tokens). The table then has only such runs, and no knock-outs."""
    eval_max_tokens: int | None = None
    """Tokens of a document that evaluations read at most, if not as many as the rows and the scale say
    (scale.eval_max_tokens)."""
    untrained: list[str] = field(default_factory=list)
    """Rows of pretrained models that are evaluated without a training. No other run fills a cell of theirs."""
    trained_on: str | None = None
    """Task that the rows are trained on, if it is not the one that evaluates them."""

    def __post_init__(self) -> None:
        self.check_choices()
        require(
            set(self.untrained) <= set(self.models),
            "report.untrained",
            self.untrained,
            "must be a list of rows of report.models",
        )
        names = self.former_names
        require(isinstance(names, list), "report.former_names", names, "a list of names")
        if self.trained_on is not None:
            one_of("report.trained_on", self.trained_on, groups()["task"])
        hint = did_you_mean(self.task, self.benchmarks)
        require(self.task in self.benchmarks, "report.task", self.task, f"must be a task of report.benchmarks{hint}")
        most = self.eval_max_tokens
        known = most is None or (type(most) is int and most > 0 and not self.whole_documents)
        require(known, "report.eval_max_tokens", most, "must be null or a positive number; null with whole_documents")
        for key in ("baseline", "memory_baseline"):
            row = getattr(self, key)
            allowed = f"must be null or a row of report.models{did_you_mean(str(row), self.models)}"
            require(row is None or row in self.models, f"report.{key}", row, allowed)
        alone = bool(self.baselines) and self.baseline is None
        require(not alone, "report.baselines", self.baselines, "needs report.baseline, for the rows it does not name")
        for key in ("paper", "variants", "baselines", "compared_in_paper", "budgets"):
            rows: list[str] = list(getattr(self, key))
            if key in ("baselines", "compared_in_paper"):
                rows += getattr(self, key).values()
            if key == "budgets":
                rows += [row for own in self.budgets.values() for row in own]
            for row in rows:
                if row not in self.models:
                    raise InputError(f"report.{key}: no row {row!r} in report.models{did_you_mean(row, self.models)}")
        first = all(own[:1] == [row] for row, own in self.budgets.items())
        require(first, "report.budgets", self.budgets, "row: [row, ...], each model's own row first")
        hint = f"rows of report.budgets ({', '.join(self.budgets)})"
        require(set(self.budgets_over) <= set(self.budgets), "report.budgets_over", self.budgets_over, hint)
        variants = {name: _variant(f"report.variants.{name}", given) for name, given in self.variants.items()}
        object.__setattr__(self, "variants", variants)
        self._check_rows()
        for name, variant in variants.items() if self.trained_on is not None else ():
            for scale, settings in variant.settings.items():
                # They would change the evaluation alone, and the row would refuse its own runs.
                of_task = [text for text in settings if text.startswith("task")]
                key = f"report.variants.{name}.settings.{scale}"
                require(not of_task, key, of_task, f"no setting of the task, which is {self.trained_on} in training")

    def _check_rows(self) -> None:
        """Raise InputError for a row that nothing could ever fill: its model or scale is misspelt."""
        for name, variant in self.variants.items():
            one_of(f"report.variants.{name}.model", variant.model, groups()["model"])
            for scale in variant.settings:
                one_of(f"report.variants.{name}.settings", scale, groups()["scale"])
        for row in self.models:
            if not (row in self.variants or row in self.paper or row in groups()["model"]):
                hint = did_you_mean(row, groups()["model"])
                raise InputError(
                    f"report.models: row {row!r} is no model, and neither report.variants nor report.paper has it{hint}"
                )

    @property
    def titles(self) -> Mapping[str, str]:
        return self.models

    @property
    def parts(self) -> tuple[Report, ...]:
        return tuple(
            replace(self, task=task, name=self.name if task == self.task else f"{self.name}_{task}")
            for task in self.benchmarks
        )

    def row_of(self, run: RunRecord, known: Selection) -> tuple[str | None, str]:
        trained = known.training_config(run)
        trained_as, own = trained.get("variant"), {self.variants_of or self.name, *self.former_names}
        # A variant of another report is another model, even if this report's rows do not set what it sets.
        if trained_as and not {trained_as, f"{trained_as}_{self.task}"} & own:
            return None, ""
        if otherwise := self._reads_otherwise(run):
            return None, otherwise
        for name, variant in self.variants.items():
            if (name in self.untrained) == (run.parent is None) and variant.fits(run, trained):
                return name, ""
        # A model that was trained as a variant is not the model with its default settings.
        usual = run.model in self.models and run.model not in self.variants and not trained_as
        if usual and (run.model in self.untrained) == (run.parent is None):
            return run.model, ""
        return None, f"no row has model={run.model} with the settings of its training"

    def _reads_otherwise(self, run: RunRecord) -> str | None:
        """Says how an evaluation's text differs from this table's; None if it does not."""
        if (split := run.data.get("split")) != self.split:
            return f"it reads the {split} split, this table is about the {self.split} split"
        whole = value_at(run.config, "scale.eval_max_tokens") is None
        if whole == self.whole_documents or (whole and _limit_at(run.scale) is None):
            return None
        read, about = ("whole documents", "their beginnings") if whole else ("beginnings of documents", "whole ones")
        return f"it reads {read}, this table is about {about}"

    def evaluation_settings(self) -> list[str]:
        """Settings of the evaluations of every row."""
        if self.whole_documents:
            # Knock-outs are measured once, at the beginnings of documents.
            return ["scale.eval_max_tokens=null", "scale.knockouts=false"]
        return [] if self.eval_max_tokens is None else [f"scale.eval_max_tokens={self.eval_max_tokens}"]

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
        if self.eval_max_tokens is not None:
            return self.eval_max_tokens
        settings = values_of(self.settings_of(row, scale) or ())
        limit: int | None = settings.get("scale.eval_max_tokens", _limit_at(scale))
        return limit

    def render(
        self, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
    ) -> RenderedReport:
        """The columns paper, published and yours of each task, and the other tables."""
        published, yours = list(published), None if yours is None else list(yours)
        # Task -> source -> selection.
        chosen = {part.task: select_sources(part, scale, published, yours) for part in self.parts}
        counts = counted([*published, *(yours or ())])
        mark = ""
        made_up = [task for task, sources in chosen.items() if any(found.synthetic for found in sources.values())]
        if made_up:
            with_runs = [task for task, sources in chosen.items() if any(found.runs for found in sources.values())]
            where = "" if made_up == with_runs else f" in {', '.join(self.benchmarks[task] for task in made_up)}"
            # Published runs are never synthetic.
            where += " of the rows that are yours" if any(chosen[task]["published"].runs for task in made_up) else ""
            mark = f" [SYNTHETIC CORPUS{where}: shows that the pipeline works, says nothing about the models]"
        main, without_run = _main_table(self, chosen)
        tables = [main, _sizes_table(self, chosen)]
        absent = not_shown(without_run)
        seeds = f"mean {PLUS_MINUS} standard deviation over seeds, number of seeds in brackets"
        notes = [*absent, f"{seeds}; {DASH_MEANS}.", *_unequal_seeds(self, chosen)]
        for part in self.parts:
            sources = chosen[part.task]
            # The other tables compare runs in pairs, so they show the runs of one source.
            beside = "yours" if yours is not None and sources["yours"].runs else "published"
            if sources[beside].runs:
                shown = part, beside, sources[beside]
                # By position, the loss shows whether the gap keeps growing; by place, that the baseline sees little
                # where a segment begins.
                tables += [
                    _measures_table(*shown, counts),
                    _trainings_table(*shown),
                    _memory_table(*shown),
                    growth_table(*shown),
                    _gap_table(*shown, BY_POSITION, BIN_GROWTH, "by position in the document"),
                    _gap_table(*shown, BY_PLACE, 1.0, "by place in the segment"),
                ]
            named = {f"{self.benchmarks[part.task]}, {source}": selection for source, selection in sources.items()}
            notes += [
                provenance(source, selection.all_runs, _data(selection, part))
                for source, selection in named.items()
                if selection.runs or (part.task == self.task and not selection.disputed)
            ]
            for source, selection in named.items():
                notes += products(source, part.models, selection)
            notes += [*report_mismatches(named, scale, part.models), *disputes(named)]
            if other := _other_data(sources):
                notes.append(f"{OTHER_DATA_MARK} {self.benchmarks[part.task]}, yours: {other}")
            notes += left_out(sources)
            absent += left_out(sources)
        return self.rendered(scale, [table for table in tables if table.rows], notes, mark, legend=tuple(absent))

    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        from infini.report.costs import by_seconds, draw_costs, memory_points, token_points
        from infini.report.figures import draw_curves, draw_gap, draw_gates
        from infini.report.suites import newest

        if self.variants and not self.variants.keys() & selection.runs.keys():
            # Another report draws the models with their default settings.
            return {}
        # One training for all tasks has the same gates whichever of them is read.
        drawn_elsewhere = self.trained_on is not None and self.task != next(iter(self.benchmarks))
        by_cost = partial(draw_costs, self, selection)
        held, tokens = "numbers carried from segment to segment (0: none)", "training tokens"
        of_models = (run for run in known if "models" in run.series.get("train", {}))
        seconds, where = by_seconds(self, selection, newest(of_models, scale, "train"))
        corpus = self.benchmarks[self.task]
        trained = corpus if self.trained_on is None else self.title
        # Gates of an untrained row are where they were put.
        titles = {row: title for row, title in self.models.items() if row not in self.untrained}
        gates: Drawings = {"gates": partial(draw_gates, selection, titles=titles, what=trained)}
        return {
            "gap_by_position": partial(draw_gap, self, selection, BY_POSITION),
            "gap_by_place": partial(draw_gap, self, selection, BY_PLACE),
            **({} if drawn_elsewhere else gates),
            "perplexity_by_memory": partial(
                by_cost, points=memory_points(selection), label=held, unit="numbers carried"
            ),
            "perplexity_by_seconds": partial(by_cost, points=seconds, label=where, unit="seconds of training"),
            "perplexity_by_tokens": partial(
                by_cost, points=token_points(selection), label=tokens, unit=tokens, budgets=True
            ),
            "gain_by_tokens": partial(draw_gains, self, selection),
            "training": partial(draw_curves, selection, self.models, f"{self.title}: {corpus}, scale {scale}"),
        }


def _variant(where: str, given: Any) -> Variant:
    allowed = "{model: name, settings: {scale: [key=value, ...]}}, with rates: {task: number above 0} or without"
    try:
        made = given if isinstance(given, Variant) else build(Variant, given, where)
        fits = all(texts and all("=" in text for text in texts) for texts in made.settings.values())
        fits = fits and all(rate > 0 for rate in made.rates.values())
    except InputError:
        fits = False
    require(fits, where, given, f"must be {allowed}")
    return made


@cache
def _limit_at(scale: str) -> int | None:
    """Tokens of a document that evaluations at a scale read at most; None: all."""
    limit: int | None = settings_in("scale", scale).get("eval_max_tokens")
    return limit


def _main_table(report: Report, chosen: dict[str, dict[str, Selection]]) -> tuple[Table, list[str]]:
    """The perplexities, and the titles of rows that are left out: those without any number, where others have one."""
    columns: list[str] = []
    printed = {task for values in report.paper.values() for task, value in values.items() if value is not None}
    for task, benchmark in report.benchmarks.items():
        columns += [f"{benchmark} paper"] * (task in printed)
        columns += [f"{benchmark} {source}" for source in chosen[task]]
    rows = []
    for model, title in report.models.items():
        paper = report.paper.get(model, {})
        cells: list[Cell] = []
        for task, sources in chosen.items():
            cells += [quoted(paper.get(task))] * (task in printed)
            for source, selection in sources.items():
                runs = selection.runs.get(model, ())
                cell = over_seeds(runs, lambda run: run.metric("perplexity"), ".2f", source)
                lost = {run.seed for run in runs if _is_not_finite(run)}
                shown = f"{cell.text}, {in_words(len(lost), 'seed')} not finite" if lost else cell.text
                text = DISPUTED if model in selection.disputed else marked(shown, selection, model)
                if source == "yours" and runs and _other_data(sources):
                    text += f" {OTHER_DATA_MARK}"
                cells.append(replace(cell, text=text))
        rows.append(Row(model, title, tuple(cells)))
    empty = [row for row in rows if all(cell.origin == "missing" and cell.text == DASH for cell in row.cells)]
    if not any(cell.origin == "measured" for row in rows for cell in row.cells):
        # Before the first run the table shows which rows there are.
        empty = []
    kept = tuple(row for row in rows if row not in empty)
    return Table("Perplexity per token", tuple(columns), kept), [row.title for row in empty]


def _unequal_seeds(report: Report, chosen: Mapping[str, Mapping[str, Selection]]) -> list[str]:
    """A note for the tasks whose rows have different seeds."""

    def differ(selection: Selection) -> bool:
        return len({frozenset(run.seed for run in runs) for runs in selection.runs.values()}) > 1

    named = [report.benchmarks[task] for task, sources in chosen.items() if any(map(differ, sources.values()))]
    if not named:
        return []
    others = ", or look at the differences, which are paired by seed" * bool(report.baseline)
    return [f"{' and '.join(named)}: not all rows have the same seeds; compare only rows with the same seeds{others}."]


def _is_not_finite(run: RunRecord) -> bool:
    """Whether tokens were scored, and the perplexity is not finite."""
    entry = run.results.get("perplexity", {"n": 0})
    return bool(entry["n"]) and entry["value"] is None


def _other_data(sources: Mapping[str, Selection]) -> str:
    """Says how the data of the reader's runs differ from those of the published ones; empty where they do not."""
    runs = [selection.all_runs[:1] for selection in sources.values()]
    if len(runs) < 2 or not all(runs):
        return ""
    # All runs of a selection read the same documents with the same tokenizer.
    published, yours = (found[0].data for found in runs)
    ways = [
        f"{what} ({_count(yours.get(name))} instead of {_count(published.get(name))})"
        for key, what, name in (
            ("revision", "other documents", "documents"),
            ("tokenizer", "another tokenizer", "tokenizer"),
        )
        if yours.get(key) != published.get(key)
    ]
    return f"{' and '.join(ways)} than published; perplexities cannot be compared" if ways else ""


def _sizes_table(report: Report, chosen: Mapping[str, Mapping[str, Selection]]) -> Table:
    """Memory, compression, XL cache and segment length: the paper's and ours, which are the same for every task."""
    sizes = ("memory", "xl_cache", "segment_length")
    beside_paper = any(name in values for values in report.paper.values() for name in sizes)
    found: dict[str, tuple[str, Selection]] = {}
    for sources in chosen.values():
        for source, selection in sources.items():
            for row in selection.runs:
                # The reader's own runs replace the published ones.
                if row not in found or source == "yours" != found[row][0]:
                    found[row] = source, selection
    first = {row: selection.runs[row][0] for row, (_, selection) in found.items()}
    floats = {row: carried_floats(run, found[row][1].training_config(run)) for row, run in first.items()}
    rows = []
    for row, title in report.models.items():
        paper = [quoted(report.paper.get(row, {}).get(name)) for name in sizes]
        ours = [MISSING, MISSING, MISSING]
        if row in found:
            source, selection = found[row]
            title = marked(title, selection, row)
            cache = xl_cache(first[row], selection.training(first[row]))
            size, length = floats[row], value_at(selection.training_config(first[row]), "dims.segment_length")
            ratio = "" if size is None else compression(size, floats.get(report.memory_baseline or ""))
            run_ids = [run.run_id for run in selection.runs[row]]
            seeds = {run.seed for run in selection.runs[row]}
            shown = (
                (None if size is None else f"{size:,.0f}{ratio}", size),
                (str(cache), None if cache is None else float(cache)),
                (None if length is None else str(length), length),
            )
            ours = [
                MISSING if text is None else measured_cell(text, source, value, len(seeds), run_ids)
                for text, value in shown
            ]
        pairs = zip(paper, ours, strict=True)
        cells = [cell for pair in pairs for cell in (pair if beside_paper else pair[1:])]
        if any(cell is not MISSING for cell in cells):
            rows.append(Row(row, title, tuple(cells)))
    compared = any(cell.text.endswith("x)") for row in rows for cell in row.cells)
    headings = (f"Memory size{' (comp.)' * compared}", "XL cache", "Segment length")
    whose = ("paper", "ours") if beside_paper else ("",)
    columns = tuple(f"{name} {of}".rstrip() for name in headings for of in whose)
    return Table(SIZES.format(COMPARED * compared), columns, tuple(rows))


def _measures_table(report: Report, source: str, selection: Selection, counts: Counts) -> Table:
    measures: dict[str, tuple[Callable[[RunRecord], Any], str]] = {
        "Training tokens": (lambda run: selection.spent(run, "tokens_seen"), ",.0f"),
        "Word perplexity": (partial(word_perplexity, counts=counts), ".1f"),
        "Bits per byte": (partial(bits_per_byte, counts=counts), ".3f"),
        "Training seconds": (lambda run: selection.spent(run, "wall_seconds"), ",.0f"),
        # The seconds of all processes of an evaluation, without the knock-outs, which not every model has.
        "Reading seconds": (lambda run: run.cost.get("streaming_seconds"), ",.0f"),
    }
    rows = []
    for model, runs in selection.runs.items():
        cells = tuple(over_seeds(runs, value, form, source) for value, form in measures.values())
        rows.append(Row(model, marked(report.models[model], selection, model), cells))
    what = (
        "other measures, and wall-clock seconds of the training and of reading the documents once (longer where the "
        "machine was also doing other work)"
    )
    title = f"{report.benchmarks[report.task]}: {what} ({source_label(source)})"
    # An untrained model has no training.
    return Table(title, tuple(measures), tuple(rows)).with_measured_columns()


def _trainings_table(report: Report, source: str, selection: Selection) -> Table:
    """The start and the wall-clock seconds of the trainings behind the rows, by seed; without untrained models."""
    known = {row: {run.seed: selection.training(run) for run in runs} for row, runs in selection.runs.items()}
    seeds = sorted({seed for by_seed in known.values() for seed, training in by_seed.items() if training is not None})
    rows = []
    for row, by_seed in known.items():
        cells = []
        for seed in seeds:
            training = by_seed.get(seed)
            seconds = None if training is None else training.cost.get("wall_seconds")
            if training is None or seconds is None:
                cells.append(MISSING)
                continue
            began = datetime.fromisoformat(training.started).astimezone(UTC)
            text = f"{began:%Y-%m-%d %H:%M}, {seconds:,.0f} s"
            cells.append(measured_cell(text, source, seconds, 1, [training.run_id]))
        if any(cell is not MISSING for cell in cells):
            rows.append(Row(row, marked(report.models[row], selection, row), tuple(cells)))
    title = (
        f"{report.benchmarks[report.task]}: start (UTC) and wall-clock seconds of each training, evaluations not "
        f"counted ({source_label(source)}); most shared their machine with other work"
    )
    return Table(title, tuple(f"Seed {seed}" for seed in seeds), tuple(rows))


def tested_effects(report: Report, selection: Selection) -> dict[str, list[Effect | None]]:
    """Row -> the cost of resetting its memory, the cost of another document's memory and, if the report has a baseline,
    its loss minus the loss of its baseline. Rows without any are left out.

    The p-values of all effects are one family (Holm). With one seed an effect is tested over documents alone, which is
    another hypothesis than over documents and seeds and has a smaller p-value. So effects of one seed have a p-value
    only if no effect has more seeds.
    """
    found: dict[str, list[Effect | None]] = {}
    for row, runs in selection.runs.items():
        effects = [knockout_cost(runs, "reset"), knockout_cost(runs, "foreign")]
        if report.baseline:
            other = report.baseline_of(row)
            effects.append(paired_difference(runs, selection.runs.get(other, [])) if other else None)
        if any(effects):
            found[row] = effects
    family = [effect for effects in found.values() for effect in effects if effect and effect.df > 0]
    if any(effect.n_seeds > 1 for effect in family):
        family = [effect for effect in family if effect.n_seeds > 1]
    adjusted = dict(zip(map(id, family), holm([effect.p for effect in family]), strict=True))
    return {
        row: [effect and replace(effect, adjusted_p=adjusted.get(id(effect))) for effect in effects]
        for row, effects in found.items()
    }


def _p_described(effects: Sequence[Effect]) -> str:
    """Describes the p-values of these effects."""
    n_tested = sum(effect.adjusted_p is not None for effect in effects)
    several = {effect.n_seeds > 1 for effect in effects if effect.df > 0}
    alone = ", of one seed over documents alone" * (several == {False})
    some = " with two seeds or more" * (several == {False, True})
    others = f", {DASH} with one seed" * (several == {False, True})
    return f"p: two-sided{alone}, adjusted for the {n_tested} comparisons of this table{some} (Holm){others}"


def _in_the_first_tokens(selection: Selection, rows: Iterable[str]) -> str:
    """How many tokens of a document the knock-outs of these rows read at most, where that is on record."""
    names = [f"{name}_tokens" for name in get_args(Knockout)]
    runs = [run for row in rows for run in selection.runs[row]]
    most = {max((entry.get(name) or 0 for entry in run.documents for name in names), default=0) for run in runs} - {0}
    read = " to ".join(f"{number:,}" for number in sorted({min(most), max(most)})) if most else ""
    return f", in the first {read} tokens of a document," if read else ""


def _memory_table(report: Report, source: str, selection: Selection) -> Table:
    names = ("Reset", "Foreign", *(["Minus baseline"] if report.baseline else []))
    found = tested_effects(report, selection)
    rows = []
    for model, effects in found.items():
        cells = [cell for effect in effects for cell in _effect_cells(effect, source)]
        cells += _baseline_cells(report, model)
        known = [effect for effect in effects if effect]
        ids = list(dict.fromkeys(run_id for effect in known for run_id in effect.run_ids))
        documents = [f"{effect.n_documents} ({effect.effective_documents:.1f})" for effect in known]
        for counts, last in ((documents, known[-1].n_documents), ([str(e.n_seeds) for e in known], known[-1].n_seeds)):
            text = "/".join(dict.fromkeys(counts))
            cells.append(measured_cell(text, source, last, known[-1].n_seeds, ids))
        rows.append(Row(model, marked(report.models[model], selection, model), tuple(cells)))
    title = (
        f"{report.benchmarks[report.task]}: knock-outs of the memory, in nats a token [95 % interval, {CLUSTERED}] "
        f"({source_label(source)}): loss added{_in_the_first_tokens(selection, found)} by resetting it at every "
        "segment, and by another document's memory (both say how far a model relies on its memory, not what the memory "
        "is worth)"
    )
    if report.baseline:
        title += f", and loss minus the loss of {_baseline(report)} (below 0: better), paired by seed and document"
    title += f"; {_p_described([effect for effects in found.values() for effect in effects if effect])}"
    title += "; effective: the number of documents of equal length with the same precision"
    columns = [heading for name in names for heading in (name, f"{name}: p")]
    return Table(title, (*columns, *_baseline_columns(report), "Documents (effective)", "Seeds"), tuple(rows))


def _gap_table(report: Report, source: str, selection: Selection, series: str, growth: float, by_what: str) -> Table:
    """The gap to the baseline in bins of a series. growth: the end of a bin over its start, at least."""
    at_zero = {row: selection.runs.get(baseline, []) for row in selection.runs if (baseline := report.baseline_of(row))}
    gaps = {row: gap(selection.runs[row], baseline, growth, series) for row, baseline in at_zero.items()}
    bins = sorted({(first, last) for points in gaps.values() for first, last, _, _ in points.tolist()})
    rows = []
    for row, points in gaps.items():
        mine, theirs = ([run for run in runs if series in run.series] for runs in (selection.runs[row], at_zero[row]))
        shared = {run.seed for run in mine} & {run.seed for run in theirs}
        run_ids, found = [run.run_id for run in (*mine, *theirs) if run.seed in shared], {}
        for first, last, mean, half in points.tolist():
            text = f"{mean:+.4f} {PLUS_MINUS} {half:.4f}"
            found[first, last] = measured_cell(text, source, mean, len(shared), run_ids, half, "ci")
        if found:
            cells = [found.get(at, MISSING) for at in bins]
            ids = dict.fromkeys(run_id for cell in cells for run_id in cell.run_ids)
            cells += _baseline_cells(report, row)
            cells.append(measured_cell(str(len(shared)), source, len(shared), len(shared), ids))
            rows.append(Row(row, marked(report.models[row], selection, row), tuple(cells)))
    columns = tuple(
        f"{format_length(int(first)) if first else 0} to {format_length(int(last))}" for first, last in bins
    )
    title = (
        f"{report.benchmarks[report.task]}: loss minus the loss of {_baseline(report)} {by_what}, in "
        f"nats a token {PLUS_MINUS} half of its 95 % interval, {CLUSTERED}, each cell by itself "
        f"({source_label(source)})"
    )
    return Table(title, (*columns, *_baseline_columns(report), "Seeds"), tuple(rows))


def _baseline(report: Report) -> str:
    if report.baselines:
        return "the row's baseline"
    return f"the baseline ({report.models[report.baseline]})" if report.baseline else ""


def _baseline_columns(report: Report) -> list[str]:
    """A column for the baselines, if they differ."""
    return ["Baseline"] if report.baseline and report.baselines else []


def _baseline_cells(report: Report, row: str) -> list[Cell]:
    other = report.baseline_of(row)
    return [Cell(report.models[other], "computed") if other else MISSING for _ in _baseline_columns(report)]


def _effect_cells(effect: Effect | None, source: str) -> list[Cell]:
    if effect is None:
        return [MISSING, MISSING]
    size = effect_cell(effect, source)
    if (p := effect.adjusted_p) is None:
        return [size, MISSING]
    return [size, measured_cell(p_value(p), source, p, effect.n_seeds, effect.run_ids)]


def _data(selection: Selection, report: Report) -> list[str]:
    """Data, tokenizer and training tokens of the runs of a selection."""
    data = []
    for run in selection.all_runs:
        seen, scored = run.data, run.cost.get("tokens_seen")
        size = _count(seen.get("tokens"))
        # An evaluation may stop early.
        tokens = size if scored in (None, seen.get("tokens")) else f"the first {_count(scored)} of {size}"
        data.append(
            f"{seen.get('name')} {seen.get('split')} "
            f"({seen.get('source')}, revision {str(seen.get('revision'))[:12]}), "
            f"{_count(seen.get('documents'))} documents, {tokens} tokens"
        )
    by_title = {report.models[model]: found for model, found in selection.runs.items()}
    trained = described_tokens(selection, by_title)
    tokenizers = distinct(run.data.get("tokenizer") for run in selection.all_runs)
    return [f"data {distinct(data)}", f"tokenizer {tokenizers}", f"training tokens {trained}"]


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value or "unknown")
