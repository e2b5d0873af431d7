"""Which jobs of a sweep are done, so that one that is stopped goes on with the others when it is started again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from infini.records import write_atomically

if TYPE_CHECKING:
    from infini.config.schema import Config


class SweepProgress:
    """A folder with an empty file for every job that is done; jobs may run in several processes.

    Of no use once every job is done: then the same command runs them all again.
    """

    def __init__(self, results_dir: str | Path, verb: str, overrides: Sequence[str]) -> None:
        self.folder = Path(results_dir) / "unfinished" / f"sweep-{_digest(verb, *overrides)}"

    def is_done(self, cfg: Config) -> bool:
        """Whether a job of this configuration came to its end in an earlier sitting."""
        return self._path(cfg).exists()

    def done(self, cfg: Config) -> None:
        """Remember that this job came to its end."""
        write_atomically(self._path(cfg), b"")

    def clear(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, cfg: Config) -> Path:
        return self.folder / _digest(json.dumps(asdict(cfg), sort_keys=True, default=str))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
