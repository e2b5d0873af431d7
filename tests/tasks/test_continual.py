"""task=continual: a mixture of corpora, the models trained on it, and their evaluation on other tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_runner import Runner
from tiny_runs import open_split, write_corpus

from infini.config.compose import compose
from infini.errors import InputError
from infini.tasks.continual.task import DataModule, at_least, sources_of
from infini.tasks.text.documents import Documents, synthetic_documents

MIXTURE = ["task=continual", "task.min_tokens=16"]


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Books and mathematics; web pages are not at hand."""
    for name in ("pg19", "arxiv_math"):
        write_corpus(tmp_path / "corpora" / name)
    return tmp_path / "corpora"


@pytest.fixture
def mixed(infini: Runner, corpora: Path, elsewhere: None, clock: None) -> Runner:
    infini.settings = [text for text in infini.settings if not text.startswith("task.data_dir=")]
    infini.settings.append(f"task.data_dir={corpora}")
    return infini


def test_a_mixture_has_the_documents_of_its_sources(corpora: Path, tmp_path: Path) -> None:
    cfg = compose([*MIXTURE, f"task.data_dir={corpora}", f"cache_dir={tmp_path}/cache", "scale.vocab_size=300"])
    split, tokenizer = open_split(cfg, "train")
    assert list(split.names) == [f"{name}/train{i}" for name in ("pg19", "arxiv_math") for i in range(4)]
    assert sources_of(split) == {"pg19": [0, 1, 2, 3], "arxiv_math": [4, 5, 6, 7]}
    alone = compose(["task=pg19", f"task.data_dir={corpora}/pg19", f"cache_dir={tmp_path}/cache"])
    books, _ = open_split(alone, "train", tokenizer)
    assert all(np.array_equal(split.ids(index), books.ids(index)) for index in range(4))
    longest = int(split.n_tokens.max())
    kept = at_least(split, longest)
    assert len(kept) == int((split.n_tokens == longest).sum()) and set(kept.n_tokens) == {longest}
    with pytest.raises(InputError, match=f"task.min_tokens={longest + 1}: the longest document .* {longest} tokens"):
        at_least(split, longest + 1)
    shorter = min(int(split.n_tokens[found].max()) for found in sources_of(split).values())
    if shorter < longest:
        with pytest.raises(InputError, match="leave it out of task.sources"):
            at_least(split, shorter + 1)


def test_the_shares_of_the_sources_reach_their_documents(corpora: Path, tmp_path: Path) -> None:
    """In the order of task.sources, of which one is not at hand."""
    words = ["task.sources=[arxiv_math,c4,pg19]", "task.shares=[3,5,1]", "scale.vocab_size=300"]
    cfg = compose([*MIXTURE, *words, f"task.data_dir={corpora}", f"cache_dir={tmp_path}/cache"])
    data = DataModule(cfg)
    data.train, _ = open_split(cfg, "train")
    found = {data.train.names[documents[0]].partition("/")[0]: share for documents, share in data.parts()}
    assert found == {"arxiv_math": 3.0, "pg19": 1.0}


