"""Table 1 of the paper: the size of each model's memory and its context length, by the paper's formulas and by ours.

The paper's formulas are written as it prints them. `carried` is the formula of what a model of this project carries
from segment to segment; docs/explanation/paper.md explains the differences.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from infini.config.schema import REPORT_KEYS, SHOWN
from infini.errors import InputError, did_you_mean
from infini.report.kind import OwnVerb, ReportKind
from infini.report.tables import DASH, MISSING, Cell, Origin, RenderedReport, Row, Table, quoted


@dataclass(frozen=True)
class Symbols:
    """The symbols of Table 1. H: query heads. G: key-value heads, an addition (the paper has G = H)."""

    N: int
    """Tokens a segment."""
    S: int
    """Segments."""
    l: int  # noqa: E741 the paper's letter
    """Layers."""
    H: int
    G: int
    d_model: int
    d_key: int
    d_value: int
    c: int = 0
    """Compressed memories of the Compressive Transformer."""
    r: int = 1
    """Tokens to a compressed memory."""
    p: int = 0
    """Summary vectors of a segment."""
    m: int = 0
    """Segments whose summary vectors are accumulated."""
    M: int = 0
    """Tokens of a large memory."""


@dataclass(frozen=True)
class Entry:
    """A row of Table 1, and what a model of this project carries instead if that differs."""

    title: str
    footprint: str
    context: str
    update: str
    retrieval: str
    carried: str
    """Formula of the floats that a model with its default options carries."""
    why: str = ""
    """Explanation of the difference."""

    def floats(self, s: Symbols) -> int:
        """`footprint`, evaluated."""
        return evaluate(self.footprint, s)

    def tokens(self, s: Symbols) -> int:
        """`context`, evaluated."""
        return evaluate(self.context, s)


def evaluate(formula: str, s: Symbols) -> int:
    """A formula of TABLE1, sums and products of symbols and numbers, evaluated."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        return int(getattr(s, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node))

    return value(ast.parse(formula.replace(" x ", " * "), mode="eval").body)


TABLE1: dict[str, Entry] = {
    "transformer_xl": Entry(
        "Transformer-XL",
        "(d_key + d_value) x H x N x l",
        "N x l",
        "Discarded",
        "Dot-product attention",
        "(d_key + d_value) x G x N x l",
        "Transformer-XL with positions=dai2019 carries layer inputs, d_model x N x l.",
    ),
    "compressive": Entry(
        "Compressive Transformer",
        "d_model x (c + N) x l",
        "(c x r + N) x l",
        "Discarded",
        "Dot-product attention",
        "d_model x (c + M) x l",
        "The Compressive Transformer's memory has M tokens, by default one segment, as in the formula.",
    ),
    "memorizing": Entry(
        "Memorizing Transformers",
        "(d_key + d_value) x H x N x S",
        "N x S",
        "None",
        "kNN + dot-product attention",
        "(d_key + d_value) x G x (M + N x l)",
        "Memorizing Transformers keep the last M tokens in one layer (the paper counts N x S tokens, without bound) "
        "and an XL cache in every layer, which Table 1 leaves out and the printed 183M counts.",
    ),
    "rmt": Entry(
        "RMT",
        "d_model x p x l x 2",
        "N x S",
        "Discarded",
        "Soft-prompt input",
        "d_model x p",
        "RMT and AutoCompressors carry only the output of the last layer. Table 1 counts every layer, for RMT read and "
        "write vectors separately, for AutoCompressors also the vectors of the segment that is read.",
    ),
    "autocompressor": Entry(
        "AutoCompressors",
        "d_model x p x (m + 1) x l",
        "N x S",
        "Discarded",
        "Soft-prompt input",
        "d_model x p x m",
    ),
    "infini_linear": Entry(
        "Infini-Transformer (Linear)",
        "d_key x (d_value + 1) x H x l",
        "N x S",
        "Incremental",
        "Linear attention",
        "d_key x (d_value + 1) x G x l",
        "With grouped-query attention (G < H) there is one memory for each key-value head, not for each query head.",
    ),
}
TABLE1["infini_delta"] = replace(TABLE1["infini_linear"], title="Infini-Transformer (Linear + Delta)")

PAPER = Symbols(N=2048, S=16, l=12, H=8, G=8, d_model=1024, d_key=128, d_value=128, p=100)
"""The sizes of the paper's experiments."""
LETTERS = (
    "Letters: N tokens a segment, S segments, l layers, H query heads, G key-value heads (in the paper as many), c "
    "compressed memories of r tokens each, p summary vectors of a segment, m segments whose summary vectors are kept, "
    "M tokens of a large memory. Floats are numbers carried from one segment to the next."
)
OWN = ("c", "r", "p", "m", "M")
"""Symbols of single models."""
DEFAULTS = {entry.name: entry.default for entry in fields(Symbols)}
ENTRIES_65K = 65_000
"""Table 2's "65K": with 65,536 the printed 183M would be 185M."""


