"""What a table of running text shows beside perplexity: perplexity per word and bits per byte, tokens of trainings, and
what a model carries from segment to segment, as in the paper's Table 2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infini.records import RunRecord, value_at
from infini.report.selection import Selection

Counts = Mapping[tuple[Any, ...], tuple[int, int]]
"""Document, as `_key` names it -> words and bytes of its scored text. Records from before 2026-11-25 estimate them."""
TOLERANCE = 0.001
"""Relative difference up to which token counts of one seed are equal. Sequences of different lengths end with different
padding."""
_OLDER = {"transformer_xl": "", "infini_xl": "", "memorizing": "", "compressive": "memory_segments"}
"""Model with an XL cache -> option with its length in segments (empty: one), for trainings whose records do not have
`cost.xl_cache` yet."""
_WHOLE_CONTEXT = ("llama", "olmo2", "smollm3")
"""Families of pretrained models without layers that see a sliding window alone."""


def counted(runs: Iterable[RunRecord]) -> Counts:
    """Words and bytes of the documents whose scored text a run counted."""
    return {
        _key(run, document): (document["words"], document["bytes"])
        for run in runs
        if run.verb == "eval"
        for document in run.documents
        if {"name", "tokens", "words", "bytes"} <= document.keys() and not _estimated(document)
    }


def word_perplexity(run: RunRecord, counts: Counts) -> float | None:
    """Perplexity per word, by the words that were counted if the run estimated them; None if it has none."""
    value, sizes = run.metric("word_perplexity"), _sizes(run, counts)
    return value if value is None or sizes is None else math.exp(_nll(run) / sizes[0])


def bits_per_byte(run: RunRecord, counts: Counts) -> float | None:
    """Bits per byte, by the bytes that were counted if the run estimated them; None if it has none."""
    value, sizes = run.metric("bits_per_byte"), _sizes(run, counts)
    return value if value is None or sizes is None else _nll(run) / math.log(2) / sizes[1]


def _nll(run: RunRecord) -> float:
    return math.fsum(document["nll"] for document in run.documents)


def _sizes(run: RunRecord, counts: Counts) -> tuple[int, int] | None:
    """Words and bytes of all documents; None if the run counted them itself, or if no run did."""
    keys = [_key(run, document) for document in run.documents]
    if not any(map(_estimated, run.documents)) or not counts.keys() >= set(keys):
        return None
    words, sizes = zip(*(counts[key] for key in keys), strict=True)
    return sum(words), sum(sizes)


def _estimated(document: Mapping[str, Any]) -> bool:
    """Whether words and bytes are a share of the whole document's. A share is a fraction."""
    return any((document.get(key) or 0) % 1 for key in ("words", "bytes"))


def _key(run: RunRecord, document: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(run.data.get(key) for key in ("revision", "split", "tokenizer")), document["name"], document["tokens"])


def equal_tokens(selection: Selection, rows: Iterable[Sequence[RunRecord]]) -> bool:
    """Whether at every seed all runs of the rows were trained on equal numbers of tokens, up to TOLERANCE. An unknown
    number equals no other.

    How much padding a training reads, and so its number of tokens, differs between seeds if documents are short
    (Arxiv-math), but hardly within one.
    """
    by_seed: dict[int, list[int | None]] = {}
    for run in (run for runs in rows for run in runs):
        by_seed.setdefault(run.seed, []).append(selection.spent(run, "tokens_seen"))
    for counts in by_seed.values():
        known = [count for count in counts if count is not None]
        if known and (len(known) < len(counts) or max(known) > min(known) * (1 + TOLERANCE)):
            return False
    return True


def described_tokens(selection: Selection, rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """The training tokens of a table, as text for its provenance. rows: title -> runs."""
    if equal_tokens(selection, rows.values()):
        span = _span(selection, [run for runs in rows.values() for run in runs])
        return f"{span}, equal to {TOLERANCE:.1%} within each seed" if " to " in span else span
    titles: dict[str, list[str]] = {}
    for title, runs in rows.items():
        titles.setdefault(_span(selection, runs), []).append(title)
    listed = "; ".join(f"{span} for {', '.join(having)}" for span, having in titles.items())
    return f"NOT equal between runs ({listed})"


def _span(selection: Selection, runs: Iterable[RunRecord]) -> str:
    runs = list(runs)
    counts = {selection.spent(run, "tokens_seen") for run in runs if run.parent}
    known = sorted(count for count in counts if count is not None)
    parts = [" to ".join(f"{count:,}" for count in dict.fromkeys((known[0], known[-1])))] if known else []
    untrained = ["none"] if any(not run.parent for run in runs) else []
    return " and ".join([*parts, *(["unknown"] if None in counts else []), *untrained])


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
