"""Encoder-decoders of transformers (BART, LED) with this project's interface for training and decoding.

Letters: B rows, S tokens of the source, T tokens of the target, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from infini.errors import InputError, at_least, require
from infini.evaluation.decoding import logits_of
from infini.nn.protocols import ModelOutput
from infini.pretrained.unlimiformer import encode, extend

Unlimiformer = Literal["none", "test", "alternating"]
MAX_NEW_TOKENS = 2048
"""Target positions of models with new weights."""
FILL = 1
"""Padding token of short inputs, masked. This project's tokenizers never produce it. In T5's vocabulary it ends a text,
so that its embedding is trained like any other."""


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Options of all encoder-decoders."""

    weights: str | None
    """Name on the Hugging Face hub of trained weights, with their own sizes and tokenizer. None: new weights at the
    sizes of dims."""
    window: int
    """Source tokens that the encoder reads at once. Without Unlimiformer the rest of the source is not read."""
    unlimiformer: Unlimiformer
    """none. test: evaluation reads the whole source, training is that of none. alternating: training reads long sources
    too, in turn with the k best states and with k random states."""
    k: int
    """Encoder states that a head of the decoder attends to."""
    search: Literal["exact", "approximate"]
    """Search for these states in decoding; approximate needs faiss. Training is exact."""

    def __post_init__(self) -> None:
        even = self.window >= 2 and self.window % 2 == 0
        require(even, "model.window", self.window, "must be even and at least 2")
        at_least("model", self, 1, "k")


