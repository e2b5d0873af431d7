"""`infini inject`: put the memory into a pretrained language model, and write a model folder of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from infini.commands import Arguments, Verb
from infini.config.keys import take_texts
from infini.pretrained.base_names import SEGMENT

SHORT = {
    "segment_length": "dims.segment_length",
    **{
        name: f"model.{name}"
        for name in ("update_rule", "gate_init", "window", "sinks", "memory_decay", "input_gate", "layers", "dtype")
    },
}
"""Keys that may be written without their group here."""


def read(words: Sequence[str]) -> Arguments:
    """base and out are taken as they are typed; options may be written without their group."""
    texts, settings = take_texts(words)
    named = []
    for word in settings:
        key, separator, value = word.partition("=")
        named.append(f"{SHORT.get(key, key)}{separator}{value}")
    return Arguments(named, {"texts": texts})


VERB = Verb(
    "inject",
    "put the memory into a pretrained language model, and write a folder for transformers",
    "infini inject base=smollm2 out=smollm2-infini",
    "infini.runs.inject",
    groups=("model",),
    keys=("base", "out", "checkpoint", "results_dir"),
    also=("dims.segment_length",),
    never=("model.base", "model.memory", "model.train", "model.lora_rank"),
    short=SHORT,
    order=10,
    read=read,
    # Its own defaults.
    fixed=("model=llm", f"dims.segment_length={SEGMENT}", "model.dtype=null"),
)
