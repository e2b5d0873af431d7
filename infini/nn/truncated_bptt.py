"""Groups of segments that no gradient crosses, read side by side.

Where a gradient goes back bptt_depth segments at most (see Recurrence), a document falls into groups of bptt_depth + 1
segments that have nothing in common but the memory that one hands to the next. So a call is read twice: segment by
segment without gradients, for the memory that each group begins with; then the first segments of all groups as one
batch, the second ones, and so on. Values and gradients are those of reading once, segment by segment, up to rounding;
what is done one after the other with gradients is one group, however long the call.

Letters as in infini/nn/recurrent.py; R segments of a call of N tokens each, M vectors of the memory, K pairs of a
segment and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from infini.nn.recurrent import Recurrence

MAX_NUMEL = 1 << 14
"""Numbers of a segment's embeddings, of all rows, up to which this pays: where to call operations takes longer than
what they do. The reading without gradients is a third of the arithmetic more. Measured on a processor alone."""

Resets = Sequence[torch.Tensor | None]


class Schedule(NamedTuple):
    """Of each segment and row of a call, on the processor: how often the document wrote before it [R, B], and the round
    in which it is read with gradients, which is how many segments of its group the call has before it [R, B]."""

    writes_RB: torch.Tensor
    round_RB: torch.Tensor


def schedule(writes_B: torch.Tensor, resets: Resets, group: int) -> Schedule:
    """writes_B: before the call. resets: which rows forget before each segment [B] (None: none). group: segments of a
    group."""
    none_B = torch.zeros_like(writes_B, dtype=torch.bool)
    resets_RB = torch.stack([none_B if reset_B is None else reset_B for reset_B in resets]).cpu()
    writes_B = writes_B.cpu()
    round_B = torch.full_like(writes_B, -1)
    writes, rounds = [], []
    for reset_B in resets_RB:
        writes_B = writes_B.masked_fill(reset_B, 0)
        round_B = (round_B + 1).masked_fill(writes_B % group == 0, 0)
        writes.append(writes_B)
        rounds.append(round_B)
        writes_B = writes_B + 1
    return Schedule(torch.stack(writes), torch.stack(rounds))


def read_groups(
    model: Recurrence, ids_BT: torch.Tensor, memory_BMD: torch.Tensor, writes_B: torch.Tensor, resets: Resets
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Final hidden states [B, T, D] of whole segments, and memory and number of writes after them.

    memory_BMD, writes_B: before the call. resets: see schedule.
    """
    assert model.gradient_horizon is not None
    plan, device = schedule(writes_B, resets, model.gradient_horizon + 1), ids_BT.device
    R, B = plan.round_RB.shape
    # A pair's turn is where it comes among all.
    order_K = plan.round_RB.flatten().sort(stable=True).indices
    turn_RB = order_K.argsort().view(R, B)
    counts = plan.round_RB.flatten().bincount().tolist()
    # Where a pair's memory is: in the first round among those that groups begin with, later among what the round before
    # wrote, that of the same row's segment before.
    begin_of_round_before = torch.tensor([0, 0, *counts[:-2]]).cumsum(0)
    # (What roll puts before the first segment is not used: that is in the first round.)
    among_written_RB = turn_RB.roll(1, 0) - begin_of_round_before[plan.round_RB]
    source_RB = torch.where(plan.round_RB > 0, among_written_RB, torch.arange(R * B).view(R, B))
    source_K = source_RB.flatten()[order_K]
    last_beginning = int((plan.round_RB == 0).any(1).nonzero().max())
    order_K, source_K, end_B, turn_K = (x.to(device) for x in (order_K, source_K, turn_RB[-1], turn_RB.T.flatten()))
    writes_RB = plan.writes_RB.to(device)
    ids_RBN = ids_BT.unflatten(1, (R, -1)).transpose(0, 1)
    memories = [_beginnings(model, ids_RBN, memory_BMD, writes_RB, resets[: last_beginning + 1]).flatten(0, 1)]
    tokens, tables = model.embedding(ids_RBN.flatten(0, 1)[order_K]).split(counts), model.tables()
    outputs = []
    for tokens_KND, writes_K, from_K in zip(
        tokens, writes_RB.flatten()[order_K].split(counts), source_K.split(counts), strict=True
    ):
        before_KMD = memories[-1].index_select(0, from_K)
        hidden_KND, written_KWD, _ = model.read_segment(tokens_KND, tables, before_KMD, writes_K)
        assert written_KWD is not None
        outputs.append(hidden_KND)
        memories.append(model.updated(before_KMD, written_KWD.to(before_KMD.dtype)))
    hidden_BTD = torch.cat(outputs).index_select(0, turn_K).unflatten(0, (B, R)).flatten(1, 2)
    return hidden_BTD, torch.cat(memories[1:]).index_select(0, end_B), writes_RB[-1] + 1


def _beginnings(
    model: Recurrence, ids_RBN: torch.Tensor, memory_BMD: torch.Tensor, writes_RB: torch.Tensor, resets: Resets
) -> torch.Tensor:
    """The memory before each of the first segments [., B, M, D], as many as resets are given; that before the first one
    has the history of what the call was given."""
    found: list[torch.Tensor] = []
    with torch.no_grad():
        # Not those of the reading with gradients: T5's biases would have no history.
        tables = model.tables()
    for segment, reset_B in enumerate(resets):
        if found:
            with torch.no_grad():
                tokens_BND, writes_B = model.embedding(ids_RBN[segment - 1]), writes_RB[segment - 1]
                _, written_BWD, _ = model.read_segment(tokens_BND, tables, found[-1], writes_B, outputs=False)
                assert written_BWD is not None
                memory_BMD = model.updated(found[-1], written_BWD.to(memory_BMD.dtype))
        if reset_B is not None:
            memory_BMD = memory_BMD.masked_fill(reset_B[:, None, None], 0)
        found.append(memory_BMD if found else model.cut_gradient(memory_BMD, writes_RB[0]))
    # Older versions of torch keep a weight that was cast without gradients, so that it would get none later on.
    torch.clear_autocast_cache()
    return torch.stack(found)
