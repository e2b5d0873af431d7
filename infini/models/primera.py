"""PRIMERA: an encoder-decoder that reads 4,096 tokens by attention within a window around each (Xiao et al., "PRIMERA:
Pyramid-based Masked Sentence Pre-training"), which is the Longformer encoder-decoder with other weights."""

from __future__ import annotations

from infini.models import register
from infini.nn.protocols import Dimensions
from infini.pretrained.seq2seq import MAX_NEW_TOKENS, Seq2Seq, Seq2SeqConfig, fresh, fresh_sizes, library, trained

ATTENTION_WINDOW = 512
"""Tokens, half of them on either side, that a token of the source attends to; PRIMERA's."""


@register("primera", Seq2SeqConfig, kind="seq2seq")
def build(config: Seq2SeqConfig, dims: Dimensions, vocab_size: int) -> Seq2Seq:
    """transformers' LED, fresh at the sizes of dims with as many layers on either side, or the weights that
    model.weights names. The first token of every window attends to all of it and is attended to by all. Raises
    InputError without transformers or where the hub does not give the weights."""
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
