"""What the data modules of all tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning

from infini.config.schema import Config


class ResumableDataModule(lightning.LightningDataModule, ABC):
    """Resuming from a Lightning checkpoint goes on with the batch after the last one that was trained on."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self._first_batch = 0

    @abstractmethod
    def revision(self, split: str) -> str:
        """Content hash of what a split is made of, as `data_record` has it; nothing is tokenised for it.

        Raises InputError when the data cannot be had.
        """

    def has_read(self, data: Mapping[str, Any], split: str) -> bool:
        """Whether a record says `data` of the split as it is now: a run on other texts is another run."""
        return data.get("revision") == self.revision(split)

    def state_dict(self) -> dict[str, Any]:
        """Batches trained on so far. Lightning fetches one ahead, so the loader itself would say one too many."""
        return {"batches": self.trainer.fit_loop.epoch_loop.batch_progress.total.ready if self.trainer else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batches that `state_dict` counts."""
        self._first_batch = int(state_dict["batches"])
