"""The segment grid: how a call of any length divides into segments. Planned once for all layers.

The grid belongs to the document: a segment has N tokens, however the document is cut into calls. A call is split into
pieces: the rest of an unfinished segment, whole segments, and a new unfinished segment.

No value is read back from the device while `Clock.slot` is known and a call has neither mask nor resets: the grid then
depends on sizes alone, and torch.compile traces a call into one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infini.nn.state import Clock, State, place_rows, reset_rows, select_rows


class OffGridError(ValueError):
    """Padding or a reset that does not fit the grid, at a row and column of the planned call."""

    def __init__(self, row: int, column: int, what: str) -> None:
        super().__init__(f"row {row}, column {column}: {what}")
        self.row, self.column, self.what = row, column, what


@dataclass(frozen=True)
class Piece:
    """Columns [start, stop) of a call, divided into n_segments segments.

    offset: tokens of the first segment that an earlier call has read.
    first_BS: bool, whether the segment is the first since the row's last reset.
    index_BS: int64, segments of the same document before this one.
    reset_BS: bool, whether the row is reset before the segment; None if no row is.
    weight_BSN: write weights of whole segments; None if all are 1.
    commits: whether the piece completes its segments.
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
    """A call's pieces, and the clock after the call.

    Columns are counted from the start of the segment that is unfinished before the call.
    offset: tokens of that segment that earlier calls have read, the same in every row.
    window_B: the column at which each row's new unfinished segment begins.
    window: the same as a number if all rows agree on it and on the slot after the call, otherwise None.
    """

    pieces: tuple[Piece, ...]
    offset: int
    window_B: torch.Tensor
    window: int | None
    clock: Clock

    def new_window(self, old_BN: torch.Tensor, new_BT: torch.Tensor) -> torch.Tensor:
        """The tokens [B, N, ...] of the unfinished segment after the call; free slots are 0.

        old_BN: the same before the call. new_BT: the call's tokens [B, T, ...].
        """
        N = old_BN.shape[1]
        slot_B = self.clock.slot_B
        if not self.offset and self.clock.slot == 0:
            return old_BN  # empty before and after the call
        new_BT = new_BT.to(old_BN.dtype)
        window = torch.zeros_like(old_BN)
        if self.window is not None and self.clock.slot is not None:
            begin, filled = self.window, self.clock.slot
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
        """The last whole segment [B, N, ...] of each row's document after the call; zeros if it has none yet.

        cache_BN: the same before the call. old_BN, new_BT: as for new_window.
        """
        N = old_BN.shape[1]
        whole_B = self.clock.position_B // N
        line = torch.cat([old_BN[:, : self.offset], new_BT.to(old_BN.dtype)], 1)
        if self.window is not None and bool((whole_B > 0).all()):
            # A copy: a slice would keep the whole call alive.
            return line[:, self.window - N : self.window].clone() if self.window else cache_BN
        # The cache precedes the line: it holds the segment that ended with the previous call.
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
    """The grid of a call of n_tokens columns. All rows must be at the same slot.

    Padding (mask false) must end its row, or its document before a reset. A reset must begin a segment. Raises
    OffGridError with the row and column of the first violation.
    """
    N, T = segment_length, n_tokens
    B, device = clock.slot_B.shape[0], clock.slot_B.device
    offset = int(clock.slot_B[0]) if clock.slot is None else clock.slot
    real = torch.ones(B, T, dtype=torch.bool, device=device) if mask_BT is None else mask_BT
    resets = reset_BT is not None and bool(reset_BT.any())
    column = torch.arange(T, device=device)

    if resets:
        assert reset_BT is not None
        _refuse(reset_BT & ~real, "a reset at a padding token")
        off_grid = ((offset + column) % N != 0) & (column > 0)
        _refuse(reset_BT & off_grid, f"a reset inside a segment of {N} tokens")
        # The column of the row's last reset; -1 before the first one, where the row continues from its clock.
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

    # Positions count real tokens only; trailing padding does not move the row.
    end = last_reset[:, -1]
    since = real & (column >= end[:, None])
    position_B = torch.where(end < 0, clock.position_B, 0) + since.sum(1)
    trailing = torch.zeros(B, dtype=torch.long, device=device)
    if mask_BT is not None:
        trailing = T - torch.where(real, column + 1, 0).amax(1)
    stop_B = offset + T - trailing
    window_B = stop_B // N * N
    slot_B = stop_B - window_B
    stop: int | None = offset + T
    if mask_BT is not None:
        stop = int(stop_B[0]) if bool((stop_B == stop_B[0]).all()) else None
    window, slot = (None, None) if stop is None else (stop // N * N, stop % N)

    weight = None
    # A compiled graph multiplies by weights of 1 instead of asking for them.
    carried = offset > 0 and (torch.compiler.is_compiling() or bool((clock.weight_BN[:, :offset] != 1).any()))
    if write_weight_BT is not None or mask_BT is not None or carried:
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
                # A segment that padding cuts short is not complete: it stays in the window and is not committed.
                complete = stop_B[:, None] >= offset + head_column + N
                piece_weight = piece_weight * complete[..., None].to(weight.dtype)
        commits = begin + stop - start == n * N
        pieces.append(Piece(start, stop, begin, n, first, index, restarts if resets else None, piece_weight, commits))

    grid = Grid(tuple(pieces), offset, window_B, window, Clock(position_B, slot_B, clock.weight_BN, slot))
    token_weight = torch.ones(B, T, dtype=clock.weight_BN.dtype, device=device) if weight is None else weight
    weight_BN = grid.new_window(clock.weight_BN, token_weight)
    return Grid(grid.pieces, offset, window_B, window, Clock(position_B, slot_B, weight_BN, slot))


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
    """The clock of rows that have read nothing. dtype: of the write weights, the state's dtype."""
    zero = torch.zeros(batch_size, dtype=torch.long, device=device)
    return Clock(zero, zero.clone(), torch.zeros(batch_size, segment_length, dtype=dtype, device=device), 0)


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
    """Run body(x, layer leaves, grid) on a call of any length, with each row at any slot of its segment.

    Left padding is rolled to the right before the call and back after it. A row with a reset at its first column is
    cleared and starts at slot 0. Rows at different slots run in groups. Raises ValueError for an empty call, a batch
    size that differs from the state's, or padding and resets that do not fit the grid.
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
    lead_B = None
    if mask_BT is not None and not bool(mask_BT[:, 0].all()):
        lead_B = mask_BT.long().argmax(1)
        x_BT, *extras = (None if e is None else _roll(e, lead_B) for e in (x_BT, *extras))  # type: ignore[assignment]

    parts = []
    start = 0
    while start < T:
        span = slice(start, T)
        if inner_resets and extras[1] is not None:
            # A document begins its own grid: the call is cut there, and the row continues at slot 0.
            column = torch.arange(T - start, device=x_BT.device)
            inside = (state.clock.slot_B[:, None] * ~extras[1][:, start : start + 1] + column) % segment_length != 0
            cuts = (extras[1][:, start:] & inside & (column > 0)).any(0)
            if bool(cuts.any()):
                span = slice(start, start + int(cuts.long().argmax()))
        part, state = _run_span(body, x_BT, state, segment_length, extras, span, lead_B, T)
        parts.append(part)
        start = span.stop
    y_BT = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (y_BT if lead_B is None else _roll(y_BT, -lead_B)), state


def _run_span(
    body: Body,
    x_BT: torch.Tensor,
    state: State,
    segment_length: int,
    extras: Sequence[torch.Tensor | None],
    span: slice,
    lead_B: torch.Tensor | None,
    n_columns: int,
) -> tuple[torch.Tensor, State]:
    """Run columns `span` of a call, with no reset inside a segment. Rows at different slots run in groups."""
    x_BT = x_BT[:, span]
    mask, reset, weight = (None if e is None else e[:, span] for e in extras)
    if reset is not None and bool(reset[:, 0].any()):
        state = reset_rows(state, reset[:, 0])

    def call(state: State, rows_B: torch.Tensor | None = None) -> tuple[torch.Tensor, State]:
        x, *picked = (e if rows_B is None or e is None else e[rows_B] for e in (x_BT, mask, reset, weight))
        assert x is not None
        try:
            grid = plan(state.clock, x.shape[1], segment_length, *picked)
        except OffGridError as error:
            row = error.row if rows_B is None else int(rows_B[error.row])
            lead = 0 if lead_B is None else int(lead_B[row])
            raise ValueError(
                f"row {row}, column {(span.start + error.column + lead) % n_columns}: {error.what}"
            ) from None
        y, layers = body(x, state.layers, grid)
        return y, State(grid.clock, layers)

    if state.clock.slot is not None:
        return call(state)
    slots = state.clock.slot_B.tolist()
    if len(set(slots)) == 1:
        return call(state)
    new_state, parts, order = state, [], []
    for slot in sorted(set(slots)):
        rows = torch.tensor([b for b, s in enumerate(slots) if s == slot], device=x_BT.device)
        part, part_state = call(select_rows(state, rows), rows)
        new_state = place_rows(new_state, rows, part_state)
        parts.append(part)
        order.append(rows)
    return torch.cat(parts)[torch.cat(order).argsort()], new_state


def _roll(x_BT: torch.Tensor, left_B: torch.Tensor) -> torch.Tensor:
    """Roll each row left by its own number of columns."""
    T = x_BT.shape[1]
    column = (torch.arange(T, device=x_BT.device) + left_B[:, None]) % T
    return x_BT[torch.arange(x_BT.shape[0], device=x_BT.device)[:, None], column]
