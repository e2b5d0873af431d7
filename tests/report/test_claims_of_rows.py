"""Claims that need rows of other tables than Table 2: RMT's sweep, and summaries of books."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import make_eval, make_train
from test_claims import three, to_decide, verdicts

from infini.records import RunRecord

CONF = Path(__file__).parents[2] / "conf" / "report"


@pytest.mark.parametrize("model", ["infini_linear", "infini_delta"])
@pytest.mark.parametrize("other", ["memorizing", "transformer_xl", "rmt"])
def test_both_rules_are_held_to_every_baseline(model: str, other: str) -> None:
    assert verdicts([])[f"pg19_{model}_{other}"][0] == verdicts([])[f"arxiv_math_{model}_{other}"][0] == "inconclusive"
    assert verdicts(three(other) + three(model, 3.9))[f"pg19_{model}_{other}"][0] == "holds"


def sweep(losses: dict[str, float], seeds: tuple[int, ...] = (1, 2, 3), report: str = "rmt_sweep") -> list[RunRecord]:
    """Runs of every row of RMT's sweep, or of another report; where no loss is named it is 4."""
    runs = []
    for row, variant in yaml.safe_load((CONF / f"{report}.yaml").read_text())["variants"].items():
        model = variant["model"]
        for seed in seeds:
            training = make_train(model, seed, run_id=f"train-{row}-{seed}")
            training.config["variant"] = report
            for text in variant["settings"]["laptop"]:
                key, _, value = text.partition("=")
                group, _, name = key.partition(".")
                training.config[group] = {**training.config[group], name: yaml.safe_load(value)}
            run = make_eval(model, seed, losses.get(row, 4.0), run_id=f"eval-{row}-{seed}", parent=training.run_id)
            runs += [training, run]
    return runs


@pytest.mark.parametrize(
    ("runs", "verdict", "measured"),
    [
        (sweep({"rmt_100_8k": 3.9}), "holds", "-0.1000 [-0.1000, -0.1000]"),
        (
            sweep({"rmt_100_8k": 3.9, "rmt_150_32k": 3.8}),
            "does not hold",
            'against "RMT, 150 vectors, sequences of 32768", the nearest of 8 rows: +0.1',
        ),
        (sweep({"rmt_100_8k": 3.9}, (1, 2)), "inconclusive", "2 seeds)"),
        (
            [run for run in sweep({"rmt_100_8k": 3.9}) if "rmt_50_4k" not in run.run_id],
            "inconclusive",
            "the nearest of 7 rows with three seeds, of 8: -0.1",
        ),
        # One row that is better is enough for a no.
        (
            [run for run in sweep({"rmt_50_4k": 3.9}) if "32k" not in run.run_id],
            "does not hold",
            'against "RMT, 50 vectors, sequences of 4096", the nearest of 5 rows with three seeds, of 8: +0.1',
        ),
    ],
)
def test_the_best_of_rmts_sweep(runs: list[RunRecord], verdict: str, measured: str) -> None:
    found = verdicts(runs)["pg19_rmt_sweep"]
    assert found[0] == verdict and measured in found[1]
    assert verdicts(runs)["arxiv_math_rmt_sweep"][0] == "inconclusive"


def test_a_row_that_is_missing_is_what_decides_a_sweep() -> None:
    runs = [run for run in sweep({"rmt_100_8k": 3.9}) if "rmt_50_4k" not in run.run_id]
    assert to_decide(runs)["pg19_rmt_sweep"] == "needs one more row with three seeds"
    alone = [run for run in sweep({}) if "rmt_50_4k" in run.run_id or "rmt_100_8k" in run.run_id]
    measured = verdicts(alone)["pg19_rmt_sweep"][1]
    assert measured.startswith(
        'against "RMT, 50 vectors, sequences of 4096", the only one of 8 rows with three seeds: '
    )
    assert to_decide(alone)["pg19_rmt_sweep"] == "needs seven more rows with three seeds"


def test_rows_that_are_missing_count_where_one_better_row_decides() -> None:
    """The chance that one of eight rows seems better is as large before the others are published as after."""
    runs = sweep({})
    for run in runs:
        if run.run_id.startswith("eval-rmt_50_4k"):
            for document in run.documents:
                document["nll"] -= (0.02 + 0.005 * run.seed) * document["tokens"]
    few = [run for run in runs if "32k" not in run.run_id]
    found = [verdicts(published)["pg19_rmt_sweep"][1].partition("; p = ")[2] for published in (runs, few)]
    assert found[0] == found[1] and 0.05 < float(found[0]) < 0.5


