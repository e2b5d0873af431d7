"""Encoder-decoders of transformers.

`bart`: inputs of 1,024 tokens (Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language
Generation, Translation, and Comprehension"). `primera`: inputs of 4,096 tokens and windowed attention (Xiao et al.,
"PRIMERA: Pyramid-based Masked Sentence Pre-training"); it is the Longformer encoder-decoder (LED) with other weights.
"""

from __future__ import annotations

from infini.models import register
from infini.nn.protocols import Dimensions
from infini.pretrained.seq2seq import MAX_NEW_TOKENS, Seq2Seq, Seq2SeqConfig, fresh, fresh_sizes, library, trained

ATTENTION_WINDOW = 512
"""Tokens that a source token of PRIMERA attends to, half of them on each side."""


@register("bart", Seq2SeqConfig, kind="seq2seq")
def build_bart(config: Seq2SeqConfig, dims: Dimensions, vocab_size: int) -> Seq2Seq:
    """The BART of transformers."""
    positions = {"max_position_embeddings": max(config.window, MAX_NEW_TOKENS)}
    return _build("Bart", config, dims, vocab_size, positions, global_first=False)


@register("primera", Seq2SeqConfig, kind="seq2seq")
def build_primera(config: Seq2SeqConfig, dims: Dimensions, vocab_size: int) -> Seq2Seq:
    """The LED of transformers. The first token of every window has global attention."""
    positions = {
        "max_encoder_position_embeddings": config.window,
        "max_decoder_position_embeddings": MAX_NEW_TOKENS,
        "attention_window": min(ATTENTION_WINDOW, config.window),
    }
    return _build("LED", config, dims, vocab_size, positions, global_first=True)


def _build(
    family: str, config: Seq2SeqConfig, dims: Dimensions, vocab_size: int, positions: dict[str, int], global_first: bool
) -> Seq2Seq:
    """With new weights at the sizes of dims and equally many layers in encoder and decoder, or with the trained weights
    model.weights. Raises InputError if transformers or the weights are not available."""
    transformers = library()
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    if config.weights is not None:
        inner = trained(kind, config.weights)
    else:
        sizes = getattr(transformers, f"{family}Config")
        inner = fresh(kind, sizes(**fresh_sizes(dims, vocab_size), **positions))
    return Seq2Seq(inner, config, dims.segment_length, global_first)
