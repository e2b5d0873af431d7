"""The claims of the paper: what makes each hold, and what it must not rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import make_eval, make_train, pair

from infini.commands.claims import judged, write_claims
from infini.config import compose
from infini.lengths import format_length
from infini.records import RunRecord
from infini.report.claims import ClaimsReport
from infini.report.load import load_report


def verdicts(runs: list[RunRecord]) -> dict[str, tuple[str, str]]:
    """Name of a claim -> verdict and what was measured."""
    report = load_report(compose(["report=claims"]).report)
    assert isinstance(report, ClaimsReport)
    (table,) = judged(report, "laptop", runs).tables
    return {
        row.model: (table.cell(row.model, "Verdict").text, table.cell(row.model, "Measured").text) for row in table.rows
    }


def test_without_runs_nothing_is_said_but_arithmetic() -> None:
    found = verdicts([])
    assert {name for name, (verdict, _) in found.items() if verdict == "holds"} == {"memory_ratio"}
    assert found["memory_ratio"][1].startswith("115.7x")
    assert {verdict for verdict, _ in found.values()} == {"holds", "not measured yet", "not testable at this scale"}


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(3.9, "holds"), (4.1, "does not hold"), (4.0, "does not hold")],
    ids=["better", "worse", "same"],
)
def test_a_lower_perplexity_is_a_lower_loss_on_the_same_books(loss: float, verdict: str) -> None:
    runs = [make_eval("memorizing", seed) for seed in (1, 2)] + [
        make_eval("infini_linear", seed, loss) for seed in (1, 2)
    ]
    found = verdicts(runs)
    assert found["pg19_infini_linear_memorizing"][0] == verdict
    assert "(3 documents, 2 seeds)" in found["pg19_infini_linear_memorizing"][1]
    assert found["arxiv_math_infini_linear_memorizing"][0] == "not measured yet"


def test_a_difference_within_its_error_is_none() -> None:
    """Better on one book and worse on the others: two standard errors are more than the mean."""
    runs = [make_eval("memorizing", 1), make_eval("infini_linear", 1, 3.99)]
    runs[1].documents[0]["nll"] += 0.05 * runs[1].documents[0]["tokens"]
    assert verdicts(runs)["pg19_infini_linear_memorizing"][0] == "does not hold"


@pytest.mark.parametrize(("loss", "verdict"), [(3.5, "holds"), (4.009, "holds"), (4.02, "does not hold")])
def test_delta_may_be_worse_by_a_hundredth(loss: float, verdict: str) -> None:
    runs = [make_eval("infini_linear", 1), make_eval("infini_delta", 1, loss)]
    assert verdicts(runs)["pg19_delta"][0] == verdict


@pytest.mark.parametrize(
    ("gates", "short", "kinds"),
    [
        ([[0.05, 0.5], [0.02, 0.45]], "holds", "holds"),
        ([[0.05, 0.5], [0.3, 0.45]], "does not hold", "holds"),
        ([[0.05, 0.3], [0.02, 0.95]], "holds", "does not hold"),
    ],
)
def test_gates_are_judged_where_they_did_not_begin_so(gates: list[list[float]], short: str, kinds: str) -> None:
    training, run = make_train("infini_linear", 1), make_eval("infini_linear", 1)
    run.series["gates"] = gates
    training.config["model"] = {"name": "infini_linear", "gate_init": "specialised"}
    found = verdicts([training, run])
    assert {found[name][0] for name in ("short_range_heads", "two_kinds_of_heads")} == {"not measured yet"}
    training.config["model"]["gate_init"] = "zeros"
    found = verdicts([training, run])
    assert (found["short_range_heads"][0], found["two_kinds_of_heads"][0]) == (short, kinds)


def test_made_up_books_count_for_nothing() -> None:
    runs = [make_eval("memorizing", 1), make_eval("infini_linear", 1, 3.0)]
    for run in runs:
        run.data["source"] = "synthetic"
    assert verdicts(runs)["pg19_infini_linear_memorizing"][0] == "not measured yet"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "holds"), ({"512K": (95.0, 100.0, 100.0)}, "holds"), ({"1M": (96.0, 91.9, 100.0)}, "does not hold")],
)
def test_a_passkey_claim_is_the_papers_row_with_a_little_slack(changes: dict[str, Any], verdict: str) -> None:
    runs = pair()
    for cell in runs[-1].series["cells"]:
        accuracies = changes.get(format_length(cell["length"]))
        if accuracies is not None:
            cell["token_accuracy"] = accuracies[["start", "middle", "end"].index(cell["depth"])] / 100
    assert verdicts(runs)["passkey_linear"][0] == verdict


def test_length_extension_proves_nothing_about_the_paper() -> None:
    found = verdicts(pair(recipe="passkey_laptop_extended"))
    assert {verdict for name, (verdict, _) in found.items() if name.startswith("passkey_")} == {"not measured yet"}


def test_a_length_that_is_missing_leaves_the_claim_open() -> None:
    runs = pair()
    runs[-1].series["cells"] = [cell for cell in runs[-1].series["cells"] if cell["length"] < 1_000_000]
    assert verdicts(runs)["passkey_linear"][0] == "not measured yet"


def test_the_claims_are_written_with_the_runs_behind_them(tmp_path: Path) -> None:
    runs = [make_eval("memorizing", 1), make_eval("infini_linear", 1, 3.9)]
    text = write_claims("laptop", runs, tmp_path).read_text(encoding="utf-8")
    assert "| Claim | Where | Test | Measured | Verdict |" in text
    assert "[`eval-infini_linear-1`](runs/eval-infini_linear-1.json)" in text
