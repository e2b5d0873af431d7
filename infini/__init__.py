"""infini: Infini-attention reproduced, measured and beyond. Names are loaded on first use, so importing is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini.models import build_model as build_model
    from infini.nn.attention import InfiniAttention as InfiniAttention
    from infini.nn.attention import LocalAttention as LocalAttention

__version__ = "0.1.0"

_HOME = {
    "InfiniAttention": "infini.nn.attention",
    "LocalAttention": "infini.nn.attention",
    "build_model": "infini.models",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'infini' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
