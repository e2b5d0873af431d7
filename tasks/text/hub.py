"""The Hugging Face hub: the texts of its data sets, and its tokenizers.

Only the used part of a data set is downloaded: it is streamed once and stored as one memory-mapped file.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from infini.errors import InputError, lone_surrogate
from infini.records import sync_and_rename
from infini.system.network import reachable
from infini.system.paths import scratch_folder
from infini.system.progress import plain_console, progress_bar, warn
from infini.tasks.text.documents import Documents, TextTokenizer, distinct


@dataclass(frozen=True)
class JsonLines:
    """A data set of JSON lines whose loading script `datasets` no longer runs, and the rows to use.

    Lines are read as text, because the fields of `meta` differ from row to row and have no common schema.
    """

    files: Mapping[str, str]
    """Split -> URL of its files."""
    config: str | None
    """Value of meta.config in the rows to use; other rows come from other sources. None: rows have no such field."""
    most: int
    """Most documents of the validation and of the test split, from the beginning."""
    shortest: int = 0
    """Characters of the shortest text to use."""

    def text_of(self, line: str) -> str | None:
        """The text of a row; None when the row comes from another source or is too short."""
        row = json.loads(line)
        if len(row["text"]) < self.shortest:
            return None
        if self.config is None:
            return str(row["text"])
        meta = row["meta"]
        meta = json.loads(meta) if isinstance(meta, str) else meta
        return row["text"] if meta.get("config") == self.config else None


_PROOF_PILE = "hf://datasets/hoskinson-center/proof-pile"
_C4 = "hf://datasets/allenai/c4/en"
JSON_LINES: dict[str, JsonLines] = {
    "hoskinson-center/proof-pile": JsonLines(
        {
            "train": f"{_PROOF_PILE}/train/*.jsonl.gz",
            "validation": f"{_PROOF_PILE}/dev/*.jsonl.gz",
            "test": f"{_PROOF_PILE}/test/*.jsonl.gz",
        },
        "arxiv",
        # PG19's test split has as many.
        100,
    ),
    # Web pages, of which few are long. The data set has no test split: the second file of its validation split is ours.
    "allenai/c4": JsonLines(
        {
            "train": f"{_C4}/c4-train.*.json.gz",
            "validation": f"{_C4}/c4-validation.00000-of-00008.json.gz",
            "test": f"{_C4}/c4-validation.00001-of-00008.json.gz",
        },
        None,
        100,
        # The paper takes documents of more than 4K tokens; English has 3 to 5 characters a token.
        shortest=12288,
    ),
}
"""Hub id -> how to read it."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow file."""

KEPT = 2
"""Version of the files that are kept of a data set. Version 1 counted blank rows as documents."""


def hub_documents(name: str, split: str, hub_id: str, limit: int | None, cache_dir: Path | None) -> Documents:
    """The documents of a split of `hub_id`, which must have a column `text`, in its order; with a `limit`, the first
    ones. They are read on demand.

    A data set in JSON_LINES gives the rows of one source. The whole train split of any other is in the cache of
    `datasets`. All else is streamed, because `datasets` would download the files of all splits to read one, and stored
    in `cache_dir`/hub (None: in memory), after which no network is needed. Without a network only caches are used.
    Blank rows are left out; the names of the others keep their numbers. A name that came before gets its place behind
    it.

    Raises:
        InputError: the data set has no column `text`, or no text in it.
        Exception: of many kinds, when neither the hub nor a cache has the texts.
    """
    from datasets import Dataset

    if split == "train" and limit is None and hub_id not in JSON_LINES:
        return distinct(_whole(name, hub_id, split))
    if cache_dir is None:
        rows = list(_rows(hub_id, split, limit))
        names, revision = [name for name, _ in rows], _revision(hub_id, split, limit, rows)
        return distinct(Documents(name, split, "hub", revision, names, lambda index: rows[index][1]))
    key = hashlib.sha256(json.dumps([hub_id, split, limit, KEPT]).encode()).hexdigest()[:16]
    for path in sorted((cache_dir / "hub").glob(f"{key}-*.arrow")):
        # An older version kept files without documents.
        if dataset := open_arrow(path):
            break
    else:
        path = _keep(hub_id, split, limit, cache_dir / "hub", key)
        dataset = Dataset.from_file(str(path))
    revision = path.stem.partition("-")[2]
    return distinct(Documents(name, split, "hub", revision, dataset["name"][:], lambda index: dataset[index]["text"]))


