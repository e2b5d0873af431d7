"""The controls: the Infini-Transformer without its memory, and otherwise the same code.

`local`: attention inside segments. `full`: causal attention inside windows of `window_segments` segments, the length of
the training sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infini.models import register
from infini.nn.attention import LocalAttention, Positions, at_least_one
from infini.nn.decoder import Decoder, DecoderConfig, attention_sizes
from infini.nn.protocols import Dimensions


@dataclass
class LocalConfig(DecoderConfig):
    """Options of `local`. See LocalAttention."""

    attention_scale: Literal["d_key", "d_model"] = "d_key"
    positions: Positions = "rotary"
    rope_base: float = 10000.0


@dataclass
class FullConfig(LocalConfig):
    """Options of `full`. window_segments: attention window in segments."""

    window_segments: int = 16


@register("local", LocalConfig)
def build_local(config: LocalConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with attention inside segments of dims.segment_length tokens."""
    return config.decoder(dims, vocab_size, LocalAttention)


@register("full", FullConfig)
def build_full(config: FullConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with attention inside windows of window_segments segments."""
    n = config.window_segments
    at_least_one(window_segments=n)

    def attention(layer: int) -> LocalAttention:
        return LocalAttention(
            **attention_sizes(dims) | {"segment_length": dims.segment_length * n},
            positions=config.positions,
            rope_base=config.rope_base,
            attention_scale=config.attention_scale,
        )

    return Decoder(
        dims,
        vocab_size,
        attention,
        activation=config.activation,
        tie_embeddings=config.tie_embeddings,
        window_segments=n,
    )
