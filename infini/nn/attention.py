"""Layers: attention inside segments, Infini-attention, and the feed-forward layer.

Letters: B rows, T tokens of a call, S segments, N segment length, Q query tokens of a piece, H query heads,
G key-value heads, K d_key, V d_value, D d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from infini.nn.grid import Grid, Piece, fresh_clock, run_on_grid
from infini.nn.ops import attention, memory
from infini.nn.ops.blocks import BlockSums, in_blocks, read_and_mix
from infini.nn.ops.dtypes import check_dtype, for_products, state_dtype, without_autocast
from infini.nn.ops.memory import DeltaNormaliser, FirstSegment, InputGate, Memory, UpdateRule
from infini.nn.ops.relative import T5_BUCKETS, t5_attention
from infini.nn.protocols import Keep, Projection
from infini.nn.state import State, difference, leaves, reset_rows, state_class

Positions = Literal["rotary", "t5"]
QK_NORM_EPS = 1e-6
GateInit = Literal["specialised", "local", "zeros", "normal", "spread"]


@state_class
class Window(NamedTuple):
    """Keys [B, N, G, K] (before the rotary embedding) and values [B, N, G, V] of the unfinished segment."""

    k_BNGK: Tensor
    v_BNGV: Tensor


@state_class
class AttentionLeaves(NamedTuple):
    """The state of one layer: the window, and the layer's memory, if it has one. Both are those of the layer's kind."""

    window: Any
    memory: Any


# States that older versions wrote with torch.save name the class of their model's layers.
torch.serialization.add_safe_globals(
    [
        (AttentionLeaves, "infini.models.compressive.CompressiveLeaves"),
        (AttentionLeaves, "infini.models.infini_xl.InfiniXLLeaves"),
        (AttentionLeaves, "infini.models.memorizing.MemorizingLeaves"),
        (AttentionLeaves, "infini.models.transformer_xl.XLLeaves"),
    ]
)


def at_least_one(**sizes: int) -> None:
    """Raise ValueError for the first of these sizes below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")


