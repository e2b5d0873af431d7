"""What a model of running text carries from segment to segment, by its records, as in the paper's Table 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infini.records import RunRecord, value_at

REFERENCE = "memorizing"
"""The row whose memory is divided by that of the others, as in the paper: their compression."""
_OLDER = {"transformer_xl": "", "infini_xl": "", REFERENCE: "", "compressive": "memory_segments"}
"""Model with an XL cache -> option with its length in segments (empty: one), for trainings whose records do not have
`cost.xl_cache` yet."""
_WHOLE_CONTEXT = ("llama", "olmo2", "smollm3")
"""Families of pretrained models without layers that see a sliding window alone."""


def carried_floats(run: RunRecord, training: Mapping[str, Any]) -> float | None:
    """Floats that a model carries from one segment into the next; None if they are not known.

    Attention over a window of several segments keeps the keys and values of the earlier ones, at most
    window_segments - 1, which are not in its memory leaves. training: the configuration of its training.
    """
    dims, options = training.get("dims") or {}, training.get("model") or {}
    window = options.get("window_segments")
    if options.get("memory") == "full":
        # A pretrained model with its whole context, of which a call reads the last segment.
        tokens, length = value_at(training, "scale.eval_max_tokens"), dims.get("segment_length")
        known = (run.environment.get("base") or {}).get("family") in _WHOLE_CONTEXT
        window = -(-tokens // length) if known and tokens is not None and length is not None else None
    # Older records of full attention do not have the option.
    if window is None and "full" not in (run.model, options.get("memory")):
        found = run.cost.get("state_floats")
        return None if found is None else float(found)
    if window is None or not {"d_key", "n_heads", "n_layers", "segment_length"} <= set(dims):
        return None
    heads = dims["n_heads"] if dims.get("n_kv_heads") is None else dims["n_kv_heads"]
    values = dims["d_key"] if dims.get("d_value") is None else dims["d_value"]
    return float((dims["d_key"] + values) * heads * dims["n_layers"] * (window - 1) * dims["segment_length"])


def xl_cache(run: RunRecord, training: RunRecord | None) -> int | None:
    """Tokens before the segment whose keys and values, or layer inputs, every layer keeps uncompressed; None: none."""
    if training is not None and "xl_cache" in training.cost:
        return training.cost["xl_cache"] or None
    config = (training or run).config
    length = (config.get("dims") or {}).get("segment_length")
    options = config.get("model") or {}
    if length is not None and training is None and "base" in options and options.get("window") == "previous":
        # A pretrained model as it is has no training.
        return int(length)
    if length is None or run.model not in _OLDER:
        return None
    return int(length * options.get(_OLDER[run.model], 1))


def compression(floats: float, reference: float | None) -> str:
    """ " (3.7x)" for a model with 3.7 times less memory than the reference; nothing without one."""
    if not reference or not floats:
        return ""
    ratio = reference / floats
    return f" ({ratio:,.0f}x)" if ratio >= 100 else f" ({ratio:.3g}x)"
