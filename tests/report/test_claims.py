"""The claims of the paper: what makes each hold, and what it must not rest on."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from report_runs import make_eval, make_train, pair

from infini.config.compose import compose
from infini.config.lengths import format_length
from infini.errors import InputError
from infini.records import RunRecord, load_records, published_dir
from infini.report.claims import PATTERNS, ClaimsReport, Evidence, build_claims
from infini.report.load import load_report
from infini.report.passkey import PasskeyReport, additions_of
from infini.report.selection import select_runs
from infini.report.tables import RenderedReport, Table
from infini.runs.claims import claims_text, declared_report, judged


def three(model: str, loss: float = 4.0) -> list[RunRecord]:
    """The evaluations of a model at three seeds."""
    return [make_eval(model, seed, loss) for seed in (1, 2, 3)]


@cache
def claims(documents: int = 3) -> ClaimsReport:
    """The project's claims, decided by as many documents as these records have."""
    report = load_report(compose(["report=claims"]).report)
    assert isinstance(report, ClaimsReport)
    return replace(report, claims=tuple(replace(claim, documents=documents) for claim in report.claims))


def verdicts(runs: list[RunRecord], documents: int = 3) -> dict[str, tuple[str, str]]:
    """Name of a claim -> verdict and what was measured."""
    return {
        row.model: (table.cell(row.model, "Verdict").text, table.cell(row.model, "Measured").text)
        for table in tables_of_claims(judged(claims(documents), "laptop", runs))
        for row in table.rows
    }


def tables_of_claims(rendered: RenderedReport) -> list[Table]:
    """The tables that have verdicts."""
    return [table for table in rendered.tables if "Verdict" in table.columns]


def to_decide(runs: list[RunRecord]) -> dict[str, str]:
    """Name of a claim -> what it would take."""
    tables = tables_of_claims(judged(claims(), "laptop", runs))
    return {row.model: table.cell(row.model, "To decide").text for table in tables for row in table.rows}


def test_without_runs_nothing_is_said_but_arithmetic() -> None:
    found = verdicts([])
    sizes = {f"size_{model}" for model in ("transformer_xl", "memorizing", "rmt", "infini_linear")}
    assert {name for name, (verdict, _) in found.items() if verdict == "holds"} == {"memory_ratio"} | sizes
    assert found["size_rmt"][1] == "2,457,600"
    assert found["memory_ratio"][1].startswith("115.7x")
    assert {verdict for verdict, _ in found.values()} == {"holds", "inconclusive", "not testable"}
    assert to_decide([])["pg19_delta"] == "needs three seeds of both models" and to_decide([])["size_rmt"] == "—"


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(3.9, "holds"), (4.1, "does not hold"), (4.0, "inconclusive")],
    ids=["better", "worse", "same"],
)
def test_a_lower_perplexity_is_a_lower_loss_on_the_same_books(loss: float, verdict: str) -> None:
    found = verdicts(three("memorizing") + three("infini_linear", loss))
    assert found["pg19_infini_linear_memorizing"][0] == verdict
    assert "(3 documents, effective number 2.3; 3 seeds)" in found["pg19_infini_linear_memorizing"][1]
    assert found["arxiv_math_infini_linear_memorizing"][0] == "inconclusive"


def test_a_difference_within_its_interval_is_inconclusive() -> None:
    """Worse on one book and better on the others."""
    runs = three("infini_linear", 3.99)
    for run in runs:
        run.documents[0]["nll"] += 0.05 * run.documents[0]["tokens"]
    verdict, measured = verdicts(three("memorizing") + runs)["pg19_infini_linear_memorizing"]
    assert verdict == "inconclusive" and measured.endswith("; p = 1, adjusted for 9 tests")
    # Seeds are all alike: documents are what is missing.
    assert re.fullmatch(
        r"would need (about|more than) \d+ seeds and \d+ documents",
        to_decide(three("memorizing") + runs)["pg19_infini_linear_memorizing"],
    )


def test_a_difference_within_the_spread_of_its_seeds_is_inconclusive() -> None:
    """The difference is the same on every document; over seeds it is -0.01, -0.01 and -0.05, an error of 0.0133 that
    1.33 degrees of freedom (three documents of 1, 2 and 4 thousand tokens are worth 2.33) make 7.2 times as wide."""
    runs = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.99), (2, 3.99), (3, 3.95))]
    verdict, measured = verdicts(three("memorizing") + runs)["pg19_infini_linear_memorizing"]
    assert verdict == "inconclusive" and "-0.0233 [-0.1192, +0.0726] nats a token" in measured


