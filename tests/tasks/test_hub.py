"""Documents of the Hugging Face hub: how much of it is fetched, what is kept, and what happens without a network."""

import gzip
import hashlib
import json
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import constants
from tiny_runs import open_split

from infini.config.compose import compose
from infini.errors import InputError
from infini.system import network
from infini.tasks.text import hub
from infini.tasks.text.documents import Documents, load_documents
from infini.tasks.text.hub import caches_only, reachable

HUB_ID = "somebody/books"
BOOKS = {
    "url": [f"http://www.gutenberg.org/ebooks/{number}" for number in range(11, 16)],
    "text": [f"This is book {number}.\r\nIt is naïve. " * 3 for number in range(5)],
}


class FakeHub:
    """Answers load_dataset from BOOKS; remembers what was asked for and how many rows of a stream were made."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.rows = 0

    def load_dataset(self, hub_id: str, **options: Any) -> Any:
        assert hub_id == HUB_ID
        self.calls.append(options)
        if not options.get("streaming"):
            found = datasets.Dataset.from_dict(BOOKS)
            found.info.download_checksums = {"hf://somebody/books@1": {}}
            return found

        def stream() -> Iterator[dict[str, str]]:
            for url, text in zip(BOOKS["url"], BOOKS["text"], strict=True):
                self.rows += 1
                yield {"url": url, "text": text}

        return datasets.IterableDataset.from_generator(stream)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    return fake


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that goes nowhere, and the hub's clients as they come."""
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def hub_documents(split: str = "train", cache_dir: Path | None = None, limit: int | None = None) -> Documents:
    return load_documents("pg19", split, None, HUB_ID, cache_dir, limit)


def texts(documents: Documents) -> list[str]:
    return [document.text for document in documents]


