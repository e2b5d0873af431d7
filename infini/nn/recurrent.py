"""Decoders that are recurrent over segments: vectors written at the end of a segment stand before the next ones.

A segment is read as [prefix; tokens; write tokens] by all layers, causally, before the next one begins: what the last
layer gives at the write tokens is written to the memory. So segments are read one after the other; only short ones
between which gradients stop are read side by side (infini/nn/truncated_bptt.py). Models differ in what the prefix is,
what the write tokens are, and how the memory takes up what was written (see Recurrence).

Letters: B rows, T tokens of a call, Q new tokens of a segment, P prefix vectors, W write tokens, D d_model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infini.nn.attention import Positions, Window
from infini.nn.decoder import Decoder
from infini.nn.grid import Grid, Piece, run_on_grid
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.prefix_attention import PrefixAttention, SegmentShape, read_layers
from infini.nn.protocols import Dimensions, ModelOutput
from infini.nn.state import State, state_class
from infini.nn.truncated_bptt import MAX_NUMEL, read_groups


@state_class
class RecurrentLeaves(NamedTuple):
    """Keys and values of the unfinished segment, a layer each; the memory [B, M, D]; how often a document wrote [B]."""

    window: tuple[Window, ...]
    memory: torch.Tensor
    writes_B: torch.Tensor


class _Read(NamedTuple):
    """Slots [begin, stop) of the segment [first, last) at one place of the call's grid; which rows forget before it."""

    place: int
    first: int
    last: int
    begin: int
    stop: int
    reset_B: torch.Tensor | None


class _Layout(NamedTuple):
    """What segments of a call have in common that are laid out alike: who sees whom, whether that is just what stands
    before it, who is who, and T5's biases of each layer [H, Q, L], minus infinity for who is not seen (None: other
    positions).

    Made once a call: of short segments, of which a call has many, the lookup costs as much as attention itself.
    """

    mask_QL: torch.Tensor
    is_causal: bool
    self_QL: torch.Tensor
    biases: list[torch.Tensor | None]


class _Tables(NamedTuple):
    """What is made once for all segments of a call: each layer's matrices of attention (see projections; None: not
    worth making), and the layouts so far."""

    projections: list[torch.Tensor | None]
    layouts: dict[tuple[int, ...], _Layout]


