"""BART: an encoder-decoder with inputs of 1,024 tokens (Lewis et al., "BART: Denoising Sequence-to-Sequence
Pre-training for Natural Language Generation, Translation, and Comprehension")."""

from __future__ import annotations

from infini.models import register
from infini.nn.protocols import Dimensions
from infini.pretrained.seq2seq import MAX_NEW_TOKENS, Seq2Seq, Seq2SeqConfig, fresh, fresh_sizes, library, trained


@register("bart", Seq2SeqConfig, kind="seq2seq")
def build(config: Seq2SeqConfig, dims: Dimensions, vocab_size: int) -> Seq2Seq:
    """The BART of transformers: with new weights at the sizes of dims and equally many layers in encoder and decoder,
    or with the trained weights model.weights. Raises InputError if transformers or the weights are not available."""
    transformers = library()
    if config.weights is not None:
        return Seq2Seq(trained(transformers.BartForConditionalGeneration, config.weights), config, dims.segment_length)
    sizes = transformers.BartConfig(
        **fresh_sizes(dims, vocab_size),
        max_position_embeddings=max(config.window, MAX_NEW_TOKENS),
    )
    return Seq2Seq(fresh(transformers.BartForConditionalGeneration, sizes), config, dims.segment_length)
