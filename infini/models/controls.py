"""The controls: the Infini-Transformer without its memory, and otherwise the same code.

`local`: attention inside segments. `full`: causal attention inside windows of `window_segments` segments, the length of
the training sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infini.models import register
from infini.nn.attention import LocalAttention, Positions, at_least_one
from infini.nn.decoder import Decoder, DecoderConfig
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
    at_least_one(window_segments=config.window_segments)
    return config.decoder(dims, vocab_size, LocalAttention, config.window_segments)