def test_three_seeds_that_agree_to_two_and_a_half_errors_are_not_sure() -> None:
    """A difference of 3.5 standard errors of the seeds, which a fixed 2.5 took for sure: by Student's t p = 0.128,
    times nine claims more than 1."""
    runs = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.99), (2, 3.98), (3, 3.97))]
    verdict, measured = verdicts(three("memorizing") + runs)["pg19_infini_linear_memorizing"]
    assert verdict == "inconclusive" and "-0.0200 [-0.0615, +0.0215]" in measured and "p = 1," in measured
    assert (
        to_decide(three("memorizing") + runs)["pg19_infini_linear_memorizing"]
        == "would need about 10 seeds and 6 documents"
    )


def test_claims_about_one_table_share_their_error_rate() -> None:
    """p = 0.039 is sure for a claim that is declared alone, and not for one of nine, whether the others have runs or
    not."""
    runs = [make_eval("infini_linear", seed, loss) for seed, loss in ((1, 3.99), (2, 3.9875), (3, 3.985))]
    report, name = claims(), "pg19_infini_linear_memorizing"
    alone = replace(report, claims=tuple(claim for claim in report.claims if claim.name == name))
    (table,) = tables_of_claims(judged(alone, "laptop", three("memorizing") + runs))
    measured = table.cell(name, "Measured").text
    assert table.cell(name, "Verdict").text == "holds" and "p = 0.039" in measured and "adjusted" not in measured
    others = [make_eval(model, seed, 4.0 + seed % 2) for model in ("rmt", "transformer_xl") for seed in (1, 2, 3)]
    for published in (runs, [*runs, *others]):
        verdict, measured = verdicts([*three("memorizing"), *published])[name]
        assert verdict == "inconclusive" and measured.endswith("p = 0.35, adjusted for 9 tests")


def test_two_seeds_are_no_answer() -> None:
    runs = [*three("memorizing"), *three("infini_linear", 3.0)[:2]]
    verdict, measured = verdicts(runs)["pg19_infini_linear_memorizing"]
    assert verdict == "inconclusive" and measured.endswith("2 seeds)")
    assert to_decide(runs)["pg19_infini_linear_memorizing"] == "needs one more seed"


def test_few_documents_and_unequal_tokens_are_no_answer() -> None:
    runs = three("memorizing") + three("infini_linear", 3.0)
    trainings = [make_train(run.model, run.seed) for run in runs]
    name = "pg19_infini_linear_memorizing"
    assert verdicts([*runs, *trainings])[name][0] == "holds"
    trainings[0].cost["tokens_seen"] = 7
    assert verdicts([*runs, *trainings])[name] == ("inconclusive", "trained on different numbers of tokens")
    verdict, measured = verdicts(runs, documents=4)[name]
    assert verdict == "inconclusive" and measured.endswith("(3 documents; 3 seeds)")


def test_a_claim_about_unequal_tokens_says_so() -> None:
    runs = three("memorizing") + three("infini_linear", 3.0)
    trainings = [make_train(run.model, run.seed) for run in runs]
    trainings[0].cost["tokens_seen"] = 7
    report, name = claims(3), "pg19_infini_linear_memorizing"
    (claim,) = (claim for claim in report.claims if claim.name == name)
    for unequal, verdict in ((False, "inconclusive"), (True, "holds")):
        asked = replace(report, claims=(replace(claim, unequal_tokens=unequal),))
        (table,) = tables_of_claims(judged(asked, "laptop", [*runs, *trainings]))
        assert table.cell(name, "Verdict").text == verdict


def test_tokens_are_compared_within_a_seed() -> None:
    """The share of padding differs from seed to seed if documents are short, but hardly between systems of one seed."""
    runs, trainings = [], []
    for seed in (1, 2, 3):
        for model, loss, more in (("memorizing", 4.0, 0), ("infini_linear", 3.5, 900)):
            runs.append(make_eval(model, seed, loss))
            trainings.append(make_train(model, seed))
            trainings[-1].cost["tokens_seen"] += 10_000 * seed + more
    name = "pg19_infini_linear_memorizing"
    assert verdicts([*runs, *trainings])[name][0] == "holds"
    trainings[-1].cost["tokens_seen"] += 200
    assert verdicts([*runs, *trainings])[name] == ("inconclusive", "trained on different numbers of tokens")


@pytest.mark.parametrize(("loss", "verdict"), [(3.5, "holds"), (4.009, "holds"), (4.02, "does not hold")])
def test_delta_may_be_worse_by_a_hundredth(loss: float, verdict: str) -> None:
    assert verdicts(three("infini_linear") + three("infini_delta", loss))["pg19_delta"][0] == verdict


@pytest.mark.parametrize(
    ("gates", "short", "kinds", "interleaved"),
    [
        ([[0.05, 0.55], [0.02, 0.45]], True, True, False),
        ([[0.05, 0.55], [0.3, 0.45]], False, True, False),
        # A gate that never left 0.5 is no mixer.
        ([[0.05, 0.5], [0.02, 0.501]], True, False, False),
        ([[0.05, 0.3], [0.02, 0.95]], True, False, False),
        ([[0.05, 0.6], [0.02, 0.95]], True, True, True),
        # Half of all gates are not most of them.
        ([[0.05, 0.3], [0.3, 0.45]], False, False, False),
        # The middle layer is of both halves.
        ([[0.05, 0.05], [0.02, 0.95], [0.05, 0.05]], True, False, True),
    ],
)
def test_patterns_of_gates(gates: list[list[float]], short: bool, kinds: bool, interleaved: bool) -> None:
    assert [has(gates) for has, _ in PATTERNS.values()] == [short, kinds, interleaved]


