"""The interface of every language model, and the sizes it is built from.

A model has every member of LanguageModel. It may have members of OptionalMembers; `optional` reads them, and gives the
default to a model without them. No other member of a language model is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from infini.nn.state import State


class ModelOutput(NamedTuple):
    """hidden_BTD: final hidden states, the input of `head`. state: after the call. aux_loss: a term of the training
    loss."""

    hidden_BTD: Tensor
    state: State
    aux_loss: Tensor


class Dimensions(Protocol):
    """The sizes that all rows of a table share; set by `conf/dims/` through `infini.config.schema.DimsConfig`."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    d_key: int
    d_value: int | None
    d_ff: int
    segment_length: int


class LanguageModel(Protocol):
    """A causal language model: a torch.nn.Module that takes a state and returns the next one. A call has any length >=
    1.

    segment_length: tokens in a segment. gradient_horizon: segments that a gradient reaches back within one call; None:
    all. checkpoint_activations: set by training; if true, the backward pass computes activations again instead of
    keeping them. The conformance tests check these declarations for every registered model.

    Training and evaluation pass mask_BT and reset_BT on the host, whatever device the ids are on, so that a call can be
    planned without reading values of the device. On the device they are allowed; a model reads them back once a call.
    """

    segment_length: int
    gradient_horizon: int | None
    checkpoint_activations: bool

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State: ...

    def resize_segments(self, segment_length: int) -> None:
        """Change the segment length from the next call on."""

    def __call__(
        self,
        ids_BT: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        reset_BT: Tensor | None = None,
        write_weight_BT: Tensor | None = None,
    ) -> ModelOutput: ...

    def prefill(self, ids_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> State:
        """The state after a call, computed without its output."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary. Separate from the call, so that the loss is computed in chunks."""

    @property
    def output_weight(self) -> Tensor:
        """The output embedding [vocabulary, d_model]."""

    def state_floats(self, n_segments: int) -> int:
        """Numbers per row in memory leaves after n_segments whole segments."""

    def receptive_field(self, n_segments: int) -> int:
        """Tokens that can change the output of the last of n_segments whole segments, counted back from its end."""


Projection = Literal["queries", "keys"]
Keep = Callable[[Tensor], None]


class MemoryLayer(Protocol):
    """A layer in memory_layers. It has H = n_heads query heads, G = n_kv_heads key-value heads, each of H / G query
    heads, with keys of d_key entries, and gates beta [H] (Eq. 6)."""

    n_heads: int
    n_kv_heads: int
    d_key: int

    @property
    def beta(self) -> Tensor: ...

    def write_weights(self, k_BTGK: Tensor) -> Tensor | None:
        """The factors [B, T, G] on what tokens with these keys add to the memory; None: 1 (the paper)."""

    def watch(self, projection: Projection, keep: Keep) -> Callable[[], None]:
        """Pass the queries [B, T, H K] or keys [B, T, G K] of every call to `keep`, before positions and before sigma,
        as the memory reads with them and is written with them. The result ends that."""


class OptionalMembers:
    """Optional members of a language model, and their defaults."""

    memory_layers: Sequence[Any] = ()
    """The layers with a compressive memory (see MemoryLayer), from the bottom. The half-dilution length is measured on
    them, and recipe.sparse_writes penalises their writes."""
    memory_is_a_sum: bool = False
    """Whether a layer's memory is a sum over tokens (see infini.nn.state.scale_memory), which recipe.length_extension
    needs."""
    takes_write_weights: bool = True
    """Whether calls take write_weight_BT, a factor on what each token adds to that sum, which recipe.long_history
    needs."""
    summary_vectors: int = 0
    """Vectors that a segment writes (p in the paper's Table 1)."""
    xl_cache: int = 0
    """Tokens before the segment whose keys and values, or layer inputs, every layer keeps uncompressed."""
    random_segments: bool = False
    """Whether a call in training draws where segments end, alike for all rows, by torch's generator on the CPU."""
    called_layers: Sequence[Any] = ()
    """Layers whose weights are used by calls of the layer alone: parallel=fsdp2 gathers them one layer at a time."""
    hides_states: bool = False
    """Whether the state leaves called_layers beside their outputs. A gradient may then reach a layer by the state
    alone, which fsdp2 does not see: once gathered, their weights stay so until the gradients are there. Ranks may then
    call a layer differently often, if the outputs of all calls are in the loss's graph."""

    def window_floats(self, n_segments: int) -> int | None:
        """Numbers per row in the keys and values of earlier segments, which the last of n_segments sees beside the
        memory leaves (state_floats); None: not known."""
        return 0

    def gates(self) -> list[list[float]] | None:
        """sigmoid(beta), the weight of the memory, by layer and head, for the layers with gates; None without any.
        Records keep them, and a model that has them is also evaluated with its memory knocked out."""
        return None


def carried_floats(model: Any, n_segments: int) -> int | None:
    """Numbers per row that a model carries into the last of n_segments; None: not known."""
    window = optional(model, "window_floats")(n_segments)
    return None if window is None else model.state_floats(n_segments) + window


_DEFAULTS = OptionalMembers()


def optional(model: Any, name: str) -> Any:
    """The model's member `name`, or the default of OptionalMembers."""
    default = getattr(_DEFAULTS, name)
    if inspect.getattr_static(model, name, None) is not None:
        # A default would hide an AttributeError raised inside a property of the model.
        return getattr(model, name)
    return getattr(model, name, default)


def missing_members(model: Any) -> list[str]:
    """Members of LanguageModel that the model does not have."""
    names = [*LanguageModel.__annotations__, *vars(LanguageModel)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and not hasattr(model, name)]


@contextmanager
def recorded(model: Any, projection: Projection) -> Iterator[list[Tensor]]:
    """Record what every layer in model.memory_layers passes to MemoryLayer.watch [B, T, X], from the bottom.

    The list is filled at the end of the `with` block; several calls inside it are joined along T. Only calls with the
    same gradient mode as the block are recorded: others read tokens a second time.
    """
    layers = optional(model, "memory_layers")
    with_gradients = torch.is_grad_enabled()
    parts: list[list[Tensor]] = [[] for _ in layers]

    def keep(kept: list[Tensor], output: Tensor) -> None:
        if torch.is_grad_enabled() == with_gradients:
            kept.append(output)

    ends = [
        layer.watch(projection, lambda output, kept=kept: keep(kept, output))
        for kept, layer in zip(parts, layers, strict=True)
    ]
    outputs: list[Tensor] = []
    try:
        yield outputs
    finally:
        for end in ends:
            end()
    if not all(parts):
        raise RuntimeError(f"no {projection} were recorded: the model was not called with gradients {with_gradients}")
    outputs.extend(torch.cat(kept, 1) if len(kept) > 1 else kept[0] for kept in parts)
