"""The plan of a call: which rows of a batch are computed together. The host makes it once for each forward pass.

Each row counts its real tokens from its own first one. So every row of a padded batch has the right segments, and
padding enters neither a window nor a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from infini.nn.host import to_numpy

Columns = range | tuple[int, ...]
"""The columns of a row's real tokens in a call; a range if there is no padding between them."""


@dataclass(frozen=True)
class Group:
    """Rows that are computed together: they have real tokens in the same columns, and `slot` and `segment` in
    common."""

    rows: tuple[int, ...]
    everything: bool
    """Whether the group is the whole call: all rows and all columns."""
    columns: Columns
    """The columns of the rows' real tokens."""
    slot: int
    """Tokens of each row's unfinished segment before the call, in [0, segment length)."""
    segment: int
    """Segments that each row had finished before the call, at most `depth`: all later ones are treated alike."""


@dataclass(frozen=True)
class SingleTokens:
    """Rows that bring one real token each, in the same column, to different places."""

    rows: tuple[int, ...]
    everything: bool
    columns: Columns
    slots: tuple[int, ...]
    segments: tuple[int, ...]
    """Group.segment of each row."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a group's rows: `whole` segments, or, where that is 0, a part of one from `slot` on."""

    start: int
    stop: int
    whole: int
    slot: int
    segment: int


def real_columns(mask_BT: Tensor | None, batch: int, columns: int) -> list[Columns]:
    """The columns of each row's real tokens. mask_BT: 0 is padding; None: all are real."""
    if mask_BT is None:
        return [range(columns)] * batch
    rows: list[Columns] = []
    for real in to_numpy(mask_BT).astype(bool):
        found = np.flatnonzero(real).tolist()
        block = range(found[0], found[-1] + 1) if found else range(0)
        rows.append(block if len(block) == len(found) else tuple(found))
    return rows


def group_rows(
    lengths: Sequence[int], columns_B: Sequence[Columns], columns: int, segment_length: int, depth: int
) -> list[Group | SingleTokens]:
    """The work of one call. lengths: real tokens that each row has read before; columns_B: those of the new ones.

    Rows without a real token are in no group.
    """
    found: dict[tuple[Columns, int, int], list[int]] = {}
    for row, (length, real) in enumerate(zip(lengths, columns_B, strict=True)):
        if real:
            segment = min(length // segment_length, depth)
            found.setdefault((real, length % segment_length, segment), []).append(row)
    alike = {real for real, _, _ in found}
    if len(found) > 1 and len(alike) == 1 and len(real := alike.pop()) == 1:
        # Decoding: one call for all rows, however their segments began.
        by_row = sorted((row, slot, segment) for (_, slot, segment), rows in found.items() for row in rows)
        rows, slots, segments = zip(*by_row, strict=True)
        return [SingleTokens(rows, len(rows) == len(lengths) and columns == 1, real, slots, segments)]
    return [
        Group(tuple(rows), len(rows) == len(lengths) and columns == len(real), real, slot, segment)
        for (real, slot, segment), rows in found.items()
    ]


def pieces(group: Group, segment_length: int, depth: int, alike: bool) -> list[Piece]:
    """A group's tokens cut at segment boundaries, whole segments together.

    alike: all segments attend to equally many keys; otherwise each of the first `depth` is a piece of its own.
    """
    cut, start, slot, segment = [], 0, group.slot, group.segment
    tokens = len(group.columns)
    while start < tokens:
        left = tokens - start
        whole = left // segment_length if slot == 0 else 0
        if whole and not alike and segment < depth:
            whole = 1
        length = whole * segment_length if whole else min(segment_length - slot, left)
        cut.append(Piece(start, start + length, whole, slot, segment))
        start, slot = start + length, (slot + length) % segment_length
        if slot == 0:
            segment = min(segment + max(whole, 1), depth)
    return cut
