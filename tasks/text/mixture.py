"""Several corpora as one: their documents side by side, each named after its source."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from infini.config.compose import data_folder
from infini.config.data_files import TEXT_LAYOUT, no_data
from infini.config.schema import settings_in
from infini.errors import InputError
from infini.system.paths import is_folder
from infini.system.progress import plain_console, warn
from infini.tasks.text.documents import SYNTHETIC, Documents, load_documents, synthetic_documents

if TYPE_CHECKING:
    from infini.tasks.text.token_cache import TokenisedSplit


def mixture(
    sources: Sequence[str],
    split: str,
    data_dir: str | Path | None,
    hub_id: str,
    cache_dir: Path | None = None,
    max_documents: int | None = None,
) -> Documents:
    """The documents of all sources of a split, one source after the other, named <source>/<document>.

    data_dir: folder that holds a folder for each source; None: $INFINI_DATA_DIR, else the hub. A source whose folder is
    missing is left out, which is printed. hub_id: data set of a source that is no task. max_documents: of each source;
    see load_documents. Raises InputError where there is no source at all.
    """
    if data_dir == SYNTHETIC:
        found = {name: synthetic_documents(split, seed) for seed, name in enumerate(sources)}
    else:
        folders = {name: _folder(name, data_dir) for name in sources}
        missing = [name for name, folder in folders.items() if folder is not None and not is_folder(folder)]
        present = [name for name in sources if name not in missing]
        if not present:
            named = ", ".join(str(folders[name]) for name in missing)
            raise InputError(f"task.sources={list(sources)}: none of the folders {named} exists")
        if missing:
            _say_missing(", ".join(str(folders[name]) for name in missing), " and ".join(present))
        try:
            found = {
                name: load_documents(name, split, folders[name], _hub_id(name, hub_id), cache_dir, max_documents)
                for name in present
            }
        except InputError as error:
            if any(folders.values()) or not isinstance(error.__cause__, Exception):
                raise
            hubs = ", ".join(_hub_id(name, hub_id) for name in present)
            raise no_data("the mixture", TEXT_LAYOUT, hubs, error.__cause__, among=present) from error
    return _joined(found, split)


def sources_of(split: TokenisedSplit) -> dict[str, list[int]]:
    """Source -> the numbers of its documents, of a split of `mixture`."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(split.names):
        found.setdefault(name.partition("/")[0], []).append(index)
    return found


def at_least(split: TokenisedSplit, n_tokens: int) -> TokenisedSplit:
    """The documents of at least so many tokens. Raises InputError where a source has none."""
    for source, documents in sources_of(split).items():
        longest = max(split.n_tokens[index] for index in documents)
        if longest < n_tokens:
            said = f"the longest document of {source} to train on has {longest} tokens"
            raise InputError(f"task.min_tokens={n_tokens}: {said}; leave it out of task.sources, or take fewer")
    kept = [index for index, length in enumerate(split.n_tokens) if length >= n_tokens]
    return replace(
        split,
        names=[split.names[index] for index in kept],
        tokens=[split.tokens[index] for index in kept],
        n_words=split.n_words[kept],
        n_bytes=split.n_bytes[kept],
    )


def _folder(name: str, data_dir: str | Path | None) -> Path | None:
    found = data_folder(name, None if data_dir is None else Path(data_dir) / name)
    return None if found is None else found[0]


@cache
def _say_missing(folders: str, present: str) -> None:
    """Once a process, not once a split."""
    warn(plain_console(), f"{folders}: no such folder; the mixture is {present} alone")


def _hub_id(name: str, hub_id: str) -> str:
    """The data set of the task of this name, or the given one."""
    return str(settings_in("task", name).get("hub_id", hub_id))


def _joined(sources: dict[str, Documents], split: str) -> Documents:
    parts = list(sources.values())
    starts = list(itertools.accumulate((len(part) for part in parts), initial=0))

    def read(index: int) -> str:
        part = bisect.bisect_right(starts, index) - 1
        return parts[part].read(index - starts[part])

    revisions = "\n".join(f"{name} {documents.revision}" for name, documents in sources.items())
    sizes = [part.total_bytes for part in parts]
    return Documents(
        name="mixture",
        split=split,
        source=parts[0].source,
        revision=hashlib.sha256(revisions.encode()).hexdigest(),
        names=[f"{name}/{document}" for name, documents in sources.items() for document in documents.names],
        read=read,
        total_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
    )
