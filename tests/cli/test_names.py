"""Names of files and texts that are none: too long, not UTF-8, half a letter, and `~`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from books import row, write_books
from command_runner import Runner
from tiny_runs import SUMMARIES, TINY, open_split

from infini.config.compose import cache_folder, compose
from infini.errors import InputError
from infini.system.paths import home_expanded, is_file, is_folder
from infini.tasks.booksum.books import load_books
from infini.tasks.text import hub
from infini.tasks.text.documents import load_documents

LETTERS = "狐狸遇见了母鸡他们谈论玉米" * 7
"""More bytes than a file's name may have, and fewer letters than look like a text."""
HALF = "\\ud83d"


@pytest.mark.parametrize("name", [LETTERS, "x" * 300, "a" * 5000, "x/" * 3000, "a\0b", "\ud800", "\udce9", ""])
def test_any_text_may_be_asked_whether_it_is_a_file(name: str) -> None:
    assert not is_file(name) and not is_file(Path(name)) and not (name and is_folder(name))


def test_a_prompt_of_many_letters_is_a_text(with_model: Runner, tmp_path: Path) -> None:
    for prompt in (LETTERS, "x" * 300, "a/" * 3000):
        with_model("generate", f"prompt={prompt}", "decoding.max_new_tokens=1")
        assert "tokens read" in with_model.err
    for words in (
        ("generate", f"prompt=@{LETTERS}"),
        ("generate", "prompt=a", f"save_state={LETTERS}"),
        ("generate", "prompt=a", f"save_state={tmp_path}/{LETTERS}/state"),
        ("generate", f"load_state={LETTERS}"),
        ("generate", "prompt=a", f"checkpoint={LETTERS}"),
        ("train", f"init_from={LETTERS}"),
        ("train", f"task.data_dir={LETTERS}"),
        ("train", "task=booksum", f"task.data_dir={LETTERS}"),
        ("train", f"results_dir={LETTERS}"),
        ("table", f"results_dir={LETTERS}"),
        ("train", f"cache_dir={LETTERS}"),
        ("publish", "x" * 300),
        ("summarize", LETTERS),
        ("summarize", LETTERS + ".epub"),
    ):
        assert LETTERS[:20] in with_model.error(*words) or words[0] == "publish", words


@pytest.mark.parametrize("key", ["save_state", "output"])
def test_a_name_that_cannot_be_written_is_refused_before_anything_is_read(
    with_model: Runner, tmp_path: Path, key: str
) -> None:
    (tmp_path / "book.txt").write_text("A book.", encoding="utf-8")
    words = ["summarize", str(tmp_path / "book.txt")] if key == "output" else ["generate", "prompt=a"]
    # The name of the file that is being written would be too long.
    for name in ("x" * 250, "none/" + "x" * 250, "x" * 260 + "/none"):
        said = with_model.error(*words, f"{key}={tmp_path / name}")
        assert said.startswith(f"{key}=") and "a name in it is too long" in said
    assert "continues" not in with_model.err and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("key", ["save_state", "output"])
@pytest.mark.parametrize("name", ["/", "/..", "."])
def test_a_folder_without_a_name_is_no_file_to_write(with_model: Runner, tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "book.txt").write_text("A book.", encoding="utf-8")
    words = ["summarize", str(tmp_path / "book.txt")] if key == "output" else ["generate", "prompt=a"]
    said = with_model.error(*words, f"{key}={name}")
    assert said == f"{key}={name!r}: exists and is not a regular file; name another file"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"bid": 2, "title": "b", "text": "A dog %s.", "summary": [{"text": "Dog."}]}', "text"),
        ('{"bid": 2, "title": "b", "text": "A dog.", "summary": [{"text": "Cat."}, {"text": "Dog %s."}]}', "summary"),
        ('{"bid": "%s", "title": "b", "text": "A dog.", "summary": [{"text": "Dog."}]}', "bid"),
        ('{"bid": 2, "title": "%s", "text": "A dog.", "summary": [{"text": "Dog."}]}', "title"),
        ('{"bid": 2, "title": "b", "book": "%s.txt", "summary": [{"text": "Dog."}]}', "book"),
    ],
)
def test_half_a_letter_is_named_with_its_line(tmp_path: Path, line: str, key: str) -> None:
    (tmp_path / "booksum").mkdir()
    path = tmp_path / "booksum" / "test.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + line % HALF + "\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        load_books("test", path.parent, "none/none")
    assert str(error.value).startswith(f"{path}, line 3: not a book ({key} contains {HALF}, a lone surrogate")
    str(error.value).encode()
    # Both halves are a letter.
    path.write_text(json.dumps(row()) + "\n" + line % (HALF + "\\ude00") + "\n", encoding="utf-8")
    if key != "book":
        assert len(load_books("test", path.parent, "none/none").documents) == 2


def test_half_a_letter_stops_a_training_with_one_line(infini: Runner, tmp_path: Path) -> None:
    data = write_books(tmp_path / "data", text="A man goes. A dog runs. \ud83d" * 60)
    said = infini.error("train", "task=booksum", *SUMMARIES, f"task.data_dir={data}")
    assert "train.jsonl, line 1: not a book (text contains \\ud83d" in said