def error_line(**arguments: Any) -> str:
    with pytest.raises(InputError) as error:
        hub_documents(**arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("cached", [False, True])
def test_a_limit_streams_only_the_first_documents(fake_hub: FakeHub, tmp_path: Path, cached: bool) -> None:
    documents = hub_documents(cache_dir=tmp_path if cached else None, limit=2)
    assert fake_hub.calls == [{"split": "train", "streaming": True}]
    assert fake_hub.rows == 2
    assert documents.source == "hub"
    assert list(documents.names) == ["11", "12"]
    # Read twice: by the tokenizer, then for the tokens.
    assert texts(documents) == texts(documents) == BOOKS["text"][:2]


def test_a_blank_row_of_a_stream_is_left_out(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can remove it from the hub."""
    monkeypatch.setitem(BOOKS, "text", ["  \n", *BOOKS["text"][1:]])
    assert list(hub_documents(limit=2).names) == ["12", "13"]
    assert fake_hub.rows == 3


@pytest.mark.parametrize(("rows", "limit"), [(0, 2), (5, 2), (5, None)])
@pytest.mark.parametrize("cached", [False, True])
def test_a_split_without_text_is_one_line_and_leaves_nothing_behind(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, limit: int | None, cached: bool
) -> None:
    for column in ("url", "text"):
        monkeypatch.setitem(BOOKS, column, [" \n"] * rows)
    cache = tmp_path if cached else None
    assert error_line(cache_dir=cache, limit=limit) == f"task.hub_id='{HUB_ID}': train has no text"
    assert error_line(cache_dir=cache, split="test") == f"task.hub_id='{HUB_ID}': test has no text"
    assert not list(tmp_path.glob("hub/*"))


def test_a_kept_file_without_documents_is_fetched_again(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version kept such files."""
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_rows", lambda *given: iter([]))
        assert len(hub_documents(cache_dir=tmp_path, limit=2)) == 0
    assert len(hub_documents(cache_dir=tmp_path, limit=2)) == 2


@pytest.mark.parametrize("blank", ["", " " * 999 + "\n", None])
def test_a_blank_row_of_a_whole_split_is_left_out(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, blank: str | None
) -> None:
    """The names of the others are those that they have in a stream. Only with a blank row the revision is another than
    that of all rows."""
    before = hashlib.sha256(json.dumps([HUB_ID, "train", ["hf://somebody/books@1"]]).encode()).hexdigest()
    assert hub_documents().revision == before
    late = " " * 999 + "Chapter 1."
    monkeypatch.setitem(BOOKS, "text", [blank, BOOKS["text"][1], blank, late, BOOKS["text"][4]])
    documents, streamed = hub_documents(), hub_documents(limit=5)
    assert list(documents.names) == list(streamed.names) == ["12", "14", "15"]
    assert texts(documents) == texts(streamed) == [BOOKS["text"][1], late, BOOKS["text"][4]]
    assert documents.revision != before
    monkeypatch.delitem(BOOKS, "url")
    assert list(hub_documents().names) == ["train-1", "train-3", "train-4"]


def test_what_was_fetched_is_not_fetched_again(fake_hub: FakeHub, tmp_path: Path) -> None:
    first = hub_documents(cache_dir=tmp_path, limit=2)
    again = hub_documents(cache_dir=tmp_path, limit=2)
    assert len(fake_hub.calls) == 1
    assert (again.revision, list(again.names), texts(again)) == (first.revision, list(first.names), texts(first))
    hub_documents(cache_dir=tmp_path, limit=3)
    assert len(fake_hub.calls) == 2


@pytest.mark.parametrize("way", ["whole", "streamed", "cached"])
def test_addresses_that_end_alike_give_names_that_differ(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """This includes a cache of an older version, which has the names of the addresses; the revision differs."""
    addresses = ["http://a/index", "http://b/index", "http://c/index-3", "http://d/index", "http://e/index/"]
    cache, limit = tmp_path if way == "cached" else None, None if way == "whole" else 5
    alone = hub_documents(limit=limit).revision
    monkeypatch.setitem(BOOKS, "url", addresses)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "distinct", lambda documents: documents)
        before = hub_documents(cache_dir=cache, limit=limit)
    found = hub_documents(cache_dir=cache, limit=limit)
    assert list(found.names) == ["index", "index-1", "index-3", "index-3-3", "index-4"]
    assert texts(found) == texts(before) == BOOKS["text"] and found.revision not in (before.revision, alone)


@pytest.mark.parametrize("left", [0, -100, -8])
def test_damaged_texts_are_fetched_again(
    fake_hub: FakeHub, tmp_path: Path, left: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that lacks its last 8 bytes opens as if it were whole."""
    first = hub_documents(cache_dir=tmp_path, limit=2)
    (path,) = (tmp_path / "hub").iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:left])
    again = hub_documents(cache_dir=tmp_path, limit=2)
    assert (again.revision, list(again.names), texts(again)) == (first.revision, list(first.names), texts(first))
    assert path.read_bytes() == whole and f"{path}: is damaged and is rebuilt\n" in capsys.readouterr().err
    path.unlink()
    path.write_bytes(whole[:left])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
    assert error_line(cache_dir=tmp_path, limit=2).startswith("no data for pg19: ")


def test_the_revision_follows_limit_split_and_texts_only(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hub_documents(cache_dir=tmp_path / "here", limit=5).revision
    assert hub_documents(cache_dir=tmp_path / "there", limit=5).revision == here
    assert hub_documents(limit=5).revision == here
    others = {hub_documents(limit=4).revision, hub_documents(limit=6).revision, hub_documents("test").revision}
    monkeypatch.setitem(BOOKS, "text", ["x", *BOOKS["text"][1:]])
    others.add(hub_documents(limit=5).revision)
    assert len(others | {here}) == 5


def test_without_a_limit_the_train_split_is_loaded_whole(fake_hub: FakeHub) -> None:
    documents = hub_documents()
    assert fake_hub.calls == [{"split": "train"}]
    assert texts(documents) == BOOKS["text"]
    assert list(documents.names) == ["11", "12", "13", "14", "15"]


def test_the_limit_is_of_the_train_split(fake_hub: FakeHub, tmp_path: Path) -> None:
    for split in ("validation", "test"):
        assert len(hub_documents(split, tmp_path, limit=2)) == 5
    # Streamed: loading one split whole would fetch the files of all.
    assert all(call["streaming"] for call in fake_hub.calls)


def test_a_folder_is_used_whole(tmp_path: Path) -> None:
    for book in range(3):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / f"{book}.txt").write_text("A book.")
    assert len(load_documents("pg19", "train", tmp_path, HUB_ID, None, 2)) == 3


def test_the_scale_sets_the_limit(fake_hub: FakeHub, tmp_path: Path) -> None:
    cfg = compose(
        [f"task.hub_id={HUB_ID}", f"cache_dir={tmp_path}", "scale.vocab_size=260", "scale.hub_train_documents=3"]
    )
    assert len(open_split(cfg, "train")[0]) == 3
    assert len(open_split(cfg, "validation")[0]) == 5
    assert [compose([f"scale={name}"]).scale.hub_train_documents for name in ("laptop", "gpu", "paper")] == [
        128,
        2048,
        None,
    ]
    with pytest.raises(InputError, match=r"scale\.hub_train_documents=0: must be at least 1"):
        compose(["scale.hub_train_documents=0"])


def test_a_broken_transfer_leaves_nothing_behind(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(*_: Any) -> Iterator[tuple[str, str]]:
        yield "11", "one"
        raise ConnectionError("reset\nby peer")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_rows", breaking)
        assert HUB_ID in error_line(cache_dir=tmp_path, limit=2)
    assert list((tmp_path / "hub").iterdir()) == []
    assert len(hub_documents(cache_dir=tmp_path, limit=2)) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_without_text_is_refused(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.delitem(BOOKS, "text")
    if streamed:
        rows = datasets.IterableDataset.from_generator(lambda: iter([{"story": "x"}]))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    line = error_line(cache_dir=tmp_path, limit=2 if streamed else None)
    assert f"task.hub_id='{HUB_ID}'" in line
    assert ("story" if streamed else "url") in line


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.usefixtures("no_hub")
def test_without_folder_and_network_one_line_says_how_to_get_data(
    limit: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.perf_counter()
    line = error_line(cache_dir=tmp_path, limit=limit)
    assert time.perf_counter() - begin < 5
    for part in ("INFINI_DATA_DIR", "pg19/{train,validation,test}/*.txt", HUB_ID):
        assert part in line
    assert capfd.readouterr() == ("", "")
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


@pytest.fixture
def loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that `datasets` keeps of a data set it has loaded whole."""
    folder = tmp_path / "huggingface"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    files = {}
    for split in ("train", "test"):
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_dict(BOOKS).to_parquet(files[split])
    builder = Parquet(cache_dir=str(folder), dataset_name="books", hash="0" * 16, data_files=files)
    builder.download_and_prepare()
    # Named after local files so far; these are the names it has when the files came from the hub.
    (folder / "somebody___books").mkdir()
    made = Path(builder.cache_dir)
    made.parents[1].rename(folder / "somebody___books" / builder.config.name)


@pytest.mark.parametrize(("split", "limit", "expected"), [("train", None, 5), ("train", 2, 2), ("test", 2, 5)])
@pytest.mark.usefixtures("no_hub", "loaded_once")
def test_without_a_network_a_cached_data_set_still_works(
    split: str, limit: int | None, expected: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    documents = hub_documents(split, tmp_path / "cache", limit)
    assert texts(documents) == BOOKS["text"][:expected]
    assert "latest cached version" not in capfd.readouterr().err


@pytest.mark.usefixtures("no_hub", "loaded_once")
def test_cached_and_streamed_documents_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = hub_documents(cache_dir=tmp_path / "cache", limit=3).revision
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", FakeHub().load_dataset)
    assert hub_documents(limit=3).revision == cached


class TestReachable:
    @pytest.fixture(autouse=True)
    def no_proxy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(urllib.request, "getproxies", dict)

    @pytest.fixture
    def port(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]

    def test_an_endpoint_that_listens(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}/hub")
        assert reachable()

    def test_an_endpoint_that_does_not(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            closed = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
        assert not reachable()

    def test_a_proxy_stands_for_the_hub(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": f"http://user:word@127.0.0.1:{port}"})
        monkeypatch.setattr(urllib.request, "proxy_bypass", lambda host: False)
        assert reachable()
        monkeypatch.setattr(urllib.request, "proxy_bypass", lambda host: host == "hub.invalid")
        assert not reachable()

    def test_a_name_server_that_is_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answered = threading.Event()

        def wait(*_: Any) -> None:
            answered.wait(10)
            raise OSError

        monkeypatch.setattr(network, "PROBE_SECONDS", 0.1)
        monkeypatch.setattr(socket, "create_connection", wait)
        begin = time.perf_counter()
        assert not reachable()
        assert time.perf_counter() - begin < 5
        answered.set()

    def test_offline_mode_is_not_probed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("connected"))
        with caches_only():
            assert not reachable()


ARTICLE = "\\section{One}\nLet $x$ be naïve.\u2028So"


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture
def proof_pile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files as the hub has them, every one with rows of several sources whose `meta` differ."""
    folder = tmp_path / "pile"
    rows: list[dict[str, Any]] = [
        {"text": "A wiki page.", "meta": {"config": "wiki", "title": "A"}},
        {
            "text": ARTICLE,
            "meta": {"config": "arxiv", "file": "math/1.tex", "n": 1},
        },
        {"text": "theorem foo", "meta": {"config": "formal", "n": [1, 2]}},
        {"text": "Two.", "meta": json.dumps({"config": "arxiv"})},
        {"text": " \n", "meta": {"config": "arxiv"}},
    ]
    write_lines(folder / "train" / "proofpile_train_0.jsonl.gz", rows)
    write_lines(folder / "train" / "proofpile_train_1.jsonl.gz", rows[1:2])
    write_lines(folder / "dev" / "proofpile_dev.jsonl.gz", [*rows, *rows])
    hub_id = "hoskinson-center/proof-pile"
    there = hub.JSON_LINES[hub_id]
    files = {split: address.replace(hub._PROOF_PILE, str(folder)) for split, address in there.files.items()}
    monkeypatch.setitem(hub.JSON_LINES, hub_id, hub.JsonLines(files, there.config, most=2))
    monkeypatch.setattr(hub, "reachable", lambda: True)
    return folder


def arxiv(split: str, cache_dir: Path | None = None, limit: int | None = None) -> Documents:
    return load_documents("arxiv_math", split, None, compose(["task=arxiv_math"]).task.hub_id, cache_dir, limit)


def test_only_arxiv_rows_of_the_proof_pile_are_used(proof_pile: Path, tmp_path: Path) -> None:
    documents = arxiv("train", tmp_path / "cache")
    assert texts(documents) == [ARTICLE, "Two.", ARTICLE]
    # A blank article is left out.
    assert list(documents.names) == ["train-1", "train-3", "train-5"]
    assert texts(arxiv("train", None, limit=1)) == [ARTICLE]
    # The first rows of validation and test, up to the limit.
    assert texts(arxiv("validation", tmp_path / "cache")) == [ARTICLE, "Two."]


def test_the_proof_pile_is_fetched_once(proof_pile: Path, tmp_path: Path) -> None:
    before = arxiv("train", tmp_path / "cache")
    shutil.rmtree(proof_pile)
    after = arxiv("train", tmp_path / "cache")
    assert (texts(after), after.revision) == (texts(before), before.revision)


def test_only_long_pages_of_c4_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of web pages have no `meta`. Validation and test are different files."""
    there = hub.JSON_LINES["allenai/c4"]
    pages = {name: f"{name} page. " * 2000 for name in ("first", "second")}
    short = {"text": "A short page.", "timestamp": "2019-04-25T12:57:54Z", "url": "http://a"}
    for number, text in enumerate(pages.values()):
        for split, total in (("train", "01024"), ("validation", "00008")):
            write_lines(tmp_path / f"c4-{split}.0000{number}-of-{total}.json.gz", [short, {**short, "text": text}])
    files = {split: address.replace(hub._C4, str(tmp_path)) for split, address in there.files.items()}
    monkeypatch.setitem(hub.JSON_LINES, "allenai/c4", replace(there, files=files))
    monkeypatch.setattr(hub, "reachable", lambda: True)
    found = {split: texts(load_documents("c4", split, None, "allenai/c4")) for split in files}
    first, second = pages.values()
    assert found == {"train": [first, second], "validation": [first], "test": [second]}


def test_without_a_network_the_proof_pile_is_one_line(no_hub: None, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no data for arxiv_math: set INFINI_DATA_DIR to a folder .* or try it out with"
    ):
        arxiv("test", tmp_path)
