"""How a call of any length falls onto the segment grid, worked out once for all layers.

The grid belongs to the document: a row's segment ends N tokens after it began, however the calls were cut. A call is
split into pieces: the rest of an unfinished segment, whole segments, and a new unfinished one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infini.state import Clock


class OffGridError(ValueError):
    """Padding or a reset that does not fit the grid, at a row and column of the call as it was planned."""

    def __init__(self, row: int, column: int, what: str) -> None:
        super().__init__(f"row {row}, column {column}: {what}")
        self.row, self.column, self.what = row, column, what


@dataclass(frozen=True)
class Piece:
    """Columns [start, stop) of a call, as n_segments segments of which the first `offset` tokens came before the call.

    first_BS: the segment is the first since the row's reset. reset_BS: the row forgets before it (None: no row does).
    weight_BSN: write weights over whole segments (None: all 1). commits: the piece completes its segment(s).
    """

    start: int
    stop: int
    offset: int
    n_segments: int
    first_BS: torch.Tensor
    reset_BS: torch.Tensor | None
    weight_BSN: torch.Tensor | None
    commits: bool


@dataclass(frozen=True)
class Grid:
    """A call's pieces, and where each row stands after it.

    offset: filled slots before the call (the same in every row). window_B: the column, counted from the start of the
    unfinished segment, at which each row's new unfinished segment begins. uniform: that is the same in every row.
    """

    pieces: tuple[Piece, ...]
    offset: int
    window_B: torch.Tensor
    uniform: bool
    clock: Clock

    def new_window(self, old_BN: torch.Tensor, new_BT: torch.Tensor) -> torch.Tensor:
        """The unfinished segment's tokens [B, N, ...] after the call; slots not filled yet are 0."""
        N = old_BN.shape[1]
        new_BT = new_BT.to(old_BN.dtype)
        slot_B = self.clock.slot_B
        window = torch.zeros_like(old_BN)
        if self.uniform:
            begin, filled = int(self.window_B[0]), int(slot_B[0])
            carried = max(0, min(self.offset - begin, filled))
            if carried:
                window[:, :carried] = old_BN[:, begin : begin + carried]
            if filled > carried:
                column = begin + carried - self.offset
                window[:, carried:filled] = new_BT[:, column : column + filled - carried]
            return window
        line = torch.cat([old_BN[:, : self.offset], new_BT, window], 1)
        slot = torch.arange(N, device=line.device)
        index = (self.window_B[:, None] + slot).clamp(max=line.shape[1] - 1)
        picked = line[torch.arange(line.shape[0], device=line.device)[:, None], index]
        kept = (slot < slot_B[:, None]).view(*index.shape, *[1] * (picked.dim() - 2))
        return picked * kept.to(picked.dtype)


def plan(
    clock: Clock,
    n_tokens: int,
    segment_length: int,
    mask_BT: torch.Tensor | None,
    reset_BT: torch.Tensor | None,
    write_weight_BT: torch.Tensor | None,
) -> Grid:
    """The grid of a call of n_tokens columns. All rows must stand at the same slot.

    Padding (mask false) must end its row, or its document before a reset; a reset must begin a segment. Raises
    OffGridError naming row and column of what does not fit.
    """
    N, T = segment_length, n_tokens
    B, device = clock.slot_B.shape[0], clock.slot_B.device
    offset = int(clock.slot_B[0])
    real = torch.ones(B, T, dtype=torch.bool, device=device) if mask_BT is None else mask_BT
    resets = reset_BT is not None and bool(reset_BT.any())
    column = torch.arange(T, device=device)

    if resets:
        assert reset_BT is not None
        _refuse(reset_BT & ~real, "a reset at a padding token")
        off_grid = ((offset + column) % N != 0) & (column > 0)
        _refuse(reset_BT & off_grid, f"a reset inside a segment of {N} tokens")
        # Columns since the row's last reset; before the first one the row goes on from its clock.
        last_reset = torch.where(reset_BT, column, -1).cummax(1).values
    else:
        last_reset = torch.full((B, 1), -1, device=device).expand(B, T)
    if mask_BT is not None:
        follows_gap = torch.zeros_like(real)
        follows_gap[:, 1:] = real[:, 1:] & ~real[:, :-1]
        if resets:
            assert reset_BT is not None
            follows_gap &= ~reset_BT
        _refuse(follows_gap, "a token after padding in the same document")

    # Positions count real tokens only; trailing padding leaves the row where its last token left it.
    end = last_reset[:, -1]
    since = real & (column >= end[:, None])
    position_B = torch.where(end < 0, clock.position_B, 0) + since.sum(1)
    trailing = torch.zeros(B, dtype=torch.long, device=device)
    if mask_BT is not None:
        trailing = T - torch.where(real, column + 1, 0).amax(1)
    stop_B = offset + T - trailing
    window_B = stop_B // N * N
    slot_B = stop_B - window_B
    uniform = mask_BT is None or bool((stop_B == stop_B[0]).all())

    weight = None
    if write_weight_BT is not None or mask_BT is not None or bool((clock.weight_BN[:, :offset] != 1).any()):
        weight = real.to(clock.weight_BN.dtype)
        if write_weight_BT is not None:
            weight = weight * write_weight_BT.to(weight.dtype)
    pieces = []
    for start, stop, begin, n in _split(offset, T, N):
        segments = torch.arange(n, device=device) * N
        head_column = start - begin + segments  # the column of each segment's slot 0; negative: before the call
        at_head = last_reset[:, head_column.clamp(min=0)].expand(B, n)
        restarts = (at_head == head_column) & (at_head >= 0)
        first = restarts | ((at_head < 0) & (clock.position_B[:, None] + head_column == 0))
        piece_weight = None
        if weight is not None:
            own = weight[:, start:stop]
            if begin:
                own = torch.cat([clock.weight_BN[:, :begin], own], 1)
            piece_weight = own.unflatten(1, (n, -1))
            if mask_BT is not None:
                # A segment that padding cut short is not complete: it stays in the window and is not committed.
                complete = stop_B[:, None] >= offset + head_column + N
                piece_weight = piece_weight * complete[..., None].to(weight.dtype)
        commits = begin + stop - start == n * N
        pieces.append(Piece(start, stop, begin, n, first, restarts if resets else None, piece_weight, commits))

    grid = Grid(tuple(pieces), offset, window_B, uniform, Clock(position_B, slot_B, clock.weight_BN))
    token_weight = torch.ones(B, T, dtype=clock.weight_BN.dtype, device=device) if weight is None else weight
    new_clock = Clock(position_B, slot_B, grid.new_window(clock.weight_BN, token_weight))
    return Grid(grid.pieces, offset, window_B, uniform, new_clock)


def _split(offset: int, n_tokens: int, N: int) -> list[tuple[int, int, int, int]]:
    """(start, stop, tokens before the call in its segment, number of segments) for each piece of the call."""
    pieces, start = [], 0
    if offset:
        start = min(N - offset, n_tokens)
        pieces.append((0, start, offset, 1))
    whole = (n_tokens - start) // N
    if whole:
        pieces.append((start, start + whole * N, 0, whole))
        start += whole * N
    if start < n_tokens:
        pieces.append((start, n_tokens, 0, 1))
    return pieces


def _refuse(wrong_BT: torch.Tensor, what: str) -> None:
    if bool(wrong_BT.any()):
        row, column = (int(i) for i in wrong_BT.nonzero()[0])
        raise OffGridError(row, column, what)
