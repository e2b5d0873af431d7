"""Infini-Transformer: a pre-norm decoder whose every layer is Infini-attention.

Features: local causal attention inside segments with rotary positions; a compressive memory per head, read without
positions (Eq. 3); Linear (Eq. 4) or Linear + Delta (Eq. 5) update; one learned gate per head (Eq. 6); back-propagation
through all segments of a training sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infini.errors import require
from infini.models import register
from infini.nn.attention import GateInit, InfiniAttention, Positions
from infini.nn.decoder import Decoder, DecoderConfig
from infini.nn.protocols import Dimensions


@dataclass
class MemoryConfig(DecoderConfig):
    """Options of every decoder with a compressive memory. See InfiniAttention."""

    update_rule: Literal["linear", "delta"] = "linear"
    first_segment: Literal["local", "zero"] = "local"
    gate_init: GateInit = "specialised"
    delta_normaliser: Literal["previous", "current"] = "previous"
    memory_decay: float | None = None
    input_gate: Literal["sigmoid"] | None = None
    attention_scale: Literal["d_key", "d_model"] = "d_key"


@dataclass
class InfiniConfig(MemoryConfig):
    """Options of infini_linear and infini_delta."""

    positions: Positions = "rotary"
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        # Records name a run's model, and the name states the rule.
        rule = "delta" if isinstance(self, InfiniDeltaConfig) else "linear"
        allowed = f"must be {rule} for infini_{rule}; take the other model"
        require(self.update_rule == rule, "model.update_rule", self.update_rule, allowed)


@dataclass
class InfiniDeltaConfig(InfiniConfig):
    """Options of infini_delta."""

    update_rule: Literal["linear", "delta"] = "delta"


@register("infini_linear", InfiniConfig)
@register("infini_delta", InfiniDeltaConfig)
def build(config: InfiniConfig, dims: Dimensions, vocab_size: int) -> Decoder:
    """A decoder with InfiniAttention in every layer."""
    return config.decoder(dims, vocab_size, InfiniAttention)
