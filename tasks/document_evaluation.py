"""The evaluation of a running-text task: perplexity over whole documents, and what the memory is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from infini.config import Config
from infini.precision import autocast
from infini.progress import progress_bar
from infini.records import RunRecord
from tasks.language_modelling import metrics, stream_documents, stream_with_foreign_memory
from tasks.text import TextTokenizer
from tasks.token_cache import open_split


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Stream the report's split through the model and fill the record; nothing lies beside it, nothing is left to do.

    Raises InputError when the data cannot be had.
    """
    split_name = str(cfg.report["split"])
    split, _ = open_split(cfg, split_name, tokenizer)
    console = Console(stderr=True)
    console.print(f"evaluating {record.parent} on {len(split)} documents", markup=False, highlight=False)

    N = cfg.dims.segment_length
    limit = cfg.scale.eval_max_tokens
    knock_limit = min(cfg.scale.knockout_max_tokens, limit or cfg.scale.knockout_max_tokens)
    knockouts = cfg.scale.knockouts and model.gates() is not None and len(split) > 1
    total = int(np.minimum(split.n_tokens, limit or split.n_tokens.max()).sum())
    knocked = int(np.minimum(split.n_tokens, knock_limit).sum()) * knockouts
    call = cfg.scale.eval_segments_per_call * N
    read = partial(stream_documents, model, split, tokenizer.bos_id, tokens_per_call=call)

    started = time.perf_counter()
    title = f"{cfg.model['name']} on {split_name}"
    with progress_bar(title, total + 4 * knocked, console.is_terminal) as advance:
        with autocast(cfg.parallel.precision, device):
            streamed = read(max_tokens=limit, advance=advance)
            seconds = time.perf_counter() - started
            if knockouts:
                own, foreign = stream_with_foreign_memory(
                    model, split, tokenizer.bos_id, max_tokens=knock_limit, advance=lambda n: advance(2 * n)
                )
                reset = read(max_tokens=knock_limit, reset_every=N, advance=advance)
                base = read(max_tokens=knock_limit, advance=advance)

    share = streamed.tokens / split.n_tokens
    record.data = split.data_record()
    record.results = metrics(streamed, split.n_words * share, split.n_bytes * share)
    record.documents = [
        {"name": name, "tokens": tokens, "words": words, "bytes": size, "nll": nll}
        for name, tokens, words, size, nll in zip(
            split.names, streamed.tokens, split.n_words * share, split.n_bytes * share, streamed.nll, strict=True
        )
    ]
    record.series["nll_by_position"] = {
        "edges": streamed.edges,
        "nll": np.round(streamed.nll_by_position, 3),
        "tokens": streamed.tokens_by_position,
    }
    if knockouts:
        _add_knockouts(record, own, foreign, reset, base)
    record.cost = {
        "streaming_seconds": seconds,
        "tokens_per_second": total / seconds,
        "tokens_seen": int(streamed.tokens.sum()),
        "state_floats": model.state_floats(int(max(split.n_tokens)) // N),
    }
    return {}, lambda: None


def _add_knockouts(record: RunRecord, own: Any, foreign: Any, reset: Any, base: Any) -> None:
    rows = zip(record.documents, own.tokens, own.nll, foreign.nll, reset.tokens, reset.nll, base.nll, strict=True)
    for entry, tokens, nll, nll_foreign, reset_tokens, nll_reset, nll_base in rows:
        entry |= {"foreign_tokens": tokens, "nll_foreign": nll_foreign, "nll_foreign_base": nll}
        entry |= {"reset_tokens": reset_tokens, "nll_reset": nll_reset, "nll_reset_base": nll_base}
    for name, knocked, normal in (("reset", reset, base), ("foreign", foreign, own)):
        n = int(normal.tokens.sum())
        cost = float((knocked.nll - normal.nll).sum()) / n
        record.results[f"{name}_delta"] = {"value": cost, "n": n, "unit": "nats/token", "higher_is_better": True}
    record.series["normaliser_growth"] = own.growth
