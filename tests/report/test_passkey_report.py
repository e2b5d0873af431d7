"""Table 3 from made-up records: whose row a run is, what a cell shows, and what never stands side by side."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_train, pair
from rich.console import Console

from infini.config.compose import compose
from infini.errors import InputError
from infini.records import RunRecord, load_records, published_dir
from infini.report import passkey_figures
from infini.report.load import draw, load_report, report_of_runs
from infini.report.palette import MUTED
from infini.report.passkey import PasskeyReport, additions_of, longest_input, tokens_of_filler
from infini.report.passkey_figures import _Accuracy, _found_at_the_longest
from infini.report.render import print_report
from infini.report.selection import select_runs


def report(**changes: Any) -> PasskeyReport:
    loaded = load_report({**compose(["report=table3_passkey"]).report, **changes})
    assert isinstance(loaded, PasskeyReport)
    return loaded


BOOKS = make_train("infini_linear", 1, run_id="books")
SHORT = {
    "recipe.batch_size": 40,
    "recipe.segments_per_sequence": 4,
    "recipe.curriculum": [[128, 256]],
    "recipe.advance_below": 0.2,
    "recipe.sparse_writes": 0.03,
    "dims.segment_length": 128,
}
OF_640 = {"recipe.batch_size": 6, "recipe.sparse_loss_scale": None}
"""The recipe of the rows of passkey_beyond without length extension."""
TUNED = {"init_from": "books", "task.few_digit_share": 0.0}
FROZEN = {"optimizer.gate_lr": 0.0, "model.gate_init": "zeros"}


def rows_of(runs: list[RunRecord]) -> dict[str, list[str]]:
    chosen = select_runs(report(), "laptop", runs)
    return {name: [run.run_id for run in of_row] for name, of_row in chosen.runs.items()}


def test_how_a_model_was_trained_decides_its_row() -> None:
    runs = [
        BOOKS,
        *pair(),
        *pair(recipe="passkey_laptop_extended"),
        *pair("infini_delta", "passkey_laptop_plain"),
        *pair("infini_delta", "passkey_laptop_finetune", trained=TUNED),
        *pair("infini_delta", "passkey_laptop_finetune", trained=TUNED | {"task.few_digit_share": 0.8}, name="few-"),
        *pair("infini_delta", "passkey_laptop_finetune", trained=SHORT | {"init_from": "books"}, name="short-"),
        *pair("infini_delta", "pg19_laptop"),
        *pair("local", trained={"recipe.curriculum": None}),
        *pair(recipe="passkey_laptop_extended", asked={"task.knockout": "reset"}, name="reset-"),
        *pair(recipe="passkey_laptop_extended", trained=FROZEN, name="frozen-"),
    ]
    assert {name: len(ids) for name, ids in rows_of(runs).items()} == {
        "linear": 1,
        "linear_extended": 1,
        "delta_plain": 1,
        "delta_finetuned": 1,
        "delta_finetuned_few_digits": 1,
        "delta_finetuned_short": 1,
        "delta_zero_shot": 1,
        "local": 1,
        "linear_reset": 1,
        "linear_frozen": 1,
    }


def test_what_was_learned_and_what_is_asked_decide_a_row_beyond_the_paper() -> None:
    digits, false_keys, book = {"task.digits": 8}, {"task.distractors": 3}, {"task.filler": "book"}
    runs = [
        *pair(trained=OF_640),
        *pair(recipe="passkey_laptop_extended"),
        *pair(trained=OF_640 | digits, asked=digits, name="digits-"),
        *pair(trained=OF_640, asked=digits, name="digits-unseen-"),
        *pair(trained=OF_640, asked=false_keys, name="unwarned-"),
        *pair("infini_delta", trained=OF_640 | false_keys, asked=false_keys, name="false-"),
        *pair(trained=OF_640 | book | {"task.tokenizer": "scale"}, asked=book, name="book-"),
        *pair(
            trained=OF_640 | book | {"task.tokenizer": "scale", "optimizer.lr": 0.004}, asked=book, name="slow-book-"
        ),
        *pair(
            recipe="passkey_laptop_extended",
            trained=book | {"task.tokenizer": "scale"},
            asked=book,
            name="long-book-",
        ),
        *pair(
            recipe="passkey_laptop_extended",
            trained=book | {"task.tokenizer": "scale", "task.distractors": 1, "recipe.curriculum": [[128, 320]]},
            asked=book,
            name="warned-book-",
        ),
    ]
    beyond = report_of_runs(compose(["report=passkey_beyond"]).report, "draw")
    chosen = select_runs(beyond, "laptop", runs)
    assert {name: [run.run_id.split("-infini")[0] for run in found] for name, found in chosen.runs.items()} == {
        "linear": ["eval"],
        "linear_extended": ["eval"],
        "linear_digits": ["eval-digits"],
        "linear_unwarned": ["eval-unwarned"],
        "delta_distractors": ["eval-false"],
        "linear_book_slow": ["eval-slow-book"],
        "linear_book": ["eval-book"],
        "linear_book_extended": ["eval-long-book"],
        "linear_book_warned": ["eval-warned-book"],
    }


@pytest.mark.parametrize(
    ("strays", "why"),
    [
        ({"asked": {"task.digits": 8}}, "it is not 'Linear, scratch, penalty on writes': task.digits=8, the row has 5"),
        ({"trained": {"optimizer.gate_lr": 0, "model.gate_init": "zeros"}}, "frozen_gates=True, the row has False"),
        *(
            ({"trained": {f"model.{key}": value}}, f"model.{key}={value}, the row has {usual}")
            for key, value, usual in (
                ("memory_decay", 16, None),
                ("input_gate", "sigmoid", None),
                ("gate_init", "zeros", "specialised"),
            )
        ),
        ({"trained": {"model.positions": "t5", "task.positions": "rotary"}}, "model.positions=t5, the row has rotary"),
        ({"asked": {"dims.segment_length": 64}}, "dims.segment_length=64, its training has 128"),
        ({"trained": {"init_from": "lost"}}, "its training began with other weights than the row's (fresh ones)"),
        ({"model": "rmt"}, "no row has model=rmt"),
        ({"lengths": (512,)}, "it measures nothing that this table has a cell for"),
    ],
)
def test_a_run_without_a_cell_is_named_with_what_differs_from_the_nearest_row(strays: dict[str, Any], why: str) -> None:
    stray = pair(seed=2, name="stray-", **strays)
    rendered = report().render("laptop", [], [*pair(), *stray])
    (line,) = [note for note in rendered.notes if "without a cell" in note]
    assert line in rendered.short().notes
    assert line.startswith(f"yours: 1 evaluation without a cell here; the last is {stray[1].run_id}: ") and why in line
    assert not [note for note in report().render("laptop", stray, pair()).notes if "without a cell" in note]


def test_three_seeds_leave_room_for_the_titles(capsys: pytest.CaptureFixture[str]) -> None:
    """Mean and deviation over seeds make wide cells; in 120 columns no title may be cut short for them."""
    runs = [run for seed in (1, 2, 3) for run in pair(recipe="passkey_laptop_extended", seed=seed)]
    for run, tokens in zip(runs[::2], (9_736_621, 10_024_123, 9_944_730), strict=True):
        run.cost = {"tokens_seen": tokens}
    for run, diluted in zip(runs[1::2], (176.2, 566.9, 955.4), strict=True):
        run.results = {"half_dilution": {"value": diluted, "n": 16, "unit": "tokens", "higher_is_better": True}}
    print_report(report().render("laptop", [], runs), Console(width=120))
    out = capsys.readouterr().out
    assert "9,901,825 ±" in out and "\u2026" not in out


def test_tokens_of_filler_are_written_with_the_digits_that_mean_something() -> None:
    assert list(map(tokens_of_filler, (596.7, 1363.0, 999_999.0, 53_352_877_056.0))) == [
        "597",
        "1,363",
        "999,999",
        "5.3e+10",
    ]


def test_what_a_lost_training_taught_is_not_guessed() -> None:
    digits = {"task.digits": 8}
    lost = pair(trained=OF_640 | digits, asked=digits)[1:]
    beyond = report_of_runs(compose(["report=passkey_beyond"]).report, "draw")
    assert select_runs(beyond, "laptop", lost).runs == {}


def test_rows_of_made_up_books_stand_beside_rows_without_books() -> None:
    book = {"task.filler": "book"}
    runs = [
        *pair(trained=OF_640),
        *pair(trained=OF_640 | book | {"task.tokenizer": "scale"}, asked=book, name="book-"),
    ]
    for run in runs[2:]:
        run.data = {**run.data, "source": "synthetic"}
    table = report_of_runs(compose(["report=passkey_beyond"]).report, "draw").render("laptop", [], runs).tables[0]
    labels = {row.model: row.cells[0].text for row in table.rows if row.model.endswith("yours")}
    assert labels == {"linear/yours": "yours", "linear_book/yours": "yours (books: SYNTHETIC)"}


@pytest.mark.parametrize(
    ("trained", "asked"),
    [
        (None, {"task.digits": 8}),
        (None, {"task.distractors": 3}),
        (None, {"task.filler": "book"}),
        ({"task.digits": 8}, {"task.digits": 5}),
        ({"task.distractors": 9}, {"task.distractors": 0}),
        ({"recipe.length_extension": 500.0}, None),
        ({"recipe.sparse_writes": None}, None),
        ({"recipe.name": "passkey_laptop_plain"}, None),
        ({"recipe.segments_per_sequence": 160}, None),
        ({"recipe.curriculum": [[128, 20480]]}, None),
        ({"init_from": "an-extended-run"}, None),
        ({"optimizer.gate_lr": 0.0, "recipe.name": "passkey_laptop_extended", "recipe.length_extension": 2.0}, None),
        (None, {"dims.segment_length": 32}),
    ],
    ids=str,
)
def test_what_is_not_the_rows_stays_out_of_the_papers_table(trained: Any, asked: Any) -> None:
    assert rows_of(pair(trained=trained, asked=asked)) == {}


def test_inputs_as_long_as_the_papers_are_not_longer() -> None:
    assert list(rows_of(pair(trained={"recipe.curriculum": [[128, 5120]]}))) == ["linear"]


def test_fine_tuning_starts_from_books_or_is_no_fine_tuning() -> None:
    runs = pair(recipe="passkey_laptop_finetune", trained=TUNED)
    assert list(rows_of([BOOKS, *runs])) == ["linear_finetuned"]
    other = make_train("infini_linear", 1, run_id="books", task="passkey")
    assert rows_of([other, *runs]) == rows_of(runs) == {}


@pytest.mark.parametrize("init_from", ["books", "results/checkpoints/books", "/elsewhere/books/"])
def test_a_row_whose_books_were_made_up_says_so(init_from: str) -> None:
    """However the checkpoint of the books is named, by its run or by its folder."""
    runs = pair(recipe="passkey_laptop_finetune", trained=TUNED | {"init_from": init_from})
    made_up = make_train("infini_linear", 1, run_id="books", data={**BOOKS.data, "source": "synthetic"})
    for books, label in ((BOOKS, "yours"), (made_up, "yours (books: SYNTHETIC)")):
        table = report().render("laptop", [], [books, *runs]).tables[0]
        assert [row.cells[0].text for row in table.rows if row.model == "linear_finetuned/yours"] == [label]


def test_a_row_knows_the_books_by_their_run_in_a_folder_of_another_name() -> None:
    few = pair("infini_linear", "passkey_laptop_finetune", trained=TUNED | {"init_from": "/elsewhere/best"})
    assert rows_of([BOOKS, *few]) == {}
    for run in few:
        run.environment = {**run.environment, "started_from": "books"} if run.verb == "train" else run.environment
    assert list(rows_of([BOOKS, *few])) == ["linear_finetuned"]
    made_up = make_train("infini_linear", 1, run_id="books", data={**BOOKS.data, "source": "synthetic"})
    table = report().render("laptop", [], [made_up, *few]).tables[0]
    labels = [row.cells[0].text for row in table.rows if row.model == "linear_finetuned/yours"]
    assert labels == ["yours (books: SYNTHETIC)"]


def test_a_training_that_never_left_its_curriculum_fills_no_row() -> None:
    runs = pair()
    runs[0].series = {"in_last_stage": False}
    assert rows_of(runs) == {}
    notes = report().render("laptop", [], runs).notes
    assert [note for note in notes if note.endswith("its training ended before the last stage of its recipe")]


def test_rows_have_tokenizers_of_their_own_and_seeds_of_a_row_do_not() -> None:
    books = pair("infini_delta", "pg19_laptop", tokenizer="bpe-2048")
    rendered = report().render("laptop", [], [*pair(), *books])
    column = rendered.tables[1].columns.index("Tokenizer")
    assert {row.cells[column].text for row in rendered.tables[1].rows} == {"wordlevel-57", "bpe-2048"}
    with pytest.raises(InputError, match="different data in one row"):
        rows_of([*pair(), *pair(seed=2, tokenizer="bpe-2048")])


@pytest.mark.parametrize("key", ["task.lm_loss_weight", "task.few_digit_share", "recipe.steps", "dims.segment_length"])
def test_seeds_trained_differently_are_not_averaged(key: str) -> None:
    other = pair(seed=2, trained={key: 7})
    if key == "dims.segment_length":
        other[1].config["dims"] = {"segment_length": 7}
    with pytest.raises(InputError, match="runs with different settings in one cell"):
        rows_of([*pair(), *other])


def test_settings_that_only_trainings_read_keep_no_evaluations_apart() -> None:
    """An evaluation of a checkpoint that was named recorded the defaults, and its row was disputed."""
    training, evaluation = pair(lengths=[2**15], trained={"task.few_digit_share": 0.8})
    _, later = pair(lengths=[2**17], asked={"task.few_digit_share": 0.0, "task.cut_key_share": None}, name="later-")
    later.parent = training.run_id
    assert len(rows_of([training, evaluation, later])["linear"]) == 2


def test_a_training_with_the_settings_of_a_row_fills_that_row() -> None:
    """Keys of any digits once filled the row that has keys of few digits, because that row did not name the default."""
    report = load_report(compose(["report=llm_passkey"]).report)
    assert isinstance(report, PasskeyReport)
    known = {run.run_id: run for run in load_records(published_dir())}
    measured = known["20261128T143245Z-eval-passkey-llm-s1-dacc6b"]
    training = known[measured.parent or ""]
    rows = {name: row for name, row in report.rows.items() if row.recipe and not row.start}
    assert len(rows) > 8
    for name, row in rows.items():
        words = [f"recipe={(row.recipe or '').format(scale='laptop')}", f"model={row.model}", *row.overrides]
        own, asked = copy.deepcopy(training), copy.deepcopy(measured)
        own.config = asdict(compose(["task=passkey", *words, f"task.knockout={row.knockout}"]))
        asked.config |= {group: own.config[group] for group in ("model", "dims")}
        asked.config["task"] = own.config["task"] | row.questions
        assert list(select_runs(report, "laptop", [own, asked]).runs) == [name]


def test_the_recipe_of_an_untrained_model_keeps_no_runs_apart() -> None:
    """Its configuration has the defaults of the day, which change; it was asked other lengths on another day."""
    report = load_report(compose(["report=llm_passkey"]).report)
    assert isinstance(report, PasskeyReport)
    name = "20261126T164409Z-eval-passkey-llm-s1-fe29f2"
    (base,) = (run for run in load_records(published_dir()) if run.run_id == name)
    later = copy.deepcopy(base)
    later.run_id = "later"
    later.config["recipe"]["batch_size"] += 1
    later.config["optimizer"]["lr"] *= 2
    assert select_runs(report, "laptop", [base, later]).runs["local"] == [base, later]
    later.config["dims"]["d_model"] *= 2
    with pytest.raises(InputError, match="different settings in one cell.*dims.d_model"):
        select_runs(report, "laptop", [base, later])


def test_an_extended_run_never_stands_beside_the_papers_numbers() -> None:
    table = report().render("laptop", [], pair(recipe="passkey_laptop_extended")).tables[0]
    names = [row.model for row in table.rows]
    assert "linear_extended/yours" in names and "linear_extended/paper" not in names
    assert "linear/paper" in names and "linear/yours" not in names
    for row in report().rows.values():
        assert not (row.paper and additions_of(row, "laptop")["extended"])


@pytest.mark.parametrize("name", ["table3_passkey", "llm_passkey"])
def test_fine_tuned_rows_beside_the_papers_numbers_have_keys_of_all_digits(name: str) -> None:
    """Keys of few different digits are an addition, and may be why a model repeats one digit."""
    rows = load_report(compose([f"report={name}"]).report).rows  # type: ignore[attr-defined]
    tuned = [row for row in rows.values() if row.paper and row.recipe and row.recipe.endswith("_finetune")]
    assert len(tuned) == 2
    for row in tuned:
        words = [f"recipe={row.recipe.format(scale='laptop')}", f"model={row.model}", *row.overrides]
        assert compose(["task=passkey", *words]).task.few_digit_share == 0


def test_cells_show_all_places_and_mark_those_that_need_no_memory() -> None:
    runs = [*pair(seed=1), *pair(seed=2, accuracy=0.98)]
    table = report().render("laptop", [], runs).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert row.cells[1].text == "99/99/99*"
    assert set(row.cells[1].run_ids) == {"eval-infini_linear-passkey_laptop-1", "eval-infini_linear-passkey_laptop-2"}


@pytest.mark.parametrize(("share", "marked"), [(1.0, True), (0.94, False), (0.0, False)])
def test_where_some_prompts_need_memory_nothing_says_that_none_is_needed(
    share: float, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [*pair(seed=1), *pair(seed=2)]
    runs[3].series["cells"][2]["same_segment"] = share
    table = report().render("laptop", [], runs).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert [cell.text for cell in row.cells[1:3]] == ["100/100/100" + "*" * marked, "100/100/100*"]
    drawn: list[Any] = []
    monkeypatch.setattr(passkey_figures, "save", lambda figure, path: drawn.append(figure) or [path])
    passkey_figures.accuracy_heatmap(report(), "laptop", select_runs(report(), "laptop", runs), tmp_path / "figure")
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert texts[:6] == ["100", "100", "100" + "*" * marked, "100", "100", "100*"]


def test_a_cell_says_from_how_many_seeds_it_is() -> None:
    """The longest lengths of a row are often asked of one seed alone."""
    runs = [*pair(seed=1), *pair(seed=2, lengths=[2**15])]
    row = next(row for row in report().render("laptop", [], runs).tables[0].rows if row.model == "linear/yours")
    assert [(cell.text, cell.n_seeds) for cell in row.cells[1:3]] == [("100/100/100*", 2), ("100/100/100* (1)", 1)]
    # The place that was asked of the fewest counts.
    del runs[3].series["cells"][0]
    row = next(row for row in report().render("laptop", [], runs).tables[0].rows if row.model == "linear/yours")
    assert (row.cells[1].text, row.cells[1].n_seeds) == ("100/100/100* (1)", 1)


@pytest.mark.parametrize(
    ("accuracy", "text"),
    [
        (1.0, "100/100/100*"),
        (0.14, "14/14/14*"),
        (0.9996, "99.9/99.9/99.9*"),
        (0.5, "50/50/50*"),
        (0.984, "98.4/98.4/98.4*"),
    ],
)
def test_less_than_all_is_never_printed_as_100(accuracy: float, text: str) -> None:
    table = report().render("laptop", [], pair(accuracy=accuracy)).tables[0]
    assert next(row for row in table.rows if row.model == "linear/yours").cells[1].text == text


def test_a_length_nobody_measured_is_a_dash() -> None:
    table = report().render("laptop", [], pair(lengths=[2**15])).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert [cell.text for cell in row.cells[1:]] == ["100/100/100*", *["\N{EM DASH}"] * 4]


def test_the_run_with_most_examples_counts_for_a_cell() -> None:
    whole, later = pair(accuracy=0.5), pair(accuracy=1.0, lengths=[2**20], examples=1)
    later[1].run_id, later[1].started = "later", "2099-01-01T00:00:00Z"
    table = report().render("laptop", [], [*whole, later[1]]).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    assert row.cells[-1].text == "50/50/50*" and row.cells[-1].run_ids == (whole[1].run_id,)
    more = pair(accuracy=1.0, lengths=[2**20], examples=60)
    more[1].run_id = "more"
    table = report().render("laptop", [], [*whole, more[1]]).tables[0]
    row = next(row for row in table.rows if row.model == "linear/yours")
    # The cells with fewer prompts than others of the row have a mark, which a note explains.
    assert [cell.text for cell in row.cells[-2:]] == ["50°/50°/50*°", "100/100/100*"]
    with pytest.raises(InputError, match="two runs for seed 1.*choose with report.aggregate=largest"):
        select_runs(report(aggregate=None), "laptop", [*whole, more[1]])


def trained_again(lengths: list[int], examples: int = 50) -> list[RunRecord]:
    """Another training of seed 1, and its evaluation."""
    training, made = pair(lengths=lengths, examples=examples)
    training.run_id = made.parent = "again"
    made.run_id, made.started = "eval-again", "2099-01-01T00:00:00Z"
    return [training, made]


def test_two_trainings_of_one_seed_are_named_where_they_fill_one_row() -> None:
    """Cells of one line are of different models, which nothing else in the table shows."""
    first = pair(lengths=[2**15, 2**20])
    for runs, columns in (
        ([*first, *trained_again([2**19])], ("32K, 1M", "512K")),
        # The newer of two alike fills the cell.
        ([*first, *trained_again([2**20])], ("32K", "1M")),
        ([*first, *trained_again([2**20], examples=3)], ("32K, 1M", "no cell")),
    ):
        rendered = report().render("laptop", runs)
        (row,) = (row for row in rendered.tables[0].rows if row.model == "linear/published")
        note = (
            f"¶ published: {report().titles['linear']}: seed 1 has 2 trainings: {runs[0].run_id} ({columns[0]}); "
            f"again ({columns[1]})"
        )
        assert row.title == f"{report().titles['linear']} ¶" and note in rendered.notes
        assert note in rendered.short().notes
    once = report().render("laptop", [*first, *pair(seed=2, lengths=[2**15])])
    assert not any("¶" in text for text in [*once.notes, *(row.title for row in once.tables[0].rows)])


def test_two_evaluations_of_one_training_are_no_two_trainings() -> None:
    first = pair(lengths=[2**15])
    later = trained_again([2**20])[1]
    later.parent = first[0].run_id
    assert not any("¶" in note for note in report().render("laptop", [*first, later]).notes)


def test_a_model_trained_for_a_knocked_out_row_fills_the_others_of_its_recipe() -> None:
    runs = [*pair(), *pair(seed=2, trained={"task.knockout": "reset"})]
    assert len(select_runs(report(), "laptop", runs).runs["linear"]) == 2
    with pytest.raises(InputError, match="different settings in one cell.*training task.digits"):
        select_runs(report(), "laptop", [*pair(), *pair(seed=2, trained={"task.digits": 5.0})])


def test_cells_outside_the_table_count_nowhere() -> None:
    runs = pair()
    cell = {"length": 2**30, "depth": "start", "token_accuracy": 0.1, "exact_match": 0.0, "examples": 5}
    runs[1].series["cells"].append({**cell, "same_segment": 0.0})
    table = report().render("laptop", [], runs).tables[1]
    row = next(row for row in table.rows if row.model == "linear/yours")
    shown = dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))
    # 15 cells are right together where each is at 99.67 %.
    assert (shown["Worst cell"], shown["Exact match"], shown["Examples a cell"]) == ("100 [88.0, 100]", "100", "50")


def test_what_stands_behind_a_row() -> None:
    table = report().render("laptop", [], pair(accuracy=0.5)).tables[1]
    row = next(row for row in table.rows if row.model == "linear/yours")
    shown = dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))
    assert (shown["Examples a cell"], shown["Worst cell"], shown["Exact match"]) == ("50", "50 [29.3, 70.7]", "50")
    assert shown["Longest"] == "640"
    runs = [*pair(accuracy=0.5), *pair(accuracy=0.6, seed=2)]
    runs[1].series["cells"][4]["token_accuracy"] = 0.3
    table = report().render("laptop", [], runs).tables[1]
    (worst,) = [row.cells[table.columns.index("Worst cell")].text for row in table.rows if row.model == "linear/yours"]
    assert worst.startswith("30 [")


def test_the_worst_cell_names_its_prompts_where_others_have_more() -> None:
    """The 66.7 % of a row stood beside [0.0, 99.9], and came from one prompt."""
    runs = pair()
    runs[1].series["cells"][4] |= {"token_accuracy": 0.5, "examples": 1}
    table = report().render("laptop", [], runs).tables[1]
    assert table.cell("linear/yours", "Worst cell").text.startswith("50 (1 prompt) [")
    # If cells are equally bad, the one with most prompts counts.
    runs[1].series["cells"][5] |= {"token_accuracy": 0.5}
    table = report().render("laptop", [], runs).tables[1]
    assert table.cell("linear/yours", "Worst cell").text.startswith("50 [")


def test_a_model_that_was_not_trained_has_no_longest_input() -> None:
    """The recipe in its configuration is a default that nobody ran."""
    loaded = load_report(compose(["report=llm_passkey"]).report)
    assert isinstance(loaded, PasskeyReport)
    table = loaded.render("laptop", load_records(published_dir())).tables[1]
    assert [table.cell(f"{row}/published", "Longest").text for row in ("base", "local")] == ["\N{EM DASH}"] * 2
    assert table.cell("delta_zero_shot/published", "Longest").text == "2,048"


def test_rows_to_run_are_checked() -> None:
    assert report(run="all").to_run == list(report().rows)
    assert report(run=["delta", "linear"]).to_run == ["linear", "delta"]
    with pytest.raises(InputError, match="^report.run='linaer': all, or names of .* did you mean 'linear'"):
        report(run="linaer")
    with pytest.raises(
        InputError, match="^report.rows.one.titel='x': no such key of report.rows.one; allowed: .*did you mean .*title"
    ):
        report(rows={"one": {"titel": "x"}})
    for wrong in ({"lengths": "32K"}, {"lengths": 512}, {"depths": "start"}, {"run": None}, {"lengths": ["1X"]}):
        with pytest.raises(InputError):
            report(**wrong)


def test_rows_may_differ_in_a_setting() -> None:
    updates = report_of_runs(compose(["report=passkey_updates"]).report, "draw")
    base = pair(recipe="passkey_laptop_extended")[0]
    runs = [base]
    for segment in (128, 512):
        runs += updated(segment, base.run_id)
    chosen = select_runs(updates, "laptop", runs)
    assert {name: run.run_id.split("-")[1] for name, (run,) in chosen.runs.items()} == {
        "linear_128": "128",
        "linear_512": "512",
    }


@pytest.mark.parametrize(
    "before",
    [
        pair(recipe="passkey_laptop", name="before-")[0],
        pair(recipe="passkey_laptop_extended", model="infini_delta", name="before-")[0],
        pair(recipe="passkey_laptop_extended", trained={"task.digits": 8}, name="before-")[0],
        BOOKS,
        None,
    ],
    ids=["recipe", "model", "prompts", "books", "unknown"],
)
def test_a_row_starts_from_the_model_that_it_names(before: RunRecord | None) -> None:
    updates = report_of_runs(compose(["report=passkey_updates"]).report, "draw")
    base = pair(recipe="passkey_laptop_extended")[0]
    start = "none" if before is None else before.run_id
    others = [run for run in (base, before) if run is not None]
    assert not select_runs(updates, "laptop", [*others, *updated(512, start)]).runs
    assert not select_runs(updates, "laptop", [*others, *updated(512, None)]).runs
    assert list(select_runs(updates, "laptop", [*others, *updated(512, base.run_id)]).runs) == ["linear_512"]


def test_starts_must_be_rows_and_end() -> None:
    row = {"title": "x", "model": "infini_linear", "recipe": "passkey_laptop"}
    with pytest.raises(InputError, match=r"^report.rows.one.start='too'.*did you mean 'two'"):
        report(rows={"one": row | {"start": "too"}, "two": row}, run="all")
    with pytest.raises(InputError, match=r"^report.rows.two.start='one'"):
        report(rows={"one": row | {"start": "two"}, "two": row | {"start": "one"}}, run="all")


def updated(segment: int, start: str | None) -> list[RunRecord]:
    sized = {"dims.segment_length": segment, "recipe.segments_per_sequence": 5120 // segment}
    return pair(
        recipe="passkey_laptop_updates", lengths=[2**17], name=f"{segment}-", trained=sized | {"init_from": start}
    )


def test_figures_are_drawn_and_are_the_same_bytes_twice(tmp_path: Path) -> None:
    updates = report_of_runs(compose(["report=passkey_updates"]).report, "draw")
    base = pair(recipe="passkey_laptop_extended")[0]
    runs = [base, *updated(128, base.run_id)]
    for made, of in ((runs, updates), (pair(), report())):
        selection = select_runs(of, "laptop", made)
        assert selection.runs
        first = draw(of, "laptop", selection, tmp_path / "first")
        second = draw(of, "laptop", selection, tmp_path / "second")
        assert [path.suffix for path in first] == [".png", ".svg"] * 3
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_updates_are_drawn_of_the_runs_that_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a seed has two runs, the one with more examples counts, not the mean of both."""
    drawn: list[Any] = []
    monkeypatch.setattr(passkey_figures, "save", lambda figure, path: drawn.append(figure) or [path])
    updates = report_of_runs(compose(["report=passkey_updates"]).report, "draw")
    assert isinstance(updates, PasskeyReport)
    base = pair(recipe="passkey_laptop_extended")[0]
    runs = [base, *updated(128, base.run_id), *updated(512, base.run_id)]
    few = copy.deepcopy(runs[2])
    few.run_id = "few"
    for cell in few.series["cells"]:
        cell |= {"examples": 5, "token_accuracy": 0.2}
    selection = select_runs(updates, "laptop", [*runs, few])
    assert len(selection.runs["linear_128"]) == 2
    passkey_figures.accuracy_by_updates(updates, "laptop", selection, tmp_path / "figure")
    values = {tuple(line.get_ydata()) for line in drawn[0].axes[0].lines if line.get_color() != MUTED}
    assert values == {(100, 100)}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, of which no file is written."""
    drawn: list[Any] = []
    monkeypatch.setattr(passkey_figures, "save", lambda figure, path: drawn.append(figure) or [path])
    return drawn


def lines_of(figure: Any) -> list[list[tuple[float, float]]]:
    return [list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines]


def texts_of(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)


def test_keys_are_drawn_by_the_segments_of_their_texts(saved: list[Any], tmp_path: Path) -> None:
    """Keys at the start and in the middle of a text count together, weighed by their prompts. What lies in the
    question's segment, a knock-out, and a row that finds no key are not drawn."""
    of = report(lengths=["1K", "2K"])
    found, other = pair(lengths=[1024, 2048]), pair("infini_delta", lengths=[1024, 2048])
    extended = pair(recipe="passkey_laptop_extended", lengths=[1024, 2048], asked={"task.knockout": "reset"})
    exact = {(1024, "start"): 1.0, (1024, "middle"): 1.0, (2048, "start"): 0.0, (2048, "middle"): 0.5}
    for cell in found[1].series["cells"]:
        cell["examples"] = {"start": 20, "middle": 60, "end": 10}[cell["depth"]]
        cell["exact_match"] = exact.get((cell["length"], cell["depth"]), 0.0)
    for cell in other[1].series["cells"]:
        cell["exact_match"] = float(cell["depth"] == "end")
    chosen = select_runs(of, "laptop", [*found, *other, *extended])
    assert chosen.runs.keys() == {"linear", "delta", "linear_reset"}
    passkey_figures.exact_by_segments(of, "laptop", chosen, tmp_path / "figure")
    assert lines_of(saved[0]) == [[(8, 100), (16, (20 * 0 + 60 * 50) / 80)]]
    said = " ".join(texts_of(saved[0]).split())
    assert "Every key in texts of up to 8 segments: " in said and "no key: 1 row of 2" in said
    assert "80 to 80 prompts a point" in said
    for cell in found[1].series["cells"]:
        cell["exact_match"] = 0.0
    assert not passkey_figures.exact_by_segments(of, "laptop", select_runs(of, "laptop", found), tmp_path / "figure")


