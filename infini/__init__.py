"""infini: Infini-attention, its controls and baselines.

InfiniAttention, LocalAttention: the layers. State: what they return beside their outputs. save_state, load_state: a
state on disk. build_model: a language model by name. Names are loaded on first use, so that importing infini is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini.models import build_model as build_model
    from infini.nn.attention import InfiniAttention as InfiniAttention
    from infini.nn.attention import LocalAttention as LocalAttention
    from infini.nn.state import State as State
    from infini.nn.state import load_state as load_state
    from infini.nn.state import save_state as save_state
    from infini.pretrained.llm import inject as inject

__version__ = "0.1.0"

_HOME = {
    "InfiniAttention": "infini.nn.attention",
    "LocalAttention": "infini.nn.attention",
    "State": "infini.nn.state",
    "build_model": "infini.models",
    "load_state": "infini.nn.state",
    "save_state": "infini.nn.state",
    "inject": "infini.pretrained.llm",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'infini' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