def test_the_order_in_longer_segments_is_judged_by_rows_of_their_own() -> None:
    runs = sweep({"linear_256": 3.9, "xl_256": 4.0, "rmt_256": 3.8}, report="segment_lengths")
    found = verdicts(runs)
    assert found["pg19_256_infini_linear_transformer_xl"][0] == "holds"
    assert found["pg19_256_infini_linear_rmt"][0] == "does not hold"
    # Segments of the usual length are other rows.
    assert found["pg19_infini_linear_transformer_xl"] == ("inconclusive", "—")
    # If two minutes of training decide no order, it says so, and runs do not change that.
    name = "arxiv_math_256_infini_linear_rmt"
    assert found[name][0] == "not testable" and "learned to copy" in found[name][1]
    measured = [replace(run, task="arxiv_math") for run in sweep({"linear_256": 3.9}, report="segment_lengths")]
    assert verdicts(measured)[name] == found[name]
    few = verdicts(sweep({"linear_256": 3.9}, (1, 2), "segment_lengths"))
    assert few["pg19_256_infini_linear_rmt"][0] == "inconclusive"


METRICS = ("rouge1", "rouge2", "rougeL")
"""The parts of the Overall."""


def summaries(
    row: str, scores: list[float], split: str = "test", seeds: tuple[int, ...] = (1, 2, 3)
) -> list[RunRecord]:
    """Evaluations of a system on ten books; scores: Overall of the first book at each length, the n-th has n more."""
    lengths = [512_000] if split == "test" else [16384 * 2**step for step in range(5)] + [512_000]
    model, _, attention = row.partition("_") if row.startswith(("bart", "primera")) else (row, "", "")
    options = {"name": model, "unlimiformer": "alternating" if attention else "none", "k": 1024}
    runs = []
    for seed in seeds:
        cells: list[dict[str, Any]] = []
        for length, score in zip(lengths, scores, strict=True):
            books = [{"name": f"b{n}", **dict.fromkeys(METRICS, score + n)} for n in range(10)]
            cells.append({"length": length, "books": books})
        decoding = {"max_new_tokens": 1024, "temperature": 0.5, "top_p": 0.95}
        config = {"model": options, "task": {"references": "mean"}, "decoding": decoding, "seed": seed}
        data = {"split": split, "revision": "r", "source": "folder"}
        named = {"run_id": f"eval-{row}-{split}-{seed}", "verb": "eval", "task": "booksum"}
        runs.append(make_train(model, seed, **named, config=config, data=data, series={"cells": cells}))
    return runs


def test_a_better_summary_is_a_higher_overall_on_the_same_books() -> None:
    runs = [*summaries("infini_delta", [18.0]), *summaries("bart", [16.0]), *summaries("primera_unlimiformer", [18.5])]
    found = verdicts(runs)
    verdict, measured = found["booksum_infini_delta_bart"]
    assert verdict == "holds" and measured.startswith("+2.00 [+2.00, +2.00] points (10 books; 3 seeds)")
    assert found["booksum_infini_delta_primera_unlimiformer"][0] == "does not hold"
    others = ("booksum_infini_delta_primera", "booksum_infini_delta_bart_unlimiformer", "booksum_infini_linear_bart")
    assert {found[name] for name in others} == {("inconclusive", "—")}
    # Books scatter, and so do seeds: either alone makes a difference unsure.
    scattered = [*summaries("infini_delta", [18.0]), *summaries("bart", [16.0])]
    for run in scattered[:3]:
        for number, book in enumerate(run.series["cells"][0]["books"]):
            for metric in METRICS:
                book[metric] += 5 * (-1) ** number
    assert verdicts(scattered)["booksum_infini_delta_bart"][0] == "inconclusive"
    seeds = [*summaries("infini_delta", [16.1], seeds=(1, 2)), *summaries("infini_delta", [24.0], seeds=(3,))]
    assert verdicts([*seeds, *summaries("bart", [16.0])])["booksum_infini_delta_bart"][0] == "inconclusive"
    short = [*summaries("infini_delta", [18.0]), *summaries("bart", [16.0])]
    for run in short[:3]:
        run.config["decoding"] = {**run.config["decoding"], "max_new_tokens": 64}
    verdict, measured = verdicts(short)["booksum_infini_delta_bart"]
    assert verdict == "inconclusive" and "decoding.max_new_tokens 64 instead of 1024" in measured
    # One metric of one seed is 0 in every book: its Overall is 0, and a seed that failed is not left out.
    nothing = [*summaries("infini_delta", [18.0]), *summaries("bart", [16.0])]
    for book in nothing[0].series["cells"][0]["books"]:
        book[METRICS[1]] = 0.0
    assert verdicts(nothing)["booksum_infini_delta_bart"] == ("inconclusive", "—")
    few = [*summaries("infini_delta", [18.0], seeds=(1, 2)), *summaries("bart", [16.0])]
    verdict, measured = verdicts(few)["booksum_infini_delta_bart"]
    assert verdict == "inconclusive" and measured.endswith("(10 books; 2 seeds)")


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [([10.0, 11.0, 12.0, 13.0, 14.0, 15.0], "holds"), ([15.0, 14.0, 13.0, 12.0, 11.0, 10.0], "does not hold")],
)
def test_more_text_makes_better_summaries_where_overall_rises_with_length(scores: list[float], verdict: str) -> None:
    found = verdicts(summaries("infini_linear", scores, "validation"))
    assert found["booksum_lengths_infini_linear"][0] == verdict
    assert "points a doubling" in found["booksum_lengths_infini_linear"][1]
    assert found["booksum_lengths_infini_delta"] == ("inconclusive", "—")
