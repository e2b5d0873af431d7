"""The curriculum of tasks of running text: gradients over few segments first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_model
from test_training import SEGMENT, fit, recipe_overrides

from infini.config.compose import compose
from infini.errors import InputError
from infini.runs.common import load_data_module
from infini.training.activation_checkpointing import cut


def test_a_curriculum_over_segments_of_running_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMT's: one segment at a time, then two, then the whole sequence; the batches are those of every training."""
    asked: list[int] = []

    def watched(model: Any, tokens: int) -> Any:
        asked.append(tokens)
        return cut(model, tokens)

    monkeypatch.setattr("infini.training.module.cut", watched)
    words = [*recipe_overrides(5, segments=4), f"recipe.curriculum=[[{SEGMENT},{SEGMENT}],[{SEGMENT},{2 * SEGMENT}]]"]
    staged = fit(make_model({"name": "rmt"}, torch.float64), compose([*words, "recipe.advance_below=100"]))
    assert asked == [SEGMENT, 2 * SEGMENT] and staged.stage_steps == [1, 2]
    plain = fit(make_model({"name": "rmt"}, torch.float64), compose(recipe_overrides(5, segments=4)))
    # One segment a call is other operations than four, and other rounding.
    assert staged.loss_curve[0] == pytest.approx(plain.loss_curve[0], rel=1e-8)
    assert staged.tokens_seen == plain.tokens_seen
    assert staged.loss_curve[1] != plain.loss_curve[1]


def test_a_stage_ends_after_its_steps_where_the_loss_stays_above() -> None:
    """Text never gets to the loss of a pass key: without steps the first stage is the last one."""
    words = [*recipe_overrides(7, segments=4), "recipe.advance_below=0"]
    stages = f"recipe.curriculum=[[{SEGMENT},{SEGMENT},2],[{SEGMENT},{2 * SEGMENT},3]]"
    timed = fit(make_model({"name": "rmt"}, torch.float32), compose([*words, stages]))
    assert timed.stage_steps == [2, 5] and timed.in_last_stage
    endless = fit(make_model({"name": "rmt"}, torch.float32), compose([*words, stages.replace(",2]", "]", 1)]))
    assert endless.stage_steps == [] and not endless.in_last_stage


@pytest.mark.parametrize("stages", ["[[16]]", "[[16,8]]", "[[16,32,0]]", "[[16,32,1,1]]"])
def test_a_stage_that_is_none_is_one_line(stages: str) -> None:
    with pytest.raises(InputError, match="^recipe.curriculum=.*: stages must be \\[segment length, tokens a sequence"):
        compose([f"recipe.curriculum={stages}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe.curriculum=[[8,64]]"], "stages of task=pg19 are \\[dims.segment_length=16, a multiple of it\\]"),
        (["recipe.curriculum=[[16,40]]"], "stages of task=pg19 are"),
        (["task=booksum", "recipe.curriculum=[[16,64]]"], "booksum has no stages"),
    ],
)
def test_a_curriculum_that_a_task_cannot_follow_is_one_line(words: list[str], said: str) -> None:
    cfg = compose(["task=pg19", "dims.segment_length=16", "task.data_dir=synthetic", *words])
    with pytest.raises(InputError, match=f"^recipe.curriculum=.*{said}"):
        load_data_module(cfg).setup("fit")
