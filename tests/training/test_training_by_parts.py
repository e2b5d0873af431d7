"""Trainings that do not read a sequence whole: groups of segments, and the length extension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same_state, make_model
from test_training import SEGMENT, fit, recipe_overrides

from infini.config.compose import compose
from infini.training.activation_checkpointing import grouped
from infini.training.additions import length_extension
from infini.training.module import LanguageModelModule

SEGMENTS = 4


def trained(steps: int, *words: str, model: str = "infini_linear", carry_state: bool = True) -> LanguageModelModule:
    """A training on documents that end within sequences, of the same start each time."""
    cfg = compose([*recipe_overrides(steps, SEGMENTS), "optimizer=adamw", *words])
    return fit(make_model({"name": model}, torch.float64), cfg, carry_state=carry_state)


@pytest.mark.parametrize("model", ["infini_delta", "transformer_xl", "rmt"])
def test_a_training_by_groups_of_segments_is_the_training(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def watched(model: Any, tokens: int) -> Any:
        asked.append(tokens)
        return grouped(model, tokens)

    monkeypatch.setattr("infini.training.module.grouped", watched)
    whole = trained(5, model=model)
    parts = trained(5, "recipe.checkpoint_segments=1", model=model)
    assert asked == [SEGMENT] * 5
    assert [loss for _, loss in parts.loss_curve] == pytest.approx([loss for _, loss in whole.loss_curve], rel=1e-6)
    for (name, ours), theirs in zip(parts.model.named_parameters(), whole.model.parameters(), strict=True):
        assert_close(ours, theirs, 1e-6, name)
    # A group of as many segments as a sequence has, or more, is no group.
    trained(1, f"recipe.checkpoint_segments={SEGMENTS}", model=model)
    assert len(asked) == 5


@pytest.mark.parametrize("groups", [[], ["recipe.checkpoint_segments=1"]], ids=["whole", "by groups"])
def test_the_length_extension_is_for_its_own_sequence_alone(groups: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row continues from what it read, without the factor; where no row continues one call is enough."""
    called: list[str] = []

    def watch(name: str, call: Any) -> None:
        def watched(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(length_extension, name, watched)

    watch("extended_in_two_calls", length_extension.extended_in_two_calls)
    watch("extended_call", length_extension.extended_call)
    words = ["recipe.length_extension=1000", "recipe.length_extension_share=1.0"]
    assert_same_state(trained(1, *words, *groups).carried, trained(1).carried, 1e-9)
    assert called == ["extended_in_two_calls"]
    # The memory is seen to be longer where something is written after the boundary, and read after that.
    assert trained(4, *words, *groups).loss_curve != trained(4).loss_curve
    called.clear()
    trained(1, *words, *groups, carry_state=False)
    assert called == ["extended_call"]
    trained(2, "recipe.length_extension=1000", "recipe.length_extension_share=0.0")
    trained(2, *words, model="rmt")
    assert len(called) == 1, "never, and of models without such a memory"
