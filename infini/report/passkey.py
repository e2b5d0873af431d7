"""The passkey table: token accuracy by length and place of the key, the paper's numbers beside ours."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

from infini.config.lengths import (
    HISTORY_SEGMENTS,
    NAMED_DEPTHS,
    format_length,
    parse_depths,
    parse_length,
    parse_lengths,
)
from infini.config.schema import groups, task_schema
from infini.errors import InputError, did_you_mean, require
from infini.records import RunRecord, start_of, value_at
from infini.report.intervals import minimum_interval
from infini.report.kind import REPRODUCED, OwnVerb, usual_options, values_of
from infini.report.selection import Drawings, RowMatchingReport, Selection, cells_with_most, differences, select_sources
from infini.report.tables import (
    DASH,
    DASH_MEANS,
    MISSING,
    Cell,
    RenderedReport,
    Row,
    Table,
    counted,
    distinct,
    measured_cell,
    over_seeds,
    quoted,
    rows_by_source,
)

PAPER_LONGEST = 5120
"""Tokens of the longest input that the paper fine-tunes on."""
DETAILS = (
    "Details: token accuracy of the worst cell of a seed (and its number of prompts, if other cells have more), in "
    "brackets the 95 % interval of the lowest accuracy among all cells and seeds; exact match over all cells in per "
    "cent; the longest training input; and the number of filler tokens that together weigh as much as the key in the "
    "head that is best at it"
)
DETAIL_COLUMNS = (
    *("Source", "Tokenizer", "Examples a cell", "Seeds", "Worst cell", "Exact match", "Training tokens", "Longest"),
    "Half-dilution",
)
LOCAL_MARK = "*"
FEWER_MARK = "\N{DEGREE SIGN}"
STANDARD = {"digits": 5, "distractors": 0, "filler": "block"}
"""The paper's prompts: what a row learns and is asked where it does not say otherwise."""
NEWER = {"fill": "blocks", "as_printed": False}
"""The same, of options that older records lack."""


def newer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The usual values of the options of NEWER that a configuration has."""
    return {key: value for key, value in NEWER.items() if key in config.get("task", {})}


@dataclass(frozen=True)
class PasskeyRow:
    """A row: how a model is trained and asked, and the paper's numbers for it."""

    title: str
    model: str
    short: str = ""
    """Title in figures, where there is little room; empty: the title."""
    recipe: str = ""
    """Name of the training recipe, `{scale}` standing for the scale; empty for a model not trained on prompts."""
    start: str = ""
    """The start of its training: nothing, the model of a task of running text (pg19), or the model of the row of this
    name. A row with neither start nor recipe is a pretrained model as it is."""
    start_overrides: list[str] = field(default_factory=list)
    """Settings of the training on the task that it starts from."""
    knockout: str = "none"
    overrides: list[str] = field(default_factory=list)
    """Further settings of the training, for example dims.segment_length=512 or task.digits=8. Options of the model that
    are not among them are those with which it is shipped."""
    lengths: list[str | int] = field(default_factory=list)
    """Lengths that `infini reproduce` asks, if not all of the report."""
    questions: dict[str, Any] = field(default_factory=dict)
    """Settings of the task in which the questions differ from the paper's, for example digits: 8."""
    paper: dict[str, str] = field(default_factory=dict)
    """Length -> start/middle/end in per cent, as printed."""

    def printed(self, key: str = "paper") -> dict[int, dict[str, float]]:
        """The paper's numbers: length in tokens -> name of the place -> per cent. InputError, naming the setting `key`,
        for what is not one number for each place."""
        found = {}
        for length, text in self.paper.items():
            values = [float(part) for part in text.split("/") if re.fullmatch(r"\d+(\.\d+)?", part)]
            fits = len(values) == text.count("/") + 1 == len(NAMED_DEPTHS) and max(values) <= 100
            allowed = f"must be three numbers in per cent, {'/'.join(NAMED_DEPTHS)}, as 97/99/100"
            require(fits, f"{key}.{length}", text, allowed)
            found[parse_length(length, key)] = dict(zip(NAMED_DEPTHS, values, strict=True))
        return found

    def beside(self, length: int, depths: Iterable[str]) -> str | None:
        """The paper's numbers at a length, in the order of these places; None if it has none of them."""
        values = self.printed().get(length, {})
        texts = [f"{values[depth]:g}" if depth in values else DASH for depth in depths]
        return "/".join(texts) if set(texts) != {DASH} else None


@cache
def pretraining_tasks() -> tuple[str, ...]:
    """Tasks of the trainings that a row's training may start from: those of running text."""
    schemas = {name: task_schema(name) for name in groups()["task"]}
    return tuple(name for name, schema in schemas.items() if schema.is_trained_on and schema.has_documents)


