"""A corpus of several sources. A document's name begins with its source."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from infini.config.compose import data_folder
from infini.config.data_files import TEXT_LAYOUT, no_data
from infini.config.schema import TaskConfig, groups, settings_in, task_schema
from infini.errors import InputError, did_you_mean
from infini.system.paths import is_folder
from infini.tasks.text.documents import SYNTHETIC, Documents, load_documents, synthetic_documents, warn_once

C4 = "c4"
"""A source that is not a task: web pages. On the hub it is the data set that task.hub_id names in task=continual."""


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
    missing is left out, and a line names it. hub_id: the data set of C4, or of one source that is neither C4 nor a
    task. max_documents: the most documents of each source; see load_documents. Raises InputError if there is no
    source, or if one is not on the hub.
    """
    if data_dir == SYNTHETIC:
        found = {name: synthetic_documents(split, seed) for seed, name in enumerate(sources)}
    else:
        named_in = {name: data_folder(name, None if data_dir is None else Path(data_dir) / name) for name in sources}
        folders = {name: found and found[0] for name, found in named_in.items()}
        missing = [name for name, folder in folders.items() if folder is not None and not is_folder(folder)]
        present = [name for name in sources if name not in missing]
        if not present:
            named = ", ".join(str(folders[name]) for name in missing)
            raise InputError(f"task.sources={list(sources)}: none of the folders {named} exists")
        if missing:
            left_out = ", ".join(str(folders[name]) for name in missing)
            warn_once(f"{left_out}: no such folder; the mixture is {' and '.join(present)} alone")
        if not any(folders.values()):
            _check_on_hub(sources, hub_id)
        # The data set of the task of this name, or the given one.
        hub_ids = {name: str(settings_in("task", name).get("hub_id", hub_id)) for name in present}
        try:
            found = {
                name: load_documents(name, split, folders[name], hub_ids[name], cache_dir, max_documents)
                for name in present
            }
        except InputError as error:
            if any(folders.values()) or not isinstance(error.__cause__, Exception):
                raise
            hubs = ", ".join(hub_ids.values())
            raise no_data("the mixture", TEXT_LAYOUT, hubs, error.__cause__, among=present) from error
    return _joined(found, split)


def _check_on_hub(sources: Sequence[str], hub_id: str) -> None:
    """Raises InputError for a source that is neither C4, nor a task of running text with a data set of its own, nor the
    only name for a data set that the user gives."""
    tasks = groups()["task"]
    known = [
        name
        for name in tasks
        if (schema := task_schema(name)).has_documents
        and schema.is_trained_on
        and schema.corpora is TaskConfig.corpora
        and settings_in("task", name).get("hub_id")
    ]
    others = [name for name in sources if name not in (*known, C4)]
    given = hub_id != settings_in("task", "continual").get("hub_id") and C4 not in sources
    if not others or (given and len(others) == 1 and others[0] not in tasks):
        return
    options = [*known, C4]
    allowed = f"a source from the hub must be one of {', '.join(options)}"
    another = "another needs task.data_dir, or a task.hub_id of its own"
    said = f"task.sources={list(sources)}: {others[0]!r}: {allowed}; {another}{did_you_mean(others[0], options)}"
    raise InputError(said)


def _joined(found: dict[str, Documents], split: str) -> Documents:
    parts = list(found.values())
    starts = list(itertools.accumulate((len(part) for part in parts), initial=0))

    def read(index: int) -> str:
        part = bisect.bisect_right(starts, index) - 1
        return parts[part].read(index - starts[part])

    revisions = "\n".join(f"{name} {documents.revision}" for name, documents in found.items())
    sizes = [part.total_bytes for part in parts]
    return Documents(
        name="mixture",
        split=split,
        source=parts[0].source,
        revision=hashlib.sha256(revisions.encode()).hexdigest(),
        names=[f"{name}/{document}" for name, documents in found.items() for document in documents.names],
        read=read,
        total_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
    )
