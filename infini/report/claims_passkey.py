"""Claims about the passkey task: every row that has the paper's numbers beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from infini.lengths import format_length, parse_depths, parse_lengths
from infini.report.passkey import PasskeyReport, chosen_cells, percent
from infini.report.verdicts import FEWEST_EXAMPLES, FEWEST_SEEDS, Claim, Evidence, Finding, counted

SLACK, FAR = 2.0, 20.0
"""Points of token accuracy that a passkey cell, the mean over seeds, may stay behind the paper's; and so far behind
that a claim does not hold however few the seeds."""
CHANCE, LOCAL = 25.0, 90.0
"""Zero-shot: at most so many per cent where memory is needed (the paper has 3 to 14), at least so many at the end."""


def passkey_claims(report: PasskeyReport) -> list[Claim]:
    """Every row of the table of the passkey task that is held to the paper's numbers."""
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
            test = (
                f"no more than {CHANCE:g} % where memory is needed, {LOCAL:g} % or more at the end, at every length, "
                f"mean over seeds; {FEWEST_SEEDS} seeds of {FEWEST_EXAMPLES} examples, fewer where a cell is {FAR:g} "
                "points off"
            )
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
        off: list[float] = []
        seeds: set[int] | None = None
        examples = set[int]()
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
            off += [LOCAL - ours[-1], *(value - CHANCE for value in ours[:-1])]
            for of in found:
                seeds = set(of) if seeds is None else seeds & set(of)
                examples |= {cell["examples"] for _, cell in of.values()}
                used |= {run.run_id: None for run, _ in of.values()}
            parts.append(f"{format_length(length)} {'/'.join(map(percent, ours))} (paper {printed})")
        n_seeds = len(seeds or ())
        measured = f"{'; '.join(parts)}; {counted(n_seeds, 'seed')} of {counted(min(examples), 'example')}"
        enough = n_seeds >= FEWEST_SEEDS and min(examples) >= FEWEST_EXAMPLES
        # Without a training on prompts what counts is to fail where the paper fails, and not where it does not.
        worst, allowed = (max(behind), SLACK) if row.recipe else (max(off), 0.0)
        if worst > FAR:
            return Finding("does not hold", measured, tuple(used))
        if not enough:
            return Finding("not measured yet", measured, tuple(used))
        return Finding("holds" if worst <= allowed else "does not hold", measured, tuple(used))

    return judge
