"""How a call of any length falls onto the segment grid, worked out once for all layers.

The grid belongs to the document: a row's segment ends N tokens after it began, however the calls were cut. A call is
split into pieces: the rest of an unfinished segment, whole segments, and a new unfinished one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infini.nn.state import Clock, State, place_rows, reset_rows, select_rows


class OffGridError(ValueError):
    """Padding or a reset that does not fit the grid, at a row and column of the call as it was planned."""

    def __init__(self, row: int, column: int, what: str) -> None:
        super().__init__(f"row {row}, column {column}: {what}")
        self.row, self.column, self.what = row, column, what


@dataclass(frozen=True)
class Piece:
    """Columns [start, stop) of a call, as n_segments segments of which the first `offset` tokens came before the call.

    first_BS: the segment is the first since the row's reset. index_BS: how many of its document come before it.
    reset_BS: the row forgets before it (None: no row does). weight_BSN: write weights over whole segments (None: all
    1). commits: the piece completes its segment(s).
    """

    start: int
    stop: int
    offset: int
    n_segments: int
    first_BS: torch.Tensor
    index_BS: torch.Tensor
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
        slot_B = self.clock.slot_B
        if self.uniform and not self.offset and not int(slot_B[0]):
            return old_BN  # empty before and after: whole segments cost no window
        new_BT = new_BT.to(old_BN.dtype)
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

    def last_segment(self, cache_BN: torch.Tensor, old_BN: torch.Tensor, new_BT: torch.Tensor) -> torch.Tensor:
        """The last whole segment [B, N, ...] of each row's document after the call; zeros where there is none yet.

        cache_BN: the same before the call. old_BN, new_BT: as for new_window.
        """
        N = old_BN.shape[1]
        whole_B = self.clock.position_B // N
        line = torch.cat([old_BN[:, : self.offset], new_BT.to(old_BN.dtype)], 1)
        if self.uniform and bool((whole_B > 0).all()):
            begin = int(self.window_B[0])
            # A copy: a slice would keep the whole call alive.
            return line[:, begin - N : begin].clone() if begin else cache_BN
        # Before the line stands the cache: a segment that ended with the last call is read from there.
        line = torch.cat([cache_BN, line], 1)
        index = self.window_B[:, None] + torch.arange(N, device=line.device)
        picked = line[torch.arange(line.shape[0], device=line.device)[:, None], index]
        return picked * (whole_B > 0).view(-1, *[1] * (picked.dim() - 1)).to(picked.dtype)


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
        index = torch.where(at_head < 0, clock.position_B[:, None] + head_column, head_column - at_head) // N
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
        pieces.append(Piece(start, stop, begin, n, first, index, restarts if resets else None, piece_weight, commits))

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


def fresh_clock(
    batch_size: int, segment_length: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Clock:
    """The clock of rows that have read nothing. dtype: of the write weights; the state's."""
    zero = torch.zeros(batch_size, dtype=torch.long, device=device)
    return Clock(zero, zero.clone(), torch.zeros(batch_size, segment_length, dtype=dtype, device=device))


Body = Callable[[torch.Tensor, tuple[Any, ...], Grid], tuple[torch.Tensor, tuple[Any, ...]]]


