"""What the paper claims, the test that each claim is put to, and the verdict.

A verdict rests on published records alone. A claim about the passkey task is judged by rows whose inputs are no longer
than the paper's, never by rows with length extension; what a row has beside that is said with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from infini.errors import InputError
from infini.lengths import format_length, parse_depths, parse_lengths
from infini.records import RunRecord
from infini.report.footprint import ENTRIES_65K, PAPER, TABLE1
from infini.report.passkey import PasskeyReport, chosen_cells, percent
from infini.report.selection import Selection, checked
from infini.report.stats import paired_difference
from infini.report.summaries import SummaryReport
from infini.report.tables import MISSING, PLUS_MINUS, Cell, RenderedReport, Row, Table

Verdict = Literal["holds", "does not hold", "not testable at this scale", "not measured yet"]

LONGER, GATES = "table2_100k", "lm_gates"
"""Reports of models trained on longer sequences, and of models whose gates begin at 0.5."""
SURE, FEWEST_DOCUMENTS = 2.5, 7
"""Standard errors, clustered by document, that a difference must be away from 0: with so many documents or more that is
Student's t at 95 %."""
NO_WORSE = 0.01
"""Nats a token by which Linear + Delta may be worse than Linear and still count as no worse: the paper's own values
are 0.002 apart on PG19 and 0.004 on Arxiv-math."""
SLACK, FAR = 2.0, 20.0
"""Points of token accuracy that a passkey cell, the mean over seeds, may stay behind the paper's; and so far behind
that a claim does not hold however few the seeds."""
FEWEST_SEEDS, FEWEST_EXAMPLES = 3, 50
"""Less is no answer, but for what is far behind."""
CHANCE, LOCAL = 25.0, 90.0
"""Zero-shot: at most so many per cent where memory is needed (the paper has 3 to 14), at least so many at the end."""
SPECIALISED, MIXER, MOVED = (0.1, 0.9), (0.4, 0.6), 0.01
"""Gates beyond the first pair are specialised, those within the second are mixers, if they have left 0.5 by so much."""


@dataclass(frozen=True)
class Finding:
    """What was measured of a claim, and what follows."""

    verdict: Verdict
    measured: str = ""
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Published runs: of running text by task, of the passkey task, and of reports with variants of models."""

    text: Mapping[str, Selection]
    passkey_report: PasskeyReport
    passkey: Selection
    variants: Mapping[str, Mapping[str, Selection]]
    """Name of the report -> task -> runs."""
    summaries: Mapping[str, tuple[SummaryReport, Selection]] = field(default_factory=dict)
    """Of summaries of books: name of the report -> the report and its runs."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, where it stands, the test that was chosen for it, and the function that applies it."""

    name: str
    says: str
    place: str
    test: str
    judge: Callable[[Evidence], Finding]


@dataclass(frozen=True)
class ClaimsReport:
    """The report of the claims, as `conf/report/claims.yaml` declares it. tables: the reports whose runs are judged."""

    name: str
    title: str
    task: str
    tables: list[str]
    note: str = ""

    @classmethod
    def from_config(cls, config: Any) -> ClaimsReport:
        """A report from the `report` group; InputError: a key is missing or unknown."""
        report: ClaimsReport = checked(cls, config, "title", "task", "tables")
        return report


def build_claims(report: ClaimsReport, scale: str, evidence: Evidence, benchmarks: Mapping[str, str]) -> RenderedReport:
    """Every claim with its test, what was measured, and the verdict. benchmarks: task -> its title."""
    rows = []
    for claim in claims(evidence.passkey_report, benchmarks):
        found = claim.judge(evidence)
        measured = MISSING
        if found.run_ids:
            measured = Cell(found.measured, "measured", run_ids=found.run_ids, source="published")
        elif found.measured:
            measured = Cell(found.measured, "computed")
        verdict = Cell(found.verdict, "computed")
        cells = (Cell(claim.place, "quoted", source="paper"), Cell(claim.test, "computed"), measured, verdict)
        rows.append(Row(claim.name, claim.says, cells))
    table = Table("Verdicts", ("Where", "Test", "Measured", "Verdict"), tuple(rows), "Claim")
    notes = tuple(filter(None, [report.note]))
    return RenderedReport(report.name, scale, f"{report.title}, scale {scale}", (table,), notes)


def claims(passkey: PasskeyReport, benchmarks: Mapping[str, str]) -> list[Claim]:
    """All claims, in the paper's order."""
    # Claims are made of what this module defines.
    from infini.report.summary_claims import summary_claims

    text = [_memory_ratio(), *_language_modelling(benchmarks), *_longer_training(), *_gates()]
    return [*text, *_passkey(passkey), *summary_claims()]


