"""Decoders that are recurrent over segments: a segment writes vectors that precede the following segments.

All layers read a segment as [prefix; tokens; write tokens], causally. The last layer's outputs at the write tokens are
written to the memory. Segments are therefore read in sequence; only short segments between which gradients are cut are
read in parallel (infini/nn/truncated_bptt.py). Subclasses of Recurrence define the prefix, the write tokens and the
update of the memory.

Letters: B rows, T tokens of a call, Q new tokens of a segment, or queries of it, P prefix vectors, W write tokens, L
vectors of a segment, H query heads, G key-value heads, K d_key, V d_value, D d_model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infini.nn.attention import LocalAttention, Positions, Window
from infini.nn.decoder import Decoder, DecoderConfig, attention_sizes
from infini.nn.grid import Grid, Piece
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.attention import rotate
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.ops.relative import masked_attention, t5_bias
from infini.nn.protocols import Dimensions
from infini.nn.state import State, state_class
from infini.nn.truncated_bptt import MAX_NUMEL, read_groups


class SegmentShape(NamedTuple):
    """The shape of a segment, the same for all layers: the number of prefix vectors, the index of the first write
    token, the attention mask (None: causal), and the index from which the last layer's outputs are wanted."""

    n_prefix: int
    write_from: int
    mask: Tensor | None
    wanted_from: int


class PrefixAttention(LocalAttention):
    """Causal attention over [prefix; tokens; write tokens] of a segment; positions count from the prefix."""

    inner_resets = False
    plain_projections = True

    def projections(self) -> Tensor:
        """The projection matrices of queries, keys and values, joined: for many short segments one product is faster
        than three small ones."""
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def attend_segment(
        self,
        x_BLD: Tensor,
        projections: Tensor | None,
        old: Window | None,
        shape: SegmentShape,
        bias_HQL: Tensor | None,
    ) -> tuple[Tensor, Window]:
        """The concatenated outputs of the heads, before o_proj, and keys and values of the new tokens.

        x_BLD: the prefix, the new tokens, the write tokens. projections: the joined matrices; None: the layer's own.
        old: keys and values of the segment's earlier tokens, if any. bias_HQL: T5's biases, minus infinity where
        masked; None: rotary positions.
        """
        H, G, P = self.n_heads, self.n_kv_heads, shape.n_prefix
        offset = 0 if old is None else old.k_BNGK.shape[1]
        x_BLD = for_products(x_BLD)
        if projections is None:
            qkv = torch.cat([self.q_proj(x_BLD), self.k_proj(x_BLD), self.v_proj(x_BLD)], -1)
        else:
            qkv = F.linear(x_BLD, projections)
        qk, v = qkv.split([(H + G) * self.d_key, G * self.d_value], -1)
        qk, v = qk.unflatten(-1, (H + G, self.d_key)), v.unflatten(-1, (G, self.d_value))
        new = Window(qk[:, P : shape.write_from, H:], v[:, P : shape.write_from])
        # Positions of tokens follow the prefix; those of write tokens follow the segment's last token.
        if bias_HQL is None and offset:
            turned = rotate(qk[:, :P], 0, self.rope_base), rotate(qk[:, P:], P + offset, self.rope_base)
            qk = torch.cat(turned, 1)
        elif bias_HQL is None:
            qk = rotate(qk, 0, self.rope_base)
        (q, k), mask = qk.split([H, G], 2), shape.mask
        if old is not None:
            before = old.k_BNGK.to(v.dtype)
            before = rotate(before, P, self.rope_base) if bias_HQL is None else before
            k = torch.cat([k[:, :P], before, k[:, P:]], 1)
            v = torch.cat([v[:, :P], old.v_BNGV.to(v.dtype), v[:, P:]], 1)
        if bias_HQL is not None:
            bias_XHQL = bias_HQL[None] if mask is None else bias_HQL.masked_fill(~mask, -math.inf)
            return masked_attention(q, k, v, bias_XHQL, self.scale).flatten(-2), new
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        a = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=H != G
        )
        return a.transpose(1, 2).flatten(-2), new

    def bias(self, distance_QL: Tensor, mask_QL: Tensor) -> Tensor | None:
        """T5's biases [H, Q, L], minus infinity where masked; None for rotary positions."""
        if self.positions != "t5":
            return None
        return t5_bias(self.bucket_bias, distance_QL).masked_fill(~mask_QL, -math.inf)


