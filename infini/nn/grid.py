"""The segment grid: how a call of any length divides into segments. Planned once for all layers.

The grid belongs to the document: a segment has N tokens, however the document is cut into calls. A call is split into
pieces: the rest of an unfinished segment, whole segments, and a new unfinished segment.

A call is planned on the host, with NumPy: clocks are there (infini.nn.state.Clock), and no value is read back from the
device. Masks, resets and write weights that are given on the device are read, once each. While `Clock.slot` is known
and a call has none of them, the grid depends on sizes alone, and torch.compile traces a call into one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infini.nn.host import take, to_device, to_numpy
from infini.nn.ops.memory import Earlier
from infini.nn.state import Clock, State, place_rows, reset_rows, select_rows


class OffGridError(ValueError):
    """Padding or a reset that does not fit the grid, at a row and column of the planned call."""

    def __init__(self, row: int, column: int, what: str) -> None:
        super().__init__(f"row {row}, column {column}: {what}")
        self.row, self.column, self.what = row, column, what


@dataclass(frozen=True)
class Piece:
    """Columns [start, stop) of a call, divided into n_segments segments. Tensors are on the call's device.

    offset: tokens of the first segment that an earlier call has read.
    first_BS: bool, whether the segment is the first since the row's last reset; None if none is.
    index_BS: int64, segments of the same document before this one.
    restarts_BS: bool, whether the row is reset before the segment; None if no row is.
    reset_BS: the same on the device.
    weight_BSN: write weights of whole segments; None if all are 1.
    commits: whether the piece completes its segments.
    complete_BS: bool, whether the row goes on to the segment's end or beyond; None if all do. It is also true of a
        segment that padding cuts short before a reset in the call, which clears the memory.
    earlier: segments before the call that other processes read; see infini.nn.sequence_parallel. None: none.
    """

    start: int
    stop: int
    offset: int
    n_segments: int
    first_BS: Tensor | None
    index_BS: np.ndarray
    restarts_BS: np.ndarray | None
    reset_BS: Tensor | None
    weight_BSN: Tensor | None
    commits: bool
    complete_BS: Tensor | None = None
    earlier: Earlier | None = None

    def segments(self, old_BN: Tensor, new_BT: Tensor) -> Tensor:
        """The piece's tokens by segment [B, S, N, ...], preceded by those of its first segment that an earlier call
        read. old_BN, new_BT: as for Grid.new_window."""
        tokens = new_BT[:, self.start : self.stop]
        if self.offset:
            tokens = torch.cat([old_BN[:, : self.offset].to(tokens.dtype), tokens], 1)
        return tokens.unflatten(1, (self.n_segments, -1))


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
    window_B: np.ndarray
    window: int | None
    clock: Clock

    @property
    def stop_B(self) -> np.ndarray:
        """The column after the last token of each row; in the columns after it there is padding."""
        return self.window_B + to_numpy(self.clock.slot_B)

    def new_window(self, old_BN: Tensor, new_BT: Tensor) -> Tensor:
        """The tokens [B, N, ...] of the unfinished segment after the call; free slots are 0.

        old_BN: the same before the call. new_BT: the call's tokens [B, T, ...].
        """
        N = old_BN.shape[1]
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
        slot, slot_B = np.arange(N), to_numpy(self.clock.slot_B)
        picked = take(line, np.minimum(self.window_B[:, None] + slot, line.shape[1] - 1))
        return keep(picked, slot < slot_B[:, None])

    def last_segment(self, cache_BN: Tensor, old_BN: Tensor, new_BT: Tensor) -> Tensor:
        """The last whole segment [B, N, ...] of each row's document after the call; zeros if it has none yet.

        cache_BN: the same before the call. old_BN, new_BT: as for new_window.
        """
        N = old_BN.shape[1]
        some_B1 = (to_numpy(self.clock.position_B) >= N)[:, None]
        line = torch.cat([old_BN[:, : self.offset], new_BT.to(old_BN.dtype)], 1)
        if self.window is not None and some_B1.all():
            # A copy: a slice would keep the whole call alive.
            return line[:, self.window - N : self.window].clone() if self.window else cache_BN
        # The cache precedes the line: it holds the segment that ended with the previous call.
        line = torch.cat([cache_BN, line], 1)
        return keep(take(line, self.window_B[:, None] + np.arange(N)), some_B1)


def keep(x_BN: Tensor, kept_BN: np.ndarray) -> Tensor:
    """x [B, N, ...] with 0, also in place of what is not finite, where kept_BN (bool, broadcastable) is false."""
    return x_BN.masked_fill(to_device(~kept_BN, x_BN.device).view(*kept_BN.shape, *[1] * (x_BN.dim() - 2)), 0)


def plan(
    clock: Clock,
    n_tokens: int,
    segment_length: int,
    mask_BT: Tensor | np.ndarray | None,
    reset_BT: Tensor | np.ndarray | None,
    write_weight_BT: Tensor | None,
    device: torch.device | None = None,
) -> Grid:
    """The grid of a call of n_tokens columns on `device` (None: the CPU). All rows must be at the same slot.

    Padding (mask false) must end its row, or its document before a reset. A reset must begin a segment. Raises
    OffGridError with the row and column of the first violation.
    """
    N, T = segment_length, n_tokens
    device = torch.device("cpu") if device is None else device
    compiling = torch.compiler.is_compiling()
    position_B, weight_BN = to_numpy(clock.position_B), clock.weight_BN
    B, dtype = len(position_B), weight_BN.dtype
    offset = next(iter(to_numpy(clock.slot_B).tolist()), 0) if clock.slot is None else clock.slot
    real_BT, reset_BT = (None if marks is None else to_numpy(marks) for marks in (mask_BT, reset_BT))
    if reset_BT is not None and not reset_BT.any():
        reset_BT = None
    column = np.arange(T)

    # The column of the row's last reset; -1 before the first one, where the row continues from its clock.
    last_reset_BT = None
    if reset_BT is not None:
        if real_BT is not None:
            _refuse(reset_BT & ~real_BT, "a reset at a padding token")
        off_grid = ((offset + column) % N != 0) & (column > 0)
        _refuse(reset_BT & off_grid, f"a reset inside a segment of {N} tokens")
        last_reset_BT = np.maximum.accumulate(np.where(reset_BT, column, -1), 1)
    if real_BT is not None:
        follows_gap = np.zeros_like(real_BT)
        follows_gap[:, 1:] = real_BT[:, 1:] & ~real_BT[:, :-1]
        if reset_BT is not None:
            follows_gap &= ~reset_BT
        _refuse(follows_gap, "a token after padding in the same document")

    # Positions count real tokens only; trailing padding does not move the row.
    after_B, stop_B = position_B + T, np.full(B, offset + T)
    if real_BT is not None:
        after_B = position_B + real_BT.sum(1)
        stop_B = offset + np.where(real_BT, column + 1, 0).max(1)
    if last_reset_BT is not None:
        end_B1 = last_reset_BT[:, -1:]
        since_BT = column >= end_B1 if real_BT is None else real_BT & (column >= end_B1)
        after_B = np.where(end_B1[:, 0] < 0, position_B, 0) + since_BT.sum(1)
    window_B = stop_B // N * N
    slot_B = stop_B - window_B
    window, slot = None, None
    if real_BT is None or (stop_B == stop_B[:1]).all():
        stop = offset + T if real_BT is None or B == 0 else int(stop_B[0])
        window, slot = stop // N * N, stop % N

    weight_BT = None
    # A compiled graph multiplies by weights of 1 instead of asking for them.
    carried = offset > 0 and (compiling or bool((to_numpy(weight_BN)[:, :offset] != 1).any()))
    if write_weight_BT is not None or real_BT is not None or carried:
        weight_BT = torch.from_numpy(np.ones((B, T), dtype=bool) if real_BT is None else real_BT).to(dtype)
        if write_weight_BT is not None:
            weight_BT = weight_BT * write_weight_BT.to("cpu", dtype)
    pieces = []
    for start, stop, begin, n in _split(offset, T, N):
        head = start - begin + np.arange(n) * N  # the column of each segment's slot 0; negative: before the call
        # Tokens of the document before the segment.
        before_BS, restarts_BS = position_B[:, None] + head, None
        if last_reset_BT is not None:
            at_head_BS = last_reset_BT[:, np.maximum(head, 0)]
            before_BS = np.where(at_head_BS < 0, before_BS, head - at_head_BS)
            restarts_BS = (at_head_BS == head) & (at_head_BS >= 0)
        first_BS = before_BS == 0
        # A compiled graph masks in any case: whether a segment is a document's first is not known while it is traced.
        masked = compiling or first_BS.any()
        piece_weight = complete_BS = None
        if weight_BT is not None:
            own = weight_BT[:, start:stop]
            if begin:
                own = torch.cat([weight_BN[:, :begin], own], 1)
            piece_weight = own.unflatten(1, (n, -1))
            if real_BT is not None:
                # A segment that padding cuts short is not complete: it stays in the window and is not committed.
                complete = stop_B[:, None] >= offset + head + N
                piece_weight, complete_BS = keep(piece_weight, complete), to_device(complete, device)
            piece_weight = to_device(piece_weight, device)
        pieces.append(
            Piece(
                start,
                stop,
                begin,
                n,
                to_device(first_BS, device) if masked else None,
                before_BS // N,
                restarts_BS,
                None if restarts_BS is None else to_device(restarts_BS, device),
                piece_weight,
                commits=begin + stop - start == n * N,
                complete_BS=complete_BS,
            )
        )

    clock = Clock(torch.from_numpy(after_B), torch.from_numpy(slot_B), weight_BN, slot)
    grid = Grid(tuple(pieces), offset, window_B, window, clock)
    if weight_BT is None:
        weight_BN = torch.from_numpy(np.arange(N) < slot_B[:, None]).to(dtype)
    else:
        weight_BN = grid.new_window(weight_BN, weight_BT)
    return replace(grid, clock=clock._replace(weight_BN=weight_BN))


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


def _refuse(wrong_BT: np.ndarray, what: str) -> None:
    if wrong_BT.any():
        row, column = np.argwhere(wrong_BT)[0].tolist()
        raise OffGridError(row, column, what)


def fresh_clock(batch_size: int, segment_length: int, dtype: torch.dtype = torch.float32) -> Clock:
    """The clock of rows that have read nothing. dtype: of the write weights, the state's dtype."""
    zero = torch.zeros(batch_size, dtype=torch.long, device="cpu")
    return Clock(zero, zero.clone(), torch.zeros(batch_size, segment_length, dtype=dtype, device="cpu"), 0)


