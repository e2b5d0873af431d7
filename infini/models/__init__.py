"""The registry of models. Importing the package finds every model file.

A model file decorates its builder with `@register("name", Config)`; the builder takes (config, dims, vocab_size).
"""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from infini.errors import InputError, did_you_mean, require
from infini.system.modules import import_all

Builder = Callable[[Any, Any, int], Any]
Kind = Literal["language_model", "seq2seq"]
_REGISTRY: dict[str, tuple[type, Builder]] = {}
_KINDS: dict[str, Kind] = {}
_BASES: dict[str, Callable[[str], Any] | None] = {}
_NOUNS = {bool: "true or false", float: "a number", int: "an integer"}


def register(
    name: str, config: type, kind: Kind = "language_model", base: Callable[[str], Any] | None = None
) -> Callable[[Builder], Builder]:
    """Register a builder and the dataclass of its options under a name. kind: "language_model", a model with the
    interface `infini.nn.protocols.LanguageModel`; or "seq2seq", an encoder-decoder.

    base: for models whose option `base` names a pretrained model, from that name to it; see base_of."""

    def add(builder: Builder) -> Builder:
        if name in _REGISTRY:
            raise ValueError(f"model {name!r} is registered twice")
        _REGISTRY[name], _KINDS[name], _BASES[name] = (config, builder), kind, base
        return builder

    return add


def registered(kind: Kind | None = None) -> dict[str, tuple[type, Builder]]:
    """name -> (config dataclass, builder) of every model in this package, or of one kind.

    Raises InputError, naming file and line, if a model file cannot be imported: no model is left out silently.
    """
    import_all(__name__, __path__)
    return {name: entry for name, entry in _REGISTRY.items() if kind in (None, _KINDS[name])}


def kind_of(name: str) -> Kind | None:
    """The kind of a registered model; None if no model has this name."""
    return _KINDS[name] if name in registered() else None


def base_of(options: Mapping[str, Any]) -> Any:
    """The pretrained model (infini.pretrained.llm.bases.Base) whose sizes and tokenizer the model options["name"] has,
    and which can be evaluated without a training; None for models that are trained from scratch."""
    if "base" not in options:
        # Models from scratch are known as such without importing any.
        return None
    found = _BASES[options["name"]] if options.get("name") in registered() else None
    return found and found(str(options["base"]))


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, with None where it is optional; empty for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    each = [(None,) if part is type(None) else _choices(part) for part in typing.get_args(hint)]
    return tuple(itertools.chain(*each)) if each and all(each) else ()


def build_model(options: Mapping[str, Any], dims: Any, vocab_size: int) -> Any:
    """Build the model options["name"] with the other options, at the sizes of `dims`.

    options: as in the group `model` of a configuration. dims: as in its group `dims`. The weights are random.

        from infini.config.compose import compose

        cfg = compose(["model=infini_delta", "dims=laptop", "model.gate_init=zeros"])
        model = build_model(cfg.model, cfg.dims, vocab_size=2048)
        hidden, state, _ = model(torch.randint(2048, (1, 100)))
        logits = model.head(hidden)  # [1, 100, 2048]

    Raises InputError naming key, value and what is allowed, or the members that the model's class lacks.
    """
    name, config = options.get("name"), check_options(options)
    builder, hints = registered()[str(name)][1], typing.get_type_hints(type(config))
    try:
        model = builder(config, dims, vocab_size)
    except ValueError as error:
        # A message that begins with an option names it as it is typed.
        where = "model." if str(error).partition("=")[0] in hints else f"model={name}: "
        raise InputError(f"{where}{error}") from error
    # Imported late, because it imports torch, which the names of models do not need.
    from infini.nn.protocols import missing_members

    if _KINDS[str(name)] == "language_model" and (lacking := missing_members(model)):
        # Checked before any training: some members are only used at the end of an evaluation.
        raise InputError(f"model={name}: lacks {', '.join(lacking)}; see infini.nn.protocols.LanguageModel")
    return model


def check_options(options: Mapping[str, Any]) -> Any:
    """The options of a model as the dataclass that it registered; nothing is built.

    Raises InputError naming key, value and what is allowed.
    """
    options = dict(options)
    name = options.pop("name", None)
    models = registered()
    if name not in models:
        known = ", ".join(sorted(models))
        raise InputError(f"model={name}: no file of infini/models registers this name; registered: {known}")
    config_class = models[name][0]
    hints = typing.get_type_hints(config_class)
    for key, value in options.items():
        if key not in hints:
            raise InputError(f"model.{key}={value!r}: {name} has only {', '.join(sorted(hints))}")
        allowed = _choices(hints[key])
        if allowed and value not in allowed:
            names = ["null" if each is None else str(each) for each in allowed]
            near = did_you_mean(str(value), names)
            raise InputError(f"model.{key}={value!r}: must be one of {', '.join(names)}{near}")
        is_union = typing.get_origin(hints[key]) in (typing.Union, types.UnionType)
        arms = typing.get_args(hints[key]) if is_union else (hints[key],)
        given = [hint for hint in arms if hint is not type(None)]
        if len(given) == 1 and given[0] in _NOUNS:
            (hint,), optional = given, given[0] is not hints[key]
            # A truth value is an int of Python, and an int may stand for a float.
            kinds = (int, float) if hint is float else hint
            right = isinstance(value, kinds) and isinstance(value, bool) == (hint is bool)
            noun = _NOUNS[hint] + " or null" * optional
            require(right or (optional and value is None), f"model.{key}", value, f"must be {noun}")
    return config_class(**options)