def open_arrow(path: Path) -> Any:
    """The `datasets.Dataset` in a file, memory-mapped; None where there is no such file, or a damaged one, which is
    printed."""
    from datasets import Dataset

    try:
        with open(path, "rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            # A file that is cut between two documents would open with fewer of them.
            if file.read() == _END:
                return Dataset.from_file(str(path))
    except FileNotFoundError:
        return None
    except Exception:  # every layer below raises its own kinds
        pass
    warn(plain_console(), f"{path}: is damaged and is rebuilt")
    return None


@contextmanager
def caches_only() -> Iterator[None]:
    """A context in which the hub's clients answer from their caches or fail immediately."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before[:2]
        datasets.logging.set_verbosity(before[2])


def _whole(name: str, hub_id: str, split: str) -> Documents:
    import datasets

    with nullcontext() if reachable() else caches_only():
        dataset = datasets.load_dataset(hub_id, split=split)
    _check_columns(hub_id, dataset.column_names)
    if not (kept := _with_text(dataset)):
        raise _no_text(hub_id, split)
    urls = dataset["url"][:] if "url" in dataset.column_names else [None] * len(dataset)
    # A fingerprint depends on the time of the download; URLs name the commit and are the same on every machine.
    files = sorted((dataset.info.download_checksums or {}).keys())
    origin = [hub_id, split, files or dataset._fingerprint]
    if len(kept) < len(dataset):
        origin.append("without blank rows")
    names = [_name(split, index, urls[index]) for index in kept]
    revision = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
    return Documents(name, split, "hub", revision, names, lambda index: dataset[kept[index]]["text"])


def _with_text(dataset: Any) -> list[int]:
    """The indices of the rows that are not blank. It reads only the beginning of most rows: all texts are gigabytes."""
    import pyarrow.compute as pc

    beginnings: list[str | None] = []
    for batch in dataset.select_columns("text").with_format("arrow").iter(1000):
        beginnings += pc.utf8_slice_codeunits(batch["text"], 0, 64).to_pylist()
    return [
        index
        for index, text in enumerate(beginnings)
        if text and not (text.isspace() and dataset[index]["text"].isspace())
    ]


def _rows(hub_id: str, split: str, limit: int | None) -> Iterator[tuple[str, str]]:
    """(name, text) of the first `limit` documents, streamed, or without a network from a cached data set. Raises
    InputError where there is none."""
    source = JSON_LINES.get(hub_id)
    if source is not None and split != "train":
        limit = min(limit or source.most, source.most)
    rows = _of_table(hub_id, split) if source is None else _lines(source, split)
    found = islice(rows, limit)
    if (first := next(found, None)) is None:
        raise _no_text(hub_id, split)
    yield from chain([first], found)


def _no_text(hub_id: str, split: str) -> InputError:
    return InputError(f"task.hub_id={hub_id!r}: {split} has no text")


def _of_table(hub_id: str, split: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each row that is not blank."""
    import datasets

    online = reachable()
    with nullcontext() if online else caches_only():
        dataset = datasets.load_dataset(hub_id, split=split, streaming=online)
    if dataset.column_names is not None:
        _check_columns(hub_id, dataset.column_names)
    for index, row in enumerate(dataset):
        _check_columns(hub_id, list(row))
        if row["text"] and not row["text"].isspace():
            yield _name(split, index, row.get("url")), row["text"]


def _lines(source: JsonLines, split: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each row to use, streamed; the name is the row's number in the whole split."""
    import datasets

    files = {split: source.files[split]}
    with nullcontext() if reachable() else caches_only():
        lines = datasets.load_dataset("text", data_files=files, split=split, streaming=True)
        for index, row in enumerate(lines):
            name, text = _name(split, index, None), source.text_of(row["text"])
            # A user cannot remove what is blank there.
            if not text or text.isspace():
                continue
            if (letter := lone_surrogate(text)) is not None:
                raise InputError(f"{files[split]}, row {name}: contains {letter}, a lone surrogate: not valid text")
            yield name, text


def _check_columns(hub_id: str, columns: Sequence[str]) -> None:
    if "text" not in columns:
        raise InputError(f"task.hub_id={hub_id!r}: has no column text, only {', '.join(columns)}")


def _name(split: str, index: int, url: str | None) -> str:
    # The number of the book at Project Gutenberg; titles are not unique.
    return f"{split}-{index}" if url is None else str(url).rstrip("/").rsplit("/", 1)[-1]


def _revision(hub_id: str, split: str, limit: int | None, rows: Iterable[tuple[str, str]]) -> str:
    revision = hashlib.sha256(json.dumps([hub_id, split, limit]).encode())
    for name, text in rows:
        revision.update(f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return revision.hexdigest()


def _keep(hub_id: str, split: str, limit: int | None, folder: Path, key: str) -> Path:
    """Write the rows to `folder`/<key>-<revision>.arrow, atomically."""
    from datasets import Features, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({"name": Value("string"), "text": Value("large_string")})
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder) as temporary:
        path = temporary / f"{key}.arrow"
        with ArrowWriter(features=features, path=str(path), writer_batch_size=16) as writer:

            def written() -> Iterator[tuple[str, str]]:
                rows = _rows(hub_id, split, limit)
                # The bar appears with the first row, so that a failure prints one line only.
                if (first := next(rows, None)) is not None:
                    with progress_bar(f"fetching {hub_id}/{split}", limit) as advance:
                        for name, text in chain([first], rows):
                            advance(1)
                            writer.write({"name": name, "text": text})
                            yield name, text

            revision = _revision(hub_id, split, limit, written())
            writer.finalize()
        complete = folder / f"{key}-{revision}.arrow"
        sync_and_rename(path, complete)
    return complete


def hub_tokenizer(hub_id: str, setting: str = "scale.tokenizer", instead: str = "scale.tokenizer=bpe") -> TextTokenizer:
    """A tokenizer of the Hugging Face hub, by id; InputError (one line) when it cannot be loaded.

    setting, instead: the key that names it, and an alternative setting.
    """
    try:
        with nullcontext() if reachable() else caches_only():
            tokenizer = _of_hub(hub_id)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"{setting}={hub_id!r}: its tokenizer could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}); connect to a network, or use {instead}"
        ) from error
    return TextTokenizer(tokenizer)


def _of_hub(hub_id: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_pretrained(hub_id)
    except Exception:  # the library raises bare Exception
        # Older repositories have only vocabulary and merges, from which transformers builds a tokenizer.
        try:
            from transformers import AutoTokenizer
        except ImportError:
            pass
        else:
            return AutoTokenizer.from_pretrained(hub_id).backend_tokenizer
        raise