def trained_gates(having: int, n: int, seeds: int = 3) -> list[RunRecord]:
    """n models, both rules on both corpora; `having` of them have short-range heads in every layer."""
    made = []
    cells = [(model, task, s) for s in range(seeds) for model in ("infini_linear", "infini_delta") for task in TASKS]
    for index, (model, task, seed) in enumerate(cells[:n]):
        training = make_train(model, seed, run_id=f"train-{model}-{task}-{seed}", task=task)
        training.config["model"] = {"name": model, "gate_init": "zeros"}
        run = make_eval(model, seed, run_id=f"eval-{model}-{task}-{seed}", parent=training.run_id, task=task)
        run.series["gates"] = [[0.05, 0.5]] if index < having else [[0.5, 0.5]]
        run.config["variant"] = training.config["variant"] = "lm_gates"
        made += [training, run]
    return made


TASKS = ("pg19", "arxiv_math")


@pytest.mark.parametrize(
    ("having", "verdict"),
    [(20, "holds"), (19, "holds"), (14, "inconclusive"), (1, "does not hold"), (0, "does not hold")],
)
def test_a_claim_about_models_is_one_about_most_of_them(having: int, verdict: str) -> None:
    found = verdicts(trained_gates(having, 20, seeds=5))["short_range_heads"]
    assert found[0] == verdict and found[1].startswith(f"{having} of 20 trained models (5 seeds of each)")


def test_two_rules_of_one_corpus_and_seed_are_no_independent_models() -> None:
    """They begin with the same weights and read the same batches: twelve models are six draws, too few to judge."""
    found = verdicts(trained_gates(12, 12))["short_range_heads"]
    assert found[0] == "inconclusive" and found[1].startswith("12 of 12 trained models (3 seeds of each); p = 0.")
    assert float(found[1].partition("p = ")[2].partition(",")[0]) > 0.015


def test_gates_of_few_models_or_that_began_elsewhere_prove_nothing() -> None:
    found = verdicts(trained_gates(8, 8, seeds=2))["short_range_heads"]
    assert found == ("inconclusive", "8 of 8 trained models (2 seeds of each)")
    runs = trained_gates(12, 12)
    for training in runs[::2]:
        training.config["model"] = {**training.config["model"], "gate_init": "specialised"}
    assert verdicts(runs)["short_range_heads"] == ("inconclusive", "—")


@pytest.mark.parametrize(
    "left", [lambda run: run.model == "infini_linear", lambda run: run.task == "pg19"], ids=["one row", "one corpus"]
)
def test_gates_of_one_model_alone_prove_nothing_about_the_other(left: Callable[[RunRecord], bool]) -> None:
    runs = [run for run in trained_gates(32, 32, seeds=8) if left(run)]
    name = "short_range_heads"
    assert verdicts(runs)[name] == ("inconclusive", "16 of 16 trained models, and none of another")
    assert to_decide(runs)[name] == "needs three seeds of each model"


@pytest.mark.parametrize(
    ("loss", "verdict"), [(3.5, "holds"), (4.0, "holds"), (4.15, "does not hold"), (4.2, "does not hold")]
)
def test_longer_training_must_lower_the_loss_by_more_than_that_of_a_model_without_memory(
    loss: float, verdict: str
) -> None:
    """Local attention loses 0.1 by the same change: of longer sequences a step has fewer."""
    runs = []
    for model, usual, longer in (("infini_linear", 4.0, loss), ("local", 4.5, 4.6)):
        for seed, (segments, at) in enumerate([(24, usual), (75, longer)] * 3):
            training, run = make_train(model, seed, task="arxiv_math"), make_eval(model, seed, at)
            run.task = "arxiv_math"
            recipe = training.config["recipe"]
            recipe |= {"segments_per_sequence": segments, "excerpt_tokens": 9600}
            if segments == 75:
                recipe |= {"batch_size": 2, "steps": 960, "checkpoint_segments": 25}
            runs += [training, run]
    assert verdicts(runs)["linear_100k"][0] == "inconclusive", "no seed is shared"
    for record in runs:
        record.seed //= 2
    assert verdicts(runs)["linear_100k"][0] == verdict


def test_made_up_books_count_for_nothing() -> None:
    runs = three("memorizing") + three("infini_linear", 3.0)
    for run in runs:
        run.data["source"] = "synthetic"
    assert verdicts(runs)["pg19_infini_linear_memorizing"][0] == "inconclusive"