def test_the_accuracy_of_a_training_is_drawn_by_its_steps(saved: list[Any], tmp_path: Path) -> None:
    runs = [*pair(), *pair(seed=2)]
    assert not passkey_figures.recall_by_steps(
        report(), "laptop", select_runs(report(), "laptop", runs), tmp_path / "f"
    )
    # In the second half of the steps a quarter of the targets of seed 1 and three quarters of seed 2 are right.
    for run, right in ((runs[0], 1), (runs[2], 3)):
        run.series["recall_curve"] = [[step, right * (step > 16), 4] for step in range(1, 33)]
        run.series["stage_steps"] = [5]
    passkey_figures.recall_by_steps(report(), "laptop", select_runs(report(), "laptop", runs), tmp_path / "figure")
    curve, *stages = lines_of(saved[0])
    assert curve == [(2 * point + 1.5, 50.0 * (point >= 8)) for point in range(16)]
    assert [stage[0][0] for stage in stages] == [5, 5]
    assert "at the end of training: " in texts_of(saved[0]) and "50 %" in texts_of(saved[0])


def test_a_training_that_two_rows_ask_is_drawn_once(saved: list[Any], tmp_path: Path) -> None:
    of = load_report(compose(["report=llm_passkey"]).report)
    assert isinstance(of, PasskeyReport)
    chosen = select_runs(of, "laptop", load_records(published_dir()))
    parents = [{run.parent for run in chosen.runs[name]} for name in ("delta_input_gate", "delta_input_gate_books")]
    assert parents[0] == parents[1]
    passkey_figures.recall_by_steps(of, "laptop", chosen, tmp_path / "figure")
    said = " ".join(texts_of(saved[0]).split())
    assert of.short_titles["delta_input_gate"] in said and of.short_titles["delta_input_gate_books"] not in said


