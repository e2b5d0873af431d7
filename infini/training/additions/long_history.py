"""Long histories, a part of length extension: sequences that begin after up to millions of tokens of irrelevant text.

Scaling a memory leaves what is read of it as it was. Reading on does not: every segment is written beside what was read
of the memory before it, and by Eq. 5 values go on moving towards what the rule converges to, about as far with every
doubling of what was read. So a history is read in pieces that write more and more, each three times as much as all
before it: eight pieces stand for 16 thousand, and the values move as if those had been read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from infini.nn.protocols import ModelOutput
from infini.nn.state import State, detach, map_state, place_rows, select_rows

GROWTH = 4
"""How many times as much is in memory with every piece."""
EVERY = 20
"""Steps after which the histories are read again, by the weights as they are then."""
SHARE = 0.5
"""Share of the rows that begin after a history."""


def read_histories(model: Callable[..., ModelOutput], pieces_PT: torch.Tensor) -> State:
    """The states after the first piece, after the first two, and so on, a row each; without gradients.

    pieces_PT: token ids. The first is written as it is, each later one so that row p has a memory of T GROWTH^p tokens.
    """
    state, states = None, []
    with torch.no_grad():
        for p, piece_T in enumerate(pieces_PT):
            weight = float((GROWTH - 1) * GROWTH ** (p - 1)) if p else 1.0
            weight_T = torch.full(piece_T.shape, weight, device=piece_T.device)
            state = detach(model(piece_T[None], state, write_weight_BT=weight_T[None]).state)
            states.append(state)
    return map_state(lambda *rows: torch.cat(rows), *states)


def sample_initial_states(fresh: State, histories: State, rng: np.random.Generator) -> State:
    """`fresh` with about SHARE of its rows, drawn at random, after any of the histories."""
    n_rows, n_histories = (state.clock.slot_B.shape[0] for state in (fresh, histories))
    rows = np.flatnonzero(rng.random(n_rows) < SHARE)
    chosen = rng.integers(0, n_histories, len(rows))
    return place_rows(fresh, torch.from_numpy(rows), select_rows(histories, torch.from_numpy(chosen)))