def three_seeds(changes: dict[str, tuple[float, ...]] | None = None, **options: Any) -> list[RunRecord]:
    """The runs of a row at three seeds; of the first the accuracies of some lengths are others."""
    runs = [run for seed in (1, 2, 3) for run in pair(seed=seed, **options)]
    for cell in runs[1].series["cells"]:
        accuracies = (changes or {}).get(format_length(cell["length"]))
        if accuracies is not None:
            cell["token_accuracy"] = accuracies[["start", "middle", "end"].index(cell["depth"])] / 100
    return runs


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "holds"),
        # One seed behind at one place: the mean is 96.7 where 98 is asked, but seeds differ.
        ({"128K": (90.0, 100.0, 100.0)}, "inconclusive"),
        ({"1M": (100.0, 75.0, 100.0)}, "inconclusive"),
    ],
)
def test_a_passkey_claim_is_the_papers_row_with_a_little_slack(
    changes: dict[str, tuple[float, ...]], verdict: str
) -> None:
    assert verdicts(three_seeds(changes, examples=300))["passkey_linear"][0] == verdict


def test_a_confirmation_is_judged_by_its_own_seeds() -> None:
    """Seeds 1 to 3 cannot confirm a method that was changed until they found every key."""
    first, others = three_seeds(accuracy=0.5, examples=300), other_seeds(160)
    found = verdicts([*first, *others])
    assert found["passkey_linear"][0] == "does not hold" and found["passkey_linear_confirmed"][0] == "holds"
    assert to_decide(first)["passkey_linear_confirmed"] == "needs three seeds at every length and place"


def test_each_place_is_held_to_the_papers_number_of_that_place() -> None:
    """The paper's are 97 and 100 at start and end of 512K, and none at a quarter."""
    report = declared_report("table3_passkey")
    assert isinstance(report, PasskeyReport)
    found = {}
    for depths in (["start", "middle", "end"], ["end", 0.25, "start", "middle"]):
        asked = replace(report, depths=depths)
        chosen = select_runs(asked, "laptop", three_seeds({"512K": (96.0, 100.0, 100.0)}))
        about = replace(claims(), claims=tuple(one for one in claims().claims if one.name == "passkey_linear"))
        rendered = build_claims(about, "laptop", {"table3_passkey": Evidence(asked, {"passkey": chosen})})
        found[depths[0]] = rendered.tables[0].cell("passkey_linear", "Measured").text
    assert "512K 98.7/100/100 (paper 97/99/100)" in found["start"]
    assert "512K 100/98.7/100 (paper 100/97/99)" in found["end"]
    assert len({text.partition("; p ")[2] for text in found.values()}) == 1


def other_seeds(examples: int) -> list[RunRecord]:
    """The runs of seeds 4 to 6."""
    runs = three_seeds(examples=examples)
    for run in runs:
        run.seed += 3
        run.run_id += "-other"
    return runs


@pytest.mark.parametrize("other", [110, 300])
def test_a_confirmation_needs_the_number_of_prompts_that_was_fixed(other: int) -> None:
    name = "passkey_linear_confirmed"
    for run in (few := other_seeds(160))[1:2]:
        run.series["cells"][0]["examples"] = other
    for runs in (few, other_seeds(other)):
        assert verdicts(runs)[name][0] == "inconclusive" and to_decide(runs)[name] == "needs 160 prompts per cell"


def test_more_prompts_later_neither_decide_nor_withdraw_a_confirmation() -> None:
    name, more = "passkey_linear_confirmed", other_seeds(320)
    for run in more:
        run.run_id, run.started = f"more-{run.run_id}", "2100-01-01T00:00:00Z"
    assert verdicts([*other_seeds(160), *more])[name] == verdicts(other_seeds(160))[name]
    assert verdicts(other_seeds(160))[name][0] == "holds"
    failed = other_seeds(160)
    for run in failed:
        if run.verb == "eval":
            run.series["cells"][-1]["token_accuracy"] = 0.97
    assert to_decide(failed)[name] == "needs another confirmation, fixed before its runs"


def test_all_right_of_150_prompts_is_not_surely_98() -> None:
    """0.98 to the power of 150 is 0.048, on one side; the interval of a bootstrap said 100 to 100."""
    verdict, measured = verdicts(three_seeds())["passkey_linear"]
    assert verdict == "inconclusive" and measured.endswith("p = 0.97, adjusted for 10 tests")
    assert to_decide(three_seeds())["passkey_linear"] == "would need about 100 prompts per cell and seed"


def test_what_seeds_that_differ_leave_open_is_decided_by_seeds() -> None:
    """One of three is far behind at one place: no number of prompts makes that chance."""
    runs = three_seeds({"1M": (100.0, 80.0, 100.0)}, accuracy=1.0, examples=300)
    assert verdicts(runs)["passkey_linear"][0] == "inconclusive"
    assert re.match(r"would need (about|more than) \d+ seeds", to_decide(runs)["passkey_linear"])


