"""Encoder-decoders of transformers (BART, LED) as this project trains and asks them: a source in, tokens out.

Letters: B rows, S tokens of the source, T tokens of the target, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from infini.decoding import logits_of
from infini.errors import InputError
from infini.pretrained.unlimiformer import encode, extend
from infini.protocols import Dimensions, ModelOutput

Unlimiformer = Literal["none", "test", "alternating"]
MOST_NEW_TOKENS = 2048
"""Tokens of a target that fresh models have positions for."""
UNUSED = 1
"""A token that this project's tokenizers have and never give; short inputs are filled with it, behind a mask."""
WHOLE_SOURCE = ("test", "alternating")
"""Of these an evaluation reads the source in windows to its end."""


@dataclass(frozen=True)
class Seq2SeqConfig:
    """What encoder-decoders have in common."""

    weights: str | None
    """Name on the Hugging Face hub of trained weights with their sizes and tokenizer; None: fresh ones at the sizes of
    the dims."""
    window: int
    """Tokens of the source that the encoder reads at once; what is behind them is not read without Unlimiformer."""
    unlimiformer: Unlimiformer
    """none; test: in the evaluation only; alternating: trained on long sources too, in turn with the states that answer
    the decoder best and with as many at random."""
    k: int
    """Encoder states that a head of the decoder attends to."""
    search: Literal["exact", "approximate"]
    """How they are found; approximate needs faiss."""

    def __post_init__(self) -> None:
        if self.window < 2 or self.window % 2:
            raise InputError(f"model.window={self.window}: must be even and at least 2")
        if self.k < 1:
            raise InputError(f"model.k={self.k}: must be at least 1")