def run_on_grid(
    body: Body,
    x_BT: torch.Tensor,
    state: State,
    segment_length: int,
    mask_BT: torch.Tensor | None = None,
    reset_BT: torch.Tensor | None = None,
    write_weight_BT: torch.Tensor | None = None,
    inner_resets: bool = False,
) -> tuple[torch.Tensor, State]:
    """body(x, layer leaves, grid) on a call of any length, rows standing anywhere.

    Left padding is rolled to the right before and rolled back after; a row that resets at its first column forgets and
    starts at slot 0; rows that stand at different slots of their segments are run group by group. Raises ValueError for
    an empty call, a batch size unlike the state's, or padding and resets that do not fit the grid.
    """
    B, T = x_BT.shape[:2]
    if B != state.clock.slot_B.shape[0]:
        raise ValueError(f"batch size {B}, state has {state.clock.slot_B.shape[0]}: pass a fresh init_state({B})")
    if T == 0:
        raise ValueError("a call needs at least one token")
    for name, extra in {"mask_BT": mask_BT, "reset_BT": reset_BT, "write_weight_BT": write_weight_BT}.items():
        if extra is not None and extra.shape != (B, T):
            raise ValueError(f"{name} has shape {tuple(extra.shape)}, the call {(B, T)}")

    extras = (mask_BT, reset_BT, write_weight_BT)
    lead_B = torch.zeros(B, dtype=torch.long, device=x_BT.device)
    if mask_BT is not None and not bool(mask_BT[:, 0].all()):
        lead_B = mask_BT.long().argmax(1)
        x_BT, *extras = (None if e is None else _roll(e, lead_B) for e in (x_BT, *extras))  # type: ignore[assignment]

    parts = []
    start = 0
    while start < T:
        span = slice(start, T)
        if inner_resets and extras[1] is not None:
            # A document begins its own grid: the call is cut there, and the row goes on from slot 0.
            column = torch.arange(T - start, device=x_BT.device)
            inside = (state.clock.slot_B[:, None] * ~extras[1][:, start : start + 1] + column) % segment_length != 0
            cuts = (extras[1][:, start:] & inside & (column > 0)).any(0)
            if bool(cuts.any()):
                span = slice(start, start + int(cuts.long().argmax()))
        part, state = _run_span(body, x_BT, state, segment_length, extras, span, lead_B, T)
        parts.append(part)
        start = span.stop
    y_BT = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (_roll(y_BT, -lead_B) if bool(lead_B.any()) else y_BT), state


def _run_span(
    body: Body,
    x_BT: torch.Tensor,
    state: State,
    segment_length: int,
    extras: Sequence[torch.Tensor | None],
    span: slice,
    lead_B: torch.Tensor,
    n_columns: int,
) -> tuple[torch.Tensor, State]:
    """Columns `span` of a call in which no reset falls inside a segment; rows at different slots group by group."""
    x_BT = x_BT[:, span]
    mask, reset, weight = (None if e is None else e[:, span] for e in extras)
    if reset is not None and bool(reset[:, 0].any()):
        state = reset_rows(state, reset[:, 0])

    def call(rows_B: torch.Tensor, state: State, everything: bool) -> tuple[torch.Tensor, State]:
        x, *picked = (e if everything or e is None else e[rows_B] for e in (x_BT, mask, reset, weight))
        assert x is not None
        try:
            grid = plan(state.clock, x.shape[1], segment_length, *picked)
        except OffGridError as error:
            row = int(rows_B[error.row])
            column = (span.start + error.column + int(lead_B[row])) % n_columns
            raise ValueError(f"row {row}, column {column}: {error.what}") from None
        y, layers = body(x, state.layers, grid)
        return y, State(grid.clock, layers)

    slots = state.clock.slot_B.tolist()
    if len(set(slots)) == 1:
        return call(torch.arange(len(slots), device=x_BT.device), state, True)
    new_state, parts, order = state, [], []
    for slot in sorted(set(slots)):
        rows = torch.tensor([b for b, s in enumerate(slots) if s == slot], device=x_BT.device)
        part, part_state = call(rows, select_rows(state, rows), False)
        new_state = place_rows(new_state, rows, part_state)
        parts.append(part)
        order.append(rows)
    return torch.cat(parts)[torch.cat(order).argsort()], new_state


def _roll(x_BT: torch.Tensor, left_B: torch.Tensor) -> torch.Tensor:
    """Each row rolled left by its own number of columns."""
    T = x_BT.shape[1]
    column = (torch.arange(T, device=x_BT.device) + left_B[:, None]) % T
    return x_BT[torch.arange(x_BT.shape[0], device=x_BT.device)[:, None], column]