def test_claims_are_judged_by_the_runs_of_the_table() -> None:
    """A newer run that was trained otherwise replaces none that was trained as declared."""
    runs, name = [*three("memorizing"), *three("infini_linear", 3.5)], "pg19_infini_linear_memorizing"
    trainings = [make_train(run.model, run.seed) for run in runs]
    before = verdicts([*runs, *trainings])[name]
    training = make_train("infini_linear", 1, run_id="short", started="2100-01-01T00:00:00Z")
    training.config["recipe"] = {"steps": 3}
    later = make_eval("infini_linear", 1, 9.0, run_id="later", parent="short", started="2100-01-02T00:00:00Z")
    assert before[0] == "holds" and verdicts([*runs, *trainings, training, later])[name] == before


def test_what_is_far_behind_at_every_seed_does_not_hold() -> None:
    assert verdicts(three_seeds(accuracy=0.7))["passkey_linear"][0] == "does not hold"
    # One length is enough.
    runs = three_seeds()
    for run in runs[1::2]:
        for cell in run.series["cells"]:
            cell["token_accuracy"] = 0.7 if (cell["length"], cell["depth"]) == (2**18, "start") else 1.0
    assert verdicts(runs)["passkey_linear"][0] == "does not hold"
    # The row without the penalty on writes is held to the same numbers.
    found = verdicts(three_seeds(recipe="passkey_laptop_plain", accuracy=0.7))
    assert found["passkey_linear_plain"][0] == "does not hold"
    assert found["passkey_linear"][0] == "inconclusive"


def test_one_seed_decides_nothing_however_far_behind() -> None:
    assert verdicts(pair(accuracy=0.3))["passkey_linear"][0] == "inconclusive"
    assert to_decide(pair(accuracy=0.3))["passkey_linear"] == "needs two more seeds"


def test_an_interval_of_one_seed_says_so() -> None:
    """It is over documents: other seeds may differ by more."""
    _, measured = verdicts([make_eval(model, 1) for model in ("memorizing", "infini_linear")])[
        "pg19_infini_linear_memorizing"
    ]
    assert measured.endswith("; 1 seed, which says nothing about others)")
    assert (
        "says nothing" not in verdicts(three("memorizing") + three("infini_linear"))["pg19_infini_linear_memorizing"][1]
    )


def test_a_claim_names_the_smallest_and_the_largest_number_of_prompts() -> None:
    """It names the seeds, too. The few prompts of the longest inputs are not those of all cells."""
    runs = three_seeds()
    for run in runs[1::2]:
        run.series["cells"] = [cell for cell in run.series["cells"] if cell["length"] < 2**20 or run.seed == 1]
        for cell in run.series["cells"]:
            cell["examples"] = 1 if cell["length"] == 2**20 else 50
    assert verdicts(runs)["passkey_linear"][1].endswith("; 1 to 50 prompts per cell and seed, 1 to 3 seeds")


def test_length_extension_proves_nothing_about_the_paper() -> None:
    found = verdicts(three_seeds(recipe="passkey_laptop_extended"))
    assert {verdict for name, (verdict, _) in found.items() if name.startswith("passkey_")} == {"inconclusive"}


def test_a_claim_says_where_its_seeds_have_several_trainings() -> None:
    runs = three_seeds(examples=300)
    assert "several trainings" not in verdicts(runs)["passkey_linear"][1]
    training, run = copy.deepcopy(runs[:2])
    training.run_id = run.parent = "again"
    run.run_id, run.started = "eval-again", "2099-01-01T00:00:00Z"
    run.series["cells"] = [cell for cell in run.series["cells"] if cell["length"] == 2**20]
    assert "; several trainings of seed 1; p " in verdicts([*runs, training, run])["passkey_linear"][1]


def test_a_length_that_is_missing_leaves_the_claim_open() -> None:
    runs = three_seeds()
    for run in runs[1::2]:
        run.series["cells"] = [cell for cell in run.series["cells"] if cell["length"] < 1_000_000]
    verdict, measured = verdicts(runs)["passkey_linear"]
    assert verdict == "inconclusive" and "; 1M not asked; 50 prompts per cell for each of 3 seeds" in measured
    assert to_decide(runs)["passkey_linear"] == "needs prompts of 1M"
    assert to_decide(runs[:2])["passkey_linear"] == "needs two more seeds; to hold, also prompts of 1M"


def test_a_length_that_is_missing_does_not_save_the_claim_from_another() -> None:
    runs = three_seeds(accuracy=0.7)
    for run in runs[1::2]:
        run.series["cells"] = [cell for cell in run.series["cells"] if cell["length"] < 2**16]
    assert verdicts(runs)["passkey_linear"][0] == "does not hold"


