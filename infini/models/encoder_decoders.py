"""Encoder-decoders of transformers.

`bart`: inputs of 1,024 tokens (Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language
Generation, Translation, and Comprehension"). `primera`: inputs of 4,096 tokens and windowed attention (Xiao et al.,
"PRIMERA: Pyramid-based Masked Sentence Pre-training"); it is the Longformer encoder-decoder (LED) with other weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infini.errors import InputError
from infini.models import register
from infini.nn.protocols import Dimensions
from infini.pretrained.seq2seq import FILL, MAX_NEW_TOKENS, Seq2Seq, Seq2SeqConfig

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
    """An encoder-decoder in float32. It has the trained weights that model.weights names. Without a name it has new
    weights at the sizes of dims, and dims.n_layers layers on each side. Raises InputError if transformers or the
    weights are not available."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("encoder-decoders need transformers: pip install transformers") from error
    # transformers would otherwise warn about every short input that is padded.
    transformers.logging.set_verbosity_error()
    kind: Any = getattr(transformers, f"{family}ForConditionalGeneration")
    if (name := config.weights) is not None:
        try:
            # By default weights have their stored dtype and evaluation mode, which a trainer does not change.
            inner = kind.from_pretrained(name, dtype=torch.float32).train()
        except Exception as error:  # every layer below raises its own kinds
            raise InputError(
                f"model.weights={name!r}: cannot be downloaded from the Hugging Face hub ({type(error).__name__}); "
                "connect to a network, or use model.weights=null"
            ) from error
        return Seq2Seq(inner, config, dims.segment_length, global_first)
    sizes = {"vocab_size": vocab_size, "d_model": dims.d_model, "pad_token_id": FILL, "dropout": 0.0, **positions}
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": dims.n_layers,
            f"{side}_attention_heads": dims.n_heads,
            f"{side}_ffn_dim": dims.d_ff,
        }
    inner = kind(getattr(transformers, f"{family}Config")(**sizes))
    for module in inner.modules():
        if isinstance(module, nn.Embedding):
            # Otherwise the padding token's embedding gets no gradient.
            module.padding_idx = None
    return Seq2Seq(inner, config, dims.segment_length, global_first)
