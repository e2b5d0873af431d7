"""Figures hold what the records hold, and the same records give the same bytes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from report_runs import make_eval

from infini.errors import InputError
from infini.report import figures


def test_figures_are_the_same_bytes_when_drawn_twice(tmp_path: Path) -> None:
    runs = [make_eval(model, seed, loss) for model, loss in (("infini_linear", 3.9), ("local", 4.0)) for seed in (1, 2)]
    runs[0].series["nll_by_position"]["nll"][0][0] += 5.0
    for name in ("first", "second"):
        figures.gap_by_position(runs, tmp_path / name / "gap")
        figures.gate_heatmap(runs[0], tmp_path / name / "gates")
    for name in ("gap.png", "gap.svg", "gates.png", "gates.svg"):
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        assert len(first.read_bytes()) > 1000
    assert b"<dc:date>" not in (tmp_path / "first" / "gap.svg").read_bytes()


def test_gap_is_paired_by_book_and_weighed_by_tokens() -> None:
    runs, baseline = [make_eval("infini_linear", 1, 3.9)], [make_eval("local", 1, 4.0)]
    runs[0].series["nll_by_position"]["nll"][0][0] += 250 * 0.03
    position, gap, error = figures._gap(runs, baseline).T
    # The last bin holds one book only and is left out.
    assert list(position) == [125.0, 375.0, 750.0, 1500.0]
    assert gap == pytest.approx([-0.09, -0.1, -0.1, -0.1])
    assert error[0] == pytest.approx(math.sqrt(3 / 2 * ((5.0**2) + 2 * 2.5**2)) / 750)


def test_bins_grow_with_position() -> None:
    edges = np.arange(0, 256 * 41, 256)
    starts = figures._growing_bins(edges)
    bounds = edges[starts]
    assert list(bounds[:5]) == [0, 256, 512, 768, 1280]
    assert all(later >= earlier * 1.4 for earlier, later in itertools.pairwise(bounds[1:]))


def test_a_record_without_gates_cannot_be_drawn(tmp_path: Path) -> None:
    for gates in (None, [], [[0.5], [0.5, 0.1]], [[1.5]]):
        run = make_eval("infini_linear", 1, series={} if gates is None else {"gates": gates})
        with pytest.raises(InputError, match="eval-infini_linear-1"):
            figures.gate_heatmap(run, tmp_path / "gates")
    with pytest.raises(InputError, match="'local'"):
        figures.gap_by_position([make_eval("infini_linear", 1)], tmp_path / "gap")
    assert list(tmp_path.iterdir()) == []
