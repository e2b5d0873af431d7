"""The options of `inject`, stored in the config of an injected model as `config.infini`."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from infini.errors import InputError, one_of, require
from infini.nn.ops.memory import FirstSegment, InputGate, UpdateRule

Window = Literal["segment", "previous"]
Kernel = Literal["sdpa", "eager"]
FORMAT = 1
"""Version of the stored settings; newer ones are refused."""


@dataclass(frozen=True)
class InfiniSettings:
    """The options of an injected model; see `inject` for how they are chosen."""

    segment_length: int
    """Tokens of a segment, N."""
    update_rule: UpdateRule
    """How the memory is written: "linear" (Eq. 4) or "delta" (Eq. 5)."""
    layers: tuple[int, ...]
    """Layers that have a memory; the others are the base's."""
    gate_init: float = -4.0
    """Initial value of every beta; sigmoid(beta) is the weight of the memory."""
    first_segment: FirstSegment = "local"
    """Behaviour while nothing can be read yet: "local" bypasses the gate, "zero" reads 0 (Eq. 6 to the letter)."""
    window: Window = "segment"
    """The tokens that local attention sees: "segment" (the paper), or "previous" (an addition): the segment before,
    too. The memory then holds what is older than both."""
    sinks: int = 0
    """The document's first tokens that stay visible to every segment's local attention (an addition; the paper: 0)."""
    memory_decay: float | None = None
    """Longest initial half-life, in segments, of a learned decay of the memory (an addition; the paper: None)."""
    input_gate: InputGate | None = None
    """A learned gate that says how much of each token is written (an addition; the paper: None, all alike)."""
    local_attention: Kernel = "sdpa"
    """The kernel of local attention."""
    base: str = field(default="", compare=False)
    """The model that was injected, by its name on the hub or that of its folder."""
    training: str = field(default="", compare=False)
    """The training since the injection, in words, for the model card: `model.config.infini["training"] = ...`."""

    def __post_init__(self) -> None:
        for name in ("segment_length", "sinks"):
            value = getattr(self, name)
            require(type(value) is int, name, value, "must be a whole number")
        require(self.segment_length >= 1, "segment_length", self.segment_length, "must be at least 1")
        for name, options in (
            ("update_rule", get_args(UpdateRule)),
            ("first_segment", get_args(FirstSegment)),
            ("window", get_args(Window)),
            ("local_attention", get_args(Kernel)),
        ):
            one_of(name, getattr(self, name), options)
        is_number = type(self.gate_init) in (int, float) and math.isfinite(self.gate_init)
        require(is_number, "gate_init", self.gate_init, "must be a finite number; -10000 shuts the gates")
        decay = self.memory_decay
        lasts = decay is None or (type(decay) in (int, float) and 1 <= decay < math.inf)
        require(lasts, "memory_decay", decay, "must be None, or a finite number of segments, at least 1")
        if self.input_gate is not None:
            one_of("input_gate", self.input_gate, get_args(InputGate))
        for name in ("base", "training"):
            require(isinstance(getattr(self, name), str), name, getattr(self, name), "must be a text")
        most = f"must be from 0 to segment_length={self.segment_length}"
        require(0 <= self.sinks <= self.segment_length, "sinks", self.sinks, most)

    @property
    def depth(self) -> int:
        """Segments that local attention sees, its own included; as many at a document's start read no memory."""
        return 2 if self.window == "previous" else 1

    @property
    def own_position(self) -> int:
        """Rotary position of a segment's first token: after the sinks and the previous segment."""
        return self.sinks + (self.depth - 1) * self.segment_length

    @property
    def positions(self) -> int:
        """Rotary positions in use, whatever the document's length."""
        return self.own_position + self.segment_length

    def stored(self) -> dict[str, Any]:
        """The settings in the form in which the config holds them."""
        return {"format": FORMAT, **asdict(self), "layers": list(self.layers)}


def settings_of(config: Any) -> InfiniSettings:
    """The settings in a config; InputError where it has none, not all, or some that this version does not know."""
    stored = getattr(config, "infini", None)
    if not stored:
        raise InputError(f"{type(config).__name__} has no `infini` settings: make the model with inject(model, ...)")
    stored = dict(stored)
    version = stored.pop("format", None)
    unknown = sorted(set(stored) - {known.name for known in fields(InfiniSettings)})
    if version != FORMAT or unknown:
        raise InputError(
            f"config.infini has format={version!r} and unknown keys {unknown}: this version reads format {FORMAT}; "
            "update infini, or inject the base again"
        )
    missing = [known.name for known in fields(InfiniSettings) if known.default is MISSING and known.name not in stored]
    if missing:
        raise InputError(f"config.infini lacks {', '.join(missing)}: inject the base again")
    layers, known = stored["layers"], range(config.num_hidden_layers)
    if not isinstance(layers, list | tuple) or not layers or not all(layer in known for layer in layers):
        raise InputError(f"config.infini has layers={layers!r}: must be layers from 0 to {len(known) - 1}")
    return InfiniSettings(**{**stored, "layers": tuple(layers)})
