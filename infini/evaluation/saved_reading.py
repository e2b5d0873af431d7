"""States of an unfinished reading on disk: an evaluation that was stopped reads on after the last one."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from infini.evaluation.result_cache import ResultCache
from infini.nn.state import State, move, state_bytes
from infini.records import write_atomically
from infini.system.progress import plain_console, warn

SAVE_SECONDS = 120.0
"""Time between two states that are saved."""
LARGEST_STATE = 2**30
"""Bytes above which a state is not saved: caches that grow with the text, of texts that are read in minutes."""


class Reading(NamedTuple):
    """tokens: read of each row. state: after them. measured: what was measured of them, numbers and tensors by name.
    The tensors of a saved one are on the CPU."""

    tokens: int
    state: State
    measured: dict[str, Any]


class SavedReadings:
    """The last state of every reading of an evaluation, by the reading's name, in files beside its cache.

    A state is used again for the same tokens, at the same commit and on the same machine; else they are read again,
    because no single commit would reproduce the answers. The cache must be locked while states are saved.
    """

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        self._made_by = [*cache.commit, cache.machine]
        self._next = time.monotonic() + SAVE_SECONDS
        self._found: dict[str, dict[str, Any] | None] = {}
        self.taken = False
        """Whether a reading went on from a state of another process."""

    def due(self) -> bool:
        """Whether a state is to be saved now."""
        return time.monotonic() >= self._next

    def save(self, name: str, texts: Sequence[str], reading: Reading) -> None:
        """Save a reading in place of its last state. texts: a digest of each row's tokens so far."""
        if state_bytes(reading.state) <= LARGEST_STATE:
            content = io.BytesIO()
            saved = reading._replace(state=move(reading.state, "cpu"))._asdict()
            torch.save({**saved, "texts": list(texts), "made_by": self._made_by}, content)
            write_atomically(self._cache.state_path(name), content.getbuffer())
        self._next = time.monotonic() + SAVE_SECONDS

    def take(
        self, name: str, rows: int, first: int, last: int, texts: Callable[[int], Sequence[str]]
    ) -> Reading | None:
        """The saved state of a reading of this name and number of rows, after more than `first` and at most `last`
        tokens; None if there is none. It is given once. texts: makes the digests of so many tokens of each row."""
        if name not in self._found:
            self._found[name] = self._load(name)
        saved = self._found[name]
        if saved is None or not first < saved["tokens"] <= last or len(saved["texts"]) != rows:
            return None
        if saved["texts"] != list(texts(saved["tokens"])):
            return None
        self._found[name], self.taken = None, True
        return Reading(saved["tokens"], saved["state"], saved["measured"])

    def _load(self, name: str) -> dict[str, Any] | None:
        path = self._cache.state_path(name)
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            if saved.keys() != {*Reading._fields, "texts", "made_by"}:
                raise ValueError("fields are missing")
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
            warn(plain_console(), f"{path}: damaged; what it had read is read again")
            return None
        return saved if saved["made_by"] == self._made_by else None
