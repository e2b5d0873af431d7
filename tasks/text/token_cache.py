"""Tokens on disk: a split is tokenized once and then read as memory-mapped Arrow."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infini.config.compose import cache_folder
from infini.config.schema import Config
from infini.errors import InputError
from infini.models import base_of
from infini.records import naming, sync_and_rename
from infini.system.paths import scratch_folder
from infini.system.progress import progress_bar
from infini.tasks.text.documents import Documents, TextTokenizer, bpe_tokenizer, load_documents
from infini.tasks.text.hub import hub_tokenizer, open_arrow
from infini.tasks.text.mixture import mixture

_FORMAT = 1


@dataclass(frozen=True)
class TokenisedSplit:
    """The tokens of one split, one entry per document, in the order of its `Documents`."""

    name: str
    split: str
    source: str
    """"folder", "hub" or "synthetic"."""
    revision: str
    """Content hash of the texts."""
    tokenizer_name: str
    names: Sequence[str]
    tokens: Sequence[np.ndarray]
    """Token ids of each document, without bos_id; read-only views of the memory-mapped file."""
    n_words: np.ndarray
    """Words of each document, separated by white space."""
    n_bytes: np.ndarray
    """UTF-8 bytes of each document."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def n_tokens(self) -> np.ndarray:
        """Tokens of each document, int64."""
        return np.array([len(ids) for ids in self.tokens], dtype=np.int64)

    def ids(self, index: int) -> np.ndarray:
        """Token ids of document `index`, uint16 or uint32; a view that is read on use."""
        return self.tokens[index]

    def totals(self) -> dict[str, int]:
        """Documents, tokens, words and bytes of the split."""
        return {
            "documents": len(self),
            "tokens": int(self.n_tokens.sum()),
            "words": int(self.n_words.sum()),
            "bytes": int(self.n_bytes.sum()),
        }

    def data_record(self) -> dict[str, Any]:
        """The description of the data for run records."""
        return {
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            "split": self.split,
            **self.totals(),
            "tokenizer": self.tokenizer_name,
        }


def open_tokenizer(cfg: Config, documents: Callable[[], Documents] | None = None) -> TextTokenizer:
    """The tokenizer of `cfg`: that of its pretrained model if it has one, else trained on the task's train split, or
    from the hub.

    documents: gives the texts of the train split; None: those of documents_of. Raises InputError (one line) when the
    data or the tokenizer cannot be loaded.
    """
    if (base := base_of(cfg.model)) is not None:
        return TextTokenizer(base.backend_tokenizer())
    if cfg.scale.tokenizer == "bpe":
        texts = documents_of(cfg, "train") if documents is None else documents()
        return bpe_tokenizer(texts, cfg.scale.vocab_size, cache_folder(cfg))
    return hub_tokenizer(cfg.scale.tokenizer)


def documents_of(cfg: Config, split: str) -> Documents:
    """The texts of a split of `cfg.task`; InputError (one line) when they cannot be loaded."""
    task = cfg.task
    limit = cfg.scale.hub_train_documents
    if task.corpora:
        return mixture(task.corpora, split, task.data_dir, task.hub_id, cache_folder(cfg), limit)
    return load_documents(task.corpus, split, task.data_dir, task.hub_id, cache_folder(cfg), limit)


def tokenise(documents: Documents, tokenizer: TextTokenizer, cache_dir: Path, progress: bool = True) -> TokenisedSplit:
    """The tokens of `documents`, from `cache_dir`/tokens, where they are written the first time.

    The file's name is a hash of texts and tokenizer, and the file gets it only when it is complete, so that neither a
    changed corpus nor an interrupted run is read by mistake. `progress` shows a bar with an estimate on standard error
    while tokenizing. Raises InputError naming a document that is empty, not UTF-8, or without tokens.
    """
    from datasets import Dataset

    key = hashlib.sha256(json.dumps([_FORMAT, documents.revision, tokenizer.hash]).encode()).hexdigest()[:16]
    path = cache_dir / "tokens" / f"{documents.name}-{documents.split}-{key}.arrow"
    dataset = open_arrow(path)
    if dataset is None or len(dataset) != len(documents):
        _write(documents, tokenizer, path, progress)
        dataset = Dataset.from_file(str(path))
    table = dataset.data
    tokens = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in table.column("ids").chunks]
    return TokenisedSplit(
        name=documents.name,
        split=documents.split,
        source=documents.source,
        revision=documents.revision,
        tokenizer_name=tokenizer.name,
        names=table.column("name").to_pylist(),
        tokens=tokens,
        n_words=table.column("n_words").to_numpy(),
        n_bytes=table.column("n_bytes").to_numpy(),
    )


def extents(
    documents: Documents, split: TokenisedSplit, tokenizer: TextTokenizer, n_tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Words and UTF-8 bytes, int64, of the first `n_tokens` tokens of each document.

    They are counted in the text, because neither is proportional to the number of tokens.
    """
    n_words, n_bytes = np.array(split.n_words), np.array(split.n_bytes)
    for index in np.flatnonzero(np.asarray(n_tokens) < split.n_tokens):
        text = documents[int(index)].text
        n_words[index], n_bytes[index] = tokenizer.extent(text, int(n_tokens[index]))
    return n_words, n_bytes


def _write(documents: Documents, tokenizer: TextTokenizer, path: Path, progress: bool) -> None:
    import pyarrow as pa
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features(
        {
            "name": Value("string"),
            "n_words": Value("int64"),
            "n_bytes": Value("int64"),
            "ids": List(Value(tokenizer.dtype.name)),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), scratch_folder(path.parent) as folder:
        temporary = folder / path.name
        title = f"tokenizing {documents.name}/{documents.split} ({len(documents)} documents)"
        bar = progress_bar(title, documents.total_bytes or len(documents), progress)
        with ArrowWriter(features=features, path=str(temporary)) as writer, bar as advance:
            for document in documents:
                if not len(ids := tokenizer.encode(document.text)):
                    where = f"{documents.split} document {document.name} of {documents.name}"
                    raise InputError(f"{where} has no token in this vocabulary: remove it")
                n_bytes = len(document.text.encode())
                # One record batch per document: its tokens are contiguous, so that views need no copy.
                row = {
                    "name": [document.name],
                    "n_words": [len(document.text.split())],
                    "n_bytes": [n_bytes],
                    "ids": pa.ListArray.from_arrays([0, len(ids)], pa.array(ids)),
                }
                writer.write_table(pa.table(row, schema=features.arrow_schema))
                advance(n_bytes if documents.total_bytes else 1)
            writer.finalize()
        sync_and_rename(temporary, path)