def _memory_ratio() -> Claim:
    def judge(evidence: Evidence) -> Finding:
        infini = TABLE1["infini_linear"].floats(PAPER)
        large = (PAPER.d_key + PAPER.d_value) * PAPER.H * ENTRIES_65K
        ratio = (large + TABLE1["transformer_xl"].floats(PAPER)) / infini
        formula = TABLE1["memorizing"].floats(PAPER) / infini
        measured = f"{ratio:.1f}x; without the cache {large / infini:.1f}x, by Table 1's formula {formula:.1f}x"
        return Finding("holds" if ratio >= 114 else "does not hold", measured)

    return Claim(
        "memory_ratio",
        "114x less memory than Memorizing Transformers",
        "Section 3.1, Table 2",
        "arithmetic, no run: 65,000 entries in one layer and the cache of all 12 layers, which is how the printed 183M "
        "comes out, are 114 times Infini-Transformer's memory or more",
        judge,
    )


def _language_modelling(benchmarks: Mapping[str, str]) -> list[Claim]:
    found = []
    better = [
        ("infini_linear", "memorizing"),
        ("infini_delta", "memorizing"),
        ("memorizing", "transformer_xl"),
        ("transformer_xl", "rmt"),
    ]
    names = {model: entry.title for model, entry in TABLE1.items()}
    for task, title in benchmarks.items():
        for a, b in better:
            found.append(
                Claim(
                    f"{task}_{a}_{b}",
                    f"{title}: {names[a]} has a lower perplexity than {names[b]}",
                    "Table 2",
                    f"loss lower by more than {SURE:g} standard errors, paired by seed and document, equal tokens",
                    _lower(task, a, b),
                )
            )
        found.append(
            Claim(
                f"{task}_delta",
                f"{title}: Linear + Delta is no worse than Linear",
                "Table 2",
                f"difference in loss plus {SURE:g} standard errors is below {NO_WORSE} nats a token",
                _no_worse(task),
            )
        )
        found.append(
            Claim(
                f"{task}_perplexity",
                f"{title}: the perplexities themselves",
                "Table 2",
                "none: other data, another tokenizer, other sizes",
                lambda evidence: Finding("not testable at this scale"),
            )
        )
    return found


def _longer_training() -> list[Claim]:
    def judge(usual: str, longer: str) -> Callable[[Evidence], Finding]:
        def judged(evidence: Evidence) -> Finding:
            selection = evidence.variants.get(LONGER, {}).get("arxiv_math")
            return _compared(selection, longer, usual, 0.0) if selection else Finding("not measured yet")

        return judged

    return [
        Claim(
            longer,
            f"Arxiv-math: training on 100K tokens instead of 32K lowers the perplexity of {TABLE1[usual].title}",
            "Section 3.1, 100K length training",
            f"sequences longer by the same ratio, equal tokens: loss lower by more than {SURE:g} standard errors, "
            "paired by seed and document",
            judge(usual, longer),
        )
        for usual, longer in (("infini_linear", "linear_100k"), ("infini_delta", "delta_100k"))
    ]


def _lower(task: str, a: str, b: str) -> Callable[[Evidence], Finding]:
    return lambda evidence: _compared(evidence.text[task], a, b, 0.0)


def _no_worse(task: str) -> Callable[[Evidence], Finding]:
    return lambda evidence: _compared(evidence.text[task], "infini_delta", "infini_linear", NO_WORSE)


def _compared(selection: Selection, a: str, b: str, margin: float) -> Finding:
    """Whether the loss of row a is surely below that of row b plus the margin."""
    pair = [selection.runs.get(row, []) for row in (a, b)]
    try:
        effect = paired_difference(*pair)
    except InputError as error:
        return Finding("not measured yet", str(error))
    if effect is None:
        return Finding("not measured yet")
    if effect.n_books < FEWEST_DOCUMENTS:
        return Finding("not measured yet", f"on {effect.n_books} documents only")
    trainings = [selection.training(run) for runs in pair for run in runs]
    if len({None if run is None else run.cost.get("tokens_seen") for run in trainings}) > 1:
        return Finding("not measured yet", "trained on different numbers of tokens")
    surely = effect.mean + SURE * effect.se < margin
    measured = f"{effect.mean:+.4f} {PLUS_MINUS} {effect.se:.4f} nats a token"
    if abs(effect.mean) <= SURE * effect.se:
        measured += ", no sure difference"
    counts = f"{effect.n_books} documents, {effect.n_seeds} seeds"
    return Finding("holds" if surely else "does not hold", f"{measured} ({counts})", effect.run_ids)


