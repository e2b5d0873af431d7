"""Data set and base class of the data modules of all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

import lightning
from torch.utils.data import IterableDataset

from infini.config.schema import Config

T = TypeVar("T")


class NumberedDataset(IterableDataset[T]):
    """make(first), make(first + 1), ... without end."""

    def __init__(self, make: Callable[[int], T], first: int) -> None:
        self.make, self.first = make, first

    def __iter__(self) -> Iterator[T]:
        return map(self.make, count(self.first))


class ResumableDataModule(lightning.LightningDataModule, ABC):
    """A training that resumes from a Lightning checkpoint continues with the batch after the last one it trained on."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self._first_batch = 0

    @abstractmethod
    def revision(self, split: str) -> str:
        """Content hash of a split's texts, as in `data_record`, without tokenizing them.

        Raises InputError when the data cannot be loaded.
        """

    @property
    def identity(self) -> str:
        """Names the data of an unfinished training, which resumes on the same data only. Call it after setup."""
        task: Any = self
        return f"{task.data_record('train')['revision'][:8]}-{task.tokenizer.hash[:8]}"

    def has_read(self, data: Mapping[str, Any], split: str) -> bool:
        """Whether a record's `data` describes the current texts of the split."""
        return data.get("revision") == self.revision(split)

    def state_dict(self) -> dict[str, Any]:
        """Batches trained on so far. The loader itself is one ahead, because Lightning prefetches."""
        return {"batches": self.trainer.fit_loop.epoch_loop.batch_progress.total.ready if self.trainer else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches that `state_dict` counts."""
        self._first_batch = int(state_dict["batches"])
