"""The table of summaries by a pretrained language model: rows with and without a training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from books import write_books
from command_runner import Runner
from summary_runs import summaries
from tiny_llms import write_tiny_base
from transformers import AutoTokenizer

from infini.config.compose import compose
from infini.evaluation.decoding import Reader
from infini.report.load import load_report
from infini.report.selection import select_runs
from infini.report.summaries import SummaryReport
from infini.tasks.booksum.data import QUESTION, SEPARATOR, frame_of
from infini.tasks.text.token_cache import open_tokenizer

MEMORY = {"name": "llm", "base": "smollm2", "memory": "infini"}


def report_of(systems: dict[str, Any], lengths: list[str]) -> SummaryReport:
    keys = {"name": "few", "title": "Few", "task": "booksum", "split": "test", "input_lengths": lengths}
    report = load_report({**keys, "aggregate": None, "systems": systems})
    assert isinstance(report, SummaryReport)
    return report


ROWS = {
    "before": {"title": "Before", "model": "llm", "untrained": True, "settings": ["model.memory=infini"]},
    "after": {"title": "After", "model": "llm", "settings": ["model.memory=infini"]},
}


def test_a_model_as_it_is_and_a_trained_one_are_two_rows() -> None:
    report = report_of(ROWS, ["1K"])
    training, run = summaries("llm", {1024: (1, 2, 3)}, trained={"model": MEMORY})
    _, other = summaries("llm", {1024: (4, 5, 6)}, trained={"model": MEMORY}, name="as-it-is")
    other.parent = None
    found = select_runs(report, "laptop", [training, run, other]).runs
    assert {row: [run.run_id for run in runs] for row, runs in found.items()} == {
        "after": [run.run_id],
        "before": [other.run_id],
    }


def test_the_types_of_rouge_stand_beside_the_overall_value_at_every_length() -> None:
    runs = summaries("llm", {1024: (1, 2, 3), 2048: (4, 5, 6)}, trained={"model": MEMORY})
    overall, types = report_of(ROWS, ["1K", "2K", "4K"]).render("laptop", runs).tables
    (after,) = [row for row in types.rows if row.title.startswith("After")]
    assert overall.columns == types.columns == ("Source", "1K", "2K", "4K")
    assert [cell.text for cell in after.cells[1:]] == ["2.0 / 2.0 / 2.0", "5.0 / 5.0 / 5.0", "—"]


def test_the_report_that_ships_has_rows_that_can_be_composed() -> None:
    report = load_report(compose(["report=llm_booksum"]).report)
    assert isinstance(report, SummaryReport)
    for row in report.systems.values():
        if row.model == "llm":
            assert compose(["task=booksum", "model=llm", *row.settings]).model["base"] == "smollm2"


TEMPLATE = "{% for m in messages %}<|im_end|>{{ m.role }}: {{ m.content }}{% endfor %}<|im_end|>reply: "
"""The tiny base's template. It has the base's special token twice."""


def with_template(base: Path, template: str = TEMPLATE, tokens: Sequence[str] = ("<|im_end|>",)) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)
    return base


def test_in_chat_the_book_is_a_message_and_the_summary_the_answer(tmp_path: Path) -> None:
    base = with_template(write_tiny_base(tmp_path / "base"))
    words = ["task=booksum", "model=llm", f"model.base={base}"]
    tokenizer = open_tokenizer(compose(words))
    frame = frame_of(tokenizer, True, compose(words).model)
    assert frame.begin[0] == frame.middle[len(tokenizer.encode(QUESTION))] == tokenizer.end_id
    assert tokenizer.decode(frame.begin) == "<|im_end|>user: "
    assert tokenizer.decode(frame.middle) == f"{QUESTION}<|im_end|>reply: "
    plain = frame_of(tokenizer, None, compose(words).model)
    assert plain.begin.tolist() == [tokenizer.bos_id] and tokenizer.decode(plain.middle) == SEPARATOR


@pytest.mark.parametrize(
    ("after", "end"),
    [("<|turn|>\n", "<|turn|>"), ("<|im_end|>", "<|im_end|>"), ("\n", "<|im_end|>"), ("", "<|im_end|>")],
    ids=["a token of its own", "the usual one", "no token", "nothing"],
)
def test_in_chat_a_summary_ends_as_the_template_ends_a_turn(after: str, end: str, tmp_path: Path) -> None:
    """OLMo 2 has <|im_end|> in its vocabulary and ends its turns with another token."""
    template = f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{after}{{% endfor %}}"
    base = with_template(write_tiny_base(tmp_path / "base"), template, ["<|im_end|>", "<|turn|>"])
    words = ["task=booksum", "model=llm", f"model.base={base}"]
    tokenizer = open_tokenizer(compose(words))
    frame = frame_of(tokenizer, True, compose(words).model)
    assert frame.end == AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(end)


def test_a_chat_template_may_begin_with_the_message(tmp_path: Path) -> None:
    base = with_template(write_tiny_base(tmp_path / "base"), "{% for m in messages %}{{ m.content }}{% endfor %}")
    words = ["task=booksum", "model=llm", f"model.base={base}"]
    tokenizer = open_tokenizer(compose(words))
    frame = frame_of(tokenizer, True, compose(words).model)
    assert frame.begin.tolist() == [tokenizer.bos_id]
    assert frame.middle.dtype == frame.begin.dtype == np.int64


def test_a_chat_template_writes_the_same_date_every_day(tmp_path: Path) -> None:
    """Otherwise an evaluation reads other words than the training did."""
    dates = [f"{{{{ strftime_now('{format}') }}}}" for format in ("%d %B %Y", "%Y-%m-%d", "%a %-d %b %H:%M")]
    template = (
        f"\n  {{% set day = strftime_now('%Y') %}}{' | '.join(dates)}, {{{{ day }}}}: {{{{ messages[0].content }}}}"
    )
    base = with_template(write_tiny_base(tmp_path / "base"), template)
    words = ["task=booksum", "model=llm", f"model.base={base}"]
    tokenizer = open_tokenizer(compose(words))
    frame = frame_of(tokenizer, True, compose(words).model)
    assert tokenizer.decode(frame.begin) == "\n26 July 2024 | 2024-07-26 | Fri 26 Jul 00:00, 2024: "


def test_a_model_without_a_chat_template_is_refused(infini: Runner, tmp_path: Path) -> None:
    infini.settings = ["logger=none", f"results_dir={infini.results}"]
    words = ["task=booksum", "task.chat=true", f"task.data_dir={write_books(tmp_path / 'data')}"]
    base = write_tiny_base(tmp_path / "base")
    message = infini.error("eval", *words, "model=llm", f"model.base={base}", "dims.segment_length=64")
    assert message.endswith(" has no chat template; use task.chat=null") and "model.base=" in message
    message = infini.error("train", *words)
    assert message == "task.chat=true: takes a pretrained language model, model=llm"
    assert not infini.records()


def test_the_evaluation_of_a_training_in_chat_is_in_chat(infini: Runner, tmp_path: Path) -> None:
    base = with_template(write_tiny_base(tmp_path / "base"))
    infini.settings = ["logger=none", f"results_dir={infini.results}"]
    words = [f"task.data_dir={write_books(tmp_path / 'data')}", "model=llm", f"model.base={base}"]
    recipe = ("steps=1", "warmup_steps=0", "segments_per_sequence=4", "batch_size=1", "checkpoint_segments=null")
    training = [*(f"recipe.{text}" for text in recipe), "task.summary_tokens=8", "model.train=gates", "task.chat=true"]
    infini("train", "task=booksum", *words, "dims.segment_length=64", *training)
    (trained,) = infini.records()
    asked = [f"checkpoint={trained.run_id}", "length=128", "decoding.max_new_tokens=4"]
    infini("eval", "task=booksum", *words, *asked)
    (run,) = infini.records("eval")
    assert run.config["task"]["chat"] is True and run.parent == trained.run_id
    (tmp_path / "book.txt").write_text("A dog runs. " * 9, "utf-8")
    began: list[int] = []
    begin = Reader.begin

    def spied(model: Any, bos_id: int) -> Reader:
        began.append(bos_id)
        return begin(model, bos_id)

    with patch.object(Reader, "begin", spied):
        infini("summarize", str(tmp_path / "book.txt"), "decoding.max_new_tokens=2")
        # A pretrained model as it is answers in its template, too.
        infini("summarize", str(tmp_path / "book.txt"), *words[1:], "decoding.max_new_tokens=2")
    assert began == [open_tokenizer(compose(["task=booksum", *words])).end_id] * 2
    assert trained.run_id not in infini.err


def test_a_summary_ends_where_any_text_does(infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was not trained on turns ends a text with another token than they have."""
    base = write_tiny_base(tmp_path / "base")
    infini.settings = ["logger=none", f"results_dir={infini.results}"]
    words = [f"task.data_dir={write_books(tmp_path / 'data')}", "model=llm", f"model.base={base}"]
    tokenizer = open_tokenizer(compose(["task=booksum", *words]))
    (end_of_text,) = tokenizer.stop_ids - {tokenizer.end_id}
    written = [*tokenizer.encode("A dog."), end_of_text, *tokenizer.encode(" Another text.")]

    def generate(reader: Any, limit: int, temperature: float, top_p: float, generator: Any, ends: set[int]) -> Any:
        assert tokenizer.end_id in ends
        return ((token, reader) for token in itertools.takewhile(lambda token: token not in ends, written))

    for module in ("infini.tasks.booksum.evaluation", "infini.evaluation.decoding"):
        monkeypatch.setattr(f"{module}.generate", generate)
    infini("eval", "task=booksum", *words, "dims.segment_length=64", "length=128")
    (run,) = infini.records("eval")
    lines = (infini.results / "runs" / f"{run.run_id}.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["summary"] for line in lines} == {"A dog."}
    (tmp_path / "book.txt").write_text("A dog runs. " * 9, "utf-8")
    assert infini("summarize", str(tmp_path / "book.txt"), *words[1:]) == "A dog.\n"


@pytest.mark.slow
@pytest.mark.parametrize("untrained", [True, False])
def test_a_reproduction_makes_what_is_missing_and_nothing_twice(
    untrained: bool, infini: Runner, tmp_path: Path
) -> None:
    base = write_tiny_base(tmp_path / "base")
    own = [f"model.base={base}", "model.memory=infini", "dims.segment_length=64", "decoding.max_new_tokens=6"]
    if not untrained:
        recipe = ("steps=1", "warmup_steps=0", "segments_per_sequence=4", "batch_size=1", "checkpoint_segments=null")
        own += ["task.summary_tokens=8", "model.train=gates", *(f"recipe.{text}" for text in recipe)]
    name = "base" if untrained else "delta"
    words = ["report=llm_booksum", f"report.run=[{name}]", f"report.systems.{name}.settings={own}"]
    words += [f"task.data_dir={write_books(tmp_path / 'data')}", "report.input_lengths=[128,256]"]
    words += ["report.systems.base.lengths=[128]"]
    # Sizes are the base's.
    infini.settings = ["logger=none", f"results_dir={infini.results}"]
    for _ in range(2):
        out = infini("reproduce", *words)
        assert [run.verb for run in infini.records()] == ["train"] * (not untrained) + ["eval"]
    run = infini.records()[-1]
    assert [cell["length"] for cell in run.series["cells"]] == ([128] if untrained else [128, 256])
    assert (run.parent is None) == untrained and len(run.series["cells"][0]["books"]) == 2
    assert ("SmolLM2, its own cache" if untrained else "and memory (Linear + Delta)") in out
    if not untrained:
        # A book of the user's own: the model is found without being named.
        (tmp_path / "book.txt").write_text("A dog runs. " * 90, "utf-8")
        infini("summarize", str(tmp_path / "book.txt"), "decoding.max_new_tokens=2")
        assert f"tokens read by {infini.records('train')[0].run_id}" in infini.err