def read_layers(
    blocks: list[Any],
    norm: nn.Module,
    x_BLD: Tensor,
    projections: list[Tensor | None],
    old: list[Window] | None,
    biases: list[Tensor | None],
    shape: SegmentShape,
) -> tuple[Tensor, list[Window]]:
    """The normalised outputs of the last layer from shape.wanted_from on, and keys and values of the new tokens by
    layer. See PrefixAttention.attend_segment."""
    new: list[Window] = []
    windows = [None] * len(blocks) if old is None else old
    for block, projection, window, bias in zip(blocks, projections, windows, biases, strict=True):
        h_BLD = block.attention_norm(x_BLD)
        a, made = block.attention.attend_segment(h_BLD, projection, window, shape, bias)
        if block is blocks[-1]:
            x_BLD, a = x_BLD[:, shape.wanted_from :], a[:, shape.wanted_from :]
        x_BLD = x_BLD + block.attention.o_proj(a)
        x_BLD = x_BLD + block.feed_forward(block.feed_forward_norm(x_BLD))
        new.append(made)
    return norm(x_BLD), new


@state_class
class RecurrentLeaves(NamedTuple):
    """Keys and values of the unfinished segment, per layer; the memory [B, M, D]; the number of writes so far [B], on
    the host."""

    window: tuple[Window, ...]
    memory: Tensor
    writes_B: Tensor


class _Read(NamedTuple):
    """Slots [begin, stop) of the segment [first, last) at one place of the call's grid, and the rows reset before it
    (None: none), on the host."""

    place: int
    first: int
    last: int
    begin: int
    stop: int
    restarts_B: np.ndarray | None


class _Layout(NamedTuple):
    """Tensors that segments of the same sizes share: the attention mask, whether it is causal, the diagonal, and each
    layer's T5 biases [H, Q, L], minus infinity where masked (None for other positions).

    Made once per call: for short segments it costs as much as attention itself.
    """

    mask_QL: Tensor
    is_causal: bool
    self_QL: Tensor
    biases: list[Tensor | None]


class _Tables(NamedTuple):
    """Values that all segments of a call share: each layer's joined projection matrices (see
    PrefixAttention.projections; None: not worth joining), and the layouts made so far."""

    projections: list[Tensor | None]
    layouts: dict[tuple[int, ...], _Layout]