Body = Callable[[Tensor, tuple[Any, ...], Grid], tuple[Tensor, tuple[Any, ...]]]


def run_on_grid(
    body: Body,
    x_BT: Tensor,
    state: State,
    segment_length: int,
    mask_BT: Tensor | None = None,
    reset_BT: Tensor | None = None,
    write_weight_BT: Tensor | None = None,
    inner_resets: bool = False,
) -> tuple[Tensor, State]:
    """Run body(x, layer leaves, grid) on a call of any length, with each row at any slot of its segment.

    Left padding is rolled to the right before the call and back after it. A row with a reset at its first column is
    cleared and starts at slot 0. Rows at different slots run in groups. Raises ValueError for an empty call, a batch
    size that differs from the state's, masks of another dtype than bool, or padding and resets that do not fit the
    grid.
    """
    B, T = x_BT.shape[:2]
    if B != state.clock.slot_B.shape[0]:
        raise ValueError(f"batch size {B}, state has {state.clock.slot_B.shape[0]}: pass a fresh init_state({B})")
    if T == 0:
        raise ValueError("a call needs at least one token")
    for name, extra in {"mask_BT": mask_BT, "reset_BT": reset_BT, "write_weight_BT": write_weight_BT}.items():
        if extra is not None and extra.shape != (B, T):
            raise ValueError(f"{name} has shape {tuple(extra.shape)}, the call {(B, T)}")
    for name, marks in {"mask_BT": mask_BT, "reset_BT": reset_BT}.items():
        if marks is not None and marks.dtype != torch.bool:
            raise ValueError(f"{name} is {marks.dtype}: it must be torch.bool")

    state = State(state.clock.on_host(), state.layers)
    mask, reset = (None if marks is None else to_numpy(marks) for marks in (mask_BT, reset_BT))
    weight = None if write_weight_BT is None else write_weight_BT.cpu()
    lead_B = None
    if mask is not None and not mask[:, 0].all():
        lead_B = mask.argmax(1)
        x_BT = _roll(x_BT, lead_B)
        mask, reset = (
            None if marks is None else _roll(torch.from_numpy(marks), lead_B).numpy() for marks in (mask, reset)
        )
        weight = None if weight is None else _roll(weight, lead_B)
    if mask is not None and x_BT.is_floating_point() and not mask.all():
        # Weights of 0 do not cancel a padding column that is infinite or no number.
        padding = to_device(~mask, x_BT.device)
        x_BT = x_BT.masked_fill(padding.view(B, T, *[1] * (x_BT.dim() - 2)), 0)

    parts = []
    start = 0
    while start < T:
        span = slice(start, T)
        if inner_resets and reset is not None:
            # A document begins its own grid: the call is cut there, and the row continues at slot 0.
            column = np.arange(T - start)
            slot_B1 = to_numpy(state.clock.slot_B)[:, None] * ~reset[:, start : start + 1]
            cuts = (reset[:, start:] & ((slot_B1 + column) % segment_length != 0) & (column > 0)).any(0)
            if cuts.any():
                span = slice(start, start + int(cuts.argmax()))
        part, state = _run_span(body, x_BT, state, segment_length, (mask, reset, weight), span, lead_B, T)
        parts.append(part)
        start = span.stop
    y_BT = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (y_BT if lead_B is None else _roll(y_BT, -lead_B)), state