def test_lengths_that_are_missing_count_where_one_place_decides() -> None:
    """The chance that one of 15 places seems worse is as large before the others are asked as after."""
    whole = three_seeds()
    for run in whole[1::2]:
        run.series["cells"][0]["token_accuracy"] = 0.93
    few = copy.deepcopy(whole)
    for run in few[1::2]:
        run.series["cells"] = [cell for cell in run.series["cells"] if cell["length"] < 2**16]
    found = [verdicts(runs)["passkey_linear"][1].partition("; p = ")[2] for runs in (whole, few)]
    assert found[0] == found[1] and 0 < float(found[0].partition(",")[0]) < 1


def test_the_claims_are_written_with_the_runs_behind_them() -> None:
    text = claims_text("laptop", [make_eval("memorizing", 1), make_eval("infini_linear", 1, 3.9)])
    assert "| Claim | Where | Test | Measured | Verdict | To decide |" in text
    assert "[`eval-infini_linear-1`](runs/eval-infini_linear-1.json)" in text
    # Every claim is counted, under one verdict.
    total, *counts = re.findall(r"\d+", next(line for line in text.splitlines() if " claims: " in line))
    assert int(total) == sum(map(int, counts)) == len(verdicts([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measure": "los"}, r"report.claims.pg19_delta.measure='los': must be one of .*did you mean 'loss'"),
        ({"direction": "over"}, r"report.claims.pg19_delta.direction='over': must be below or above"),
        (
            {"colour": 1},
            r"report.claims.pg19_delta.colour=1: no such key of report.claims.pg19_delta; allowed: direction, ",
        ),
        ({"rows": ["infini_delta", "nothing"]}, r"report.claims.pg19_delta.rows: table2_lm has no row 'nothing'"),
        (
            {"options": {"less": ["local", "rnt"], "control": "local attention"}},
            r"pg19_delta.options.less: table2_lm has no row 'rnt'; it has .*local.*; did you mean 'rmt'\?$",
        ),
        (
            {"measure": "gates", "rows": ["infini_dleta"], "task": "", "options": {"pattern": "two_kinds"}},
            r"pg19_delta.rows: table2_lm has no row 'infini_dleta'; .*; did you mean 'infini_delta'\?$",
        ),
        (
            {"report": "table3_passkey", "measure": "token_accuracy", "task": "passkey", "rows": ["linear_plain"]}
            | {"options": {"paper_of": "liner"}},
            r"pg19_delta.options.paper_of: table3_passkey has no row 'liner'; .*; did you mean 'linear'\?$",
        ),
        (
            {"report": "table3_passkey", "measure": "token_accuracy", "task": "passkey", "rows": ["linear_plain"]},
            r"pg19_delta.rows='linear_plain': the paper prints nothing for it; set options.paper_of to one of linear, ",
        ),
        ({"task": "pg20"}, r"report.claims.pg19_delta.task='pg20': must be one of pg19, arxiv_math"),
        ({"report": "claims"}, r"report=claims has no runs"),
    ],
)
def test_a_claim_that_is_none_is_one_line(change: dict[str, Any], message: str) -> None:
    config = compose(["report=claims"]).report
    (claim,) = [values for values in config["claims"] if values["name"] == "pg19_delta"]
    with pytest.raises(InputError, match=message):
        report = load_report({**config, "claims": [{**claim, **change}]})
        assert isinstance(report, ClaimsReport)
        judged(report, "laptop", [])


BARE = {"name": "c", "says": "s", "place": "p"}
LM, ARITHMETIC = {"report": "table2_lm", "task": "pg19"}, {"measure": "memory_size"}
ASKED = {"report": "table3_passkey", "task": "passkey"}
READ = {"report": "table4_booksum", "task": "booksum"}
TWO = ["infini_linear", "rmt"]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({**LM, "measure": "loss", "rows": ["rmt"]}, r"c.rows=\['rmt'\]: measure=loss takes two rows or more"),
        (
            {"measure": "loss", "rows": TWO},
            "c.report='': measure=loss needs a table of running text, for example table2_lm",
        ),
        (
            {**ASKED, "measure": "loss", "rows": ["linear", "delta"]},
            "c.report='table3_passkey': measure=loss needs a table of running text, for example table2_lm",
        ),
        (
            {**LM, "measure": "loss", "rows": TWO, "options": {"less": ["local", "rmt"]}},
            "c.options={.*}: two rows in less and words in control, or neither",
        ),
        (
            {**LM, "measure": "loss", "rows": TWO, "options": {"lses": ["local", "rmt"]}},
            r"c.options.lses=.*: no such key of .*; allowed: control, less; did you mean .*less'",
        ),
        (
            {**LM, "measure": "overall", "rows": TWO},
            "c.report='table2_lm': measure=overall needs a table of summaries, for example table4_booksum",
        ),
        ({**READ, "measure": "overall", "rows": ["bart"]}, r"c.rows=\['bart'\]: measure=overall takes two rows"),
        (
            {**READ, "measure": "overall_by_length", "rows": ["infini_linear"], "options": {"at_end": 9}},
            r"c.options=\{'at_end': 9\}: measure=overall_by_length takes none",
        ),
        (
            {**READ, "measure": "overall_by_length", "rows": ["infini_linear"]},
            r"c.measure='overall_by_length': overall is for one input length \(of several, options.length\), "
            "overall_by_length for several",
        ),
        (
            {**READ, "report": "llm_booksum", "measure": "overall", "rows": ["linear", "local"]},
            r"c.measure='overall': overall is for one input length \(of several, options.length\)",
        ),
        (
            {**READ, "report": "llm_booksum", "measure": "overall", "rows": TWO, "options": {"length": "8K"}},
            "c.options.length='8K': must be one of 4K, 16K",
        ),
        (
            {**LM, "measure": "token_accuracy", "rows": ["infini_linear"]},
            "c.report='table2_lm': measure=token_accuracy needs a table of the passkey task, for example "
            "table3_passkey",
        ),
        (
            {**ASKED, "measure": "token_accuracy", "rows": ["linear", "delta"]},
            r"c.rows=\['linear', 'delta'\]: measure=token_accuracy takes one row",
        ),
        (
            {**ASKED, "measure": "token_accuracy", "rows": ["linear"], "options": {"only_seeds": 4}},
            r"c.options.only_seeds=4: must be a list or null$",
        ),
        (
            {**ASKED, "measure": "zero_shot_accuracy", "rows": ["linear_zero_shot"]},
            "c.options.at_end: missing; give it a value",
        ),
        (
            {**LM, "measure": "gates", "task": "", "rows": TWO},
            "c.options.pattern='': must be one of short_range, two_kinds, interleaved",
        ),
        (
            {**LM, "measure": "gates", "task": "", "rows": TWO, "options": {"pattern": "two_kind"}},
            "c.options.pattern='two_kind': must be one of short_range, .*; did you mean 'two_kinds'",
        ),
        (
            {**LM, "measure": "gates", "task": "pg18", "rows": TWO, "options": {"pattern": "two_kinds"}},
            "c.task='pg18': must be one of pg19, arxiv_math",
        ),
        (ARITHMETIC, r"c.rows=\[\]: measure=memory_size takes one row"),
        (
            {**ARITHMETIC, "rows": ["local"]},
            "c.rows='local': must be one of transformer_xl, memorizing, rmt, infini_linear",
        ),
        ({"measure": "memory_ratio", "rows": ["rmt"]}, r"c.rows=\['rmt'\]: measure=memory_ratio takes no rows"),
    ],
)
def test_what_a_measure_does_not_take_is_one_line(claim: dict[str, Any], message: str) -> None:
    config = compose(["report=claims"]).report
    with pytest.raises(InputError, match=f"^report.claims.{message}"):
        report = load_report({**config, "claims": [{**BARE, **claim}]})
        assert isinstance(report, ClaimsReport)
        judged(report, "laptop", [])


