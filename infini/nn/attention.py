"""Blocks with two or more users: attention inside segments, Infini-attention, the feed-forward layer.

Letters: B rows, T tokens of a call, S segments, N segment length, Q query tokens of a piece, H query heads,
G key-value heads, K d_key, V d_value, D d_model.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from infini.nn.grid import Grid, Piece, fresh_clock, run_on_grid
from infini.nn.ops import attention, memory
from infini.nn.ops.dtypes import for_products, state_dtype
from infini.nn.ops.memory import DeltaNormaliser, FirstSegment, Memory, UpdateRule
from infini.nn.ops.relative import T5_BUCKETS, t5_attention
from infini.nn.state import State, reset_rows

Positions = Literal["rotary", "t5"]
GateInit = Literal["specialised", "local", "zeros", "normal", "spread"]


class Window(NamedTuple):
    """Keys [B, N, G, K] (before the rotary embedding) and values [B, N, G, V] of the unfinished segment."""

    k_BNGK: torch.Tensor
    v_BNGV: torch.Tensor


class AttentionLeaves(NamedTuple):
    """One layer's share of the state: the window, and the compressive memory where the layer has one."""

    window: Window
    memory: Memory | tuple[()]


class LocalAttention(nn.Module):
    """Causal attention inside segments of N tokens; nothing crosses a boundary.

    d_key, d_value: sizes of one head. n_kv_heads: key-value heads, each shared by n_heads / n_kv_heads query heads.
    attention_scale: "d_key" is 1 / sqrt(d_key); "d_model" is what the paper prints.
    """

    # Without a memory to commit, a document may begin anywhere inside another's segment.
    inner_resets = True
    gradient_horizon: int | None = 0
    """Segments before its own that a gradient goes back to through this layer; None: all."""
    look_back: int | None = 0
    """Segments before its own that this layer's output depends on, by what it is given there; None: all."""
    memory_is_a_sum = False
    """Whether all that the layer's memory leaves hold are sums over tokens, which can be scaled (see
    infini.nn.state.scale_memory). A decoder's memory can be scaled where that holds for any of its layers; then every
    sum is scaled, those that a layer has beside a cache too."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_key: int,
        segment_length: int,
        *,
        d_value: int | None = None,
        n_kv_heads: int | None = None,
        positions: Positions = "rotary",
        rope_base: float = 10000.0,
        attention_scale: Literal["d_key", "d_model"] = "d_key",
    ) -> None:
        super().__init__()
        d_value = d_key if d_value is None else d_value
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, size in (
            ("d_model", d_model),
            ("n_heads", n_heads),
            ("d_key", d_key),
            ("d_value", d_value),
            ("n_kv_heads", n_kv_heads),
            ("segment_length", segment_length),
        ):
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads}: must divide n_heads={n_heads}")
        if d_key % 2:
            raise ValueError(f"d_key={d_key}: rotary positions need an even number")
        if positions not in get_args(Positions):
            raise ValueError(f"positions={positions!r}: must be one of {', '.join(get_args(Positions))}")
        if not 1 <= rope_base < math.inf:
            raise ValueError(f"rope_base={rope_base}: must be a finite number from 1 on")
        if attention_scale not in ("d_key", "d_model"):
            raise ValueError(f"attention_scale={attention_scale!r}: must be 'd_key' or 'd_model'")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.d_key, self.d_value, self.segment_length = d_key, d_value, segment_length
        self.rope_base = rope_base
        self.positions: str = positions
        self.scale = 1 / math.sqrt(d_key if attention_scale == "d_key" else d_model)
        self.q_proj = nn.Linear(d_model, n_heads * d_key, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * d_key, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * d_value, bias=False)
        self.o_proj = nn.Linear(n_heads * d_value, d_model, bias=False)
        if positions == "t5":
            self.bucket_bias = nn.Parameter(torch.zeros(T5_BUCKETS * n_heads))

    def memory_floats(self) -> int:
        """Numbers a row carries in this layer's memory leaves."""
        return 0

    def init_leaves(self, batch_size: int, device: torch.device) -> Any:
        """This layer's leaves for rows that have read nothing."""
        dtype = state_dtype(self.q_proj.weight.dtype)
        shape = (batch_size, self.segment_length, self.n_kv_heads)
        window = Window(
            torch.zeros(*shape, self.d_key, dtype=dtype, device=device),
            torch.zeros(*shape, self.d_value, dtype=dtype, device=device),
        )
        return AttentionLeaves(window, ())

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """A state of this layer alone, for rows that have read nothing."""
        device = self.q_proj.weight.device if device is None else torch.device(device)
        clock = fresh_clock(batch_size, self.segment_length, device, state_dtype(self.q_proj.weight.dtype))
        return State(clock, (self.init_leaves(batch_size, device),))

    def forward(
        self,
        x_BTD: torch.Tensor,
        state: State | None = None,
        mask_BT: torch.Tensor | None = None,
        reset_BT: torch.Tensor | None = None,
        write_weight_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        """x [B, T, D] and the state before it -> y [B, T, D] and the state after it; any T >= 1.

        mask_BT: false is padding (before a row's first or after its last token). reset_BT: the row forgets before that
        token, which must stand on a segment boundary. write_weight_BT: how much a token writes to memory, 1 normally.
        """

        def body(x: torch.Tensor, layers: tuple[Any, ...], grid: Grid) -> tuple[torch.Tensor, tuple[Any, ...]]:
            y, leaves = self.attend(x, layers[0], grid)
            return y, (leaves,)

        state = self.init_state(x_BTD.shape[0], x_BTD.device) if state is None else state
        return run_on_grid(
            body, x_BTD, state, self.segment_length, mask_BT, reset_BT, write_weight_BT, self.inner_resets
        )

    def attend(self, x_BTD: torch.Tensor, leaves: Any, grid: Grid) -> tuple[torch.Tensor, Any]:
        """One call on a grid that was already planned."""
        x_BTD = for_products(x_BTD)
        q_BTHK = self.q_proj(x_BTD).unflatten(-1, (self.n_heads, self.d_key))
        k_BTGK = self.k_proj(x_BTD).unflatten(-1, (self.n_kv_heads, self.d_key))
        v_BTGV = self.v_proj(x_BTD).unflatten(-1, (self.n_kv_heads, self.d_value))
        old, mem = leaves.window, leaves.memory
        outputs = []
        for piece in grid.pieces:
            q = q_BTHK[:, piece.start : piece.stop].unflatten(1, (piece.n_segments, -1))
            k, v = self._whole_segments(old, k_BTGK, v_BTGV, piece)
            if self.positions == "t5":
                a_dot = t5_attention(q, k.to(q.dtype), v.to(q.dtype), self.bucket_bias, self.scale)
            else:
                a_dot = attention.local_attention(q, k, v, scale=self.scale, rope_base=self.rope_base)
            a, mem = self.mix_memory(a_dot, q, k, v, mem, piece)
            outputs.append(a.flatten(-2).flatten(1, 2))
        a_BTX = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        window = Window(grid.new_window(old.k_BNGK, k_BTGK), grid.new_window(old.v_BNGV, v_BTGV))
        return self.o_proj(a_BTX), AttentionLeaves(window, mem)

    def attend_with_loss(
        self, x_BTD: torch.Tensor, leaves: Any, grid: Grid
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """attend(), and what the layer adds to the training loss; here nothing."""
        return (*self.attend(x_BTD, leaves, grid), None)

    def prefill(self, x_BTD: torch.Tensor, leaves: Any, grid: Grid) -> Any:
        """The leaves that attend() would return, without its output: no queries, no attention."""
        x_BTD = for_products(x_BTD)
        k_BTGK = self.k_proj(x_BTD).unflatten(-1, (self.n_kv_heads, self.d_key))
        v_BTGV = self.v_proj(x_BTD).unflatten(-1, (self.n_kv_heads, self.d_value))
        old, mem = leaves.window, leaves.memory
        for piece in grid.pieces:
            k, v = self._whole_segments(old, k_BTGK, v_BTGV, piece)
            _, mem = self.write_memory(k, v, mem, piece)
        window = Window(grid.new_window(old.k_BNGK, k_BTGK), grid.new_window(old.v_BNGV, v_BTGV))
        return AttentionLeaves(window, mem)

    @staticmethod
    def _whole_segments(
        old: Window, k_BTGK: torch.Tensor, v_BTGV: torch.Tensor, piece: Piece
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A piece's keys and values [B, S, N, ...], what the window holds of its first segment included."""
        columns = slice(piece.start, piece.stop)
        k, v = k_BTGK[:, columns], v_BTGV[:, columns]
        if piece.offset:
            k = torch.cat([old.k_BNGK[:, : piece.offset].to(k.dtype), k], 1)
            v = torch.cat([old.v_BNGV[:, : piece.offset].to(v.dtype), v], 1)
        return k.unflatten(1, (piece.n_segments, -1)), v.unflatten(1, (piece.n_segments, -1))

    def write_memory(
        self, k_BSNGK: torch.Tensor, v_BSNGV: torch.Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Memory | tuple[()], Memory | tuple[()]]:
        """What each segment of the piece reads, and the memory after it; here nothing."""
        return (), ()

    def mix_memory(
        self,
        a_dot: torch.Tensor,
        q_BSQHK: torch.Tensor,
        k_BSNGK: torch.Tensor,
        v_BSNGV: torch.Tensor,
        mem: Memory | tuple[()],
        piece: Piece,
    ) -> tuple[torch.Tensor, Memory | tuple[()]]:
        """What a layer with a memory adds; here nothing."""
        return a_dot, mem


class InfiniAttention(LocalAttention):
    """Infini-attention: local attention and a compressive memory of everything before the segment, mixed by a gate.

    update_rule: "linear" (Eq. 4) or "delta" (Eq. 5). first_segment: what a row reads before anything was written:
    "local" bypasses the gate, "zero" reads 0. gate_init: "specialised" (one head in four reads the memory, 3,
    the others do not, -3), "local" (-2: the memory weighs 0.12), "zeros", "normal" (standard deviation 1) or "spread"
    (evenly from -2 to 2 over the heads). delta_normaliser: "previous" is the
    paper's; "current" bounds the update.
    `beta`, one a query head, float32: sigmoid(beta) is the weight of the memory.
    """

    inner_resets = False
    gradient_horizon = None
    look_back = None
    memory_is_a_sum = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_key: int,
        segment_length: int,
        update_rule: UpdateRule = "linear",
        *,
        d_value: int | None = None,
        n_kv_heads: int | None = None,
        first_segment: FirstSegment = "local",
        gate_init: GateInit = "specialised",
        delta_normaliser: DeltaNormaliser = "previous",
        positions: Positions = "rotary",
        rope_base: float = 10000.0,
        attention_scale: Literal["d_key", "d_model"] = "d_key",
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            d_key,
            segment_length,
            d_value=d_value,
            n_kv_heads=n_kv_heads,
            positions=positions,
            rope_base=rope_base,
            attention_scale=attention_scale,
        )
        for name, value, allowed in (
            ("update_rule", update_rule, ("linear", "delta")),
            ("first_segment", first_segment, ("local", "zero")),
            ("gate_init", gate_init, get_args(GateInit)),
            ("delta_normaliser", delta_normaliser, ("previous", "current")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
        self.update_rule, self.first_segment, self.delta_normaliser = update_rule, first_segment, delta_normaliser
        self.gate_init = gate_init
        self.beta = nn.Parameter(torch.empty(n_heads, dtype=torch.float32))
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """(Re)initialise beta as gate_init says."""
        if self.gate_init == "zeros":
            self.beta.zero_()
        elif self.gate_init == "local":
            self.beta.fill_(-2.0)
        elif self.gate_init == "specialised":
            # Every fourth head; the last one at least. Its weights then learn from the memory alone.
            self.beta.fill_(-3.0)
            self.beta[range(self.n_heads - 1, -1, -4)] = 3.0
        elif self.gate_init == "normal":
            self.beta.normal_()
        else:
            self.beta.copy_(torch.linspace(-2, 2, self.n_heads))

    def memory_floats(self) -> int:
        """Table 1: d_key (d_value + 1) for each key-value head, whatever the number of segments."""
        return self.n_kv_heads * self.d_key * (self.d_value + 1)

    def init_leaves(self, batch_size: int, device: torch.device) -> AttentionLeaves:
        dtype = state_dtype(self.q_proj.weight.dtype)
        heads = (batch_size, self.n_kv_heads, self.d_key)
        mem = Memory(
            torch.zeros(*heads, self.d_value, dtype=dtype, device=device),
            torch.zeros(heads, dtype=dtype, device=device),
        )
        window = super().init_leaves(batch_size, device).window
        return AttentionLeaves(window, mem)

    def write_memory(
        self, k_BSNGK: torch.Tensor, v_BSNGV: torch.Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Memory, Memory]:
        assert isinstance(mem, Memory)
        if piece.commits:
            return memory.scan(
                memory.sigma(k_BSNGK.transpose(2, 3)),
                v_BSNGV.transpose(2, 3),
                mem,
                rule=self.update_rule,
                delta_normaliser=self.delta_normaliser,
                weight_BSN=piece.weight_BSN,
                reset_BS=piece.reset_BS,
            )
        if piece.reset_BS is not None:
            mem = reset_rows(mem, piece.reset_BS[:, 0])
        return Memory(mem.m_BGKV[:, None], mem.z_BGK[:, None]), mem

    def mix_memory(
        self,
        a_dot: torch.Tensor,
        q_BSQHK: torch.Tensor,
        k_BSNGK: torch.Tensor,
        v_BSNGV: torch.Tensor,
        mem: Memory | tuple[()],
        piece: Piece,
    ) -> tuple[torch.Tensor, Memory | tuple[()]]:
        B, S, Q, H, K = q_BSQHK.shape
        G = self.n_kv_heads
        # Query head h belongs to key-value head h // (H / G): its queries are further rows of that head's product.
        sq = memory.sigma(q_BSQHK.unflatten(3, (G, H // G)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4))
        read, mem = self.write_memory(k_BSNGK, v_BSNGV, mem, piece)
        numerator, denominator = memory.retrieve(sq, read.m_BGKV, read.z_BGK)

        def by_token(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(3, (H // G, Q)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)

        first = piece.first_BS[:, :, None, None, None] if bool(piece.first_BS.any()) else None
        g = torch.sigmoid(self.beta.to(denominator.dtype))[:, None]
        a = memory.gate(a_dot, by_token(numerator), by_token(denominator), g, first, self.first_segment)
        return a, mem


class FeedForward(nn.Module):
    """Two matrices with an activation between them ("gelu" or "relu"), no bias."""

    def __init__(self, d_model: int, d_ff: int, activation: Literal["gelu", "relu"] = "gelu") -> None:
        super().__init__()
        if activation not in ("gelu", "relu"):
            raise ValueError(f"activation={activation!r}: must be 'gelu' or 'relu'")
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.activation = nn.GELU() if activation == "gelu" else nn.ReLU()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x_BTD)))