class LocalAttention(nn.Module):
    """Causal attention inside segments of N tokens. No information crosses a segment boundary.

    Args:
        d_model: size D of the input and output vectors.
        n_heads: number H of query heads.
        d_key: size K of the queries and keys of a head; even.
        segment_length: tokens N in a segment.
        d_value: size V of the values of a head. Default: d_key.
        n_kv_heads: number G of key-value heads, a divisor of n_heads. Query head h uses key-value head
            h // (n_heads / n_kv_heads). Default: n_heads.
        positions: "rotary" (counted from the segment's start) or "t5" (learned biases by distance).
        rope_base: base of the rotary wavelengths, at least 1.
        attention_scale: "d_key" multiplies scores by 1 / sqrt(d_key), "d_model" by 1 / sqrt(d_model), as the paper
            prints.
        qkv_bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
        qk_norm: whether each head's queries and keys are normalised to root mean square 1 (RMSNorm with a learned
            weight [K] each), before positions are applied.
    """

    # A layer without memory allows a reset anywhere inside a segment.
    inner_resets = True
    gradient_horizon: int | None = 0
    """Segments before its own that a gradient reaches through this layer. None: all."""
    cached_segments: int = 0
    """Segments before the current one whose keys and values, or layer inputs, are kept uncompressed."""
    look_back: int | None = 0
    """Segments before its own that the layer's output depends on through its inputs there. None: all."""
    plain_projections = False
    """Whether the layer also uses the matrices of its projections alone. It then has neither qkv_bias nor qk_norm."""
    memory_is_a_sum = False
    """Whether every memory leaf of the layer is a sum over tokens, so that infini.nn.state.scale_memory applies. A
    decoder supports it if at least one layer does."""

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
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        d_value = d_key if d_value is None else d_value
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        sizes = {"d_model": d_model, "n_heads": n_heads, "d_key": d_key, "d_value": d_value}
        for name, size in (sizes | {"n_kv_heads": n_kv_heads, "segment_length": segment_length}).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r}: must be a whole number, at least 1")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads}: must divide n_heads={n_heads}")
        if d_key % 2:
            raise ValueError(f"d_key={d_key}: rotary positions need an even number")
        if positions not in get_args(Positions):
            raise ValueError(f"positions={positions!r}: must be one of {', '.join(get_args(Positions))}")
        if not 1 <= rope_base < math.inf:
            raise ValueError(f"rope_base={rope_base}: must be a finite number, at least 1")
        if attention_scale not in ("d_key", "d_model"):
            raise ValueError(f"attention_scale={attention_scale!r}: must be 'd_key' or 'd_model'")
        if self.plain_projections and (qkv_bias or qk_norm):
            raise ValueError(f"qkv_bias={qkv_bias}, qk_norm={qk_norm}: {type(self).__name__} has neither")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.d_key, self.d_value, self.segment_length = d_key, d_value, segment_length
        self.rope_base, self.attention_scale = rope_base, attention_scale
        self.positions: str = positions
        self.scale = 1 / math.sqrt(d_key if attention_scale == "d_key" else d_model)
        self.q_proj = nn.Linear(d_model, n_heads * d_key, bias=qkv_bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * d_key, bias=qkv_bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * d_value, bias=qkv_bias)
        self.o_proj = nn.Linear(n_heads * d_value, d_model, bias=out_bias)
        self.q_norm = nn.RMSNorm(d_key, eps=QK_NORM_EPS) if qk_norm else None
        self.k_norm = nn.RMSNorm(d_key, eps=QK_NORM_EPS) if qk_norm else None
        if positions == "t5":
            self.bucket_bias = nn.Parameter(torch.zeros(T5_BUCKETS * n_heads))

    def extra_repr(self) -> str:
        names = ("d_model", "n_heads", "n_kv_heads", "d_key", "d_value", "segment_length", "positions")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + self._shown_unless_default(
            rope_base=10000.0, attention_scale="d_key"
        )

    def _shown_unless_default(self, **defaults: Any) -> str:
        values = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return "".join(f", {name}={value!r}" for name, value in values.items())

    def memory_floats(self) -> int:
        """Numbers per row in this layer's memory leaves."""
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
        """The state of rows that have read nothing, for this layer alone. device: by default the weights'."""
        device = self.q_proj.weight.device if device is None else torch.device(device)
        clock = fresh_clock(batch_size, self.segment_length, state_dtype(self.q_proj.weight.dtype))
        return State(clock, (self.init_leaves(batch_size, device),))

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        reset_BT: Tensor | None = None,
        write_weight_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Read T more tokens of each of B rows. One call gives the same outputs as many calls on parts of it.

        Args:
            x_BTD: inputs [B, T, D]; any T >= 1.
            state: the state that the previous call returned. Default: init_state(B), rows that have read nothing.
            mask_BT: bool [B, T], false at padding, which may precede a row's first token or follow its last. This and
                the next two are best given on the CPU: on another device their values are read back, which waits for
                it.
            reset_BT: bool [B, T]; before a token where it is true the row's state is cleared. With a compressive
                memory such a token must begin a segment.
            write_weight_BT: float [B, T], a factor on what a token adds to the compressive memory. Default: 1. If all
                of a row's earlier segments have 0, the memory reads 0, which the gate mixes in nevertheless.

        Returns:
            The outputs [B, T, D] and the state after them. The state keeps its gradient history; see State.detach.

        Raises ValueError for inputs of another shape or dtype, a state of another layer and, naming row and column, for
        masks and resets that do not fit the segments.
        """
        self.check_inputs(x_BTD, None if torch.compiler.is_compiling() else state)

        def body(x: Tensor, layers: tuple[Any, ...], grid: Grid) -> tuple[Tensor, tuple[Any, ...]]:
            y, leaves = self.attend(x, layers[0], grid)
            return y, (leaves,)

        if state is None:
            state = self.init_state(x_BTD.shape[0], x_BTD.device)
        return run_on_grid(
            body, x_BTD, state, self.segment_length, mask_BT, reset_BT, write_weight_BT, self.inner_resets
        )

    def check_inputs(self, x_BTD: Tensor, state: Any) -> None:
        """Raise ValueError for inputs of another shape or dtype, and for what is no state or that of a layer with other
        sizes."""
        if x_BTD.dim() != 3 or x_BTD.shape[2] != self.d_model:
            raise ValueError(f"x must be [B, T, d_model={self.d_model}], got {list(x_BTD.shape)}")
        check_dtype(x_BTD, self.q_proj.weight)
        if state is None:
            return
        if not isinstance(state, State):
            raise ValueError(f"state is a {type(state).__name__}: it must be the second value that a call returned")
        mine, given = (
            dict(leaves(of_layers)) for of_layers in ((self.init_leaves(0, self.q_proj.weight.device),), state.layers)
        )
        if differs := difference(given, mine, first=1):
            raise ValueError(
                f"state of another layer: for one row, {differs}; pass one of this layer, or of init_state"
            )

    def check_segments(self, segment_length: int) -> None:
        """Raise ValueError for a segment length that the layer cannot have."""

    def project_queries(self, x: Tensor) -> Tensor:
        """Queries [..., H, K] of inputs [..., D], without positions."""
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.d_key))
        return q if self.q_norm is None else self.q_norm(q).to(q.dtype)

    def project_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., G, K], without positions, and values [..., G, V] of inputs [..., D]."""
        k = self.k_proj(x).unflatten(-1, (self.n_kv_heads, self.d_key))
        k = k if self.k_norm is None else self.k_norm(k).to(k.dtype)
        return k, self.v_proj(x).unflatten(-1, (self.n_kv_heads, self.d_value))

    def attend(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any]:
        """Outputs [B, T, D] and leaves after a call whose grid is planned."""
        x_BTD = for_products(x_BTD)
        q_BTHK = self.project_queries(x_BTD)
        new = self.project_keys_values(x_BTD)
        old, mem = leaves.window, leaves.memory
        outputs = []
        for piece in grid.pieces:
            q = q_BTHK[:, piece.start : piece.stop].unflatten(1, (piece.n_segments, -1))
            k, v = (piece.segments(o, n) for o, n in zip(old, new, strict=True))
            if self.positions == "t5":
                a_dot = t5_attention(q, k.to(q.dtype), v.to(q.dtype), self.bucket_bias, self.scale)
            else:
                a_dot = attention.local_attention(q, k, v, scale=self.scale, rope_base=self.rope_base)
            a, mem = self.mix_memory(a_dot, q, k, v, mem, piece)
            outputs.append(a.flatten(-2).flatten(1, 2))
        a_BTX = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        window = Window(*(grid.new_window(o, n) for o, n in zip(old, new, strict=True)))
        return self.o_proj(a_BTX), AttentionLeaves(window, mem)

    def attend_with_loss(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any, Tensor | None]:
        """attend(), and the layer's term of the training loss; None here."""
        return (*self.attend(x_BTD, leaves, grid), None)

    def prefill(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> Any:
        """The leaves that attend() returns, computed without queries, attention and outputs."""
        new = self.project_keys_values(for_products(x_BTD))
        old, mem = leaves.window, leaves.memory
        for piece in grid.pieces:
            k, v = (piece.segments(o, n) for o, n in zip(old, new, strict=True))
            _, mem = self.write_memory(k, v, mem, piece)
        window = Window(*(grid.new_window(o, n) for o, n in zip(old, new, strict=True)))
        return AttentionLeaves(window, mem)

    def write_memory(
        self, k_BSNGK: Tensor, v_BSNGV: Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Memory | tuple[()], Memory | tuple[()]]:
        """The memory that each segment of the piece reads, and the memory after it. Local attention has none: both are
        empty."""
        return (), ()

    def mix_memory(
        self, a_dot: Tensor, q_BSQHK: Tensor, k_BSNGK: Tensor, v_BSNGV: Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Tensor, Memory | tuple[()]]:
        """The piece's attention mixed with its memory reads, and the memory after it. Local attention reads none."""
        return a_dot, mem


class InfiniAttention(LocalAttention):
    """Infini-attention (arXiv 2404.07143): attention inside segments of N tokens, and a compressive memory of all
    earlier segments. A learned gate per head mixes the two (Eq. 6).

    A call takes inputs [B, T, D] with any T >= 1 and the state of the previous call; it returns outputs [B, T, D] and
    the next state. The module keeps no state. The state's size does not depend on the number of tokens read: per row
    and key-value head it holds a memory [K, V] and a normaliser [K] in float32 (float64 in float64), and the keys and
    values of the unfinished segment. Gradients flow through the state until State.detach cuts them.

    Args:
        d_model: size D of the input and output vectors.
        n_heads: number H of query heads.
        d_key: size K of the queries and keys of a head; even.
        segment_length: tokens N in a segment.
        update_rule: "linear" adds sigma(k)^T v of every token to the memory (Eq. 4). "delta" first subtracts the value
            that the memory already returns for the key (Eq. 5).
        d_value: size V of the values of a head. Default: d_key.
        n_kv_heads: number G of key-value heads, a divisor of n_heads. Query head h uses key-value head
            h // (n_heads / n_kv_heads). Default: n_heads.
        first_segment: output in a row's first segment, before anything is in memory. "local" is attention alone, as if
            the gate were closed. "zero" mixes attention with a read of 0.
        gate_init: initial values of `beta`. "specialised": 3 for every fourth head, -3 for the others. "local": -2.
            "zeros": 0. "normal": samples with mean 0 and standard deviation 1. "spread": evenly spaced from -2 to 2.
        delta_normaliser: divisor of the value that "delta" subtracts. "previous": sigma(k) z of the past segments, as
            in the paper. "current": this segment included, which bounds the update.
        memory_decay: not in the paper: at the end of every segment, M and z of a key-value head are multiplied by a
            learned sigmoid(decay), so that heads forget at different speeds. Their initial half-lives are spread evenly
            in logarithm from 1 to `memory_decay` segments, at least 1 (a single head: `memory_decay`). Default: nothing
            is forgotten.
        input_gate: not in the paper: "sigmoid" multiplies what a token adds to the memory of a key-value head, to M and
            z, by sigmoid(input_weight . k / |k| + input_bias), so that the head learns what to write. Default: every
            token is written alike.
        positions: positions inside a segment, "rotary" (counted from its start) or "t5" (learned biases by distance).
            The memory has no positions.
        rope_base: base of the rotary wavelengths, at least 1.
        attention_scale: "d_key" multiplies scores by 1 / sqrt(d_key), "d_model" by 1 / sqrt(d_model), as the paper
            prints.
        qkv_bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
        qk_norm: whether each head's queries and keys are normalised to root mean square 1 (RMSNorm with a learned
            weight [K] each), before positions are applied and before the memory is read and written.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: torch.nn.Linear.
        q_norm, k_norm: torch.nn.RMSNorm, or None without qk_norm.
        beta: [H], float32. sigmoid(beta) is the weight of the memory, 1 - sigmoid(beta) that of attention.
        decay: [G], float32, or None without memory_decay.
        input_weight, input_bias: [G, K] and [G], float32, 0 at first; or None without input_gate.

    Example:
        layer = InfiniAttention(d_model=512, n_heads=8, d_key=64, segment_length=256, update_rule="delta")
        y, state = layer(x)  # x: [B, T, 512]
        y2, state = layer(x2, state)
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
        memory_decay: float | None = None,
        input_gate: InputGate | None = None,
        positions: Positions = "rotary",
        rope_base: float = 10000.0,
        attention_scale: Literal["d_key", "d_model"] = "d_key",
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
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
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        )
        for name, value, allowed in (
            ("update_rule", update_rule, ("linear", "delta")),
            ("first_segment", first_segment, ("local", "zero")),
            ("gate_init", gate_init, get_args(GateInit)),
            ("delta_normaliser", delta_normaliser, ("previous", "current")),
            ("input_gate", input_gate, (None, *get_args(InputGate))),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, allowed))}")
        self.update_rule, self.first_segment, self.delta_normaliser = update_rule, first_segment, delta_normaliser
        a_number = isinstance(memory_decay, int | float) and not isinstance(memory_decay, bool)
        if memory_decay is not None and not (a_number and 1 <= memory_decay < math.inf):
            raise ValueError(f"memory_decay={memory_decay!r}: must be None, or a finite number of segments, at least 1")
        self.gate_init, self.memory_decay, self.input_gate = gate_init, memory_decay, input_gate

        def learned(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=torch.float32))

        G = self.n_kv_heads
        self.beta = learned(n_heads)
        self.decay = None if memory_decay is None else learned(G)
        self.input_weight = None if input_gate is None else learned(G, d_key)
        self.input_bias = None if input_gate is None else learned(G)
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Set beta, decay and the input gate to their initial values; see gate_init and memory_decay. An input gate
        begins with the same factor for all tokens, which changes no read."""
        for of_input in (self.input_weight, self.input_bias):
            if of_input is not None:
                of_input.zero_()
        if self.decay is not None and self.memory_decay is not None:
            self.decay.copy_(memory.decay_logits(self.n_kv_heads, self.memory_decay))
        if self.gate_init == "zeros":
            self.beta.zero_()
        elif self.gate_init == "local":
            self.beta.fill_(-2.0)
        elif self.gate_init == "specialised":
            # Every fourth head, counted back from the last one: its weights learn from the memory almost alone.
            self.beta.fill_(-3.0)
            self.beta[range(self.n_heads - 1, -1, -4)] = 3.0
        elif self.gate_init == "normal":
            self.beta.normal_()
        else:
            self.beta.copy_(torch.linspace(-2, 2, self.n_heads))

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, update_rule={self.update_rule!r}, first_segment={self.first_segment!r}"
        return text + self._shown_unless_default(delta_normaliser="previous", memory_decay=None, input_gate=None)

    def memory_floats(self) -> int:
        """d_key (d_value + 1) per key-value head (Table 1), for any number of segments."""
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

    def write_weights(self, k_BTGK: Tensor) -> Tensor | None:
        """The input gate's factors [..., G] on what tokens with these keys [..., G, K] add to the memory, in the dtype
        of the state; None without one. See infini.nn.protocols.MemoryLayer."""
        if self.input_weight is None or self.input_bias is None:
            return None
        k = k_BTGK.to(state_dtype(k_BTGK.dtype)).transpose(-3, -2)
        with without_autocast(k):
            factors = memory.input_gate(k, self.input_weight.to(k.dtype), self.input_bias.to(k.dtype))
        return factors.transpose(-2, -1)

    def watch(self, projection: Projection, keep: Keep) -> Callable[[], None]:
        """Pass the queries or keys of every call to `keep`; see infini.nn.protocols.MemoryLayer."""
        of_queries = projection == "queries"
        linear, norm = (self.q_proj, self.q_norm) if of_queries else (self.k_proj, self.k_norm)
        heads = self.n_heads if of_queries else self.n_kv_heads

        def passed(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Some layers project by segment, [B, S, Q, ...].
            keep(output.reshape(len(output), -1, heads * self.d_key))

        return (linear if norm is None else norm).register_forward_hook(passed).remove

    def write_memory(
        self, k_BSNGK: Tensor, v_BSNGV: Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Memory, Memory]:
        """The memory that each segment of the piece reads, and the memory after it (Eq. 4 or 5)."""
        assert isinstance(mem, Memory)
        if piece.commits:
            # The share of each head's memory that remains after each segment; a segment that a row has not finished
            # changes nothing.
            decay_BSG = None if self.decay is None else torch.sigmoid(self.decay.to(mem.z_BGK.dtype))[None, None]
            if decay_BSG is not None and piece.complete_BS is not None:
                decay_BSG = torch.where(piece.complete_BS[..., None], decay_BSG, 1.0)
            weight = None if piece.weight_BSN is None else piece.weight_BSN[..., None]
            if (factor_BSNG := self.write_weights(k_BSNGK)) is not None:
                weight = factor_BSNG if weight is None else weight * factor_BSNG
            sums: memory.Sums
            if in_blocks(k_BSNGK):
                sums = BlockSums(k_BSNGK, v_BSNGV, weight)
            else:
                sk_BSGNK = memory.sigma(k_BSNGK.transpose(2, 3))
                weight_BSGN = None if weight is None else weight.transpose(2, 3)
                sums = memory.TokenSums(sk_BSGNK, v_BSNGV.transpose(2, 3), weight_BSGN)
            return memory.scan_sums(
                sums,
                mem,
                rule=self.update_rule,
                delta_normaliser=self.delta_normaliser,
                reset_BS=piece.reset_BS,
                earlier=piece.earlier,
                decay_BSG=decay_BSG,
            )
        if piece.reset_BS is not None:
            mem = reset_rows(mem, piece.reset_BS[:, 0])
        return Memory(mem.m_BGKV[:, None], mem.z_BGK[:, None]), mem

    def mix_memory(
        self, a_dot: Tensor, q_BSQHK: Tensor, k_BSNGK: Tensor, v_BSNGV: Tensor, mem: Memory | tuple[()], piece: Piece
    ) -> tuple[Tensor, Memory | tuple[()]]:
        """The piece's attention mixed by the gate with what its queries read of the memory (Eq. 3, 6), and the memory
        after it."""
        B, S, Q, H, K = q_BSQHK.shape
        G = self.n_kv_heads
        read, mem = self.write_memory(k_BSNGK, v_BSNGV, mem, piece)
        g_H = torch.sigmoid(self.beta.to(read.z_BGK.dtype))
        g_H = memory.with_zero_gradients(g_H, self.decay, self.input_weight, self.input_bias)
        first = None if piece.first_BS is None else piece.first_BS[..., None]
        if in_blocks(q_BSQHK):
            weights = (g.expand(B, S, H) for g in memory.gate_weights(g_H, first, self.first_segment))
            return read_and_mix(q_BSQHK, a_dot, read, *weights), mem
        # Query head h belongs to key-value head h // (H / G): its queries are further rows of that head's product.
        sq = memory.sigma(q_BSQHK.unflatten(3, (G, H // G)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4))
        numerator, denominator = memory.retrieve(sq, read.m_BGKV, read.z_BGK)

        def by_token(x: Tensor) -> Tensor:
            return x.unflatten(3, (H // G, Q)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)

        first = None if first is None else first[..., None, None]
        a = memory.gate(a_dot, by_token(numerator), by_token(denominator), g_H[:, None], first, self.first_segment)
        return a, mem


class FeedForward(nn.Module):
    """Two linear layers without biases and an activation, "gelu" or "relu", between them."""

    def __init__(self, d_model: int, d_ff: int, activation: Literal["gelu", "relu"] = "gelu") -> None:
        super().__init__()
        if activation not in ("gelu", "relu"):
            raise ValueError(f"activation={activation!r}: must be 'gelu' or 'relu'")
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.activation = nn.GELU() if activation == "gelu" else nn.ReLU()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x_BTD)))
