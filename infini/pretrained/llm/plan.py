"""Which tokens of a call go where: rows that stand alike are computed together. On the host, once a forward pass.

A row's real tokens are counted from its own first one, so the segment grid is right for every row of a padded batch and
padding reaches neither a window nor a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infini.errors import InputError


@dataclass(frozen=True)
class Group:
    """Rows that bring the same number of real tokens, in the same columns, to the same place of a segment."""

    rows: tuple[int, ...]
    everything: bool
    """Whether that is the whole call: all rows, all columns."""
    start: int
    """First column with a real token."""
    tokens: int
    """Real tokens of each row."""
    slot: int
    """Tokens that the rows' unfinished segment had before, in [0, segment length)."""
    segment: int
    """Segments that the rows had finished before, at most `depth`: later ones are all treated alike."""


@dataclass(frozen=True)
class SingleTokens:
    """Rows that bring one real token each, in the same column, to different places."""

    rows: tuple[int, ...]
    everything: bool
    start: int
    slots: tuple[int, ...]
    segments: tuple[int, ...]
    """As Group.segment, a row."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a group: `whole` segments, or, where that is 0, a part of one from `slot` on."""

    start: int
    stop: int
    whole: int
    slot: int
    segment: int


def spans(mask_BT: torch.Tensor | None, batch: int, columns: int) -> tuple[list[int], list[int]]:
    """(first real column, number of real tokens) of each row; InputError for padding between a row's tokens."""
    if mask_BT is None:
        return [0] * batch, [columns] * batch
    real_BT = mask_BT.bool()
    starts_B, counts_B = real_BT.long().argmax(1), real_BT.sum(1)
    column_T = torch.arange(columns, device=real_BT.device)
    block_BT = (column_T >= starts_B[:, None]) & (column_T < (starts_B + counts_B)[:, None])
    broken_B = (real_BT != block_BT).any(1)
    starts, counts, broken = torch.stack([starts_B, counts_B, broken_B.long()]).tolist()
    if any(broken):
        raise InputError(
            f"attention_mask: row {broken.index(1)} has padding between its tokens; it may stand before the first or "
            "after the last of them"
        )
    return starts, counts


def group_rows(
    lengths: Sequence[int], starts: Sequence[int], counts: Sequence[int], columns: int, segment_length: int, depth: int
) -> list[Group | SingleTokens]:
    """The work of one call. lengths: real tokens that each row has read before. Rows without a token are in no group."""
    found: dict[tuple[int, int, int, int], list[int]] = {}
    for row, (length, start, count) in enumerate(zip(lengths, starts, counts, strict=True)):
        if count:
            segment = min(length // segment_length, depth)
            found.setdefault((start, count, length % segment_length, segment), []).append(row)
    alike = {(start, count) for start, count, _, _ in found}
    if len(found) > 1 and len(alike) == 1 and next(iter(alike))[1] == 1:
        # Decoding: one call for all rows, however their segments began.
        by_row = sorted((row, slot, segment) for (_, _, slot, segment), rows in found.items() for row in rows)
        rows, slots, segments = zip(*by_row, strict=True)
        everything = len(rows) == len(lengths) and columns == 1
        return [SingleTokens(rows, everything, next(iter(alike))[0], slots, segments)]
    return [
        Group(tuple(rows), len(rows) == len(lengths) and columns == count, start, count, slot, segment)
        for (start, count, slot, segment), rows in found.items()
    ]


def pieces(group: Group, segment_length: int, depth: int, alike: bool) -> list[Piece]:
    """A group's tokens cut at segment boundaries, whole segments together.

    alike: all segments see the same keys, but for the memory; else the first `depth` stand alone.
    """
    cut, start, slot, segment = [], 0, group.slot, group.segment
    while start < group.tokens:
        left = group.tokens - start
        whole = left // segment_length if slot == 0 else 0
        if whole and not alike and segment < depth:
            whole = 1
        length = whole * segment_length if whole else min(segment_length - slot, left)
        cut.append(Piece(start, start + length, whole, slot, segment))
        start, slot = start + length, (slot + length) % segment_length
        if slot == 0:
            segment = min(segment + max(whole, 1), depth)
    return cut
