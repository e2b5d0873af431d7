"""Length extension, an addition to the paper: train on short sequences as if their past were long.

At length L a memory read is divided by a sum over about L keys, which dilutes the relevant ones: a memory that works on
short sequences need not work on long ones. Multiplying (M, z) by c at a segment boundary does not change a read at that
point, because numerator and denominator scale alike. It reduces the relative weight of all later writes to 1/c, as if c
times as many tokens had been read. Training with it demands the selective keys and queries that long sequences need.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from infini.nn.protocols import ModelOutput
from infini.nn.state import State, scale_memory

MIN_SEGMENTS = 3
"""Segments of the shortest sequence that length extension changes."""


def draw(rng: np.random.Generator, n_rows: int, n_segments: int, highest: float) -> tuple[int, torch.Tensor]:
    """A random boundary, as the number of segments before it, and a factor per row, log-uniform in [1, highest].

    n_segments: at least MIN_SEGMENTS. The last boundary is never sampled: nothing written after it is read.
    """
    boundary = int(rng.integers(1, n_segments - 1))
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

    cut: a multiple of the segment length, below T, counted from a state on a segment boundary.

    One call is enough: reads before the cut do not depend on a common factor of all writes, so every token before the
    cut is written factor_B times (also with Eq. 5: M and z stay proportional).
    """
    weight_BT = torch.ones(ids_BT.shape, dtype=factor_B.dtype)
    weight_BT[:, :cut] = factor_B[:, None]
    before = None if state is None else scale_memory(state, factor_B)
    return model(ids_BT, before, mask_BT=mask_BT, reset_BT=reset_BT, write_weight_BT=weight_BT)


def extended_in_two_calls(
    model: Callable[..., ModelOutput],
    ids_BT: torch.Tensor,
    state: State | None,
    mask_BT: torch.Tensor | None,
    reset_BT: torch.Tensor | None,
    cut: int,
    factor_B: torch.Tensor,
    carry: bool = False,
) -> ModelOutput:
    """Like extended_call, for models without write weights (see infini.nn.protocols) and for carried states.

    carry: return the state of a plain call, for the next sequence. The factor is for this sequence only: if it were
    carried on, factors would accumulate over sequences, and later writes would have less and less weight. The tokens
    after the cut are therefore read again, without gradients.
    """

    def part(tensor_BT: torch.Tensor | None, later: bool) -> torch.Tensor | None:
        return None if tensor_BT is None else tensor_BT[:, cut:] if later else tensor_BT[:, :cut]

    first = model(ids_BT[:, :cut], state, mask_BT=part(mask_BT, False), reset_BT=part(reset_BT, False))
    rest = {"mask_BT": part(mask_BT, True), "reset_BT": part(reset_BT, True)}
    second = model(ids_BT[:, cut:], scale_memory(first.state, factor_B), **rest)
    after = second.state
    if carry:
        with torch.no_grad():
            after = model(ids_BT[:, cut:], first.state, **rest).state
    hidden_BTD = torch.cat([first.hidden_BTD, second.hidden_BTD], 1)
    # Means over tokens, as of one call.
    share = cut / ids_BT.shape[1]
    return ModelOutput(hidden_BTD, after, share * first.aux_loss + (1 - share) * second.aux_loss)
