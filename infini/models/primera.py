"""PRIMERA: an encoder-decoder with inputs of 4,096 tokens and windowed attention (Xiao et al., "PRIMERA: Pyramid-based
Masked Sentence Pre-training"). It is the Longformer encoder-decoder (LED) with other weights."""

from __future__ import annotations

from infini.models import register
from infini.nn.protocols import Dimensions
from infini.pretrained.seq2seq import MAX_NEW_TOKENS, Seq2Seq, Seq2SeqConfig, fresh, fresh_sizes, library, trained

ATTENTION_WINDOW = 512
"""Tokens that a source token attends to, half of them on each side; PRIMERA's value."""


@register("primera", Seq2SeqConfig, kind="seq2seq")
def build(config: Seq2SeqConfig, dims: Dimensions, vocab_size: int) -> Seq2Seq:
    """The LED of transformers: with new weights at the sizes of dims and equally many layers in encoder and decoder, or
    with the trained weights model.weights. The first token of every window has global attention. Raises InputError if
    transformers or the weights are not available."""
    transformers = library()
    if config.weights is not None:
        inner = trained(transformers.LEDForConditionalGeneration, config.weights)
        return Seq2Seq(inner, config, dims.segment_length, global_first=True)
    sizes = transformers.LEDConfig(
        **fresh_sizes(dims, vocab_size),
        max_encoder_position_embeddings=config.window,
        max_decoder_position_embeddings=MAX_NEW_TOKENS,
        attention_window=min(ATTENTION_WINDOW, config.window),
    )
    inner = fresh(transformers.LEDForConditionalGeneration, sizes)
    return Seq2Seq(inner, config, dims.segment_length, global_first=True)
