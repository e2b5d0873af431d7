"""Length extension, an addition to the paper: train on short sequences as if their past were long.

At length L a memory's read is divided by a sum over about L keys, so a memory that works on short sequences need not
work on long ones: what has to be found is diluted. Multiplying (M, z) by c at a segment boundary leaves what was read
of it unchanged, numerator and denominator alike, and makes everything written later weigh 1/c as much beside it, as
if c times as many tokens had been read. Training with that asks keys and queries for the selectivity that length needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from infini.nn.protocols import ModelOutput
from infini.nn.state import State, scale_memory


def draw(rng: np.random.Generator, n_rows: int, n_segments: int, highest: float) -> tuple[int, torch.Tensor]:
    """A boundary, 1 to n_segments - 1 (segments before it), and a factor a row, log-uniform in [1, highest]."""
    boundary = int(rng.integers(1, n_segments))
    factors = np.exp(rng.uniform(0.0, math.log(highest), n_rows))
    return boundary, torch.from_numpy(factors).float()


def extended_call(
    model: Callable[..., ModelOutput],
    ids_BT: torch.Tensor,
    state: State | None,
    mask_BT: torch.Tensor | None,
    reset_BT: torch.Tensor | None,
    cut: int,
    factor_B: torch.Tensor,
) -> ModelOutput:
    """model(ids_BT, state, mask_BT, reset_BT) with the memory multiplied by factor_B after `cut` tokens.

    cut: a multiple of the segment length, below T, counted from a state that stands on a boundary.

    In one call: what is read before the cut is the same whatever all that was written by then is multiplied with, so
    every token before the cut writes factor_B times as much from the start (with Eq. 5 too: M and z stay proportional).
    """
    weight_BT = torch.ones(ids_BT.shape, dtype=factor_B.dtype)
    weight_BT[:, :cut] = factor_B[:, None]
    before = None if state is None else scale_memory(state, factor_B)
    return model(ids_BT, before, mask_BT=mask_BT, reset_BT=reset_BT, write_weight_BT=weight_BT.to(ids_BT.device))


def carried_call(
    model: Callable[..., ModelOutput],
    ids_BT: torch.Tensor,
    state: State | None,
    mask_BT: torch.Tensor | None,
    reset_BT: torch.Tensor | None,
    cut: int,
    factor_B: torch.Tensor,
) -> ModelOutput:
    """The hidden states and losses of extended_call, and the state of a plain call: what a next sequence goes on from.

    The factor is for this sequence alone: carried on, it would be multiplied in every sequence, and what was written
    since would weigh less for ever. What follows the cut is therefore read once more, without gradients.
    """

    def part(tensor_BT: torch.Tensor | None, later: bool) -> torch.Tensor | None:
        return None if tensor_BT is None else tensor_BT[:, cut:] if later else tensor_BT[:, :cut]

    first = model(ids_BT[:, :cut], state, mask_BT=part(mask_BT, False), reset_BT=part(reset_BT, False))
    rest = {"mask_BT": part(mask_BT, True), "reset_BT": part(reset_BT, True)}
    second = model(ids_BT[:, cut:], scale_memory(first.state, factor_B), **rest)
    with torch.no_grad():
        carried = model(ids_BT[:, cut:], first.state, **rest).state
    hidden_BTD = torch.cat([first.hidden_BTD, second.hidden_BTD], 1)
    return ModelOutput(hidden_BTD, carried, first.aux_loss + second.aux_loss)
