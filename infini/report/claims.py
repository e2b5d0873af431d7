"""What the paper claims, the test that each claim is put to, and the verdict.

A verdict rests on published records alone. A claim about the passkey task is judged by rows whose inputs are no longer
than the paper's, never by rows with length extension; what a row has beside that is said with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infini.report.claims_passkey import passkey_claims
from infini.report.claims_summaries import summary_claims
from infini.report.claims_text import (
    gate_claims,
    language_modelling_claims,
    longer_training_claims,
    segment_claims,
    sweep_claims,
)
from infini.report.footprint import ENTRIES_65K, PAPER, TABLE1, printed
from infini.report.selection import checked
from infini.report.tables import MISSING, Cell, RenderedReport, Row, Table
from infini.report.verdicts import Claim, Evidence, Finding


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
    for claim in claims(evidence, benchmarks):
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
    verdicts = Counter(row.cells[-1].text for row in rows)
    counts = "; ".join(f"{verdict}: {number}" for verdict, number in verdicts.most_common())
    notes = tuple(filter(None, [f"{len(rows)} claims. {counts}.", report.note]))
    return RenderedReport(report.name, scale, f"{report.title}, scale {scale}", (table,), notes)


def claims(evidence: Evidence, benchmarks: Mapping[str, str]) -> list[Claim]:
    """All claims, in the paper's order."""
    return [
        _memory_ratio(),
        *_printed_sizes(),
        *language_modelling_claims(benchmarks),
        *segment_claims(benchmarks),
        *sweep_claims(benchmarks),
        *longer_training_claims(),
        *gate_claims(),
        *passkey_claims(evidence.passkey_report),
        *summary_claims(evidence.summaries),
    ]


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


def _printed_sizes() -> list[Claim]:
    """The memory sizes of Table 2, each by the formula of Table 1."""

    def claim(model: str, text: str, value: float, assumption: str) -> Claim:
        found = f"{value / 1e6:.1f}M" if value < 1e7 else f"{value / 1e6:.0f}M"
        return Claim(
            f"size_{model}",
            f"{TABLE1[model].title}: a memory of {text}",
            "Tables 1 and 2",
            f"arithmetic, no run: Table 1's formula at the paper's sizes, rounded; assumed: {assumption}",
            lambda _: Finding("holds" if found == text else "does not hold", f"{value:,.0f}"),
        )

    return [claim(*entry) for entry in printed() if entry[1].endswith("M")]