def printed() -> list[tuple[str, str, float, str]]:
    """Memory sizes in Table 2: model, the printed text, the computed number, and the assumption behind it."""
    xl = TABLE1["transformer_xl"].floats(PAPER)
    memorizing = (PAPER.d_key + PAPER.d_value) * PAPER.H * ENTRIES_65K + xl
    rmt, infini = TABLE1["rmt"].floats(PAPER), TABLE1["infini_linear"].floats(PAPER)
    return [
        ("transformer_xl", "50M", xl, "N = 2,048"),
        ("memorizing", "183M", memorizing, "65K is 65,000, and the XL cache of all 12 layers counts"),
        ("rmt", "2.5M", rmt, "p = 100, in and out of every layer"),
        ("infini_linear", "1.6M", infini, "none"),
        ("transformer_xl", "3.7x", 183 / 50, "quotient of the rounded 183 and 50"),
        ("rmt", "73x", 183 / 2.5, "quotient of the rounded 183 and 2.5"),
        ("infini_linear", "114x", 183 / 1.6, "quotient of the rounded 183 and 1.6"),
    ]


@dataclass(frozen=True)
class Measured:
    """A model at the sizes of a configuration, after reading s.S segments."""

    s: Symbols
    declared: int
    """Floats that it declares to carry (state_floats)."""
    carried: int
    """Floats in its memory leaves."""
    context: int
    """Tokens that can change its last segment's output (receptive_field)."""


@dataclass(frozen=True)
class MemoryReport(ReportKind):
    """The report of Table 1, as `conf/report/<name>.yaml` declares it."""

    sign = "segments"
    shows_own_runs = False
    verbs: ClassVar[Mapping[str, OwnVerb]] = {
        "table": OwnVerb(
            (*REPORT_KEYS, "task", "task.positions", "model.*", "dims.*", "recipe.*", "scale", "results_dir", *SHOWN),
            ("model", "model.name"),
            "infini.runs.table_memory",
        )
    }

    models: list[str] = field(default_factory=lambda: list(TABLE1))
    segments: int | None = None
    """Segments that are read before the memory is counted; None: those of a training sequence."""

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in TABLE1:
                raise InputError(f"report.models: Table 1 has no {model!r}{did_you_mean(model, TABLE1)}")
        if self.segments is not None and self.segments < 1:
            raise InputError(f"report.segments={self.segments!r}: must be null, or a number of at least 1")


def build_memory_report(report: MemoryReport, scale: str, measured: Mapping[str, Measured]) -> RenderedReport:
    """The paper's Table 1, its formulas and the measurements, and the sizes that Table 2 prints."""
    tables = (_formulas(report.models), _numbers(measured), _prints())
    why = dict.fromkeys(filter(None, (TABLE1[model].why for model in report.models)))
    legend = (LETTERS, _sizes(measured))
    return report.rendered(scale, tables, [" ".join(why), *legend], main=1, legend=legend)


def _number(value: float, form: str = ",.0f", origin: Origin = "computed") -> Cell:
    return Cell(format(value, form), origin, float(value))


def _formulas(models: Sequence[str]) -> Table:
    columns = ("Memory footprint", "Carried, as built here", "Context length", "Memory update", "Memory retrieval")
    rows = []
    for model in models:
        entry = TABLE1[model]
        footprint, *rest = map(quoted, (entry.footprint, entry.context, entry.update, entry.retrieval))
        rows.append(Row(model, entry.title, (footprint, Cell(entry.carried, "computed"), *rest)))
    return Table("Table 1 of the paper, and what is carried from segment to segment here", columns, tuple(rows))


def _numbers(measured: Mapping[str, Measured]) -> Table:
    columns = (
        "Floats: the paper's formula",
        "our formula",
        "measured",
        "Times Infini-Transformer",
        "Tokens of context: the paper's formula",
        "ours",
    )
    infini = next((found.carried for model, found in measured.items() if model.startswith("infini")), None)
    rows = []
    for model, found in measured.items():
        entry = TABLE1[model]
        cells = (
            _number(entry.floats(found.s)),
            _number(found.declared),
            _number(found.carried, origin="measured"),
            MISSING if infini is None else _number(found.carried / infini, ".2f"),
            _number(entry.tokens(found.s)),
            _number(found.context),
        )
        rows.append(Row(model, entry.title, cells))
    some = next(iter(measured.values()), None)
    read = DASH if some is None else f"{some.s.S} segments of {some.s.N} tokens"
    return Table(f"Evaluated and measured at these sizes, after {read}", columns, tuple(rows))


def _prints() -> Table:
    rows = []
    for model, text, value, assumption in printed():
        number = _number(value, ".1f" if text.endswith("x") else ",.0f")
        rows.append(Row(model, TABLE1[model].title, (quoted(text), number, Cell(assumption, "computed"))))
    return Table("Sizes that the paper prints, by its own sizes (12 layers)", ("Printed", "Number", "If"), tuple(rows))


def _sizes(measured: Mapping[str, Measured]) -> str:
    """The values of the symbols: first those that all models share, then those of single models."""

    def listed(found: Measured, own: bool) -> str:
        shown = {name: value for name, value in vars(found.s).items() if (name in OWN) == own}
        return ", ".join(f"{name} {value:,}" for name, value in shown.items() if not own or value != DEFAULTS[name])

    parts = [listed(found, False) for found in list(measured.values())[:1]]
    parts += [f"{TABLE1[model].title}: {own}" for model, found in measured.items() if (own := listed(found, True))]
    return f"Sizes: {'; '.join(parts)}."
