"""Groups of segments that no gradient crosses, read side by side.

Where a gradient goes back bptt_depth segments at most (see Recurrence), a document falls into groups of bptt_depth + 1
segments that have nothing in common but the memory that one hands to the next. So a call is read twice: segment by
segment without gradients, for the memory that each group begins with; then the first segments of all groups as one
batch, the second ones, and so on. Values and gradients are those of reading once, segment by segment; what is done one
after the other with gradients is one group, however long the call.

Letters as in infini/recurrent.py; R segments of a call, K pairs of a segment and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from infini.recurrent import Recurrence

Resets = Sequence[torch.Tensor | None]


class Schedule(NamedTuple):
    """On the processor. For each segment and row of a call how often its document wrote before it [R, B], and the
    segment's place in what the call has of its group [R, B]."""

    writes_RB: torch.Tensor
    place_RB: torch.Tensor


def schedule(writes_B: torch.Tensor, resets: Resets, group: int) -> Schedule:
    """writes_B: before the call. resets: which rows forget before each segment [B] (None: none). group: segments of a
    group."""
    writes_B = writes_B.cpu()
    place_B = torch.full_like(writes_B, -1)
    writes, places = [], []
    for reset_B in resets:
        if reset_B is not None:
            writes_B = writes_B.masked_fill(reset_B.cpu(), 0)
        place_B = (place_B + 1).masked_fill(writes_B % group == 0, 0)
        writes.append(writes_B)
        places.append(place_B)
        writes_B = writes_B + 1
    return Schedule(torch.stack(writes), torch.stack(places))


def read_groups(
    model: Recurrence, ids_BT: torch.Tensor, memory_BMD: torch.Tensor, writes_B: torch.Tensor, resets: Resets
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Final hidden states [B, T, D] of whole segments, and memory and number of writes after them.

    memory_BMD, writes_B: before the call. resets: see schedule.
    """
    assert model.gradient_horizon is not None
    plan, device = schedule(writes_B, resets, model.gradient_horizon + 1), ids_BT.device
    R, B = plan.place_RB.shape
    ids_RBN = ids_BT.unflatten(1, (R, -1)).transpose(0, 1)
    writes_RB = plan.writes_RB.to(device)
    last = int((plan.place_RB == 0).any(1).nonzero().max())
    begins_RBMD = _beginnings(model, ids_RBN, memory_BMD, writes_RB, resets[: last + 1])
    tables = model.tables()
    # Of each pair, where it is among all that were read.
    at_RB = torch.zeros_like(plan.place_RB)
    outputs: list[torch.Tensor] = []
    memories: list[torch.Tensor] = []
    begun = read = 0
    for place in range(int(plan.place_RB.max()) + 1):
        segment_K, row_K = (plan.place_RB == place).nonzero(as_tuple=True)
        pair = segment_K.to(device), row_K.to(device)
        if place == 0:
            before_KMD = begins_RBMD[pair]
        else:
            before_KMD = memories[-1][(at_RB[segment_K - 1, row_K] - begun).to(device)]
        begun, read = read, read + len(row_K)
        at_RB[segment_K, row_K] = torch.arange(begun, read)
        tokens_KND = model.embedding(ids_RBN[pair])
        hidden_KND, written_KWD, _ = model.read_segment(tokens_KND, tables, before_KMD, writes_RB[pair])
        assert written_KWD is not None
        outputs.append(hidden_KND)
        memories.append(model.updated(before_KMD, written_KWD.to(before_KMD.dtype)))
    hidden_BTD = torch.cat(outputs)[at_RB.T.to(device)].flatten(1, 2)
    return hidden_BTD, torch.cat(memories)[at_RB[-1].to(device)], writes_RB[-1] + 1


def _beginnings(
    model: Recurrence, ids_RBN: torch.Tensor, memory_BMD: torch.Tensor, writes_RB: torch.Tensor, resets: Resets
) -> torch.Tensor:
    """The memory before each of the first segments [., B, M, D], as many as resets are given; that before the first one
    has the history of what the call was given."""
    found: list[torch.Tensor] = []
    tables = None
    for segment, reset_B in enumerate(resets):
        if found:
            with torch.no_grad():
                tables = model.tables() if tables is None else tables
                tokens_BND, writes_B = model.embedding(ids_RBN[segment - 1]), writes_RB[segment - 1]
                _, written_BWD, _ = model.read_segment(tokens_BND, tables, found[-1], writes_B, outputs=False)
                assert written_BWD is not None
                memory_BMD = model.updated(found[-1], written_BWD.to(memory_BMD.dtype))
        if reset_B is not None:
            memory_BMD = memory_BMD.masked_fill(reset_B[:, None, None], 0)
        found.append(memory_BMD if found else model.cut_gradient(memory_BMD, writes_RB[0]))
    return torch.stack(found)
