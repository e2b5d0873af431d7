"""The decoder that all models share: embedding, pre-norm blocks, final norm, head. Models differ in their attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infini.nn.attention import FeedForward, InfiniAttention, LocalAttention
from infini.nn.grid import Grid, fresh_clock, run_on_grid
from infini.nn.ops.dtypes import state_dtype
from infini.nn.parameter_groups import GATES
from infini.nn.protocols import Dimensions, ModelOutput
from infini.nn.state import State, difference
from infini.nn.state import leaves as named_leaves


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, attention: LocalAttention, d_ff: int, activation: Any) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(attention.d_model, bias=False)
        self.attention = attention
        self.feed_forward_norm = nn.LayerNorm(attention.d_model, bias=False)
        self.feed_forward = FeedForward(attention.d_model, d_ff, activation)

    def forward(self, x_BTD: Tensor, leaves: Any, grid: Grid) -> tuple[Tensor, Any, Tensor | None]:
        a, leaves, loss = self.attention.attend_with_loss(self.attention_norm(x_BTD), leaves, grid)
        x_BTD = x_BTD + a
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD)), leaves, loss


class Decoder(nn.Module):
    """A decoder-only language model; see infini.nn.protocols.LanguageModel.

    attention: builds the attention of a layer from the layer's number, 0 at the bottom.
    """

    def __init__(
        self,
        dims: Dimensions,
        vocab_size: int,
        attention: Callable[[int], LocalAttention],
        *,
        activation: Any = "gelu",
        tie_embeddings: bool = False,
        window_segments: int = 1,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.embedding = nn.Embedding(vocab_size, dims.d_model)
            self.blocks = nn.ModuleList(Block(attention(i), dims.d_ff, activation) for i in range(dims.n_layers))
        self.norm = nn.LayerNorm(dims.d_model, bias=False)
        self.unembedding = nn.Linear(dims.d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.unembedding.weight = self.embedding.weight
        self.checkpoint_activations = False
        lengths = list(dict.fromkeys(layer.segment_length for layer in self.attentions()))
        if len(lengths) > 1:
            found = ", ".join(map(str, lengths))
            raise ValueError(f"segment_length: layers have {found}; all must have the same")
        self.segment_length, self._window_segments = lengths[0], window_segments
        # Segment length -> leaves of a state of no rows, for check_state.
        self._fresh: dict[int, dict[str, Tensor]] = {}
        # A document may begin inside a segment if no layer writes whole segments to a memory.
        self._inner_resets = all(layer.inner_resets for layer in self.attentions())
        horizons = [layer.gradient_horizon for layer in self.attentions()]
        # A gradient reaches as far as the layers together: each adds its own reach.
        self.gradient_horizon: int | None = None if None in horizons else sum(h for h in horizons if h is not None)
        self.reset_parameters()

    def attentions(self) -> list[LocalAttention]:
        """The attention of every layer, from the bottom. Layers may be of different kinds."""
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    @property
    def memory_layers(self) -> list[InfiniAttention]:
        """The layers with a compressive memory."""
        return [layer for layer in self.attentions() if isinstance(layer, InfiniAttention)]

    @property
    def called_layers(self) -> list[Block]:
        """All layers; see infini.nn.protocols.OptionalMembers."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def memory_is_a_sum(self) -> bool:
        """Whether any layer's memory is a sum over tokens."""
        return any(layer.memory_is_a_sum for layer in self.attentions())

    def reset_parameters(self) -> None:
        """Sample the initial weights.

        The standard deviation is 1 / sqrt(fan in), divided by sqrt(2 layers) for matrices that write to the residual
        stream, and 0.02 for input and output embeddings. Gates follow gate_init. They are sampled last, so that models
        that differ only in the memory start with the same weights.
        """
        depth = math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name in ("embedding.weight", "unembedding.weight"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.dim() == 2 and name.split(".")[-1] not in GATES:
                std = parameter.shape[1] ** -0.5
                nn.init.normal_(
                    parameter, std=std / depth if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                )
        for module in self.modules():
            if isinstance(module, InfiniAttention):
                module.reset_gate()

    def resize_segments(self, segment_length: int) -> None:
        """Change the segment length from the next call on. Weights do not depend on it; states do. Raises ValueError
        where a layer cannot have such segments."""
        length = segment_length * self._window_segments
        for layer in self.attentions():
            layer.check_segments(length)
        self.segment_length = length
        for layer in self.attentions():
            layer.segment_length = length

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """The state of rows that have read nothing."""
        device = self.embedding.weight.device if device is None else torch.device(device)
        layers = tuple(layer.init_leaves(batch_size, device) for layer in self.attentions())
        dtype = state_dtype(self.embedding.weight.dtype)
        return State(fresh_clock(batch_size, self.segment_length, dtype), layers)

    def check_state(self, state: Any) -> None:
        """Raise ValueError for what is no state, or that of a model with other sizes or another segment length. In
        compiled graphs nothing is checked."""
        if torch.compiler.is_compiling():
            return
        if not isinstance(state, State):
            raise ValueError(f"state is a {type(state).__name__}: it must be the one that a call returned")
        if self.segment_length not in self._fresh:
            self._fresh[self.segment_length] = dict(named_leaves(self.init_state(0).layers))
        if differs := difference(dict(named_leaves(state.layers)), self._fresh[self.segment_length], first=1):
            raise ValueError(
                f"state of another model: for one row, {differs}; pass one of this model, or of init_state"
            )

    def forward(
        self,
        ids_BT: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        reset_BT: Tensor | None = None,
        write_weight_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Final hidden states [B, T, D] for ids [B, T], the state after them, and the layers' loss.

        See LocalAttention.forward for state, mask, reset and write weights.
        """
        if state is None:
            state = self.init_state(ids_BT.shape[0], ids_BT.device)
        self.check_state(state)
        losses: list[Tensor] = []

        def body(part_BT: Tensor, layers: tuple[Any, ...], grid: Grid) -> tuple[Tensor, tuple[Any, ...]]:
            means: list[Tensor] = []
            hidden_BTD, new_layers = self.read(part_BT, layers, grid, means)
            # Weighted by tokens: rows at other slots of their segments are read in other parts.
            losses.extend(mean * (part_BT.numel() / ids_BT.numel()) for mean in means)
            return hidden_BTD, new_layers

        extras = (mask_BT, reset_BT, write_weight_BT, self._inner_resets)
        hidden, state = run_on_grid(body, ids_BT, state, self.segment_length, *extras)
        return ModelOutput(hidden, state, torch.stack(losses).sum() if losses else hidden.new_zeros(()))

    def prefill(self, ids_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> State:
        """The state that forward() returns, computed without hidden states of the last layer."""
        self.check_state(state)

        def body(ids_BT: Tensor, layers: tuple[Any, ...], grid: Grid) -> tuple[Tensor, tuple[Any, ...]]:
            x_BTD, new_layers = self._run_blocks(ids_BT, layers, grid, len(self.blocks) - 1, [])
            last: Any = self.blocks[-1]
            after = last.attention.prefill(last.attention_norm(x_BTD), layers[-1], grid)
            return ids_BT, (*new_layers, after)

        extras = (None, reset_BT, None, self._inner_resets)
        return run_on_grid(body, ids_BT, state, self.segment_length, *extras)[1]

    def read(
        self, ids_BT: Tensor, layers: tuple[Any, ...], grid: Grid, losses: list[Tensor]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Final hidden states and leaves of a call whose grid is planned. Appends the layers' losses to `losses`."""
        x_BTD, new_layers = self._run_blocks(ids_BT, layers, grid, len(self.blocks), losses)
        return self.norm(x_BTD), new_layers

    def _run_blocks(
        self, ids_BT: Tensor, layers: tuple[Any, ...], grid: Grid, n_blocks: int, losses: list[Tensor]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run the embedding and the first n_blocks layers: their output and leaves. Appends their losses to
        `losses`."""
        x_BTD = self.embedding(ids_BT)
        new_layers = []
        for block, leaves in zip(self.blocks[:n_blocks], layers, strict=False):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_BTD, leaves, loss = checkpoint(block, x_BTD, leaves, grid, use_reentrant=False)
            else:
                x_BTD, leaves, loss = block(x_BTD, leaves, grid)
            if loss is not None:
                losses.append(loss)
            new_layers.append(leaves)
        return x_BTD, tuple(new_layers)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary."""
        return self.unembedding(hidden)

    @property
    def output_weight(self) -> Tensor:
        """The output embedding [vocabulary, d_model]."""
        return self.unembedding.weight

    def state_floats(self, n_segments: int) -> int:
        """Numbers per row in memory leaves, for any number of segments; 0 without a memory."""
        return sum(layer.memory_floats() for layer in self.attentions())

    def window_floats(self, n_segments: int) -> int:
        """Numbers per row in the keys and values of the window's segments before the last, however many are read."""
        each = sum(layer.n_kv_heads * (layer.d_key + layer.d_value) for layer in self.attentions())
        return each * (self.segment_length - self.segment_length // self._window_segments)

    @property
    def xl_cache(self) -> int:
        """Tokens before the segment that every layer keeps; see infini.nn.protocols.OptionalMembers."""
        return self.segment_length * min(layer.cached_segments for layer in self.attentions())

    def receptive_field(self, n_segments: int) -> int:
        """Table 1's context length: the segment itself, and the segments that each layer's memory adds."""
        back = [layer.look_back for layer in self.attentions()]
        reached = n_segments if None in back else 1 + sum(b for b in back if b is not None)
        return self.segment_length * min(n_segments, reached)

    @torch.no_grad()
    def gates(self) -> list[list[float]] | None:
        """sigmoid(beta), the weight of the memory, by layer and head, for the layers with gates; None without any."""
        betas = [getattr(layer, "beta", None) for layer in self.attentions()]
        return [torch.sigmoid(beta).tolist() for beta in betas if isinstance(beta, Tensor)] or None


def attention_sizes(dims: Dimensions) -> dict[str, Any]:
    """The sizes of a layer's attention, by the names that LocalAttention takes."""
    names = ("d_model", "n_heads", "d_key", "segment_length", "d_value", "n_kv_heads")
    return {name: getattr(dims, name) for name in names}


@dataclass
class DecoderConfig:
    """Options of every model that is a Decoder. A subclass adds the arguments of its attention."""

    activation: Literal["gelu", "relu"] = "gelu"
    tie_embeddings: bool = True

    def decoder(
        self, dims: Dimensions, vocab_size: int, kind: type[LocalAttention], window_segments: int = 1
    ) -> Decoder:
        """A decoder with these options and this kind of attention, over windows of window_segments
        segments, in every layer."""
        left_out = {*DecoderConfig.__dataclass_fields__, "window_segments"}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        own |= attention_sizes(dims) | {"segment_length": dims.segment_length * window_segments}
        options: Any = {name: getattr(self, name) for name in DecoderConfig.__dataclass_fields__}
        return Decoder(dims, vocab_size, lambda layer: kind(**own), window_segments=window_segments, **options)