def test_a_row_of_the_hub_with_half_a_letter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": json.dumps({"text": text, "meta": {"config": "arxiv"}})} for text in ("a", "b\ud83d")]
    monkeypatch.setattr("datasets.load_dataset", lambda *given, **named: rows)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    with pytest.raises(InputError, match=r"row test-1: contains \\ud83d"):
        load_documents("arxiv_math", "test", None, "hoskinson-center/proof-pile")


def test_the_file_of_a_book_is_named_with_its_line(tmp_path: Path) -> None:
    for name in (LETTERS, "x" * 300, "none.txt", "a\0b"):
        data = write_books(tmp_path, text=None, book=name)
        with pytest.raises(InputError, match=r"test\.jsonl, line 1: the file of book 1, .*, does not exist"):
            load_books("test", data, "none/none")
        shutil.rmtree(data)


def test_documents_whose_names_are_not_utf8_are_read(
    infini: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    for split in ("train", "test"):
        shutil.copy(data / split / f"{split}0.txt", os.fsdecode(os.fsencode(data / split) + b"/caf\xe9.txt"))
    infini("train", f"task.data_dir={data}")
    infini("eval", f"task.data_dir={data}")
    (run,) = infini.records("eval")
    assert [entry["name"] for entry in run.documents] == ["caf\\xe9", "test0", "test1", "test2"]
    # The folder itself may be called so where nobody has to type it.
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.rename(data, odd)
    monkeypatch.chdir(odd)
    assert open_split(compose([*TINY, "task.data_dir=."]), "test")[0].revision == run.data["revision"]


def test_home_is_home(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, infini: Runner
) -> None:
    home = tmp_path / "home"
    shutil.copytree(trained, home / "results")
    shutil.copytree(corpus, home / "corpus")
    (home / "book.txt").write_text("A man goes.", encoding="utf-8")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(home))
    at_home = ["results_dir=~/results", "task.data_dir=~/corpus", "cache_dir=~/cache"]
    (run,) = (path.name for path in (home / "results" / "checkpoints").iterdir())
    named = [*at_home, f"checkpoint=~/results/checkpoints/{run}", "decoding.max_new_tokens=2"]
    infini("generate", *named, "prompt=@~/book.txt", "save_state=~/states/one")
    infini("generate", *at_home, "load_state=~/states/one", "decoding.max_new_tokens=2")
    infini("eval", *at_home)
    infini("summarize", "~/book.txt", *named, "output=~/said/summary.txt")
    infini("train", *at_home, f"init_from=~/results/checkpoints/{run}", "seed=2")
    infini("table", "results_dir=~/results", "report=table2_lm")
    assert (home / "states" / "one").is_file() and (home / "said" / "summary.txt").is_file()
    assert (home / "cache" / "tokens").is_dir() and len(list((home / "results" / "runs").glob("*.json"))) == 3
    assert list((tmp_path / "here").iterdir()) == []


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know."""

    def unknown(*given: Any) -> Any:
        raise KeyError(*given)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.mark.parametrize("name", ["~", "~nosuchuser"])
def test_a_home_that_is_not_known_is_one_line(
    with_model: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "~":
        homeless(monkeypatch)
    (tmp_path / "book.txt").write_text("A man goes.", encoding="utf-8")
    for words in (
        ("train", f"task.data_dir={name}/x"),
        ("train", "task=booksum", f"task.data_dir={name}/x"),
        ("train", f"results_dir={name}/x"),
        ("train", f"cache_dir={name}/x"),
        ("train", f"init_from={name}/x"),
        ("eval", f"checkpoint={name}/x"),
        ("generate", f"prompt=@{name}/x"),
        ("generate", "prompt=a", f"save_state={name}/x"),
        ("generate", f"load_state={name}/x"),
        ("summarize", f"{name}/x"),
        ("summarize", str(tmp_path / "book.txt"), f"output={name}/x"),
    ):
        assert f"the home folder {name} is not known; write the whole path" in with_model.error(*words), words
    said = f"={name + '/x'!r}: the home folder {name} is not known; write the whole path"
    assert f"model.base{said}" in with_model.error("eval", "model=llm", f"model.base={name}/x")
    assert f"base{said}" in with_model.error("inject", f"base={name}/x", f"out={tmp_path / 'out'}")
    for variable in ("INFINI_DATA_DIR", "INFINI_CACHE_DIR"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, f"{name}/x")
            said = with_model.error("train", "task.data_dir=null")
            assert said.startswith(f"{variable}=") and "is not known" in said


def test_without_a_home_what_needs_no_cache_works(with_model: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    homeless(monkeypatch)
    monkeypatch.delenv("INFINI_CACHE_DIR", raising=False)
    with_model("generate", "prompt=a", "decoding.max_new_tokens=1")
    assert with_model.error("eval").startswith("cache_dir='~/.cache/infini': the home folder ~ is not known")


def test_names_that_begin_otherwise_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    names = ["a~b", "./~/x", "~/x", "~"]
    expected = ["a~b", "~/x", "/home/someone/x", "/home/someone"]
    assert [str(home_expanded("key", name)) for name in names] == expected
    assert cache_folder(compose(["cache_dir=~/c"]), create=False) == Path("/home/someone/c")