class Recurrence(Decoder, ABC):
    """The decoder that runs segment by segment; subclasses say what prefix, write tokens and memory are.

    bptt_depth: segments before its own that a gradient goes back to at most (None: all). A document is cut into groups
    of bptt_depth + 1 segments, and no gradient crosses from one group into another: the last of a group reaches
    bptt_depth segments back, the first none, and what the last one writes gets none, however the calls are cut. (The
    same reach for every segment would take a forward pass of its own for each.)
    random_segments: in training about every second segment that a call reads whole is cut in two, at a place drawn from
    torch's generator, the same for all rows. One that began in an earlier call, or that this one does not end, is not:
    what was read of it stays as it was read.
    """

    memory_sees_itself = False
    """Whether all vectors of the prefix see each other, and all write tokens: not only those before."""

    def __init__(
        self,
        dims: Dimensions,
        vocab_size: int,
        *,
        positions: Positions = "rotary",
        rope_base: float,
        bptt_depth: int | None = None,
        random_segments: bool = False,
        **options: Any,
    ) -> None:
        def attention(layer: int) -> PrefixAttention:
            return PrefixAttention(
                dims.d_model,
                dims.n_heads,
                dims.d_key,
                dims.segment_length,
                d_value=dims.d_value,
                n_kv_heads=dims.n_kv_heads,
                positions=positions,
                rope_base=rope_base,
            )

        if bptt_depth is not None and (
            isinstance(bptt_depth, bool) or not isinstance(bptt_depth, int) or bptt_depth < 0
        ):
            raise ValueError(f"bptt_depth={bptt_depth!r}: must be an integer from 0, or null")
        super().__init__(dims, vocab_size, attention, **options)
        self.gradient_horizon, self.random_segments = bptt_depth, random_segments
        self._compiled: Callable[..., tuple[torch.Tensor, list[Window]]] | None = None

    def compile_layers(self, backend: Any = "inductor") -> bool:
        """Training steps read segments by compiled code from now on (torch.compile), but where activations are computed
        again: calling the operations of many short segments takes as long as they do. False, and nothing is compiled,
        where gradients do not go through all segments, which may then be read side by side
        (infini/nn/truncated_bptt.py), and where lengths are drawn."""
        if self.gradient_horizon is not None or self.random_segments:
            return False
        self._compiled = torch.compile(read_layers, dynamic=False, backend=backend)
        return True

    @abstractmethod
    def memory_size(self) -> int:
        """Vectors of the memory."""

    @abstractmethod
    def prefix(self, memory_BMD: torch.Tensor, writes_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What stands before a segment of a document that wrote so often: [B, P, D], and which of it exists [B, P]
        (None: all)."""

    @abstractmethod
    def write_tokens(self, prefix_BPD: torch.Tensor) -> torch.Tensor:
        """What is read behind the segment [B, W, D]."""

    @abstractmethod
    def updated(self, memory_BMD: torch.Tensor, written_BWD: torch.Tensor) -> torch.Tensor:
        """The memory that has taken up what was written."""

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        clock, layers = super().init_state(batch_size, device)
        weight = self.embedding.weight
        shape = (batch_size, self.memory_size(), weight.shape[1])
        memory = torch.zeros(shape, dtype=state_dtype(weight.dtype), device=clock.position_B.device)
        windows = tuple(leaves.window for leaves in layers)
        return State(clock, (RecurrentLeaves(windows, memory, torch.zeros_like(clock.position_B)),))

    def forward(
        self,
        ids_BT: torch.Tensor,
        state: State | None = None,
        mask_BT: torch.Tensor | None = None,
        reset_BT: torch.Tensor | None = None,
        write_weight_BT: torch.Tensor | None = None,
    ) -> ModelOutput:
        """ids [B, T] and the state before them -> final hidden states [B, T, D] and the state after them."""
        state = self.init_state(ids_BT.shape[0], ids_BT.device) if state is None else state
        hidden, state = run_on_grid(
            self._read_segments, ids_BT, state, self.segment_length, mask_BT, reset_BT, write_weight_BT
        )
        return ModelOutput(hidden, state, hidden.new_zeros(()))

    def prefill(self, ids_BT: torch.Tensor, state: State, reset_BT: torch.Tensor | None = None) -> State:
        """The state after a call: the memory is what the last layer gives, so nothing can be left out."""
        return self(ids_BT, state, reset_BT=reset_BT).state

    def _read_segments(
        self, ids_BT: torch.Tensor, layers: tuple[Any, ...], grid: Grid
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        (leaves,) = layers
        reads = list(self._reads(grid))
        if self._falls_into_groups(grid, reads):
            resets = [read.reset_B for read in reads]
            hidden, memory, writes_B = read_groups(self, ids_BT, leaves.memory, leaves.writes_B, resets)
            return hidden, (RecurrentLeaves(leaves.window, memory, writes_B),)
        memory, writes_B, N = leaves.memory, leaves.writes_B, self.segment_length
        outputs: list[torch.Tensor] = []
        kept: list[list[Window]] = [[] for _ in self.blocks]
        # Columns are counted from the beginning of the unfinished segment.
        stop_B = grid.window_B + grid.clock.slot_B
        # Cut at once: the gradient of a slice is as large as what it was cut from.
        tokens = self.embedding(ids_BT).split([read.stop - read.begin for read in reads], 1)
        tables = self.tables(len(reads) > 1)
        for read, tokens_BQD in zip(reads, tokens, strict=True):
            if read.reset_B is not None:
                memory = memory.masked_fill(read.reset_B[:, None, None], 0)
                writes_B = writes_B.masked_fill(read.reset_B, 0)
            memory = self.cut_gradient(memory, writes_B)
            old = None
            if read.begin > read.first:
                before = slice(read.first, read.begin)
                old = [Window(window.k_BNGK[:, before], window.v_BNGV[:, before]) for window in leaves.window]
            ends = read.stop == read.last
            hidden, written, new = self.read_segment(tokens_BQD, tables, memory, writes_B, old, ends)
            outputs.append(hidden)
            for layer, window in enumerate(new):
                kept[layer].append(window)
            if written is not None:
                # A row whose segment padding cut short has not ended it.
                ended = stop_B >= read.place * N + read.last
                updated = self.updated(memory, written.to(memory.dtype))
                memory = torch.where(ended[:, None, None], updated, memory)
                writes_B = writes_B + ended
        windows = []
        for old_window, parts in zip(leaves.window, kept, strict=True):
            new_BT = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
            windows.append(Window(*(grid.new_window(o, n) for o, n in zip(old_window, new_BT, strict=True))))
        return torch.cat(outputs, 1), (RecurrentLeaves(tuple(windows), memory, writes_B),)

    def _falls_into_groups(self, grid: Grid, reads: list[_Read]) -> bool:
        """Whether the call is of short whole segments of one length, more than a group of them, of which a gradient is
        wanted. Where activations are computed again, what there is of them at a time is a segment's, not a batch of
        segments'."""
        if self.gradient_horizon is None or not torch.is_grad_enabled() or self.checkpoint_activations:
            return False
        B, N = len(grid.window_B), self.segment_length
        if len(reads) <= self.gradient_horizon + 1 or B * N * self.embedding.weight.shape[1] > MAX_NUMEL:
            return False
        # Nor does any row end in padding: it would have a segment that it has not ended.
        ends_whole = grid.window == len(reads) * N
        return ends_whole and all((read.begin, read.stop) == (0, N) for read in reads)

    def _reads(self, grid: Grid) -> Iterator[_Read]:
        """What is read one after the other in a call."""
        place, N = 0, self.segment_length
        for piece in grid.pieces:
            for s in range(piece.n_segments):
                reset_B = None if piece.reset_BS is None else piece.reset_BS[:, s]
                read_to = piece.stop + grid.offset - place * N
                for first, last in self._drawn_segments(piece):
                    begin, stop = max(first, piece.offset if s == 0 else 0), min(last, read_to)
                    if begin < stop:
                        yield _Read(place, first, last, begin, stop, reset_B)
                        # Forgotten is what was written before, not what this segment's first part writes.
                        reset_B = None
                place += 1

    def _drawn_segments(self, piece: Piece) -> list[tuple[int, int]]:
        """The segments (first slot, slot after the last) of one place of the grid; all rows have the same."""
        N = self.segment_length
        whole = piece.offset == 0 and piece.commits
        if not (self.training and self.random_segments and whole) or N < 4:
            return [(0, N)]
        one, at = torch.rand(2, device="cpu").tolist()
        if one < 0.5:
            return [(0, N)]
        cut = N // 4 + int(at * (N - 2 * (N // 4) + 1))
        return [(0, cut), (cut, N)]

    def cut_gradient(self, memory: torch.Tensor, writes_B: torch.Tensor) -> torch.Tensor:
        """The memory before a segment, without history where the segment begins a group."""
        if self.gradient_horizon is None:
            return memory
        begins_B = writes_B % (self.gradient_horizon + 1) == 0
        return torch.where(begins_B[:, None, None], memory.detach(), memory)

    def tables(self, several: bool = True) -> _Tables:
        """What is made once for a call; of one segment, matrices are not put together."""
        attentions: list[Any] = self.attentions()
        return _Tables([for_products(layer.projections()) if several else None for layer in attentions], {})

    def read_segment(
        self,
        tokens_BQD: torch.Tensor,
        tables: _Tables,
        memory: torch.Tensor,
        writes_B: torch.Tensor,
        old: list[Window] | None = None,
        ends: bool = True,
        outputs: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[Window]]:
        """Final hidden states of a segment's new tokens (of none, if no outputs are wanted), what is written (None: the
        segment goes on), and keys and values of the new tokens by layer. old: keys and values of the tokens before."""
        prefix, valid = self.prefix(memory, writes_B)
        prefix = prefix.to(tokens_BQD.dtype)
        parts = [prefix, tokens_BQD, *([self.write_tokens(prefix)] if ends else [])]
        n_prefix, write_from = prefix.shape[1], prefix.shape[1] + tokens_BQD.shape[1]
        x_BLD, offset = torch.cat(parts, 1), 0 if old is None else old[0].k_BNGK.shape[1]
        sizes = (n_prefix, offset, x_BLD.shape[1], x_BLD.shape[1] - write_from)
        if sizes not in tables.layouts:
            tables.layouts[sizes] = self._layout(*sizes, x_BLD.device)
        layout = tables.layouts[sizes]
        wanted_from = n_prefix if outputs else write_from
        shape = SegmentShape(n_prefix, write_from, self._mask(layout, valid), wanted_from)
        taken = list(self.blocks), self.norm, x_BLD, tables.projections, old, layout.biases, shape
        if self.checkpoint_activations and torch.is_grad_enabled():
            hidden, new = checkpoint(read_layers, *taken, use_reentrant=False)
        elif self._compiled is not None and self.training and torch.is_grad_enabled():
            hidden, new = self._compiled(*taken)
        else:
            hidden, new = read_layers(*taken)
        hidden, written = hidden.split([write_from - wanted_from, x_BLD.shape[1] - write_from], 1)
        return hidden, written if ends else None, new

    def _layout(self, n_prefix: int, offset: int, n_new: int, n_write: int, device: torch.device) -> _Layout:
        """Of a segment of which `offset` tokens were read before: asking are the prefix and what stands behind these,
        n_new vectors in all."""
        length = offset + n_new
        place = torch.arange(length, device=device)
        asking = torch.cat([place[:n_prefix], place[n_prefix + offset :]])
        mask = asking[:, None] >= place
        blocks = self.memory_sees_itself and max(n_prefix, n_write) > 1
        if blocks:
            for inside in (lambda at: at < n_prefix, lambda at: at >= length - n_write):
                mask = mask | (inside(asking)[:, None] & inside(place))
        layers: list[Any] = list(self.blocks)
        biases = [layer.attention.bias(asking[:, None] - place, mask) for layer in layers]
        return _Layout(mask, not offset and not blocks, asking[:, None] == place, biases)

    @staticmethod
    def _mask(layout: _Layout, valid_BP: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of attention over a segment whose prefix is there as far as `valid` says (None: all of it), without
        what the layout's biases mask; None where nothing is left to be masked, or only what comes later."""
        biased = layout.biases[0] is not None
        # On a processor, where asking waits for nothing.
        if valid_BP is None or (valid_BP.device.type == "cpu" and bool(valid_BP.all())):
            return None if biased or layout.is_causal else layout.mask_QL
        seen = torch.ones(len(valid_BP), layout.mask_QL.shape[1], dtype=torch.bool, device=valid_BP.device)
        seen[:, : valid_BP.shape[1]] = valid_BP
        # A vector that does not exist sees itself, so that its softmax is one of something.
        return ((layout.mask_QL & seen[:, None]) | layout.self_QL)[:, None]

    def state_floats(self, n_segments: int) -> int:
        """d_model for each vector of the memory."""
        return self.memory_size() * self.embedding.weight.shape[1]

    def receptive_field(self, n_segments: int) -> int:
        """Everything that was read: each segment's memory has seen the one before."""
        return self.segment_length * n_segments


def vectors(n: int, d_model: int) -> nn.Parameter:
    """n learned vectors that stand among embeddings, of their size."""
    return nn.Parameter(torch.randn(n * d_model) * 0.02)