@pytest.mark.parametrize(("length", "measured"), [("4K", True), ("16K", False)])
def test_a_claim_on_summaries_is_judged_at_its_length(length: str, measured: bool) -> None:
    """Without a memory no published summary was written after 16K tokens."""
    config = compose(["report=claims"]).report
    (claim,) = (claim for claim in config["claims"] if claim["name"] == "llm_booksum_linear")
    report = load_report({**config, "claims": [{**claim, "options": {"length": length}}]})
    assert isinstance(report, ClaimsReport)
    table = judged(report.about("llm_booksum"), "laptop", load_records(published_dir())).tables[0]
    assert (table.cell("llm_booksum_linear", "Measured").text[:5] == "-1.86") is measured
    assert f"after {length} tokens of a book" in table.cell("llm_booksum_linear", "Test").text


def test_gates_may_be_judged_for_one_task() -> None:
    report = claims()
    (claim,) = (claim for claim in report.claims if claim.name == "short_range_heads")
    asked = replace(report, claims=(replace(claim, task="pg19"),))
    (table,) = tables_of_claims(judged(asked, "laptop", trained_gates(20, 20, seeds=5)))
    assert table.cell(claim.name, "Measured").text.startswith("10 of 10 trained models (5 seeds of each)")


def test_when_tests_were_fixed_is_a_table_of_its_own() -> None:
    rendered = judged(claims(), "laptop", [])
    *_, table = rendered.tables
    assert table.columns == ("Fixed on", "Before or after its runs") and table.rows_are == "Claims"
    by_title = {row.title: [cell.text for cell in row.cells] for row in table.rows}
    # It was added half an hour after its first run.
    (input_gate,) = (cells for title, cells in by_title.items() if "input gate" in title)
    assert input_gate == ["2026-11-28", "after its first run, of 2026-11-28 14:32"]
    # It is no part of the verdicts on a terminal.
    assert table not in rendered.short().tables


