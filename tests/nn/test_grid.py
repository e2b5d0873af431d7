"""The segment grid of calls, against pieces by hand and a simulation that walks token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import bools, marks
from hypothesis import given, settings
from hypothesis import strategies as st

from infini.nn.attention import fresh_clock, run_on_grid
from infini.nn.grid import Grid, Piece, plan
from infini.nn.state import Clock, State

N = 4


def clock(position: int, rows: int = 1) -> Clock:
    """Rows that stand at a position of a document without padding."""
    slot = position % N
    weight = (torch.arange(N) < slot).float().expand(rows, N)
    return Clock(torch.full((rows,), position), torch.full((rows,), slot), weight)


def cut(before: Clock, n_tokens: int, **extras: Any) -> Grid:
    call = {"mask_BT": None, "reset_BT": None, "write_weight_BT": None, **extras}
    return plan(before, n_tokens, N, **call)


def shape(grid: Grid) -> list[tuple[int, int, int, int, bool]]:
    return [(p.start, p.stop, p.offset, p.n_segments, p.commits) for p in grid.pieces]


def first_of(piece: Piece) -> torch.Tensor:
    return torch.zeros(piece.index_BS.shape, dtype=torch.bool) if piece.first_BS is None else piece.first_BS


def firsts(grid: Grid) -> list[list[list[bool]]]:
    return [first_of(piece).tolist() for piece in grid.pieces]


@pytest.mark.parametrize(
    ("position", "n_tokens", "pieces"),
    [
        (0, 1, [(0, 1, 0, 1, False)]),
        (0, 4, [(0, 4, 0, 1, True)]),
        (0, 11, [(0, 8, 0, 2, True), (8, 11, 0, 1, False)]),
        (3, 1, [(0, 1, 3, 1, True)]),
        (5, 1, [(0, 1, 1, 1, False)]),
        (6, 2, [(0, 2, 2, 1, True)]),
        (6, 7, [(0, 2, 2, 1, True), (2, 6, 0, 1, True), (6, 7, 0, 1, False)]),
        (8, 12, [(0, 12, 0, 3, True)]),
    ],
)
def test_a_call_is_cut_at_segment_boundaries(position: int, n_tokens: int, pieces: list[Any]) -> None:
    grid = cut(clock(position), n_tokens)
    assert shape(grid) == pieces
    after = position + n_tokens
    assert grid.clock.position_B.tolist() == [after] and grid.clock.slot_B.tolist() == [after % N]
    assert grid.clock.weight_BN.tolist() == [[1.0] * (after % N) + [0.0] * (N - after % N)]
    assert all(p.weight_BSN is None and p.reset_BS is None for p in grid.pieces)


def test_first_is_the_segment_that_holds_the_documents_first_token() -> None:
    assert firsts(cut(clock(0), 9)) == [[[True, False]], [[False]]]
    assert firsts(cut(clock(3), 6)) == [[[True]], [[False]], [[False]]]
    assert firsts(cut(clock(4), 4)) == [[[False]]]
    assert firsts(cut(clock(6), 4)) == [[[False]], [[False]]]


def test_a_reset_starts_a_document() -> None:
    grid = cut(clock(6, rows=2), 12, reset_BT=torch.stack([marks(1, 12, 6)[0], marks(1, 12, 2, 10)[0]]))
    assert shape(grid) == [(0, 2, 2, 1, True), (2, 10, 0, 2, True), (10, 12, 0, 1, False)]
    assert firsts(grid) == [[[False], [False]], [[False, True], [True, False]], [[False], [True]]]
    assert [p.reset_BS.tolist() for p in grid.pieces if p.reset_BS is not None] == firsts(grid)
    assert grid.clock.position_B.tolist() == [6, 2] and grid.clock.slot_B.tolist() == [2, 2]


def test_padding_leaves_a_segment_unfinished() -> None:
    """Row 0 ends inside its second segment, row 1 where a segment ends, row 2 has nothing but padding."""
    mask = torch.arange(10) < torch.tensor([[6], [8], [0]])
    grid = cut(clock(0, rows=3), 10, mask_BT=mask)
    assert grid.clock.position_B.tolist() == [6, 8, 0] and grid.clock.slot_B.tolist() == [2, 0, 0]
    assert grid.clock.weight_BN.tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]
    weight = grid.pieces[0].weight_BSN
    assert weight is not None and weight[:, :, 0].tolist() == [[1, 0], [1, 1], [0, 0]]
    assert weight.sum((1, 2)).tolist() == [4, 8, 0]
    window = grid.new_window(torch.zeros(3, N), torch.arange(30.0).view(3, 10))
    assert window.tolist() == [[4, 5, 0, 0], [0] * 4, [0] * 4]


def test_whole_segments_cost_no_window() -> None:
    empty = torch.zeros(3, N)
    assert cut(clock(0, rows=3), 2 * N).new_window(empty, torch.ones(3, 2 * N)) is empty
    assert cut(clock(0, rows=3), N + 1).new_window(empty, torch.ones(3, N + 1)).sum() == 3


def test_weights_of_the_unfinished_segment_are_carried() -> None:
    first = cut(clock(0), 3, write_weight_BT=torch.tensor([[0.5, 0.0, 2.0]]))
    assert first.clock.weight_BN.tolist() == [[0.5, 0.0, 2.0, 0.0]]
    second = cut(first.clock, 2)
    assert second.pieces[0].weight_BSN is not None
    assert second.pieces[0].weight_BSN.tolist() == [[[0.5, 0.0, 2.0, 1.0]]]
    assert second.clock.weight_BN.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_document_cannot_start_inside_a_segment() -> None:
    with pytest.raises(ValueError, match="row 0, column 1"):
        cut(clock(0), 7, reset_BT=marks(1, 7, 1))


@pytest.mark.parametrize(
    ("mask", "reset", "message"),
    [
        ([1, 0, 1, 1, 1], [0] * 5, "row 0, column 2: .*padding"),
        ([1, 1, 1, 0, 0], [0, 0, 0, 1, 0], "row 0, column 3: .*padding"),
        ([1] * 5, [0, 0, 0, 1, 0], "row 0, column 3: .*4 tokens"),
    ],
)
def test_what_does_not_fit_the_grid_is_refused(mask: list[int], reset: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(clock(0), 5, mask_BT=bools([mask]), reset_BT=bools([reset]))


def ledger(x_BT: torch.Tensor, layers: tuple[Any, ...], grid: Grid) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A model whose memory is the weighted sum of the tokens of finished segments, and whose output for a token is that
    memory, or -1 in a first segment. It uses what a layer uses: pieces, resets, firsts, weights and the window."""
    memory_B, window_BN = layers
    outputs = []
    for piece in grid.pieces:
        tokens = x_BT[:, piece.start : piece.stop]
        if piece.offset:
            tokens = torch.cat([window_BN[:, : piece.offset], tokens], 1)
        tokens = tokens.unflatten(1, (piece.n_segments, -1))
        for s in range(piece.n_segments):
            if piece.reset_BS is not None:
                memory_B = memory_B * ~piece.reset_BS[:, s]
            n = (piece.stop - piece.start) // piece.n_segments
            outputs.append(torch.where(first_of(piece)[:, s], -1, memory_B)[:, None].expand(-1, n))
            if piece.commits:
                weight = 1 if piece.weight_BSN is None else piece.weight_BSN[:, s]
                memory_B = memory_B + (tokens[:, s] * weight).sum(1)
    return torch.cat(outputs, 1), (memory_B, grid.new_window(window_BN, x_BT))