def test_the_longest_input_counts_the_filler_before_it() -> None:
    recipe = {"segments_per_sequence": 4, "curriculum": [[32, 192]]}
    for more, tokens in (({}, 512), ({"long_history": None}, 512), ({"long_history": [8, 100]}, 3072 + 512)):
        assert longest_input({"recipe": recipe | more, "dims": {"segment_length": 128}}) == tokens


def test_a_title_names_the_longest_length_that_was_asked() -> None:
    rows = {"linear": _Accuracy({(2**15, "start"): [100.0], (2**17, "start"): [40.0], (2**17, "end"): [90.0]})}
    said = _found_at_the_longest(report(), rows)
    assert said == "Tokens of a key found in a text of 128K: scratch, penalty on writes 40 to 90 %"


@pytest.mark.parametrize(
    ("depths", "texts"),
    [
        (["end", "start"], ("100/97", "100/96", "—")),
        (["start", 0.25, "middle", "end"], ("97/—/99/100", "96/—/94/100", "—")),
        ([0.25], ("—", "—", "—")),
    ],
)
def test_the_papers_numbers_stand_at_their_places(depths: list[Any], texts: tuple[str, ...]) -> None:
    table = report(depths=depths, lengths=["512K", "1M", "16K"]).render("laptop", []).tables[0]
    row = next(row for row in table.rows if row.model == "linear/paper")
    assert tuple(cell.text for cell in row.cells[1:]) == texts


