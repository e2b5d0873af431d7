"""The keys of continual pre-training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infini.config.data_files import text_files
from infini.config.fields import setting
from infini.config.schema import TaskConfig
from infini.errors import at_least, require
from infini.system.paths import is_folder


@dataclass
class ContinualConfig(TaskConfig):
    """Continual pre-training on a mixture of corpora."""

    measured_by_any_task = True
    # The model has read no text of other sources.
    evaluation_inherits = ("sources",)

    sources: list[str] = setting(
        "Corpora. One whose folder is missing is left out, and a line says so; the hub has all of them."
    )
    shares: list[float] | None = setting(
        "Share of each source in the tokens of a training; null: equal shares.", training=True
    )
    min_tokens: int = setting("Tokens of the shortest document to train on.", training=True)

    @property
    def corpus(self) -> str:
        """Empty, because the folder of its data holds a folder for each source."""
        return ""

    @property
    def corpora(self) -> tuple[str, ...]:
        return tuple(self.sources)

    def data_files(self, data_dir: Path, split: str, setting: str) -> list[Path]:
        """The files of all sources that there are."""
        found = [name for name in self.sources if is_folder(data_dir / name)]
        named = ", ".join(f"{name}/" for name in self.sources)
        require(bool(found), "task.sources", self.sources, f"{setting} holds none of the folders {named}")
        return [path for name in found for path in text_files(data_dir / name, split, setting)]

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task", self, 1, "min_tokens")
        once = len(set(self.sources)) == len(self.sources) > 0
        require(once, "task.sources", self.sources, "must name one corpus or more, each once")
        # The name of a document is source/file.
        plain = not any("/" in source for source in self.sources)
        require(plain, "task.sources", self.sources, "must be names of corpora, without /")
        whole = self.shares is None or (len(self.shares) == len(self.sources) and min(self.shares) > 0)
        require(whole, "task.shares", self.shares, "must have a number above 0 for each of task.sources, or be null")


Config = ContinualConfig