class Recurrence(Decoder, ABC):
    """A decoder that reads one segment after the other. Subclasses define prefix, write tokens and memory.

    bptt_depth: segments that a gradient reaches back at most; None: all. A document is divided into groups of
        bptt_depth + 1 segments, and no gradient crosses the boundary of a group: it reaches back bptt_depth segments
        from the last segment of a group, none from the first, and the vectors that the last one writes have no
        gradient. The division does not depend on the calls. (The same reach for every segment would need a forward pass
        for each.)
    random_segments: in training, about half of the segments that a call reads whole are cut in two at a random place,
        the same for all rows. torch's generator samples it. Segments that span several calls are not cut.
    """

    memory_size: int
    """Number of vectors in the memory."""
    memory_sees_itself = False
    """Whether attention is bidirectional among the vectors of the prefix, and among the write tokens."""

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
        # A truth value is an int of Python.
        if bptt_depth is not None and (type(bptt_depth) is not int or bptt_depth < 0):
            raise ValueError(f"bptt_depth={bptt_depth!r}: must be an integer from 0, or null")
        sizes = {**attention_sizes(dims), "positions": positions, "rope_base": rope_base}
        super().__init__(dims, vocab_size, lambda layer: PrefixAttention(**sizes), **options)
        self.gradient_horizon, self.random_segments = bptt_depth, random_segments
        self._compiled: Callable[..., tuple[Tensor, list[Window]]] | None = None

    @property
    def uncompiled_by(self) -> str | None:
        """The option with which layers are not compiled, None where there is none: bptt_depth, with which segments may
        be read in parallel (infini/nn/truncated_bptt.py), or random_segments, which have random lengths."""
        if self.gradient_horizon is not None:
            return f"bptt_depth={self.gradient_horizon}"
        return "random_segments=True" if self.random_segments else None

    def compile_layers(self, backend: Any = "inductor") -> bool:
        """Compile the reading of a segment for training steps without activation checkpointing (torch.compile).

        Launching the operations of many short segments takes as long as running them. Returns False and compiles
        nothing where an option is against it; see uncompiled_by.
        """
        if self.uncompiled_by is not None:
            return False
        self._compiled = torch.compile(read_layers, dynamic=False, backend=backend)
        return True

    @abstractmethod
    def prefix(self, memory_BMD: Tensor, writes_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """The prefix [B, P, D] of a segment after writes_B writes (on the host), and which of its vectors exist [B, P];
        None: all."""

    @abstractmethod
    def write_tokens(self, prefix_BPD: Tensor) -> Tensor:
        """The vectors [B, W, D] that follow the segment's tokens."""

    @abstractmethod
    def updated(self, memory_BMD: Tensor, written_BWD: Tensor) -> Tensor:
        """The memory after a segment has written written_BWD."""

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        clock, layers = super().init_state(batch_size, device)
        weight = self.embedding.weight
        shape = (batch_size, self.memory_size, weight.shape[1])
        memory = torch.zeros(shape, dtype=state_dtype(weight.dtype), device=layers[0].window.k_BNGK.device)
        windows = tuple(leaves.window for leaves in layers)
        return State(clock, (RecurrentLeaves(windows, memory, torch.zeros_like(clock.position_B)),))

    @property
    def called_layers(self) -> list[Any]:
        """None: segments are read by parts of layers."""
        return []

    def prefill(self, ids_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> State:
        """The state after a call. The memory is an output of the last layer, so that no computation is saved."""
        return self(ids_BT, state, reset_BT=reset_BT).state

    def read(
        self, ids_BT: Tensor, layers: tuple[Any, ...], grid: Grid, losses: list[Tensor]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        (leaves,) = layers
        reads = list(self._reads(grid))
        if self._falls_into_groups(grid, reads):
            resets = [read.restarts_B for read in reads]
            hidden, memory, writes_B = read_groups(self, ids_BT, leaves.memory, leaves.writes_B, resets)
            return hidden, (RecurrentLeaves(leaves.window, memory, writes_B),)
        memory, writes_B, N = leaves.memory, leaves.writes_B.cpu(), self.segment_length
        outputs: list[Tensor] = []
        kept: list[list[Window]] = [[] for _ in self.blocks]
        # Columns count from the start of the unfinished segment.
        stop_B = grid.stop_B
        # One split: the gradient of a slice is as large as the tensor that it is taken from.
        tokens = self.embedding(ids_BT).split([read.stop - read.begin for read in reads], 1)
        tables = self.tables(len(reads) > 1)
        for read, tokens_BQD in zip(reads, tokens, strict=True):
            if read.restarts_B is not None:
                memory = memory.masked_fill(to_device(read.restarts_B, memory.device)[:, None, None], 0)
                writes_B = writes_B.masked_fill(torch.from_numpy(read.restarts_B), 0)
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
                # Padding that cuts a row's segment short leaves it unfinished.
                ended_B = stop_B >= read.place * N + read.last
                updated = self.updated(memory, written.to(memory.dtype))
                if ended_B.all():
                    # A copy: a slice would keep the outputs of the whole segment alive.
                    memory = updated.clone()
                else:
                    memory = torch.where(to_device(ended_B, memory.device)[:, None, None], updated, memory)
                writes_B = writes_B + torch.from_numpy(ended_B)
        windows = []
        for old_window, parts in zip(leaves.window, kept, strict=True):
            new_BT = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
            windows.append(Window(*(grid.new_window(o, n) for o, n in zip(old_window, new_BT, strict=True))))
        return torch.cat(outputs, 1), (RecurrentLeaves(tuple(windows), memory, writes_B),)

    def _falls_into_groups(self, grid: Grid, reads: list[_Read]) -> bool:
        """Whether the call is read in groups: it has more than a group of short whole segments, and gradients are on.

        Activation checkpointing rules it out, because it keeps the activations of one segment at a time instead of a
        batch of them.
        """
        if self.gradient_horizon is None or not torch.is_grad_enabled() or self.checkpoint_activations:
            return False
        B, N = len(grid.window_B), self.segment_length
        if len(reads) <= self.gradient_horizon + 1 or B * N * self.embedding.weight.shape[1] > MAX_NUMEL:
            return False
        # A row that ends in padding would leave a segment unfinished.
        ends_whole = grid.window == len(reads) * N
        return ends_whole and all((read.begin, read.stop) == (0, N) for read in reads)

    def _reads(self, grid: Grid) -> Iterator[_Read]:
        """The parts of segments that a call reads in sequence."""
        place, N = 0, self.segment_length
        for piece in grid.pieces:
            for s in range(piece.n_segments):
                restarts_B = None if piece.restarts_BS is None else piece.restarts_BS[:, s]
                if restarts_B is not None and not restarts_B.any():
                    restarts_B = None
                read_to = piece.stop + grid.offset - place * N
                for first, last in self._drawn_segments(piece):
                    begin, stop = max(first, piece.offset if s == 0 else 0), min(last, read_to)
                    if begin < stop:
                        yield _Read(place, first, last, begin, stop, restarts_B)
                        # The reset clears earlier writes, not those of this segment's first part.
                        restarts_B = None
                place += 1

    def _drawn_segments(self, piece: Piece) -> list[tuple[int, int]]:
        """The segments (first slot, slot after the last) at one place of the grid, the same for all rows."""
        N = self.segment_length
        whole = piece.offset == 0 and piece.commits
        if not (self.training and self.random_segments and whole) or N < 4:
            return [(0, N)]
        one, at = torch.rand(2, device="cpu").tolist()
        if one < 0.5:
            return [(0, N)]
        cut = N // 4 + int(at * (N - 2 * (N // 4) + 1))
        return [(0, cut), (cut, N)]

    def cut_gradient(self, memory: Tensor, writes_B: Tensor) -> Tensor:
        """The memory before a segment, detached for rows in which the segment begins a group."""
        if self.gradient_horizon is None:
            return memory
        begins_B = to_device(to_numpy(writes_B) % (self.gradient_horizon + 1) == 0, memory.device)
        return torch.where(begins_B[:, None, None], memory.detach(), memory)

    def tables(self, several: bool = True) -> _Tables:
        """The tables of a call. several: whether it has several segments, so that joining matrices pays."""
        attentions: list[Any] = self.attentions()
        return _Tables([for_products(layer.projections()) if several else None for layer in attentions], {})

    def read_segment(
        self,
        tokens_BQD: Tensor,
        tables: _Tables,
        memory: Tensor,
        writes_B: Tensor,
        old: list[Window] | None = None,
        ends: bool = True,
        outputs: bool = True,
    ) -> tuple[Tensor, Tensor | None, list[Window]]:
        """Read new tokens of a segment.

        old: keys and values of the segment's earlier tokens, by layer. ends: whether the segment ends with these
        tokens. outputs: whether hidden states are wanted. Returns the final hidden states of the new tokens (none if
        not wanted), the vectors written (None if the segment does not end), and keys and values of the new tokens by
        layer.
        """
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
        """The layout of a segment of which `offset` tokens are already read. Queries are the prefix and the vectors
        after these tokens, n_new in all."""
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
    def _mask(layout: _Layout, valid_BP: Tensor | None) -> Tensor | None:
        """The attention mask of a segment, besides what the layout's biases mask; None if no mask, or the causal one,
        is enough. valid_BP: which vectors of the prefix exist; None: all."""
        biased = layout.biases[0] is not None
        if valid_BP is None:
            return None if biased or layout.is_causal else layout.mask_QL
        seen = torch.ones(len(valid_BP), layout.mask_QL.shape[1], dtype=torch.bool, device=valid_BP.device)
        seen[:, : valid_BP.shape[1]] = valid_BP
        # A vector that does not exist sees itself, so that its softmax is defined.
        return ((layout.mask_QL & seen[:, None]) | layout.self_QL)[:, None]

    def state_floats(self, n_segments: int) -> int:
        """d_model for each vector of the memory."""
        return self.memory_size * self.embedding.weight.shape[1]

    def receptive_field(self, n_segments: int) -> int:
        """All tokens read: each segment's memory depends on the one before."""
        return self.segment_length * n_segments


def vectors(n: int, d_model: int) -> nn.Parameter:
    """n learned vectors, initialised like embeddings."""
    return nn.Parameter(torch.randn(n * d_model) * 0.02)


@dataclass
class RecurrenceConfig(DecoderConfig):
    """Options of every Recurrence; see there."""

    bptt_depth: int | None = None
    positions: Positions = "rotary"
    rope_base: float = 10000.0

    @property
    def shared(self) -> dict[str, Any]:
        """The options of this class, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(RecurrenceConfig)}
