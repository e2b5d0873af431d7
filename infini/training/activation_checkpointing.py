"""Sequences read in parts of whole segments.

grouped: back-propagation through many segments with the activations of few, because those of each part are recomputed.
Only the state, which has a constant size, is kept between parts. Memory grows with the length of a part and with the
final hidden states, not with the length of the sequence times the number of layers.

cut: gradients stop at the boundaries of parts, as in a stage of the curriculum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from infini.nn.protocols import ModelOutput
from infini.nn.state import State, detach


def grouped(model: Callable[..., ModelOutput], tokens: int) -> Callable[..., ModelOutput]:
    """The model, called with at most `tokens` tokens at a time: same values and gradients, with each part's activations
    recomputed in the backward pass. Auxiliary losses, which are means over a call, are averaged by tokens.

    tokens: a multiple of the segment length.
    """

    def part(ids_BT: torch.Tensor, state: State | None, **beside: Any) -> ModelOutput:
        return checkpoint(model, ids_BT, state, use_reentrant=False, **beside)

    return _by_parts(part, tokens)


def cut(model: Callable[..., ModelOutput], tokens: int) -> Callable[..., ModelOutput]:
    """The model, called with at most `tokens` tokens at a time: same values, with the state between parts detached."""

    def part(ids_BT: torch.Tensor, state: State | None, **beside: Any) -> ModelOutput:
        return model(ids_BT, None if state is None else detach(state), **beside)

    return _by_parts(part, tokens)


def _by_parts(read: Callable[..., ModelOutput], tokens: int) -> Callable[..., ModelOutput]:
    def call(ids_BT: torch.Tensor, state: State | None = None, **beside_BT: torch.Tensor | None) -> ModelOutput:
        """beside_BT: masks, resets and weights of writes."""
        hidden, losses = [], []
        for start in range(0, ids_BT.shape[1], tokens):
            columns = slice(start, start + tokens)
            part = {name: None if each is None else each[:, columns] for name, each in beside_BT.items()}
            out = read(ids_BT[:, columns], state, **part)
            state = out.state
            hidden.append(out.hidden_BTD)
            losses.append(out.aux_loss * (out.hidden_BTD.shape[1] / ids_BT.shape[1]))
        assert state is not None
        return ModelOutput(torch.cat(hidden, 1), state, torch.stack(losses).sum())

    return call
