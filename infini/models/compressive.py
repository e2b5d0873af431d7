"""Compressive Transformer (Rae et al. 2020): a Transformer-XL that compresses its oldest memories instead of dropping
them.

Each layer keeps its inputs of the last segments (the memory, first in, first out). Inputs that leave the memory are
compressed to `rate` times fewer vectors (the compressed memory, first in, first out). The layer attends to compressed
memory, memory and its own segment, with the relative positions of Dai et al. 2019 over all three. Neither memory has a
gradient. Only convolutions have weights; the attention-reconstruction loss alone trains them. It compares the segment's
content-based attention to the memories that leave with its attention to their compressions, and only the compression
gets its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infini.models import register
from infini.models.transformer_xl import Hidden, XLAttention
from infini.nn.attention import AttentionLeaves, at_least_one
from infini.nn.decoder import Decoder, DecoderConfig
from infini.nn.grid import Grid, Piece, keep
from infini.nn.host import take, to_device, to_numpy
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.ops.relative import biased_attention
from infini.nn.protocols import Dimensions
from infini.nn.state import state_class

Compression = Literal["mean", "max", "convolution", "dilated", "most_used"]


@state_class
class Memories(NamedTuple):
    """Layer inputs of the last segments [B, m N, D], and compressed earlier ones [B, c, D], the newest last."""

    recent_BMD: Tensor
    compressed_BCD: Tensor


class CompressiveAttention(XLAttention):
    """Causal attention over compressed memory, memory and the segment.

    rate: memories per compressed memory, a divisor of the segment length.
    memory_segments, compressed_segments: lengths of the two memories in segments. The compressed memory has
        compressed_segments N vectors, each of `rate` tokens.
    compression: "mean" or "max" of `rate` neighbours; "convolution" with kernel and stride `rate`; "dilated" with
        kernel 3, dilation and stride `rate`; "most_used": the memories with the most attention from the segment at
        whose end they leave.
    """

    plain_projections = True

    def __init__(
        self,
        *sizes: Any,
        compression: Compression = "convolution",
        rate: int = 2,
        memory_segments: int = 1,
        compressed_segments: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, positions="dai2019", **options)
        at_least_one(rate=rate, memory_segments=memory_segments, compressed_segments=compressed_segments)
        if compression not in get_args(Compression):
            raise ValueError(f"compression={compression!r}: must be one of {', '.join(get_args(Compression))}")
        self.compression, self.rate, self.memory_segments = compression, rate, memory_segments
        # A chunk is the N / rate compressed memories of one segment.
        self.chunks = compressed_segments * rate
        self.look_back = memory_segments + self.chunks
        self.cached_segments = memory_segments
        self.check_segments(self.segment_length)
        taps = {"convolution": rate, "dilated": 3}.get(compression)
        self.compress_proj = None if taps is None else nn.Linear(taps * self.d_model, self.d_model, bias=False)

    def check_segments(self, segment_length: int) -> None:
        if segment_length % self.rate:
            raise ValueError(f"rate={self.rate}: must divide segments of {segment_length} tokens")

    def memory_floats(self) -> int:
        """d_model (m N + c N): what Table 1 counts."""
        return self.d_model * (self.memory_segments + self.chunks // self.rate) * self.segment_length

    def init_leaves(self, batch_size: int, device: torch.device) -> AttentionLeaves:
        self.check_segments(self.segment_length)
        dtype, N = state_dtype(self.q_proj.weight.dtype), self.segment_length
        sizes = (N, self.memory_segments * N, self.chunks * N // self.rate)
        window, recent, compressed = (
            torch.zeros(batch_size, n, self.d_model, dtype=dtype, device=device) for n in sizes
        )
        return AttentionLeaves(Hidden(window), Memories(recent, compressed))

    def attend(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any]:
        y, leaves, _ = self.attend_with_loss(x_BTD, leaves, grid)
        return y, leaves

    def attend_with_loss(
        self, x_BTD: Tensor, leaves: AttentionLeaves, grid: Grid
    ) -> tuple[Tensor, AttentionLeaves, Tensor | None]:
        x_BTD = for_products(x_BTD)
        own = [piece.segments(leaves.window.x_BND, x_BTD) for piece in grid.pieces]
        line, made, chunks = self._lines(leaves.memory, own, grid)
        outputs, first = [], 0
        losses: list[Tensor] = []
        for piece, o_BSND in zip(grid.pieces, own, strict=True):
            both = torch.cat([*self._memories_of(line, chunks, first, piece), o_BSND], 2)
            x_BSQD = o_BSND[:, :, piece.offset :]
            a, _ = self.read(x_BSQD, (both,), self._seen(piece, both.shape[2]))
            outputs.append(a.flatten(-2).flatten(1, 2))
            if piece.commits:
                span = slice(first, first + piece.n_segments)
                if self.training and self.compress_proj is not None:
                    losses.append(self._reconstruction_loss(o_BSND, line[:, span], made[:, span], piece))
                first = span.stop
        state = self._leaves_after_call(leaves, x_BTD, line, chunks, grid)
        # The mean over all segments of the call: parts of a call, weighted by their tokens, give the same loss.
        segments_read = x_BTD.shape[0] * x_BTD.shape[1] / self.segment_length
        return self.o_proj(torch.cat(outputs, 1)), state, torch.stack(losses).sum() / segments_read if losses else None

    def prefill(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> Any:
        x_BTD = for_products(x_BTD)
        own = [piece.segments(leaves.window.x_BND, x_BTD) for piece in grid.pieces]
        line, _, chunks = self._lines(leaves.memory, own, grid)
        return self._leaves_after_call(leaves, x_BTD, line, chunks, grid)

    def _lines(self, memory: Memories, own: list[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Segments [B, m + n, N, D]: those in memory, then the n that the call completes. Chunks [B, n, N / rate, D]:
        the compressions of the segments that leave as these n end. All chunks [B, c + n, N / rate, D], those in memory
        first, detached."""
        N, m, c = self.segment_length, self.memory_segments, self.chunks
        complete = [o for piece, o in zip(grid.pieces, own, strict=True) if piece.commits]
        dtype = own[0].dtype
        recent, old = memory.recent_BMD.unflatten(1, (m, N)), memory.compressed_BCD.unflatten(1, (c, N // self.rate))
        line = torch.cat([recent.to(dtype), *complete], 1).detach()
        n = line.shape[1] - m
        if self.compression == "most_used":
            chunks = self._most_used(line, old.to(dtype), own, grid)
            return line, chunks[:, c:], chunks
        made = self._compress(line[:, :n])
        return line, made, torch.cat([old.to(dtype), made.detach()], 1)

    def _compress(self, x_BSND: Tensor) -> Tensor:
        """Segments [B, S, N, D] -> chunks [B, S, N / rate, D]."""
        if self.compression == "mean":
            return x_BSND.unflatten(2, (-1, self.rate)).mean(3)
        if self.compression == "max":
            return x_BSND.unflatten(2, (-1, self.rate)).amax(3)
        assert self.compress_proj is not None
        if self.compression == "convolution":
            return self.compress_proj(x_BSND.unflatten(2, (-1, self.rate)).flatten(3))
        # Dilated: the token, and the tokens `rate` before and after it; zeros outside the segment.
        padded = F.pad(x_BSND, (0, 0, self.rate, self.rate))
        taps = [padded[:, :, tap * self.rate :][:, :, : x_BSND.shape[2] : self.rate] for tap in range(3)]
        return self.compress_proj(torch.cat(taps, 3))

    @torch.no_grad()
    def _most_used(self, line: Tensor, chunks: Tensor, own: list[Tensor], grid: Grid) -> Tensor:
        """All chunks: each segment's attention decides which vectors of the segment leaving at its end are kept."""
        N, first = self.segment_length, 0
        for piece, o_BSND in zip(grid.pieces, own, strict=True):
            for s in range(piece.n_segments if piece.commits else 0):
                one = replace(piece, n_segments=1, index_BS=piece.index_BS[:, s : s + 1])
                both = torch.cat([*self._memories_of(line, chunks, first, one), o_BSND[:, s : s + 1]], 2)
                q, bias = self.queries(o_BSND[:, s : s + 1], both.shape[2])
                k = self.project_keys_values(both)[0]
                # With unit vectors as values of the oldest segment, the output of attention is its weights.
                begin = self.chunks * (N // self.rate)
                unit = torch.eye(both.shape[2], dtype=q.dtype, device=q.device)[:, begin : begin + N]
                v = unit[None, None, :, None].expand(*k.shape[:4], N)
                weights = biased_attention(q, k.to(q.dtype), v, bias, self._seen(one, both.shape[2]), self.scale)
                used_BN = weights.mean((1, 2, 3))
                kept = used_BN.topk(N // self.rate, 1).indices.sort(1).values
                fallen = line[:, first]
                chunk = fallen.gather(1, kept[..., None].expand(-1, -1, self.d_model))
                chunks = torch.cat([chunks, chunk[:, None]], 1)
                first += 1
        return chunks

    def _memories_of(self, line: Tensor, chunks: Tensor, first: int, piece: Piece) -> tuple[Tensor, Tensor]:
        """The memories of each segment of a piece: compressed memory [B, S, C, D] and memory [B, S, M, D]."""
        segment = first + np.arange(piece.n_segments)[:, None]
        compressed = chunks[:, to_device(segment + np.arange(self.chunks), line.device)]
        recent = line[:, to_device(segment + np.arange(self.memory_segments), line.device)]
        return compressed.flatten(2, 3), recent.flatten(2, 3)

    def _filled(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each chunk [..., c] and segment [..., m] of memory is filled after `index` whole segments of a
        document."""
        m, c = self.memory_segments, self.chunks
        filled = index[..., None] >= np.arange(m + c, 0, -1)
        return filled[..., :c], filled[..., c:]

    def _seen(self, piece: Piece, n_keys: int) -> Tensor | None:
        N, index = self.segment_length, piece.index_BS
        if (index >= self.memory_segments + self.chunks).all():
            return None
        chunks, recent = self._filled(index)
        own = np.ones((*index.shape, n_keys), dtype=bool)
        old = np.concatenate([chunks.repeat(N // self.rate, -1), recent.repeat(N, -1)], -1)
        own[..., : old.shape[-1]] = old
        return to_device(own, self.o_proj.weight.device)

    def _leaves_after_call(
        self, leaves: AttentionLeaves, x_BTD: Tensor, line: Tensor, chunks: Tensor, grid: Grid
    ) -> AttentionLeaves:
        m, c = self.memory_segments, self.chunks
        done_B = grid.window_B // self.segment_length
        kept_chunks, kept = self._filled(to_numpy(grid.clock.position_B) // self.segment_length)

        def last(x: Tensor, n: int, filled: np.ndarray, like: Tensor) -> Tensor:
            return keep(take(x, done_B[:, None] + np.arange(n)), filled).flatten(1, 2).to(like.dtype)

        old = leaves.memory
        memory = Memories(last(line, m, kept, old.recent_BMD), last(chunks, c, kept_chunks, old.compressed_BCD))
        return AttentionLeaves(Hidden(grid.new_window(leaves.window.x_BND, x_BTD)), memory)

    def _reconstruction_loss(self, x_BSND: Tensor, old_BSND: Tensor, new_BSCD: Tensor, piece: Piece) -> Tensor:
        """Mean square of attn(h, old memories) - attn(h, compressed memories), summed over the segments at whose end
        memories leave. Only the compression has a gradient."""

        def heads(x: Tensor, projection: nn.Linear, size: int) -> Tensor:
            y = F.linear(x, projection.weight.detach().to(x.dtype)).flatten(0, 1)
            return y.unflatten(-1, (-1, size)).transpose(1, 2)

        def attention(x: Tensor) -> Tensor:
            k, v = heads(x, self.k_proj, self.d_key), heads(x, self.v_proj, self.d_value)
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=self.n_heads != self.n_kv_heads)

        q = heads(x_BSND.detach(), self.q_proj, self.d_key)
        error = (attention(old_BSND) - attention(new_BSCD)).to(state_dtype(q.dtype)).square().mean((1, 2, 3))
        counts = to_device((piece.index_BS >= self.memory_segments).ravel(), error.device)
        if piece.weight_BSN is not None:
            # A segment that padding cuts short does not end, at the end of the call or before a reset in it.
            counts = counts & (piece.weight_BSN > 0).all(-1).flatten()
        return (error * counts).sum()


@dataclass
class CompressiveConfig(DecoderConfig):
    """Options of compressive. See CompressiveAttention."""

    compression: Compression = "convolution"
    rate: int = 2
    memory_segments: int = 1
    compressed_segments: int = 1
    attention_scale: Literal["d_key", "d_model"] = "d_key"


@register("compressive", CompressiveConfig)
def build(config: CompressiveConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with CompressiveAttention in every layer."""
    return config.decoder(dims, vocab_size, CompressiveAttention)
