"""RULER's needles and BABILong: prompts and scores are lm-eval's own; an evaluation resumes and has parts."""

from __future__ import annotations

import inspect
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny_llms import write_tiny_base
from transformers import AutoTokenizer

from infini.cli import main as cli
from infini.errors import InputError
from infini.evaluation import decoding
from infini.records import load_records
from infini.tasks.long_context import task as long_context
from infini.tasks.long_context.prompts import RULER_TOKENS, Prompt, make_prompts
from infini.tasks.passkey.prompt import word_tokenizer
from infini.tasks.text.documents import TextTokenizer

pytestmark = pytest.mark.usefixtures("few_words")
LENGTH = 1024
"""Bytes here: the tiny tokenizer merges nothing."""
N = 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(base).backend_tokenizer)


def of_harness(folder: str, name: str, **metadata: Any) -> Any:
    """A task as lm_eval itself makes it."""
    # Not at the top, because every process of the tests imports this module.
    import lm_eval.tasks

    place = Path(lm_eval.tasks.__file__).parent / folder
    manager = lm_eval.tasks.TaskManager(include_path=str(place), include_defaults=False, metadata=metadata)
    task = manager.load(name)["tasks"][name]
    task.build_all_requests(limit=3)
    return task


def words(base: Path, results: Path, *more: str) -> list[str]:
    fixed = f"task=long_context model=llm model.base={base} model.memory=infini dims.segment_length={N} length=1K"
    return ["eval", *fixed.split(), f"results_dir={results}", *more]


