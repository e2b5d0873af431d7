"""Truncated back-propagation: groups of segments between which gradients are cut are read in parallel.

If a gradient reaches back at most bptt_depth segments (see Recurrence), a document consists of groups of bptt_depth + 1
segments that share only the memory handed from one to the next. A call is read twice. The first pass, without
gradients, reads segment after segment and finds the memory at the start of each group. The second pass, with
gradients, reads the first segments of all groups as one batch, then the second ones, and so on. Values and gradients
equal those of one sequential pass up to rounding. The sequential part with gradients is one group, for any call length.

Letters as in infini/nn/recurrent.py, and R segments of a call with N tokens each, M vectors of the memory, K pairs of
a segment and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini.nn.host import to_device, to_numpy

if TYPE_CHECKING:
    from infini.nn.recurrent import Recurrence

MAX_NUMEL = 1 << 14
"""Size of a segment's embeddings over all rows up to which this is faster: launching operations then takes longer than
running them. The pass without gradients adds a third of the arithmetic. Measured on a CPU only."""

Resets = Sequence[np.ndarray | None]


class Schedule(NamedTuple):
    """Two tables on the host, with an entry for each segment and row of a call [R, B]: the document's writes before it,
    and the round in which it is read with gradients, which is the number of its group's segments before it in the
    call."""

    writes_RB: np.ndarray
    round_RB: np.ndarray


def schedule(writes_B: Tensor, resets: Resets, group: int) -> Schedule:
    """The schedule of a call. writes_B: writes before the call. resets: rows that are reset before each segment [B];
    None: none. group: segments in a group."""
    before_B = to_numpy(writes_B)
    round_B = np.full_like(before_B, -1)
    writes, rounds = [], []
    for restarts_B in resets:
        if restarts_B is not None:
            before_B = np.where(restarts_B, 0, before_B)
        round_B = np.where(before_B % group == 0, 0, round_B + 1)
        writes.append(before_B)
        rounds.append(round_B)
        before_B = before_B + 1
    return Schedule(np.stack(writes), np.stack(rounds))


def read_groups(
    model: Recurrence, ids_BT: Tensor, memory_BMD: Tensor, writes_B: Tensor, resets: Resets
) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states [B, T, D] of whole segments, and the memory and the number of writes after them.

    memory_BMD, writes_B: before the call. resets: see schedule.
    """
    assert model.gradient_horizon is not None
    plan, device = schedule(writes_B, resets, model.gradient_horizon + 1), ids_BT.device
    R, B = plan.round_RB.shape
    # A pair's turn is its place in the order in which pairs are read.
    order_K = plan.round_RB.ravel().argsort(kind="stable")
    turn_RB = order_K.argsort().reshape(R, B)
    counts = np.bincount(plan.round_RB.ravel()).tolist()
    # Index of a pair's memory: in round 0 among the memories at the start of groups, later among those that the
    # previous round wrote, at the same row's previous segment.
    begin_of_round_before = np.cumsum([0, 0, *counts[:-2]])
    # (roll moves the last segment before the first one; that entry is not used, since the first one is in round 0.)
    among_written_RB = np.roll(turn_RB, 1, 0) - begin_of_round_before[plan.round_RB]
    source_RB = np.where(plan.round_RB > 0, among_written_RB, np.arange(R * B).reshape(R, B))
    last_beginning = int(np.flatnonzero((plan.round_RB == 0).any(1))[-1])
    writes_K = torch.from_numpy(plan.writes_RB.ravel()[order_K])
    order, source, end_B, turn_K = (
        to_device(x, device) for x in (order_K, source_RB.ravel()[order_K], turn_RB[-1], turn_RB.T.ravel())
    )
    ids_RBN = ids_BT.unflatten(1, (R, -1)).transpose(0, 1)
    memories = [_beginnings(model, ids_RBN, memory_BMD, plan, resets[: last_beginning + 1]).flatten(0, 1)]
    tokens, tables = model.embedding(ids_RBN.flatten(0, 1)[order]).split(counts), model.tables()
    outputs = []
    for tokens_KND, before_K, from_K in zip(tokens, writes_K.split(counts), source.split(counts), strict=True):
        before_KMD = memories[-1].index_select(0, from_K)
        hidden_KND, written_KWD, _ = model.read_segment(tokens_KND, tables, before_KMD, before_K)
        assert written_KWD is not None
        outputs.append(hidden_KND)
        memories.append(model.updated(before_KMD, written_KWD.to(before_KMD.dtype)))
    hidden_BTD = torch.cat(outputs).index_select(0, turn_K).unflatten(0, (B, R)).flatten(1, 2)
    return hidden_BTD, torch.cat(memories[1:]).index_select(0, end_B), torch.from_numpy(plan.writes_RB[-1] + 1)


def _beginnings(model: Recurrence, ids_RBN: Tensor, memory_BMD: Tensor, plan: Schedule, resets: Resets) -> Tensor:
    """The memory before each of the first len(resets) segments [., B, M, D]. The first one keeps the gradient history
    of the call's state."""
    found: list[Tensor] = []
    writes_RB = torch.from_numpy(plan.writes_RB)
    with torch.no_grad():
        # Separate tables: T5's biases in them have no gradient history.
        tables = model.tables()
    for segment, restarts_B in enumerate(resets):
        if found:
            with torch.no_grad():
                tokens_BND, writes_B = model.embedding(ids_RBN[segment - 1]), writes_RB[segment - 1]
                _, written_BWD, _ = model.read_segment(tokens_BND, tables, found[-1], writes_B, outputs=False)
                assert written_BWD is not None
                memory_BMD = model.updated(found[-1], written_BWD.to(memory_BMD.dtype))
        if restarts_B is not None:
            memory_BMD = memory_BMD.masked_fill(to_device(restarts_B, memory_BMD.device)[:, None, None], 0)
        found.append(memory_BMD if found else model.cut_gradient(memory_BMD, writes_RB[0]))
    # Older versions of torch cache a weight cast without gradients, which would then get no gradient in the second
    # pass.
    torch.clear_autocast_cache()
    return torch.stack(found)
