"""The families that can be injected, and why others cannot.

Each has a model class and a config of its own, with a model_type of its own, registered with transformers: an
injected checkpoint cannot be mistaken for its base.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from infini.errors import InputError
from infini.pretrained.llm.modeling import CausalLMMixin

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "SmolLM3", "Olmo2", "Phi3")
"""Names of transformers' classes, without ForCausalLM."""

_REFUSED = {
    "GptOssForCausalLM": "its attention sinks are parameters of the softmax, which the memory's gate does not know",
    "Gemma3ForConditionalGeneration": "it is multimodal; load its text model as Gemma3ForCausalLM",
    "MambaForCausalLM": "it has no attention",
}

CLASSES: dict[str, tuple[type, type]] = {}
"""Name of the stock class -> (config class, model class)."""


def _make(*bases: Any, **body: Any) -> Any:
    """A subclass of these in this module, named Infini and the name of the last."""
    name = f"Infini{bases[-1].__name__}"
    made = globals()[name] = type(name, bases, {"__module__": __name__, **body})
    return made


for _family in FAMILIES:
    _stock: Any = getattr(transformers, f"{_family}ForCausalLM")
    _config = _make(
        _stock.config_class,
        __doc__=f"{_stock.config_class.__name__} with the settings of its memory (`infini`).",
        __annotations__={"infini": "dict | None"},
        infini=None,
        model_type=f"infini_{_stock.config_class.model_type}",
        register_for_auto_class=classmethod(lambda cls, auto_class=None: None),
    )
    _doc = f"{_stock.__name__} with Infini-attention; made by `inject` or from_pretrained."
    _model = _make(CausalLMMixin, _stock, __doc__=_doc, __annotations__={"config": _config}, config_class=_config)
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
    CLASSES[_stock.__name__] = _config, _model


def classes_for(model: Any) -> tuple[Any, Any]:
    """(config class, model class) of an injected model of this family; InputError where there is none, saying why."""
    name = type(model).__name__
    known = f"these can be injected: {', '.join(CLASSES)}"
    if hasattr(model, "peft_config") or name.startswith("Peft"):
        raise InputError(f"{name}: inject the base model first, then give it to peft")
    if name in CLASSES and type(model).__module__.startswith("transformers."):
        if getattr(model.config, "use_bidirectional_attention", False) or not getattr(model.config, "is_causal", True):
            raise InputError(f"{name}: its attention is bidirectional; a memory needs a causal model")
        return CLASSES[name]
    if isinstance(model, CausalLMMixin):
        raise InputError(f"{name}: has a memory already; load the base to inject it otherwise")
    reason = _REFUSED.get(name)
    if reason is None and getattr(getattr(model, "config", None), "vision_config", None) is not None:
        reason = "it is multimodal"
    whole = f"{name.removeprefix('Infini').removesuffix('Model')}ForCausalLM"
    if reason is None and whole in CLASSES:
        reason = f"it lacks the output head; did you mean {whole!r}?"
    reason = reason or "the family is not known here"
    raise InputError(f"{name} cannot be injected: {reason}; {known}")