def test_what_nltk_says_goes_nowhere(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the standard error of its own import, which is closed by now where a test brought it along. The
    module that asks for sentence rules is imported anew."""
    import nltk.downloader

    make_prompts("niah_single_1", LENGTH, 1, tokenizer, seed=1)
    closed = io.StringIO()
    closed.close()
    names = inspect.getfullargspec(nltk.downloader.Downloader.download).args
    defaults = list(nltk.downloader.Downloader.download.__defaults__)
    defaults[names.index("print_error_to") - len(names)] = closed
    monkeypatch.setattr(nltk.downloader.Downloader.download, "__defaults__", tuple(defaults))
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        monkeypatch.delitem(sys.modules, name)
    assert make_prompts("niah_single_1", LENGTH, 1, tokenizer, seed=1)


def test_needles_are_those_of_the_harness(base: Path, tokenizer: TextTokenizer) -> None:
    """Text, length of the answer and score of the first prompts are what `lm_eval --tasks niah_single_1` has."""
    ours = make_prompts("niah_single_1", LENGTH, 3, tokenizer, seed=1)
    random.seed(f"1/niah_single_1/{LENGTH}")
    task = of_harness("ruler", "niah_single_1", max_seq_lengths=[LENGTH], tokenizer=str(base))
    assert len(ours) == len(task.instances) == 3
    for prompt, request in zip(ours, task.instances, strict=True):
        text, options = request.args
        assert tokenizer.decode(prompt.ids) == text
        assert (prompt.max_new_tokens, list(prompt.answers)) == (options["max_gen_toks"], request.doc["outputs"])
        right = f" {prompt.answers[0]}. And more"
        for given in (right, right[:-12], "1234567", "", f"\n{prompt.answers[0]}"):
            assert prompt.score(given) == task.process_results(request.doc, [given])[str(LENGTH)]
        assert prompt.score(right) == 1 > prompt.score("1234567")


def test_a_prompt_depends_on_its_number_alone(tokenizer: TextTokenizer) -> None:
    few, many = (make_prompts("niah_single_1", LENGTH, count, tokenizer, seed=1) for count in (2, 5))
    assert [list(prompt.ids) for prompt in few] == [list(prompt.ids) for prompt in many[:2]]
    assert len({prompt.answers for prompt in many}) == 5
    other = make_prompts("niah_single_1", LENGTH, 2, tokenizer, seed=2)
    assert {prompt.answers for prompt in few}.isdisjoint(prompt.answers for prompt in other)
    for prompt in many:
        # The needle is where it is said to be, once, and there is room for the answer.
        text = tokenizer.decode(prompt.ids)
        assert prompt.needle is not None
        assert tokenizer.decode(prompt.ids[: prompt.needle + 1]).endswith(f" {prompt.answers[0]}")
        assert text.count(prompt.answers[0]) == 1
        assert len(prompt.ids) + RULER_TOKENS <= LENGTH + 80  # lm-eval does not count how the answer begins


def test_making_prompts_leaves_the_random_state_alone(tokenizer: TextTokenizer) -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    make_prompts("niah_single_1", LENGTH, 1, tokenizer, seed=1)
    assert random.random() == expected


def test_babilong_is_that_of_the_harness(monkeypatch: pytest.MonkeyPatch, tokenizer: TextTokenizer) -> None:
    asked = []

    def load(path: str, name: str, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(
            [
                {"input": f"Mary went to the {place}.", "question": "Where is Mary?", "target": place}
                for place in ("park", "kitchen")
            ]
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = of_harness("babilong", "babilong_qa1", max_seq_lengths="4k")
    # The seed chooses the documents and their order.
    seeds = [make_prompts("babilong_qa1", 4096, 2, tokenizer, seed) for seed in range(8)]
    ours = next(prompts for prompts in seeds if prompts[0].answers == ("park",))
    assert {prompts[0].answers for prompts in seeds} == {("park",), ("kitchen",)}
    assert asked == [("RMT-team/babilong-1k-samples", "4k", "qa1")] * 9
    assert [tokenizer.decode(prompt.ids) for prompt in ours] == [request.args[0] for request in task.instances]
    assert [prompt.answers for prompt in ours] == [("park",), ("kitchen",)]
    assert ours[1].score(" The most recent location of Mary is kitchen.") == 1 > ours[1].score(" park")
    assert ours[0].needle is None and ours[0].max_new_tokens == 16
    with pytest.raises(
        InputError, match=r"task.examples=3: there are 2 prompts of task.subtasks=babilong_qa1, length=4K"
    ):
        make_prompts("babilong_qa1", 4096, 3, tokenizer, seed=1)


class Reading:
    """Stands for a model that reads a prompt; the tests say what is generated after it."""

    def init_state(self, batch: int) -> None:
        return None

    def prefill(self, ids: torch.Tensor, state: None) -> None:
        return None


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("says", ["the number 7654321 and then more", "nothing at all", ""])
def test_an_answer_is_scored_as_if_it_had_been_written_to_its_end(
    says: str, end: str, base: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing stops at a full score, which more text does not change, or at the end that the model writes: of a turn or
    of a text. What it writes behind the end, as the answer here, does not count."""
    (made,) = make_prompts("niah_single_1", LENGTH, 1, tokenizer, seed=1)
    says = says.replace("7654321", made.answers[0])
    mark = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(end)
    tokens = [*tokenizer.encode(says), mark, *tokenizer.encode(made.answers[0])]
    drawn = []

    def generate(reader: Any, limit: int, temperature: float, top_p: float, generator: Any, ends: set[int]) -> Any:
        assert (limit, temperature) == (RULER_TOKENS, 0.0)
        for token in tokens:
            if token in ends:
                return
            drawn.append(token)
            yield token, reader

    monkeypatch.setattr(long_context, "generate", generate)
    monkeypatch.setattr(decoding.Reader, "_ids", lambda self, ids: torch.from_numpy(ids[None]))
    entry = long_context._answer(Reading(), tokenizer, made, N, lambda tokens: None)
    assert entry["score"] == made.score(says) == float(made.answers[0] in says)
    assert says.startswith(entry["given"]) and len(drawn) == len(entry["given"])
    assert entry["given"] == says or entry["given"].endswith(made.answers[0])


@pytest.mark.parametrize(("needle", "distant"), [(0, True), (62, True), (63, False), (90, False), (None, None)])
def test_an_answer_is_distant_if_it_ends_in_an_earlier_segment(
    needle: int | None, distant: bool | None, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token before the document moves all others by one; 100 tokens end in the second segment of 64."""
    prompt = Prompt("niah_single_1", LENGTH, 0, np.arange(100) % 200, ("1",), needle, 4, lambda text: 0.0)
    monkeypatch.setattr(long_context, "generate", lambda *arguments: iter(()))
    monkeypatch.setattr(decoding.Reader, "_ids", lambda self, ids: torch.from_numpy(ids[None]))
    assert long_context._answer(Reading(), tokenizer, prompt, N, lambda tokens: None)["distant"] is distant


def test_distant_answers_are_counted_apart() -> None:
    entries = [
        {"score": score, "distant": distant, "read_seconds": 1.0, "peak_memory_bytes": 1}
        for score, distant in ((1.0, False), (1.0, True), (0.0, True), (0.0, None))
    ]
    cell = long_context._cell("niah_single_1", LENGTH, entries)
    assert (cell["accuracy"], cell["examples"]) == (0.5, 4)
    assert (cell["distant"]["accuracy"], cell["distant"]["examples"]) == (0.5, 2)
    assert long_context._cell("babilong_qa1", LENGTH, entries[3:])["distant"] == {"examples": 0}


@pytest.mark.slow
def test_a_stopped_evaluation_resumes_and_parts_add_up(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(results: Path) -> list[dict[str, Any]]:
        (record,) = load_records(results)
        text = next((results / "runs").glob("*.jsonl")).read_text()
        assert record.series["cells"][0]["examples"] == 3 and record.results["accuracy"]["n"] == 3
        kept = ("name", "given", "score", "answers")
        return [{key: entry[key] for key in kept} for entry in map(json.loads, text.splitlines())]

    assert cli.main(words(base, tmp_path / "whole", "task.examples=3")) == 0
    assert "    1K niah_single_1  accuracy" in capsys.readouterr().out
    whole = answers(tmp_path / "whole")
    assert len(whole) == 3 and all(entry["given"] for entry in whole)

    of_task = long_context._answer
    asked = []

    def stopped(model: Any, tokenizer: Any, prompt: Any, *rest: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(prompt.name)
        return of_task(model, tokenizer, prompt, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(long_context, "_answer", stopped)
        assert cli.main(words(base, tmp_path / "stopped", "task.examples=3")) == 130
    assert cli.main(words(base, tmp_path / "stopped", "task.examples=3")) == 0
    assert "2 questions (1 were answered before)" in capsys.readouterr().err
    assert answers(tmp_path / "stopped") == whole

    for part in ("1/2", "2/2"):
        assert cli.main(words(base, tmp_path / "parts", "task.examples=3", f"part={part}")) == 0
    assert cli.main(words(base, tmp_path / "parts", "task.examples=3")) == 0
    assert answers(tmp_path / "parts") == whole


def test_prompts_far_shorter_than_asked_are_refused(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Essays end somewhere; a cell for a million tokens must not hold answers to prompts of a few thousand."""
    from lm_eval.tasks.ruler import prepare_niah

    monkeypatch.setattr(prepare_niah, "get_haystack", lambda type_haystack: ["word"] * 200)
    # The rules of nltk need a network.
    monkeypatch.setattr(prepare_niah, "sent_tokenize", lambda text: [text])
    assert len(make_prompts("niah_single_2", 1500, 1, tokenizer, seed=1)[0].ids) > 750
    with pytest.raises(InputError, match=r"length=16K: the prompts of task.subtasks=niah_single_2 would have only "):
        make_prompts("niah_single_2", 16384, 1, tokenizer, seed=1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task.subtasks=[niah_single_9]"], "; did you mean 'niah_single_3'?"),
        (["task.subtasks=[niah_single_1,niah_single_1]"], "must name one subtask or more, each once"),
        (["task.subtasks=[niah_single_2]"], "baber/paul_graham_essays cannot be downloaded from the hub"),
        (["task.subtasks=[babilong_qa1]"], "RMT-team/babilong-1k-samples (1k) cannot be downloaded from the hub"),
        (["task.subtasks=[babilong_qa1]", "length=3000"], "length=3000: task.subtasks=babilong_qa1 has 1K, 2K, 4K, "),
        (["length=200"], "length=200: too short for task.subtasks=niah_single_1"),
        (["depth=[start]"], "task=long_context does not read it; add task=passkey"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    base: Path, tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(base, tmp_path, *more)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1] and lines[-1].startswith("infini: error: ")
    assert not load_records(tmp_path)


def test_without_the_harness_a_line_says_how_to_get_it(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler", None)
    with pytest.raises(InputError, match=r"needs lm-evaluation-harness .* pip install 'lm-eval\[ruler\]"):
        make_prompts("niah_single_1", LENGTH, 1, tokenizer, seed=1)


def test_a_model_that_cannot_write_the_answer_is_refused() -> None:
    """Its accuracy would be 0 whatever it has learned."""
    with pytest.raises(InputError, match=r"tokenizer wordlevel-\d+-\w+ cannot encode the answer '\d{7}'"):
        make_prompts("niah_single_1", LENGTH, 1, word_tokenizer(), seed=1)


def test_it_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "task=long_context", f"results_dir={tmp_path}"]) == 2
    assert "task=long_context: can only be evaluated; train on another task" in capsys.readouterr().err
