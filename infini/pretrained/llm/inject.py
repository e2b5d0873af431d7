"""One call that puts the compressive memory into a pretrained causal language model."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from infini.errors import InputError
from infini.nn.ops.memory import FirstSegment, InputGate, UpdateRule
from infini.pretrained.llm import saving
from infini.pretrained.llm.attention import layer_types
from infini.pretrained.llm.families import classes_for
from infini.pretrained.llm.modeling import apply_settings, convert
from infini.pretrained.llm.settings import InfiniSettings, Kernel, Window, settings_of

Model = TypeVar("Model")


def inject(
    model: Model,
    segment_length: int = 2048,
    update_rule: UpdateRule = "delta",
    layers: Sequence[int] | None = None,
    *,
    gate_init: float = -4.0,
    first_segment: FirstSegment = "local",
    window: Window = "segment",
    sinks: int = 0,
    memory_decay: float | None = None,
    input_gate: InputGate | None = None,
    local_attention: Kernel | None = None,
    base: str | None = None,
) -> Model:
    """Put Infini-attention into a ...ForCausalLM of transformers, in place. Returns the same object.

    The weights stay the base's; one float32 beta a query head is added and nothing else (with memory_decay and
    input_gate a few numbers a key-value head, too). On any input of at most one segment the model equals its base (with
    first_segment="local"). Gates start nearly shut, so a longer input is first read by segment-local attention;
    training opens them.

    Args:
        model: a causal language model of a family of docs/reference/llm_families.md.
        segment_length: tokens of a segment, N.
        update_rule: "linear" (Eq. 4) or "delta" (Eq. 5).
        layers: layers with a memory. Default: all layers with global attention or, where there is none, all. Layers
            with a sliding window stay as they are, unless they are named; then the window must hold what a segment's
            attention sees.
        gate_init: beta at the start; sigmoid(beta) is the weight of the memory.
        first_segment: what is read where nothing was written: "local" (the gate is bypassed) or "zero".
        window: not in the paper: with "previous" local attention sees the segment before, too, and the memory what is
            older. Pretrained models rest on the first token that they see, and no segment but the first has such a
            token of its own then; so give it sinks=1 (results/LOG.md, 146).
        sinks: not in the paper: how many of the document's first tokens stay visible to local attention.
        memory_decay: not in the paper: at the end of every segment the memory of each key-value head is multiplied by a
            learned number, so that it records what came last (results/LOG.md, 162). Half-lives begin between 1 and
            `memory_decay` segments. Default: nothing is forgotten.
        input_gate: not in the paper: with "sigmoid" each key-value head learns how much of a token it writes, from the
            token's key. Untrained, it writes all tokens alike. Default: every token is written alike.
        local_attention: the kernel, "sdpa" or "eager". Default: the model's; "eager" where it caps its scores.
        base: the base's name for the model card and for caches on disk. Default: the hub's, or that of its folder.

    Returns:
        The same object, of a class of its own that transformers saves and loads.

    Raises:
        InputError: (a ValueError) the model cannot be injected, with the list of those that can, or an option is out of
            range.

    Logs a warning where a token may see more positions than the base was made for.
    """
    stock: Any = model
    config_class, model_class = classes_for(stock)
    config = stock.config
    kinds = layer_types(config)
    chosen = _chosen_layers(layers, kinds)
    settings = InfiniSettings(
        segment_length=segment_length,
        update_rule=update_rule,
        layers=chosen,
        gate_init=gate_init,
        first_segment=first_segment,
        window=window,
        sinks=sinks,
        memory_decay=memory_decay,
        input_gate=input_gate,
        local_attention=_kernel(config, local_attention),
        base=_name(config) if base is None else base,
    )
    _check_positions(config, kinds, settings)
    new = config_class(**{key: value for key, value in config.to_dict().items() if key != "model_type"})
    # to_dict leaves some of these out.
    new.__dict__.update({key: value for key, value in config.__dict__.items() if key != "model_type"})
    new.infini = settings.stored()
    # Otherwise an adapter of this model would name the base, and load onto it without a memory.
    new._name_or_path = stock.name_or_path = ""
    new.architectures = [model_class.__name__]
    new.auto_map = saving.auto_map(config_class, model_class)
    for module in stock.modules():
        if getattr(module, "config", None) is config:
            module.config = new
    stock.__class__ = model_class
    convert(stock, settings)
    stock._keep_in_fp32_modules_strict = {*(stock._keep_in_fp32_modules_strict or ()), "infini_gate"}
    return model


def resize_segments(model: Any, segment_length: int) -> InfiniSettings:
    """Change the segment length of an injected model, in place -> its new settings. No weight depends on it; caches do.

    Raises InputError for a length that its layers cannot have.
    """
    settings = replace(settings_of(model.config), segment_length=segment_length)
    _check_positions(model.config, layer_types(model.config), settings)
    model.config.infini = settings.stored()
    apply_settings(model, settings)
    return settings


def _name(config: Any) -> str:
    """The base's name; of a folder only the last part, because the rest is private."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return Path(name).name if Path(name).exists() else name


