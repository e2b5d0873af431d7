"""What the paper claims, the test that each claim was put to before its runs were made, and the verdict.

A verdict rests on published records alone, and a claim about the passkey task on the rows that did what the paper did:
never on rows with length extension.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infini.lengths import format_length, parse_depths, parse_lengths
from infini.records import RunRecord
from infini.report.footprint import ENTRIES_65K, PAPER, TABLE1
from infini.report.passkey import PasskeyReport, chosen_cells, percent
from infini.report.selection import Selection, checked
from infini.report.stats import paired_difference
from infini.report.tables import MISSING, PLUS_MINUS, Cell, RenderedReport, Row, Table

Verdict = Literal["holds", "does not hold", "not testable at this scale", "not measured yet"]

SURE = 2.0
"""Standard errors, clustered by book, that a difference must be away from 0."""
NO_WORSE = 0.01
"""Nats a token by which Linear + Delta may be worse than Linear and still count as no worse: the paper's own values
are 0.002 apart on PG19 and 0.004 on Arxiv-math."""
SLACK = 2.0
"""Per cent of token accuracy that a passkey cell may stay behind the paper's."""
CHANCE, LOCAL = 25.0, 90.0
"""Zero-shot: at most so many per cent where memory is needed (the paper has 3 to 14), at least so many at the end."""
SPECIALISED, MIXER = (0.1, 0.9), (0.4, 0.6)
"""Gates beyond the first pair are specialised, those within the second are mixers."""


@dataclass(frozen=True)
class Finding:
    """What was measured of a claim, and what follows."""

    verdict: Verdict
    measured: str = ""
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Published runs: of running text by task, and of the passkey task."""

    text: Mapping[str, Selection]
    passkey_report: PasskeyReport
    passkey: Selection


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
    return [_memory_ratio(), *_language_modelling(benchmarks), *_gates(), *_passkey(passkey)]


def _memory_ratio() -> Claim:
    def judge(evidence: Evidence) -> Finding:
        xl = TABLE1["transformer_xl"].floats(PAPER)
        memorizing = (PAPER.d_key + PAPER.d_value) * PAPER.H * ENTRIES_65K + xl
        ratio = memorizing / TABLE1["infini_linear"].floats(PAPER)
        return Finding("holds" if ratio >= 114 else "does not hold", f"{ratio:.1f}x, by the paper's own sizes")

    return Claim(
        "memory_ratio",
        "114x less memory than Memorizing Transformers",
        "Section 3.1, Table 2",
        "the quotient of the two memories by Table 1's formulas and the paper's sizes is 114 or more",
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
                    f"loss lower by more than {SURE:g} standard errors, paired by seed and book, equal tokens",
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
                "none: other data, another tokenizer, models a thousand times smaller",
                lambda evidence: Finding("not testable at this scale"),
            )
        )
    return found


def _lower(task: str, a: str, b: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        effect = paired_difference(*(evidence.text[task].runs.get(model, []) for model in (a, b)))
        if effect is None:
            return Finding("not measured yet")
        verdict: Verdict = "holds" if effect.mean + SURE * effect.se < 0 else "does not hold"
        return Finding(verdict, _difference(effect), effect.run_ids)

    return judge


def _no_worse(task: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        runs = evidence.text[task].runs
        effect = paired_difference(runs.get("infini_delta", []), runs.get("infini_linear", []))
        if effect is None:
            return Finding("not measured yet")
        verdict: Verdict = "holds" if effect.mean + SURE * effect.se < NO_WORSE else "does not hold"
        return Finding(verdict, _difference(effect), effect.run_ids)

    return judge


def _difference(effect: Any) -> str:
    counts = f"{effect.n_books} documents, {effect.n_seeds} seeds"
    return f"{effect.mean:+.4f} {PLUS_MINUS} {effect.se:.4f} nats a token ({counts})"


def _gates() -> list[Claim]:
    def gates(evidence: Evidence) -> tuple[list[RunRecord], list[Sequence[float]]]:
        """Runs whose gates did not begin as the claim has them end, and every layer's gates."""
        runs = [
            run
            for selection in evidence.text.values()
            for model in ("infini_linear", "infini_delta")
            for run in selection.runs.get(model, [])
            if selection.training_config(run).get("model", {}).get("gate_init") in ("zeros", "normal", "spread")
        ]
        return runs, [layer for run in runs for layer in run.series.get("gates") or ()]

    def begun(evidence: Evidence) -> Finding:
        return Finding("not measured yet", "the published models' gates begin specialised (model.gate_init)")

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
        mixers = sum(MIXER[0] <= value <= MIXER[1] for value in values)
        verdict: Verdict = (
            "holds" if specialised and mixers and specialised + mixers > len(values) / 2 else "does not hold"
        )
        measured = f"of {len(values)} heads {specialised} specialised, {mixers} mixers"
        return Finding(verdict, measured, tuple(run.run_id for run in runs))

    low, high = SPECIALISED
    of = "models whose gates begin at 0.5 or evenly spread"
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
            "none: three layers are too few",
            lambda evidence: Finding("not testable at this scale"),
        ),
    ]


def _passkey(report: PasskeyReport) -> list[Claim]:
    places = " / ".join(parse_depths(report.depths))
    found = []
    for name, row in report.rows.items():
        if not row.paper:
            continue
        if row.recipe:
            test = f"every length at every place ({places}) at most {SLACK:g} points behind the paper's"
        else:
            test = f"no more than {CHANCE:g} % where memory is needed, {LOCAL:g} % or more at the end, at every length"
        found.append(
            Claim(f"passkey_{name}", f"Passkey: {row.title}", "Table of the passkey task", test, _accuracies(name))
        )
    return found


def _accuracies(name: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        report = evidence.passkey_report
        row, depths = report.rows[name], parse_depths(report.depths)
        cells = chosen_cells(report, evidence.passkey.runs.get(name, []))
        parts: list[str] = []
        used: dict[str, None] = {}
        good = True
        for length in parse_lengths(report.lengths):
            paper = row.paper.get(format_length(length))
            found = [
                [pair for (_, at, place), pair in cells.items() if (at, place) == (length, depth)] for depth in depths
            ]
            if paper is None or not all(found):
                return Finding("not measured yet")
            ours = [100 * statistics.fmean(cell["token_accuracy"] for _, cell in pairs) for pairs in found]
            used |= {run.run_id: None for pairs in found for run, _ in pairs}
            parts.append(f"{format_length(length)} {'/'.join(map(percent, ours))} (paper {paper})")
            if row.recipe:
                good &= all(a >= float(b) - SLACK for a, b in zip(ours, str(paper).split("/"), strict=True))
            else:
                good &= ours[-1] >= LOCAL and max(ours[:-1]) <= CHANCE
        return Finding("holds" if good else "does not hold", "; ".join(parts), tuple(used))

    return judge
