"""The keys of the long-context task."""

from __future__ import annotations

from dataclasses import dataclass

from infini.config.fields import setting
from infini.config.schema import TaskConfig
from infini.errors import at_least, one_of, require

NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
"""RULER's tasks with one needle: in sentences repeated, in essays, and in essays with an identifier as the needle."""
BABILONG = tuple(f"babilong_qa{number}" for number in range(1, 6))
"""The tasks of BABILong that its data set has with long texts."""


@dataclass
class LongContextConfig(TaskConfig):
    """Questions on long inputs: RULER's single needles, and BABILong."""

    evaluation_reads = ("length", "part")
    evaluation_changes = ("dims.segment_length",)
    evaluates_any_model = True
    is_trained_on = False

    subtasks: list[str] = setting(
        f"Of {', '.join(NEEDLES)} (RULER) and {BABILONG[0]} to {BABILONG[-1]}. The first needs no network.",
        evaluation=True,
    )
    examples: int = setting("Prompts for each subtask and length.", evaluation=True)

    @property
    def reads_data(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task", self, 1, "examples")
        once = len(set(self.subtasks)) == len(self.subtasks) > 0
        require(once, "task.subtasks", self.subtasks, "must name one subtask or more, each once")
        for name in self.subtasks:
            one_of("task.subtasks", name, (*NEEDLES, *BABILONG))


Config = LongContextConfig