class Seq2Seq(nn.Module):
    """An encoder-decoder with the interface of the trainer: `model(ids_BT, source_BS=..., source_mask_BS=...)`.

    Trained weights get inputs in the format of their training: the source between <s> and </s>, and the decoder's start
    token (</s> for BART and LED) before the target.

    inner: BartForConditionalGeneration or LEDForConditionalGeneration. segment_length: tokens in a segment; recipes
    give lengths in segments. global_first: whether the first token of every window has global attention (LED).

    Raises InputError if the encoder has fewer positions than config.window, which LED pads to whole attention windows.
    """

    def __init__(self, inner: Any, config: Seq2SeqConfig, segment_length: int, global_first: bool = False) -> None:
        super().__init__()
        self.inner, self.config, self.segment_length = inner, config, segment_length
        self.global_first = global_first
        self._again = False
        # Special tokens added to the target and to the source.
        self._marks, self._source_marks = (0, 0) if config.weights is None else (1, 2)
        positions = getattr(inner.config, "max_encoder_position_embeddings", None)
        if config.window > (most := positions or inner.config.max_position_embeddings):
            raise InputError(
                f"model.window={config.window}: must be at most {most}, which the encoder has positions for"
            )
        widths = getattr(inner.config, "attention_window", 1)
        width = max(widths) if isinstance(widths, list) else widths
        if -(-config.window // width) * width > most:
            raise InputError(f"model.window={config.window}: must be a multiple of {width}, over which a token attends")
        if config.unlimiformer != "none":
            extend(inner, config.k, config.search, in_training=config.unlimiformer == "alternating")

    def forward(
        self,
        ids_BT: Tensor,
        state: None = None,
        mask_BT: Tensor | None = None,
        reset_BT: Tensor | None = None,
        *,
        source_BS: Tensor,
        source_mask_BS: Tensor,
        at_random: bool = False,
    ) -> ModelOutput:
        """Hidden states of the target, the input of `head`.

        mask_BT: ignored, since padding follows all tokens that are scored. at_random: attend to k random states of the
        source instead of the best (Unlimiformer's training).
        """
        # The start of the target, and the summary.
        self.check_target("task.summary_tokens", ids_BT.shape[1] - 1)
        read = self.source_tokens(source_BS.shape[1])
        source_BS, mask_BS = self._between_marks(source_BS[:, :read], source_mask_BS[:, :read].long())
        states_BSD = self.encode(source_BS, mask_BS)
        at_random = at_random and self.config.unlimiformer == "alternating"
        if at_random and self.config.k < states_BSD.shape[1]:
            # Padding is sampled last.
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
        """The decoder's start token, which trained weights read before the target."""
        return int(self.inner.config.decoder_start_token_id)

    def _between_marks(self, source_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """A source and its mask between the special tokens of trained weights, </s> after each row's last token."""
        if not self._source_marks:
            return source_BS, mask_BS
        config = self.inner.config
        end_B1 = 1 + mask_BS.sum(1, keepdim=True)
        source_BS = nn.functional.pad(source_BS, (1, 1), value=int(config.bos_token_id))
        mask_BS = nn.functional.pad(nn.functional.pad(mask_BS, (1, 0), value=1), (0, 1), value=0)
        return source_BS.scatter(1, end_B1, int(config.eos_token_id)), mask_BS.scatter(1, end_B1, 1)

    def encode_source(self, source_BS: Tensor, advance: Callable[[int], None] = lambda tokens: None) -> Tensor:
        """Encoder states of the part of a source that is read, as in `forward`. advance: see encode."""
        read_BS = source_BS[:, : self.source_tokens(source_BS.shape[1])]
        return self.encode(*self._between_marks(read_BS, torch.ones_like(read_BS)), advance)

    def encode(
        self, source_BS: Tensor, mask_BS: Tensor, advance: Callable[[int], None] = lambda tokens: None
    ) -> Tensor:
        """Encoder states [B, S, D] of a source of any length, window by window."""
        encoder = self.inner.get_encoder()
        return encode(encoder, source_BS, self.config.window, self.global_first, advance, attention_mask=mask_BS)

    def source_tokens(self, length: int) -> int:
        """The number of tokens that are read of a source of this length."""
        how = self.config.unlimiformer
        whole = how == "alternating" or (how == "test" and not self.training)
        return length if whole else min(length, self.config.window - self._source_marks)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary."""
        return self.inner.lm_head(hidden) + self.inner.final_logits_bias

    @property
    def output_weight(self) -> Tensor:
        """The output embedding [vocabulary, D]. The output bias is 0 and not trained."""
        return self.inner.lm_head.weight

    @property
    def most_new_tokens(self) -> int:
        """Target tokens that the decoder has positions for, without the special tokens before them."""
        config = self.inner.config
        positions = getattr(config, "max_decoder_position_embeddings", None) or config.max_position_embeddings
        return int(positions) - 1 - self._marks

    def check_target(self, key: str, tokens: int) -> None:
        """Raise InputError, naming the key, if the decoder has fewer positions than `tokens`."""
        if tokens > self.most_new_tokens:
            raise InputError(
                f"{key}={tokens}: must be at most {self.most_new_tokens}, which the decoder has positions for"
            )

    @property
    def checkpoint_activations(self) -> bool:
        """Whether the backward pass computes the layers' activations again instead of keeping them."""
        return self._again

    @checkpoint_activations.setter
    def checkpoint_activations(self, again: bool) -> None:
        if again != self._again:
            what = "enable" if again else "disable"
            # transformers 5 removes the older name.
            call = getattr(self.inner, f"activation_checkpointing_{what}", None)
            (call or getattr(self.inner, f"gradient_checkpointing_{what}"))()
        self._again = again

    def resize_segments(self, segment_length: int) -> None:
        """Change the segment length. Only the lengths in recipes depend on it."""
        self.segment_length = segment_length

    def state_floats(self, n_segments: int) -> int:
        """Numbers kept for a source of n_segments segments: its encoder states."""
        return self.source_tokens(n_segments * self.segment_length) * int(self.inner.config.d_model)


@dataclass(frozen=True)
class SourceReader:
    """A model that has read a source and a part of its target; infini.evaluation.decoding.generate samples from it."""

    model: Seq2Seq
    state: Any
    """Encoder states, and the decoder's cache."""
    last: int
    """The last token, not read yet."""

    @classmethod
    @torch.no_grad()
    def begin(
        cls, model: Seq2Seq, ids: np.ndarray, bos_id: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> SourceReader:
        """Encode the part of a source that the model reads. bos_id: the token that begins a target."""
        device = next(model.parameters()).device
        read = np.asarray(ids[: model.source_tokens(len(ids))], dtype=np.int64)
        state = model.encode_source(torch.from_numpy(read)[None].to(device), advance), None
        if model.config.weights is not None:
            state = cls(model, state, model.start).next_logits()[1]
        return cls(model, state, bos_id)

    @torch.no_grad()
    def next_logits(self) -> tuple[Tensor, Any]:
        """float32 logits [vocabulary] of the token after `last`, and the state after reading `last`."""
        states_BSD, cache = self.state
        ids = torch.tensor([[self.last]], device=states_BSD.device)
        out = self.model.inner.get_decoder()(
            input_ids=ids, encoder_hidden_states=states_BSD, past_key_values=cache, use_cache=True
        )
        return logits_of(self.model, out.last_hidden_state[:, -1])[0], (states_BSD, out.past_key_values)