@cache
def _recipe(name: str) -> Mapping[str, Any]:
    """A recipe by name; empty where there is none, as at another scale."""
    from infini.config.compose import compose

    return vars(compose(["task=passkey", f"recipe={name}"]).recipe) if name in groups()["recipe"] else {}


def additions_of(row: PasskeyRow, scale: str) -> dict[str, bool]:
    """Whether a row's training has length extension ("extended"), and a penalty on what is written to memory
    ("sparse"), by its recipe and its own settings. A row without a recipe is the training before, which has neither."""
    recipe, own = _recipe(row.recipe.format(scale=scale)) if row.recipe else {}, values_of(row.overrides)
    extension, penalty = (own.get(f"recipe.{key}", recipe.get(key)) for key in ("length_extension", "sparse_writes"))
    return {"extended": extension is not None, "sparse": bool(penalty)}


def declared_options(row: PasskeyRow, config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a row's own settings, and of the options of its model that it leaves as they are shipped.
    config: of a training of that model."""
    return usual_options(config) | values_of(row.overrides)


@dataclass(frozen=True)
class PasskeyReport(RowMatchingReport):
    """Table 3, as `conf/report/table3_passkey.yaml` declares it."""

    sign = "rows"
    figure_kinds = (
        *("accuracy", "accuracy_by_length", "accuracy_by_updates", "exact_by_segments", "recall_by_steps"),
        *("gates", "training"),
    )
    choices = ("largest",)
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "reproduce": OwnVerb(
            (*REPRODUCED, "length", "depth"),
            ("init_from", "recipe", "recipe.name", "task.knockout"),
            "infini.runs.reproduce_passkey",
        )
    }

    lengths: list[str | int]
    depths: list[str | float]
    rows: dict[str, PasskeyRow]

    def __post_init__(self) -> None:
        parse_lengths(self.lengths, "report.lengths")
        parse_depths(self.depths, "report.depths")
        self.check_rows()
        for name, row in self.rows.items():
            row.printed(f"report.rows.{name}.paper")
            # A row may start from a row that has a start itself. The chain ends at fresh or pretrained weights.
            seen = [name]
            while row.start not in ("", *pretraining_tasks()):
                if row.start not in self.rows or row.start in seen:
                    raise InputError(
                        f"report.rows.{seen[-1]}.start={row.start!r}: {', '.join(pretraining_tasks())}, or another row "
                        f"that does not start from it{did_you_mean(row.start, self.rows)}"
                    )
                seen.append(row.start)
                row = self.rows[row.start]

    def row_mismatches(self, name: str, run: RunRecord, known: Selection) -> list[str]:
        row, training, trained = self.rows[name], known.training_config(run), known.training(run)
        if run.parent is None:
            found = differences({"model": run.model}, {"model": row.model})
            found += ["the row is trained, it is not"] if row.start or row.recipe else []
            found += differences(run.config, declared_options(row, run.config))
        else:
            found = self._training_mismatches(name, run.model, training, run.scale, known)
        # No row is asked with another segment length than its training's, or stops before the last training stage.
        learned = value_at(training, "dims.segment_length")
        found += differences(run.config, {"dims.segment_length": learned}, "its training")
        if trained and not trained.series.get("in_last_stage", True):
            found.append("its training ended before the last stage of its recipe")
        questions = STANDARD | newer_options(run.config) | row.questions | {"knockout": row.knockout}
        found += differences(run.config, {f"task.{key}": value for key, value in questions.items()})
        # Without the training's record it is unknown whether it learned these questions.
        if row.questions and trained is None:
            found.append("the record of its training is missing")
        # A row with the paper's numbers shows only models trained on inputs as long as the paper's or shorter.
        if row.paper and row.recipe and (longest := longest_input(training)) > PAPER_LONGEST:
            found.append(f"its training had inputs of {longest} tokens, the paper's at most {PAPER_LONGEST}")
        return found

    def _training_mismatches(
        self, name: str, model: str, training: Mapping[str, Any], scale: str, known: Selection
    ) -> list[str]:
        """Reasons why a training with the configuration `training` is not the one that a row declares."""
        row, recipe = self.rows[name], training.get("recipe", {})
        usual = f"{row.start}_{scale}" if row.start else ""
        shown = {
            "model": model,
            "recipe": recipe.get("name"),
            "extended": recipe.get("length_extension") is not None,
            "sparse": bool(recipe.get("sparse_writes")),
            "frozen_gates": value_at(training, "optimizer.gate_lr") == 0,
        }
        wanted = {
            "model": row.model,
            "recipe": row.recipe.format(scale=scale) if row.recipe else usual,
            **additions_of(row, scale),
            "frozen_gates": values_of(row.overrides).get("optimizer.gate_lr") == 0,
        }
        found = differences(shown, wanted)
        start = row.start if row.recipe else ""
        if start not in self._starts_of(training, scale, known):
            found.append(f"its training began with other weights than the row's ({start or 'fresh ones'})")
        of_task = training.get("task", {}).get("name") not in pretraining_tasks()
        prompts = STANDARD | newer_options(training) if of_task else {}
        declared = {f"task.{key}": value for key, value in prompts.items()}
        return found + differences(training, declared | declared_options(row, training))

    def _starts_of(self, training: Mapping[str, Any], scale: str, known: Selection) -> set[str]:
        """The names that rows give to the start of a training; empty if the record of that start is missing."""
        if (name := start_of(training)) is None:
            return {""}
        if (before := known.parents.get(name)) is None:
            return set()
        if before.task != self.task:
            return {before.task}
        training = before.traced_config
        fits = partial(self._training_mismatches, model=before.model, training=training, scale=scale, known=known)
        return {name for name in self.rows if not fits(name)}

    def cells_of(self, run: RunRecord) -> frozenset[Any]:
        wanted = {(length, depth) for length in parse_lengths(self.lengths) for depth in parse_depths(self.depths)}
        return frozenset((cell["length"], cell["depth"]) for cell in run.series.get("cells", ())) & wanted

    def render(
        self, scale: str, published: Iterable[RunRecord], yours: Iterable[RunRecord] | None = None
    ) -> RenderedReport:
        """The table of accuracy, a line for each row and source, and the table of the measurements behind each line."""
        sources = select_sources(self, scale, published, yours)
        numbers = parse_lengths(self.lengths)
        lengths = [format_length(length) for length in numbers]

        def label(source: str, runs: Sequence[RunRecord]) -> str:
            made_up = any(run.synthetic or sources[source].learned_synthetic_text(run) for run in runs)
            return source + " (books: SYNTHETIC)" * made_up

        def cells(runs: Sequence[RunRecord], source: str) -> list[Cell]:
            return [_accuracy(self, runs, length, source) for length in numbers]

        depths = parse_depths(self.depths)
        printed = {
            name: [quoted(row.beside(length, depths)) for length in numbers]
            for name, row in self.rows.items()
            if row.paper
        }
        others = [name for name, row in self.rows.items() if not row.paper]
        accuracy = rows_by_source(self.titles, sources, printed, cells, others, label)
        behind = [
            _details_row(self, name, selection.runs[name], selection, source)
            for name in self.rows
            for source, selection in sources.items()
            if name in selection.runs
        ]
        places = " / ".join(depths)
        table = Table(f"Token accuracy in per cent, key at {places}", ("Source", *lengths), tuple(accuracy))
        details = [Table(DETAILS, DETAIL_COLUMNS, tuple(behind))] * bool(behind)
        # One note for each mark: the short form has those of the marks that it shows.
        meanings = {
            LOCAL_MARK: f"{LOCAL_MARK}: key and question lie in one segment, no memory is needed.",
            DASH: f"{DASH_MEANS}.",
            "(": "(1): a mean over that many seeds; without a number over all of the row.",
            FEWER_MARK: f"{FEWER_MARK}: fewer prompts a seed than other cells of the row have.",
        }
        shown = "".join(cell.text for row in accuracy for cell in row.cells)
        notes = [note for mark, note in meanings.items() if mark in shown]
        notes += ["Cells are means over the seeds of the row."] * ("(" not in shown)

        def read(selection: Selection) -> list[str]:
            tokenizers = distinct(run.data.get("tokenizer") for run in selection.all_runs)
            return [f"lengths are tokens of {tokenizers}"]

        return self.with_provenance(scale, sources, [table], notes, read, others, details)

    def drawings(self, scale: str, selection: Selection, known: Iterable[RunRecord]) -> Drawings:
        from infini.report.figures import draw_curves, draw_gates
        from infini.report.passkey_figures import (
            accuracy_by_length,
            accuracy_by_updates,
            accuracy_heatmap,
            exact_by_segments,
            recall_by_steps,
        )

        with_memory = {name: row.title for name, row in self.rows.items() if row.knockout == "none"}
        return {
            "accuracy": partial(accuracy_heatmap, self, scale, selection),
            "accuracy_by_length": partial(accuracy_by_length, self, scale, selection),
            "accuracy_by_updates": partial(accuracy_by_updates, self, scale, selection),
            "exact_by_segments": partial(exact_by_segments, self, scale, selection),
            "recall_by_steps": partial(recall_by_steps, self, scale, selection),
            "gates": partial(draw_gates, selection, titles=with_memory, what=self.title),
            "training": partial(draw_curves, selection, self.titles, f"{self.title}, scale {scale}"),
        }


def _accuracy(report: PasskeyReport, runs: Sequence[RunRecord], length: int, source: str) -> Cell:
    """The accuracy at all places of one length, each the mean over seeds, marked if a seed has fewer prompts there than
    the row has elsewhere."""
    chosen = chosen_cells(report, runs)
    most = max((cell["examples"] for _, cell in chosen.values()), default=0)
    texts, values, used, asked = [], [], [], []
    for depth in parse_depths(report.depths):
        found = [pair for (_, *place), pair in chosen.items() if place == [length, depth]]
        if not found:
            texts.append(DASH)
            continue
        value = 100 * statistics.fmean(cell["token_accuracy"] for _, cell in found)
        values.append(value)
        used += [run.run_id for run, _ in found]
        asked.append(len(found))
        marks = LOCAL_MARK * all(is_local(cell) for _, cell in found)
        marks += FEWER_MARK * any(cell["examples"] < most for _, cell in found)
        texts.append(percent(value) + marks)
    if not values:
        return MISSING
    seeds = min(asked)
    fewer = f" ({seeds})" if seeds < len({run.seed for run in runs}) else ""
    mean = statistics.fmean(values)
    return measured_cell("/".join(texts) + fewer, source, mean, seeds, dict.fromkeys(used))


def chosen_cells(
    report: PasskeyReport, runs: Iterable[RunRecord]
) -> dict[tuple[int, int, str], tuple[RunRecord, dict[str, Any]]]:
    """(seed, length, depth) -> run and cell, for the report's lengths and depths; see cells_with_most."""
    lengths, depths = parse_lengths(report.lengths), parse_depths(report.depths)

    def place(cell: Mapping[str, Any]) -> tuple[int, str] | None:
        return (cell["length"], cell["depth"]) if cell["length"] in lengths and cell["depth"] in depths else None

    return {(seed, *at): found for (seed, at), found in cells_with_most(runs, place).items()}


def is_local(cell: Mapping[str, Any]) -> bool:
    """Whether key and question lie in one segment in all prompts of a cell, so that no memory is needed."""
    return bool(cell["same_segment"] == 1)


def longest_input(training: Mapping[str, Any]) -> int:
    """Tokens of the longest input of a training with this configuration, including filler before it (long_history)."""
    recipe, N = training["recipe"], training["dims"]["segment_length"]
    pieces, _ = recipe.get("long_history") or (0, 0)
    last = (recipe["segments_per_sequence"] + pieces * HISTORY_SEGMENTS) * N
    return max([last, *(stage[1] for stage in recipe.get("curriculum") or ())])


def percent(value: float) -> str:
    """One decimal, or none for whole numbers; a value below 100 is never printed as 100."""
    # Floating point: 100 x 0.14 is not exactly 14.
    whole = abs(value - round(value)) < 1e-9
    return f"{value:.0f}" if whole else f"{min(value, 99.9):.1f}"


def tokens_of_filler(value: float) -> str:
    """Whole tokens; from a million on two digits, because the others are noise."""
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _details_row(report: PasskeyReport, name: str, runs: list[RunRecord], selection: Selection, source: str) -> Row:
    chosen = list(chosen_cells(report, runs).values())
    used = list({run.run_id: run for run, _ in chosen}.values())
    ids = [run.run_id for run in used]
    seeds = sorted({run.seed for run in used})

    def over_cells(text: str, value: float) -> Cell:
        return measured_cell(text, source, value, len(seeds), ids)

    examples = [cell["examples"] for _, cell in chosen]
    worst, prompts = min((cell["token_accuracy"], -cell["examples"]) for _, cell in chosen)
    exact = 100 * statistics.fmean(cell["exact_match"] for _, cell in chosen)
    low, high = minimum_interval([(cell["token_accuracy"] * cell["examples"], cell["examples"]) for _, cell in chosen])
    # One wrong answer of one prompt is no such finding as one of ten.
    of_fewer = f" ({counted(-prompts, 'prompt')})" * (-prompts < max(examples))
    interval = f"{of_fewer} [{percent(100 * low)}, {percent(100 * high)}]"
    cells = (
        measured_cell(source, source, 0.0, 0, [run.run_id for run in runs]),
        over_cells("-".join(str(used[-1].data.get("tokenizer")).split("-")[:2]), 0.0),
        over_cells("-".join(map(str, dict.fromkeys((min(examples), max(examples))))), min(examples)),
        over_cells(",".join(map(str, seeds)), len(seeds)),
        over_cells(percent(100 * worst) + interval, 100 * worst),
        over_cells(percent(exact), exact),
        over_seeds(used, lambda run: selection.spent(run, "tokens_seen"), ",.0f", source),
        # A pretrained model as it is had no inputs of ours, whatever recipe stands in the configuration.
        over_seeds(
            used, lambda run: longest_input(selection.training_config(run)) if run.parent else None, ",.0f", source
        ),
        over_seeds(used, lambda run: run.metric("half_dilution"), tokens_of_filler, source),
    )
    return Row(f"{name}/{source}", report.rows[name].title, cells)