def _gates() -> list[Claim]:
    def gates(evidence: Evidence) -> tuple[list[RunRecord], list[Sequence[float]]]:
        """Runs whose gates did not begin as the claim has them end, and every layer's gates."""
        runs = [
            run
            for selection in evidence.variants.get(GATES, {}).values()
            for row in ("linear_zeros", "delta_zeros")
            for run in selection.runs.get(row, [])
        ]
        return runs, [layer for run in runs for layer in run.series.get("gates") or ()]

    def begun(evidence: Evidence) -> Finding:
        return Finding("not measured yet", "no published models whose gates begin at 0.5")

    def short_range(evidence: Evidence) -> Finding:
        runs, layers = gates(evidence)
        if not layers:
            return begun(evidence)
        having = sum(min(layer) < SPECIALISED[0] for layer in layers)
        verdict: Verdict = "holds" if having == len(layers) else "does not hold"
        return Finding(verdict, f"{having} of {len(layers)} layers", tuple(run.run_id for run in runs))

    def two_kinds(evidence: Evidence) -> Finding:
        runs, layers = gates(evidence)
        if not layers:
            return begun(evidence)
        values = [value for layer in layers for value in layer]
        specialised = sum(not SPECIALISED[0] <= value <= SPECIALISED[1] for value in values)
        mixers = sum(MIXER[0] <= value <= MIXER[1] and abs(value - 0.5) > MOVED for value in values)
        verdict: Verdict = (
            "holds" if specialised and mixers and specialised + mixers > len(values) / 2 else "does not hold"
        )
        measured = f"of {len(values)} heads {specialised} specialised, {mixers} mixers"
        return Finding(verdict, measured, tuple(run.run_id for run in runs))

    low, high = SPECIALISED
    of = "models whose gates begin at 0.5 (model.gate_init=zeros)"
    return [
        Claim(
            "short_range_heads",
            "Each layer has at least one short-range head",
            "Section 3.1, figure of gates",
            f"in {of}: every layer of every seed has a gate below {low}",
            short_range,
        ),
        Claim(
            "two_kinds_of_heads",
            "Two kinds of heads emerge, specialised ones and mixers",
            "Section 3.1, figure of gates",
            f"in {of}: both kinds (below {low} or above {high}; {MIXER[0]} to {MIXER[1]}) occur and are most heads",
            two_kinds,
        ),
        Claim(
            "interleaving",
            "Long- and short-term retrievals are interleaved throughout the layers",
            "Section 3.1, figure of gates",
            "none: the paper gives no measure of it",
            lambda evidence: Finding("not testable at this scale"),
        ),
    ]


def _passkey(report: PasskeyReport) -> list[Claim]:
    places = " / ".join(parse_depths(report.depths))
    # A row without the paper's numbers beside it, but of a model and kind that another has them for, is held to those.
    scratch = {row.model: row.paper for row in report.rows.values() if row.paper and row.recipe and not row.start}
    found = []
    for name, row in report.rows.items():
        plain = not (row.extended or row.start or row.knockout != "none" or row.frozen_gates)
        paper = row.paper or (scratch.get(row.model) if plain else None)
        if not paper:
            continue
        if row.recipe:
            test = (
                f"every length and place ({places}), mean over seeds, at most {SLACK:g} points behind the paper's; "
                f"{FEWEST_SEEDS} seeds of {FEWEST_EXAMPLES} examples, fewer where a cell is {FAR:g} points behind"
            )
        else:
            test = f"no more than {CHANCE:g} % where memory is needed, {LOCAL:g} % or more at the end, at every length"
        beside = ", with a penalty on what is written, which the paper does not name" if row.sparse else ""
        says = f"Passkey at a million tokens: {row.title}{beside}"
        found.append(Claim(f"passkey_{name}", says, "Table of the passkey task", test, _accuracies(name, paper)))
    return found


def _accuracies(name: str, paper: Mapping[str, Any]) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        report = evidence.passkey_report
        row, depths = report.rows[name], parse_depths(report.depths)
        cells = chosen_cells(report, evidence.passkey.runs.get(name, []))
        parts: list[str] = []
        used: dict[str, None] = {}
        behind: list[float] = []
        as_zero_shot, seeds, examples = True, set[int](), set[int]()
        for length in parse_lengths(report.lengths):
            printed = paper.get(format_length(length))
            found = [
                {seed: pair for (seed, at, place), pair in cells.items() if (at, place) == (length, depth)}
                for depth in depths
            ]
            if printed is None or not all(found):
                return Finding("not measured yet")
            ours = [100 * statistics.fmean(cell["token_accuracy"] for _, cell in of.values()) for of in found]
            behind += [float(b) - a for a, b in zip(ours, str(printed).split("/"), strict=True)]
            as_zero_shot &= ours[-1] >= LOCAL and max(ours[:-1]) <= CHANCE
            for of in found:
                seeds = set(of) if not seeds else seeds & set(of)
                examples |= {cell["examples"] for _, cell in of.values()}
                used |= {run.run_id: None for run, _ in of.values()}
            parts.append(f"{format_length(length)} {'/'.join(map(percent, ours))} (paper {printed})")
        measured = f"{'; '.join(parts)}; {len(seeds)} seeds of {min(examples)} examples"
        enough = len(seeds) >= FEWEST_SEEDS and min(examples) >= FEWEST_EXAMPLES
        if not row.recipe:
            return Finding("holds" if as_zero_shot else "does not hold", measured, tuple(used))
        if max(behind) > FAR:
            return Finding("does not hold", measured, tuple(used))
        if not enough:
            return Finding("not measured yet", measured, tuple(used))
        return Finding("holds" if max(behind) <= SLACK else "does not hold", measured, tuple(used))

    return judge