@pytest.mark.parametrize("depths", [["end", "start"], ["start", 0.25, "middle", "end"]], ids=str)
def test_the_papers_curves_are_drawn_at_their_places(
    depths: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(passkey_figures, "save", lambda figure, path: drawn.append(figure) or [path])
    of = report(depths=depths, lengths=["16K", "512K", "1M"])
    passkey_figures.accuracy_by_length(of, "laptop", select_runs(of, "laptop", pair()), tmp_path / "figure")
    curves = [
        [list(line.get_ydata()) for line in axes.lines if line.get_color() == MUTED and len(line.get_xdata())]
        for axes in drawn[0].axes
    ]
    printed = {"start": [[97, 96]], "middle": [[99, 94]], "end": [[100, 100]]}
    assert curves == [printed.get(str(depth), []) for depth in depths]


@pytest.mark.parametrize("text", ["100/100", "100/100/100/100", "100/x/100", "100//100", "100/101/100", "", "97/-1/99"])
def test_the_papers_numbers_are_three(text: str) -> None:
    rows = {"one": {"title": "x", "model": "infini_linear", "paper": {"32K": text}}}
    allowed = "must be three numbers in per cent, start/middle/end, as 97/99/100"
    with pytest.raises(InputError, match=f"^report.rows.one.paper.32K='{text}': {allowed}$"):
        report(rows=rows, run="all")


def test_curves_of_the_paper_look_different_and_alike_in_all_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(passkey_figures, "save", lambda figure, path: drawn.append(figure) or [path])
    runs = [BOOKS]
    for model in ("infini_linear", "infini_delta"):
        runs += pair(model, "passkey_laptop_finetune", trained=TUNED)
        runs += pair(model, "pg19_laptop")
    passkey_figures.accuracy_by_length(report(), "laptop", select_runs(report(), "laptop", runs), tmp_path / "figure")
    panels = drawn[0].axes
    assert len(panels) == 6
    looks = [
        [(line.get_linestyle(), line.get_marker()) for line in axes.lines if line.get_color() == MUTED]
        for axes in panels
    ]
    assert all(len(set(of_panel)) == 2 and of_panel == looks[0] for of_panel in looks)
    words = " ".join(" ".join(text.get_text() for text in panels[0].texts).split())
    assert "fine-tuned 400 steps: dotted with circles; zero-shot: dashed with triangles" in words
