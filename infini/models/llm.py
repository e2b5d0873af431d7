"""A pretrained language model of transformers, with a compressive memory put in or as it is.

model.base names it: a hub id, a folder, a GGUF file, or `smollm2` (see infini.pretrained.llm.bases). Sizes and
tokenizer are the base's. transformers is imported when the model is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from infini.errors import InputError, at_least, require
from infini.models import register
from infini.nn.protocols import Dimensions


@dataclass
class LLMConfig:
    """Options of `llm`. See infini.pretrained.llm.inject."""

    base: str = "smollm2"
    memory: Literal["infini", "none", "full"] = "infini"
    update_rule: Literal["linear", "delta"] = "delta"
    gate_init: float = -4.0
    window: Literal["segment", "previous"] = "segment"
    sinks: int = 0
    memory_decay: float | None = None
    input_gate: Literal["sigmoid"] | None = None
    layers: list[int] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    train: Literal["all", "lora", "gates_and_norms", "gates"] = "all"
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        # All that is known before the base is read, which may take a minute.
        at_least("model", self, 1, "lora_rank", "memory_decay")
        at_least("model", self, 0, "sinks")
        finite = "must be a finite number; -10000 shuts the gates"
        require(math.isfinite(self.gate_init), "model.gate_init", self.gate_init, finite)
        for name in ("memory_decay", "input_gate"):
            if (value := getattr(self, name)) is not None and self.memory != "infini":
                raise InputError(f"model.{name}={value!r}: has no effect with model.memory={self.memory}; leave it out")
        if self.train == "gates" and self.memory != "infini":
            lacks = f"model.memory={self.memory} has no gates to train; set model.train=all"
            raise InputError(f"model.train='gates': {lacks}")
        if self.lora_rank is not None and self.train != "lora":
            raise InputError(
                f"model.lora_rank={self.lora_rank}: has no effect with model.train={self.train}; leave it out"
            )


@lru_cache(maxsize=4)
def base_model(name: str) -> Any:
    """The infini.pretrained.llm.bases.Base of a name, whose configuration and tokenizer are read once; InputError where
    transformers is missing."""
    try:
        from infini.pretrained.llm.bases import Base
    except ImportError as error:
        raise InputError(f"model=llm: {error}") from error
    return Base(name)


@register("llm", LLMConfig, base=base_model)
def build(config: LLMConfig, dims: Dimensions, vocab_size: int) -> Any:
    """A PretrainedLM. Only dims.segment_length is read of the sizes."""
    base = base_model(config.base)
    from infini.pretrained.llm import language_model

    options = {key: value for key, value in vars(config).items() if key != "base"}
    model = language_model.build(base, dims.segment_length, **options)
    if (rows := len(model.output_weight)) < vocab_size:
        base.check_embedding(rows)
    return model
