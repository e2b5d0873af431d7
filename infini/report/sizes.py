"""What a model of running text carries from segment to segment, by its record, in the terms of the paper's Table 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infini.records import RunRecord

REFERENCE = "memorizing"
"""The model of which compression is a quotient, as in the paper: so many times less memory than it."""


def carried_floats(run: RunRecord, training: Mapping[str, Any]) -> float | None:
    """Numbers that a row carries from one segment into the next; None where they are not known.

    Attention over a window of several segments keeps the keys and values of those before the one that is read, which no
    memory leaf holds: at most window_segments - 1 of them. training: the configuration the model was trained with.
    """
    if run.model != "full":
        found = run.cost.get("state_floats")
        return None if found is None else float(found)
    dims, window = training.get("dims") or {}, (training.get("model") or {}).get("window_segments")
    if window is None or not {"d_key", "n_heads", "n_layers", "segment_length"} <= set(dims):
        return None
    heads = dims["n_heads"] if dims.get("n_kv_heads") is None else dims["n_kv_heads"]
    values = dims["d_key"] if dims.get("d_value") is None else dims["d_value"]
    return float((dims["d_key"] + values) * heads * dims["n_layers"] * (window - 1) * dims["segment_length"])


def xl_cache(model: str, training: Mapping[str, Any]) -> int | None:
    """Tokens before the segment whose keys and values, or layer inputs, every layer keeps as they are; None: none."""
    length = (training.get("dims") or {}).get("segment_length")
    if model == "compressive" and length is not None:
        return int(length * (training.get("model") or {}).get("memory_segments", 1))
    return length if model in ("transformer_xl", "infini_xl", REFERENCE) else None


def compression(floats: float, reference: float | None) -> str:
    """ " (3.7x)" for a model with 3.7 times less memory than the reference; nothing without one."""
    if not reference or not floats:
        return ""
    ratio = reference / floats
    return f" ({ratio:,.0f}x)" if ratio >= 100 else f" ({ratio:.3g}x)"