def walk(columns: list[tuple[float, bool, bool, float]]) -> tuple[list[float], int, list[float], list[float], float]:
    """One row, one column at a time: (token, real, reset, weight) -> outputs, position, window, weights, memory."""
    position, memory = 0, 0.0
    window: list[float] = []
    weights: list[float] = []
    outputs = []
    for token, real, reset, weight in columns:
        if reset:
            position, memory, window, weights = 0, 0.0, [], []
        if not real:
            outputs.append(0.0)
            continue
        outputs.append(-1.0 if position < N else memory)
        position += 1
        window.append(token)
        weights.append(weight)
        if len(window) == N:
            memory += sum(t * w for t, w in zip(window, weights, strict=True))
            window, weights = [], []
    return outputs, position, window, weights, memory


documents = st.lists(st.integers(1, 3 * N), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(documents, min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 11), min_size=1, max_size=6),
    weighted=st.booleans(),
    spare=st.integers(0, 5),
)
def test_any_stream_under_any_cuts_is_a_walk(
    rows: list[list[int]], cuts: list[int], weighted: bool, spare: int
) -> None:
    """Rows of documents padded to the grid, resets at their starts, cut anywhere: outputs, clock and window."""
    streams = []
    for lengths in rows:
        line: list[tuple[float, bool, bool, float]] = []
        for d, length in enumerate(lengths):
            line += [(0.0, False, False, 1.0)] * (-len(line) % N)
            line += [
                (float(len(line) + t + 1), True, d > 0 and t == 0, [1.0, 0.5, 0.0][t % 3] if weighted else 1.0)
                for t in range(length)
            ]
        streams.append(line)
    width = max(map(len, streams)) + spare
    for line in streams:
        line += [(0.0, False, False, 1.0)] * (width - len(line))
    token, real, reset, weight = (torch.tensor([[c[i] for c in line] for line in streams]) for i in range(4))

    rows_n = len(streams)
    state = State(fresh_clock(rows_n, N), (torch.zeros(rows_n), torch.zeros(rows_n, N)))
    outputs, start, n = [], 0, 0
    while start < width:
        call = slice(start, start + cuts[n % len(cuts)])
        extras = (real[:, call], reset[:, call], weight[:, call] if weighted else None)
        y, state = run_on_grid(ledger, token[:, call], state, N, *extras)
        outputs.append(y)
        start, n = call.stop, n + 1
    output = torch.cat(outputs, 1)
    for b, line in enumerate(streams):
        expected, position, window, weights, memory = walk(line)
        assert torch.where(real[b], output[b], 0).tolist() == expected
        assert state.clock.position_B[b] == position and state.clock.slot_B[b] == len(window)
        empty = [0.0] * (N - len(window))
        assert state.layers[1][b].tolist() == window + empty
        assert state.clock.weight_BN[b].tolist() == weights + empty
        assert state.layers[0][b] == memory