def library() -> Any:
    """transformers; InputError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("encoder-decoders need transformers: pip install transformers") from error
    # That a short input is padded is no news.
    transformers.logging.set_verbosity_error()
    return transformers


def fresh_sizes(dims: Dimensions, vocab_size: int) -> dict[str, Any]:
    """What BART's and LED's configurations share, at the sizes of dims with as many layers on either side."""
    found: dict[str, Any] = {"vocab_size": vocab_size, "d_model": dims.d_model, "pad_token_id": UNUSED, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        found[f"{side}_layers"] = dims.n_layers
        found[f"{side}_attention_heads"] = dims.n_heads
        found[f"{side}_ffn_dim"] = dims.d_ff
    return found


def trained(model_class: Any, name: str) -> Any:
    """A model of the hub, or of its cache, by name; InputError (one line) where it cannot be had."""
    try:
        return model_class.from_pretrained(name)
    except Exception as error:  # every layer below raises its own kinds
        raise InputError(
            f"model.weights={name!r}: the Hugging Face hub did not give it ({type(error).__name__}); needs a network, "
            "or use model.weights=null"
        ) from error


class Seq2Seq(nn.Module):
    """An encoder-decoder behind the calls of the trainer: `model(ids_BT, source_BS=..., source_mask_BS=...)`.

    Trained weights are given what they were trained on: the mark <s> before the source, and before the target a start
    of the decoder's own (</s>, in BART's and LED's).

    inner: BartForConditionalGeneration or LEDForConditionalGeneration. segment_length: that of the dims, in whose
    multiples a recipe counts. global_first: whether the first token of every window attends to all of it (LED).

    Raises InputError where the encoder has no positions for config.window tokens.
    """

    def __init__(self, inner: Any, config: Seq2SeqConfig, segment_length: int, global_first: bool = False) -> None:
        super().__init__()
        self.inner, self.config, self.segment_length = inner, config, segment_length
        self.global_first = global_first
        self._again = False
        self._marks = 0 if config.weights is None else 1
        positions = getattr(inner.config, "max_encoder_position_embeddings", None)
        if config.window > (most := positions or inner.config.max_position_embeddings):
            raise InputError(
                f"model.window={config.window}: must be at most {most}, which the encoder has positions for"
            )
        if config.unlimiformer != "none":
            extend(inner, config.k, config.search)

    def forward(
        self,
        ids_BT: torch.Tensor,
        state: None = None,
        mask_BT: torch.Tensor | None = None,
        reset_BT: torch.Tensor | None = None,
        *,
        source_BS: torch.Tensor,
        source_mask_BS: torch.Tensor,
        at_random: bool = False,
    ) -> ModelOutput:
        """Hidden states of the target so far, for `head`.

        mask_BT: ignored, for padding stands behind everything that is asked. at_random: of the source's states `k` that
        are drawn count (Unlimiformer's training), not the best.
        """
        # The mark, and the summary.
        self.check_target("task.summary_tokens", ids_BT.shape[1] - 1)
        read = self.source_tokens(source_BS.shape[1])
        source_BS, mask_BS = self._begun(source_BS[:, :read]), source_mask_BS[:, :read].long()
        mask_BS = nn.functional.pad(mask_BS, (self._marks, 0), value=1)
        states_BSD = self.encode(source_BS, mask_BS)
        at_random = at_random and self.config.unlimiformer == "alternating"
        if at_random and self.config.k < states_BSD.shape[1]:
            # Padding is drawn last.
            order_BS = (torch.rand(mask_BS.shape, device=mask_BS.device) + mask_BS).argsort(1, descending=True)
            kept_BR = order_BS[:, : self.config.k]
            states_BSD = states_BSD.gather(1, kept_BR[..., None].expand(-1, -1, states_BSD.shape[-1]))
            mask_BS = mask_BS.gather(1, kept_BR)
        started_BT = nn.functional.pad(ids_BT, (self._marks, 0), value=self.start)
        out = self.inner.get_decoder()(
            input_ids=started_BT, encoder_hidden_states=states_BSD, encoder_attention_mask=mask_BS, use_cache=False
        )
        hidden_BTD = out.last_hidden_state[:, self._marks :]
        return ModelOutput(hidden_BTD, None, states_BSD.new_zeros(()))  # type: ignore[arg-type]

    @property
    def start(self) -> int:
        """What trained weights read before the mark of a target."""
        return int(self.inner.config.decoder_start_token_id)

    def _begun(self, source_BS: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(source_BS, (self._marks, 0), value=int(self.inner.config.bos_token_id))

    def encode_source(self, source_BS: torch.Tensor) -> torch.Tensor:
        """Encoder states of what is read of a source, as `forward` makes them."""
        begun_BS = self._begun(source_BS[:, : self.source_tokens(source_BS.shape[1])])
        return self.encode(begun_BS, torch.ones_like(begun_BS))

    def encode(self, source_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
        """Encoder states [B, S, D] of a source of any length, window by window."""
        encoder = self.inner.get_encoder()
        return encode(encoder, source_BS, self.config.window, self.global_first, attention_mask=mask_BS)

    def source_tokens(self, length: int) -> int:
        """Of a source of this many tokens, how many are read."""
        return length if self.config.unlimiformer in WHOLE_SOURCE else min(length, self.config.window - self._marks)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary."""
        logits: torch.Tensor = self.inner.lm_head(hidden) + self.inner.final_logits_bias
        return logits

    @property
    def output_weight(self) -> torch.Tensor:
        """The output embedding [vocabulary, D]; the bias beside it is 0 and not trained."""
        weight: torch.Tensor = self.inner.lm_head.weight
        return weight

    @property
    def most_new_tokens(self) -> int:
        """Tokens of a target that the decoder has positions for, beside the mark before them."""
        config = self.inner.config
        return (
            int(getattr(config, "max_decoder_position_embeddings", None) or config.max_position_embeddings)
            - 1
            - self._marks
        )

    def check_target(self, key: str, tokens: int) -> None:
        """Raise InputError, naming the key that asks for them, where so many tokens have no positions."""
        if tokens > self.most_new_tokens:
            raise InputError(
                f"{key}={tokens}: must be at most {self.most_new_tokens}, which the decoder has positions for"
            )

    @property
    def checkpoint_activations(self) -> bool:
        """Whether the layers' activations are computed again in the backward pass instead of kept."""
        return self._again

    @checkpoint_activations.setter
    def checkpoint_activations(self, again: bool) -> None:
        if again and not self._again:
            self.inner.gradient_checkpointing_enable()
        elif self._again and not again:
            self.inner.gradient_checkpointing_disable()
        self._again = again

    def resize_segments(self, segment_length: int) -> None:
        """Nothing depends on it but what a recipe counts."""
        self.segment_length = segment_length

    def gates(self) -> None:
        return None

    def state_floats(self, n_segments: int) -> int:
        """Numbers that are kept of a source of so many segments: its encoder states."""
        return self.source_tokens(n_segments * self.segment_length) * int(self.inner.config.d_model)


@dataclass(frozen=True)
class SourceReader:
    """A model that has read a source and is in the middle of its target; `infini.decoding.generate` draws from it."""

    model: Seq2Seq
    state: Any
    """Encoder states, and the decoder's cache."""
    last: int
    """The token that comes next: known, not read yet."""

    @classmethod
    @torch.no_grad()
    def begin(
        cls, model: Seq2Seq, ids: np.ndarray, bos_id: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> SourceReader:
        """Encode the tokens of a source that the model reads; bos_id: the mark that begins a target."""
        device = next(model.parameters()).device
        read = np.asarray(ids[: model.source_tokens(len(ids))], dtype=np.int64)
        state = model.encode_source(torch.from_numpy(read)[None].to(device)), None
        advance(len(read))
        if model.config.weights is not None:
            state = cls(model, state, model.start).next_logits()[1]
        return cls(model, state, bos_id)

    @torch.no_grad()
    def next_logits(self) -> tuple[torch.Tensor, Any]:
        """float32 logits [vocabulary] of the token after `last`, and the state that has read `last`."""
        states_BSD, cache = self.state
        ids = torch.tensor([[self.last]], device=states_BSD.device)
        out = self.model.inner.get_decoder()(
            input_ids=ids, encoder_hidden_states=states_BSD, past_key_values=cache, use_cache=True
        )
        return logits_of(self.model, out.last_hidden_state[:, -1])[0], (states_BSD, out.past_key_values)
