"""Long histories, a part of length extension: sequences that start after up to millions of tokens of irrelevant text.

Scaling a memory does not change its values, but reading more text does: with Eq. 5 they keep moving towards a limit,
about equally far with every doubling of the text. A history is therefore read in pieces with growing write weights,
each three times the total of those before it. Eight pieces act like 16 thousand, and the values move accordingly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from infini.nn.protocols import ModelOutput
from infini.nn.state import State, detach, map_state, place_rows, select_rows

WEIGHT_GROWTH = 4
"""Factor by which each piece multiplies the total weight in memory."""
REFRESH_STEPS = 20
"""Steps after which the histories are read again with the current weights."""
HISTORY_FRACTION = 0.5
"""Fraction of the rows that start after a history."""


def read_histories(model: Callable[..., ModelOutput], pieces_PT: torch.Tensor) -> State:
    """The states after the first piece, the first two, and so on, one per row; without gradients.

    pieces_PT: token ids. Write weights are such that the memory of row p has the weight of T WEIGHT_GROWTH^p tokens.
    """
    state, states = None, []
    with torch.no_grad():
        for p, piece_T in enumerate(pieces_PT):
            weight = float((WEIGHT_GROWTH - 1) * WEIGHT_GROWTH ** (p - 1)) if p else 1.0
            weight_T = torch.full(piece_T.shape, weight)
            state = detach(model(piece_T[None], state, write_weight_BT=weight_T[None]).state)
            states.append(state)
    return map_state(lambda *rows: torch.cat(rows), *states)


def sample_initial_states(fresh: State, histories: State, rng: np.random.Generator) -> State:
    """`fresh` with about HISTORY_FRACTION of its rows, at random, replaced by states after random histories."""
    n_rows, n_histories = (state.clock.slot_B.shape[0] for state in (fresh, histories))
    rows = np.flatnonzero(rng.random(n_rows) < HISTORY_FRACTION)
    chosen = rng.integers(0, n_histories, len(rows))
    return place_rows(fresh, torch.from_numpy(rows), select_rows(histories, torch.from_numpy(chosen)))
