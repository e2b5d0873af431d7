"""Rows with settings of their own: each is a configuration that can be trained, and is what its title says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from infini.config import compose
from infini.report.declared import declared_at, expected
from infini.report.load import load_report
from infini.report.selection import Report

SCALES = ("laptop", "gpu", "paper")


@cache
def report_named(name: str) -> Report:
    report = load_report(compose([f"report={name}"]).report)
    assert isinstance(report, Report)
    return report


def recipes(name: str, scale: str) -> dict[str, Any]:
    """Row -> key -> value of its sizes and recipe."""
    report = report_named(name)
    return {row: expected(report, row, scale, declared_at(report.task, scale)) for row in report.models}


def sequence(row: dict[str, Any]) -> int:
    """Tokens of a training sequence."""
    length: int = row["recipe.segments_per_sequence"] * row["dims.segment_length"]
    return length


@pytest.mark.parametrize("scale", SCALES)
def test_sequences_of_100k_are_longer_by_the_papers_ratio_and_none_is_cut(scale: str) -> None:
    """Excerpts of 3,840 tokens would end sequences of 1,200 after 2.4 times the usual length, not 3.125 times."""
    rows = recipes("table2_100k", scale)
    for usual, longer in (("infini_linear", "linear_100k"), ("infini_delta", "delta_100k")):
        assert sequence(rows[longer]) == 3.125 * sequence(rows[usual])
    assert len({row["recipe.excerpt_tokens"] for row in rows.values()}) == 1, "all rows read the same texts"
    excerpt = rows["local"]["recipe.excerpt_tokens"]
    assert (excerpt is None) == (scale == "paper")
    assert all(excerpt is None or excerpt % sequence(row) == 0 for row in rows.values())