@pytest.mark.parametrize(("typed", "meant"), [("pg91", "pg19"), ("c5", "c4"), ("arxiv", "arxiv_math")])
def test_a_mistyped_source_is_no_other_corpus(typed: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are no folders, the data set of C4 would take its place."""
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    with pytest.raises(InputError) as error:
        DataModule(compose([*MIXTURE, f"task.sources=[{typed},pg19]"])).revision("train")
    assert str(error.value) == (
        f"task.sources=['{typed}', 'pg19']: '{typed}': a source from the hub must be one of arxiv_math, pg19, c4; "
        f"another needs task.data_dir, or a task.hub_id of its own; did you mean '{meant}'?"
    )


def test_a_data_set_of_the_users_own_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    asked = {}

    def load(name: str, split: str, folder: Path | None, hub_id: str, *rest: Any) -> Documents:
        asked[name] = hub_id
        return synthetic_documents(split)

    monkeypatch.setattr("infini.tasks.text.mixture.load_documents", load)
    DataModule(compose([*MIXTURE, "task.sources=[pg19,news]", "task.hub_id=me/news"])).revision("train")
    assert asked["news"] == "me/news" != asked["pg19"]
    for sources in ("[news,pg91]", "[news,c4]", "[booksum]"):
        with pytest.raises(InputError, match="a source from the hub must be one of"):
            DataModule(compose([*MIXTURE, f"task.sources={sources}", "task.hub_id=me/news"])).revision("train")


@pytest.mark.parametrize("task", ["booksum", "continual", "long_context", "passkey"])
def test_a_task_that_is_no_running_text_is_no_source(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    with pytest.raises(InputError, match=f"'{task}': a source from the hub must be one of"):
        DataModule(compose([*MIXTURE, f"task.sources=[{task}]"])).revision("train")


def test_from_the_hub_each_source_is_its_own_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    asked = []

    def load(name: str, split: str, folder: Path | None, hub_id: str, *rest: Any) -> Documents:
        asked.append((name, folder, hub_id))
        return synthetic_documents(split)

    monkeypatch.setattr("infini.tasks.text.mixture.load_documents", load)
    DataModule(compose([*MIXTURE, "task.hub_id=my/pages"])).revision("test")
    proofs = "hoskinson-center/proof-pile"
    assert asked == [("pg19", None, "emozilla/pg19"), ("arxiv_math", None, proofs), ("c4", None, "my/pages")]


def test_its_identity_is_that_of_its_texts(corpora: Path, tmp_path: Path) -> None:
    def revision() -> str:
        words = [*MIXTURE, f"task.data_dir={corpora}", f"cache_dir={tmp_path}/cache"]
        return DataModule(compose(words)).revision("train")

    before = revision()
    assert before == revision()
    (corpora / "arxiv_math" / "train" / "train1.txt").write_text("something else " * 99, encoding="utf-8")
    assert revision() != before


def test_trained_on_the_mixture_and_measured_on_each_task(mixed: Runner, corpora: Path) -> None:
    mixed("train", *MIXTURE)
    assert mixed.err.count("c4: no such folder; the mixture is pg19 and arxiv_math alone") == 1
    (run,) = mixed.records("train")
    assert run.data["sources"].keys() == {"pg19", "arxiv_math"}
    named = [f"checkpoint={run.run_id}", "scale.eval_max_tokens=64", "scale.knockouts=false"]
    for task in ("pg19", "arxiv_math"):
        folder = f"task.data_dir={corpora / task}"
        mixed("eval", f"task={task}", folder, *named)
    mixed("eval", *MIXTURE, "scale.eval_max_tokens=64", "scale.knockouts=false")
    books, mathematics, both = mixed.records("eval")
    assert {each.parent for each in (books, mathematics, both)} == {run.run_id}
    found = {entry["name"]: entry["nll"] for entry in both.documents}
    for task, record in (("pg19", books), ("arxiv_math", mathematics)):
        for entry in record.documents:
            assert found[f"{task}/{entry['name']}"] == pytest.approx(entry["nll"], rel=1e-6)
    # A model of another task is still refused.
    mixed("train", "task=pg19", f"task.data_dir={corpora / 'pg19'}")
    other = mixed.records("train")[-1].run_id
    refused = mixed.error("eval", "task=arxiv_math", f"task.data_dir={corpora / 'arxiv_math'}", f"checkpoint={other}")
    assert "was trained on task=pg19" in refused


@pytest.mark.parametrize("sources", [["pg19"], ["news"]])
def test_an_evaluation_reads_the_sources_of_the_training_unless_others_are_named(
    mixed: Runner, corpora: Path, sources: list[str]
) -> None:
    """Sources that the task does not have by default are included."""
    write_corpus(corpora / "news")
    named = [f"task.sources=[{','.join(sources)}]", f"task.data_dir={corpora}"]
    evaluation = [*MIXTURE, "scale.eval_max_tokens=64", "scale.knockouts=false"]
    said = f"data: {', '.join(sources)}, as the training; task.sources= names others"
    mixed("train", *MIXTURE, *named)
    mixed.settings = [text for text in mixed.settings if not text.startswith("task.data_dir=")]
    for words, read in (([], set(sources)), (["task.sources=[arxiv_math]"], {"arxiv_math"})):
        mixed("eval", *evaluation, *words)
        run = mixed.records("eval")[-1]
        assert {entry["name"].partition("/")[0] for entry in run.documents} == read
        assert set(run.config["task"]["sources"]) == read
        assert (said in mixed.err) == (not words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["task.sources=[]"], "task.sources=[]: must name one corpus or more, each once"),
        (["task.sources=[pg19,pg19]"], "must name one corpus or more, each once"),
        (["task.sources=[news]"], "holds none of the folders news/"),
        (["task.sources=[pg19,books/a]"], "task.sources=['pg19', 'books/a']: must be names of corpora, without /"),
        (["task.shares=[1,1]"], "task.shares=[1.0, 1.0]: must have a number above 0 for each of task.sources"),
        (["task.shares=[1,0,1]"], "must have a number above 0 for each of task.sources, or be null"),
        (["task.min_tokens=0"], "task.min_tokens=0: must be at least 1"),
        (["task.min_tokens=999999"], "task.min_tokens=999999: the longest document of pg19 to train on has"),
    ],
)
def test_bad_mixtures_are_one_line(mixed: Runner, words: list[str], named: str) -> None:
    assert named in mixed.error("train", *MIXTURE, *words)


def test_without_any_data_one_corpus_of_the_mixture_is_said_to_be_enough(mixed: Runner) -> None:
    mixed.settings = [text for text in mixed.settings if not text.startswith("task.data_dir=")]
    said = mixed.error("train", *MIXTURE)
    assert "set INFINI_DATA_DIR or task.data_dir to a folder that holds at least one of pg19/, arxiv_math/, c4/" in said
    assert said.endswith("or try it out with task.data_dir=synthetic")


@pytest.mark.slow
def test_made_up_text(mixed: Runner) -> None:
    mixed("train", *MIXTURE, "task.data_dir=synthetic", "recipe.steps=1")
    (run,) = mixed.records("train")
    assert run.synthetic and set(run.data["sources"]) == {"pg19", "arxiv_math", "c4"}
