"""Infini-attention inside pretrained language models of transformers.

    from transformers import AutoModelForCausalLM
    from infini.pretrained.llm import inject

    model = inject(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), segment_length=2048)
    model.generate(**tokenizer(book, return_tensors="pt"), prefill_chunk_size=8192, max_new_tokens=100)
    model.save_pretrained("folder")

`inject` gives the layers with global attention a compressive memory; saving, generation and training work as for any
model of transformers. Importing this module makes saved models known to
AutoModelForCausalLM: `import infini.pretrained.llm`, then `AutoModelForCausalLM.from_pretrained("folder")`.

Needs transformers: pip install transformers.
"""

from __future__ import annotations

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("infini.pretrained.llm needs transformers: pip install transformers") from error

from infini.nn.parameter_groups import parameter_groups
from infini.pretrained.llm.cache import InfiniCache
from infini.pretrained.llm.inject import inject
from infini.pretrained.llm.saving import model_card
from infini.pretrained.llm.settings import InfiniSettings, settings_of

GATE_MODULES = ["infini_gate"]
"""Modules that peft trains whole: LoraConfig(..., modules_to_save=GATE_MODULES); add names of norms to train these."""

__all__ = ["GATE_MODULES", "InfiniCache", "InfiniSettings", "inject", "model_card", "parameter_groups", "settings_of"]
