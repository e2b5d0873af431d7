"""What the floors above agree on: the interface of every language model, and the sizes it is built from."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from infini.state import State


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
    """A causal language model with a bounded state: state in, state out, a call of any length >= 1.

    segment_length: tokens a segment of its grid. gradient_horizon: how many segments back a gradient reaches within one
    call (None: all). The conformance tests hold every declaration for every registered model.
    """

    segment_length: int
    gradient_horizon: int | None

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

    def absorb(self, ids_BT: torch.Tensor, state: State, reset_BT: torch.Tensor | None = None) -> State:
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

    def gates(self) -> Any:
        """sigmoid(beta) as [layers][heads], or None for a model without gates."""
        ...