def test_the_notes_name_what_the_passkey_claims_rest_on() -> None:
    report = claims()
    assert "never by rows with length extension" not in report.note and "exploratory" in report.note
    titles = {claim.name: claim.says for claim in report.claims}
    for name in ("passkey_linear", "passkey_delta"):
        assert "short inputs, keys of few different digits and a penalty on writes" in titles[name]
    # The one row with length extension that is judged has it in its title.
    reports = {name: declared_report(name) for name in report.reports}
    extended = [
        claim.name
        for claim in report.claims
        if isinstance(about := reports.get(claim.report), PasskeyReport)
        and any(additions_of(about.rows[row], "laptop")["extended"] for row in claim.rows)
    ]
    assert extended == ["llm_passkey_linear_input_gate"] and "length extension" in titles[extended[0]]


def test_tests_are_described_by_the_titles_of_rows() -> None:
    shown = {
        row.model: table.cell(row.model, "Test").text
        for table in tables_of_claims(judged(claims(), "laptop", []))
        for row in table.rows
    }
    assert shown["pg19_as_compared_linear_memorizing"] == (
        'loss of "Linear, 16 times the tokens" minus that of "Memorizing Transformers" is below 0'
    )
    assert '", minus the change that local attention shows, is below 0' in shown["linear_100k"]
    assert shown["booksum_infini_linear_bart"] == (
        'Overall of "Infini-Transformers (Linear)" minus that of "BART" is above 0'
    )
    assert "Models with the same corpus and seed count as one model." in shown["short_range_heads"]
    assert shown["interleaving"].startswith("The paper gives no measure; ours is: in more than half")
    # Keys of rows are for files.
    assert not [text for text in shown.values() if "_" in text]


def test_a_report_declares_its_own_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"name": "own", "says": "x", "place": "not in the paper", "measure": "loss", "task": "pg19"}
    files = {"table2_lm": {"own_claims": [own | {"rows": ["infini_linear", "local"]}]}}
    monkeypatch.setattr("infini.report.claims.settings_in", lambda group, name: files.get(name, {}))
    config = compose(["report=claims"]).report
    *listed, added = load_report(config).claims  # type: ignore[attr-defined]
    assert [claim.name for claim in listed] == [claim["name"] for claim in config["claims"]]
    assert (added.name, added.report) == ("own", "table2_lm")


def test_no_two_claims_have_one_name() -> None:
    config = compose(["report=claims"]).report
    with pytest.raises(InputError, match="two claims are called 'memory_ratio'"):
        load_report({**config, "claims": [*config["claims"], config["claims"][0]]})


def zero_shot(end: float, elsewhere: float, seeds: tuple[int, ...] = (1, 2, 3)) -> list[RunRecord]:
    """The models of books, asked without a training on prompts."""
    runs = [run for seed in seeds for run in pair(recipe="pg19_laptop", seed=seed, tokenizer="bpe-2048")]
    for run in runs[1::2]:
        run.config["task"]["tokenizer"] = "scale"
        for cell in run.series["cells"]:
            cell["token_accuracy"] = end if cell["depth"] == "end" else elsewhere
    return runs


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        (zero_shot(0.97, 0.1), "holds"),
        (zero_shot(0.75, 0.1), "does not hold"),
        (zero_shot(0.97, 0.4), "does not hold"),
        (zero_shot(0.9, 0.1), "inconclusive"),
        (zero_shot(0.3, 0.1, (1,)), "inconclusive"),
    ],
)
def test_zero_shot_fails_where_the_paper_fails_and_not_where_it_does_not(runs: list[RunRecord], verdict: str) -> None:
    assert verdicts(runs)["passkey_linear_zero_shot"][0] == verdict


def test_a_claim_does_not_rest_on_what_was_trained_otherwise() -> None:
    runs, name = [*three("memorizing"), *three("infini_linear", 3.5)], "pg19_infini_linear_memorizing"
    trainings = [make_train(run.model, run.seed) for run in runs]
    assert verdicts([*runs, *trainings])[name][0] == "holds"
    for training in trainings[3:]:
        training.config["recipe"] = {"steps": 3}
    said = '"Infini-Transformer (Linear)" is not as declared: recipe.steps 3 instead of 1200'
    assert verdicts([*runs, *trainings])[name] == ("inconclusive", said)


def test_seeds_that_share_no_cell_are_none() -> None:
    """Three seeds at every length, but others at a million: no seed was asked at all lengths."""
    runs = [run for seed in range(1, 7) for run in pair(seed=seed, recipe="passkey_laptop_plain")]
    for run in runs[1::2]:
        run.series["cells"] = [cell for cell in run.series["cells"] if (cell["length"] < 2**20) == (run.seed < 4)]
    verdict, measured = verdicts(runs)["passkey_linear_plain"]
    assert verdict == "inconclusive" and measured.endswith("; 50 prompts per cell for each of 0 seeds")