def _run_span(
    body: Body,
    x_BT: Tensor,
    state: State,
    segment_length: int,
    extras: tuple[np.ndarray | None, np.ndarray | None, Tensor | None],
    span: slice,
    lead_B: np.ndarray | None,
    n_columns: int,
) -> tuple[Tensor, State]:
    """Run columns `span` of a call, with no reset inside a segment. Rows at different slots run in groups.

    extras: mask, reset and write weights of the call.
    """
    x_BT = x_BT[:, span]
    mask, reset, weight = (None if e is None else e[:, span] for e in extras)
    if reset is not None and reset[:, 0].any():
        state = reset_rows(state, torch.from_numpy(reset[:, 0]))

    def call(state: State, rows_B: np.ndarray | None = None) -> tuple[Tensor, State]:
        x = x_BT if rows_B is None else x_BT[to_device(rows_B, x_BT.device)]
        rows: Any = slice(None) if rows_B is None else rows_B
        own_mask, own_reset, own_weight = (None if e is None else e[rows] for e in (mask, reset, weight))
        try:
            grid = plan(state.clock, x.shape[1], segment_length, own_mask, own_reset, own_weight, x.device)
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
    slot_B = to_numpy(state.clock.slot_B)
    slots = np.unique(slot_B)
    if len(slots) <= 1:
        return call(state)
    new_state, parts, order = state, [], []
    for slot in slots:
        rows_B = np.flatnonzero(slot_B == slot)
        part, part_state = call(select_rows(state, torch.from_numpy(rows_B)), rows_B)
        new_state = place_rows(new_state, torch.from_numpy(rows_B), part_state)
        parts.append(part)
        order.append(rows_B)
    return torch.cat(parts)[to_device(np.concatenate(order).argsort(), x_BT.device)], new_state


def _roll(x_BT: Tensor, left_B: np.ndarray) -> Tensor:
    """Roll each row left by its own number of columns."""
    T = x_BT.shape[1]
    return take(x_BT, (np.arange(T) + left_B[:, None]) % T)
