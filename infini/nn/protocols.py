"""The interface of every language model, and the sizes it is built from.

A model has every member of LanguageModel. It may have those of OptionalMembers, which say what a model without them
counts as; whoever asks a model for one of these asks through `optional`. Nothing else is asked of a language model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infini.nn.state import State


class ModelOutput(NamedTuple):
    """hidden_BTD: final hidden states, for `head`. state: after the call. aux_loss: added to the training loss."""

    hidden_BTD: torch.Tensor
    state: State
    aux_loss: torch.Tensor


class Dimensions(Protocol):
    """The sizes shared by all rows of a table; `conf/dims/` and `infini.config.DimsConfig` fill them."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    d_key: int
    d_value: int | None
    d_ff: int
    segment_length: int


class LanguageModel(Protocol):
    """A causal language model, a torch.nn.Module, with a bounded state: state in, state out, a call of any length >= 1.

    segment_length: tokens a segment of its grid. gradient_horizon: how many segments back a gradient reaches within one
    call (None: all). checkpoint_activations: set by a training; where true, activations are computed again in the
    backward pass instead of kept. The conformance tests hold every declaration for every registered model.
    """

    segment_length: int
    gradient_horizon: int | None
    checkpoint_activations: bool

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State: ...

    def resize_segments(self, segment_length: int) -> None:
        """Segments of another length from the next call on."""
        ...

    def __call__(
        self,
        ids_BT: torch.Tensor,
        state: State | None = None,
        mask_BT: torch.Tensor | None = None,
        reset_BT: torch.Tensor | None = None,
        write_weight_BT: torch.Tensor | None = None,
    ) -> ModelOutput: ...

    def prefill(self, ids_BT: torch.Tensor, state: State, reset_BT: torch.Tensor | None = None) -> State:
        """The state after a call, for when its output is not wanted: what only the output needs is left out."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary; separate, so that the loss runs in chunks."""
        ...

    @property
    def output_weight(self) -> torch.Tensor:
        """The output embedding [vocabulary, d_model]."""
        ...

    def state_floats(self, n_segments: int) -> int:
        """Numbers a row carries in memory leaves after n_segments whole segments."""
        ...

    def receptive_field(self, n_segments: int) -> int:
        """Tokens, counted back from the end of n_segments whole segments, that can change the last one's output."""
        ...


class OptionalMembers:
    """What a language model may have beside LanguageModel, each with the value that a model without it counts as."""

    memory_layers: Sequence[Any] = ()
    """The layers with a compressive memory (infini.nn.attention.InfiniAttention), from the bottom: of these the
    half-dilution length is measured, and they are what recipe.sparse_writes is about."""
    memory_is_a_sum: bool = False
    """Whether a layer's memory is a sum over tokens that write weights multiply (see infini.nn.state.scale_memory):
    what recipe.length_extension and recipe.long_history need."""
    summary_vectors: int = 0
    """Vectors that a segment writes (p of the paper's Table 1)."""
    xl_cache: int = 0
    """Tokens before the segment whose keys and values, or layer inputs, every layer keeps uncompressed."""

    def gates(self) -> list[list[float]] | None:
        """sigmoid(beta), the weight of the memory, by layer (of those that have gates) and head; None without gates.
        They go into the records, and running text is read with knock-outs where there are some."""
        return None


_DEFAULTS = OptionalMembers()


def optional(model: Any, name: str) -> Any:
    """The member `name` of OptionalMembers that the model has, or the default."""
    default = getattr(_DEFAULTS, name)
    if inspect.getattr_static(model, name, None) is not None:
        # Not with a default: it would hide an AttributeError inside a property of the model.
        return getattr(model, name)
    return getattr(model, name, default)


def missing_members(model: Any) -> list[str]:
    """Members of LanguageModel that a model lacks."""
    names = [*LanguageModel.__annotations__, *vars(LanguageModel)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and not hasattr(model, name)]