def _chosen_layers(layers: Sequence[int] | None, kinds: list[str]) -> tuple[int, ...]:
    everything = range(len(kinds))
    if layers is None:
        found = [i for i in everything if kinds[i] == "full_attention"]
        return tuple(found or everything)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InputError(f"layers={layers!r}: must be a list of numbers, or None")
    wrong = f"layers={list(layers)}: must be whole numbers"
    try:
        # Numbers of numpy, too, which a config could not store.
        numbers = [operator.index(i) for i in layers]
    except TypeError:
        raise InputError(wrong) from None
    if any(isinstance(i, bool) for i in layers):
        raise InputError(wrong)
    chosen = tuple(sorted({i + len(kinds) if -len(kinds) <= i < 0 else i for i in numbers}))
    if not chosen or any(i not in everything for i in chosen):
        raise InputError(f"layers={list(layers)}: name at least one of 0 to {len(kinds) - 1}")
    other = [i for i in chosen if kinds[i] not in ("full_attention", "sliding_attention")]
    if other:
        raise InputError(f"layers={list(layers)}: layer {other[0]} is {kinds[other[0]]}, which has no keys to remember")
    return chosen


def _kernel(config: Any, asked: Kernel | None) -> Kernel:
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if asked == "sdpa" and capped:
        raise InputError("local_attention='sdpa': this model caps its scores, which only 'eager' does")
    if asked is not None:
        return asked
    return "eager" if capped or config._attn_implementation == "eager" else "sdpa"


def _check_positions(config: Any, kinds: list[str], settings: InfiniSettings) -> None:
    """InputError where a segment is longer than what its layers can see, or than what a rotary embedding that changes
    with the length is for; a logged warning where another embedding has more positions than the base was made for."""
    window = getattr(config, "sliding_window", None)
    slides = any(kinds[i] == "sliding_attention" for i in settings.layers)
    if slides and window is not None and settings.positions > window:
        raise InputError(
            f"segment_length={settings.segment_length}: with window={settings.window!r} and sinks={settings.sinks} a "
            f"token sees {settings.positions}, and the layers slide over {window}: at most that"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for each in [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]:
        if each.get("rope_type") not in ("longrope", "dynamic"):
            continue
        original = each.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        most = original or config.max_position_embeddings
        if settings.positions > most:
            raise InputError(
                f"segment_length={settings.segment_length}: the model's rotary embedding ({each['rope_type']}) changes "
                f"beyond {most} tokens, and a token sees {settings.positions}: at most {most}"
            )
    if settings.positions > config.max_position_embeddings:
        # No error: what a base was made for is not all that it can do.
        logging.getLogger(__name__).warning(
            "segment_length=%d: with window=%r and sinks=%d a token sees %d positions, and the base was made for "
            "max_position_embeddings=%d",
            *(settings.segment_length, settings.window, settings.sinks, settings.positions),
            config.max_position_embeddings,
        )
