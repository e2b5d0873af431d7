"""The evaluation of a running-text task: perplexity over whole documents, and what the memory is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console

from infini.config.compose import cache_folder
from infini.config.schema import Config
from infini.errors import InputError
from infini.evaluation.perplexity import (
    Advance,
    Binned,
    DocumentSubset,
    Streamed,
    metrics,
    place_edges,
    position_edges,
    stream_documents,
    stream_with_foreign_memory,
)
from infini.evaluation.result_cache import EvalCheckpoint, ResultCache, cache_path
from infini.nn.protocols import optional
from infini.records import RunRecord
from infini.system.devices import autocast
from infini.system.progress import progress_bar
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import documents_of, extents, tokenise

DOCS_PER_BATCH = 16
"""Documents that are read side by side."""


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Stream the report's split through the model and fill the record.

    Returns what is to lie beside the record (nothing), and what to call when it is on the disk. Started again with the
    same configuration, an evaluation that was stopped goes on from its last point, to the same numbers bit by bit.
    Raises InputError when the data cannot be had.
    """
    split_name = _asked_split(cfg)
    documents = documents_of(cfg, split_name)
    split = tokenise(documents, tokenizer, cache_folder(cfg))
    console = Console(stderr=True)
    console.print(f"evaluating {record.parent} on {len(split)} documents", markup=False, highlight=False)

    N = cfg.dims.segment_length
    limit = cfg.scale.eval_max_tokens
    knock_limit = min(cfg.scale.knockout_max_tokens, limit or cfg.scale.knockout_max_tokens)
    knockouts = cfg.scale.knockouts and optional(model, "gates")() is not None and len(split) > 1
    total = int(np.minimum(split.n_tokens, limit or split.n_tokens.max()).sum())
    knocked = int(np.minimum(split.n_tokens, knock_limit).sum()) * knockouts
    decides = (record.parent, N, cfg.parallel.precision, split.data_record(), split_name, limit, knock_limit)
    # What an older version kept has other fields.
    kept = ResultCache(cache_path(cfg.results_dir, cfg.task.name, *decides, _FIELDS), _FIELDS, record)
    if kept.begun:
        console.print("going on where it was stopped", markup=False, highlight=False)
    call = cfg.scale.eval_segments_per_call * N
    with (
        kept,
        progress_bar(f"{cfg.model['name']} on {split_name}", total + 4 * knocked, console.is_terminal) as advance,
        autocast(cfg.parallel.precision, device),
    ):
        reading = _Reading(kept, model, split, tokenizer.bos_id, call, N, advance)
        streamed = reading.documents("read", limit)
        if knockouts:
            own, foreign = reading.foreign(knock_limit)
            reset = reading.documents("reset", knock_limit, reset_every=N)
            base = reading.documents("base", knock_limit)
    seconds = sum(entry["seconds"] for name, entry in kept.entries.items() if name.startswith("read/"))

    n_words, n_bytes = extents(documents, split, tokenizer, streamed.tokens)
    record.data = split.data_record()
    record.results = metrics(streamed, n_words, n_bytes)
    record.documents = [
        {"name": name, "tokens": tokens, "words": words, "bytes": size, "nll": nll}
        for name, tokens, words, size, nll in zip(
            split.names, streamed.tokens, n_words, n_bytes, streamed.nll, strict=True
        )
    ]
    for name, binned in (("nll_by_position", streamed.by_position), ("nll_by_place", streamed.by_place)):
        record.series[name] = {"edges": binned.edges, "nll": np.round(binned.nll, 3), "tokens": binned.tokens}
    if knockouts:
        _add_knockouts(record, own, foreign, reset, base)
    record.cost = {
        "streaming_seconds": seconds,
        "tokens_per_second": total / seconds,
        "tokens_seen": int(streamed.tokens.sum()),
        "state_floats": model.state_floats(int(max(split.n_tokens)) // N),
        "resumed": reading.resumed,
    }
    kept.tell(record, list(kept.entries))
    return {}, lambda: kept.drop(list(kept.entries))


_FIELDS = ("seconds", "by_position", "by_place", "growth")


def _asked_split(cfg: Config) -> str:
    if "split" not in cfg.report:
        name, task = cfg.report.get("name"), cfg.task.name
        raise InputError(f"report={name}: names no split of task={task} to evaluate; take one that does, as table2_lm")
    return str(cfg.report["split"])


class _Reading:
    """Passes over the documents of a split, a group at a time; what `kept` has is not read again."""

    def __init__(
        self,
        kept: ResultCache,
        model: Any,
        split: Any,
        bos_id: int,
        tokens_per_call: int,
        segment_length: int,
        advance: Advance,
    ) -> None:
        self.kept, self.model, self.split, self.bos_id = kept, model, split, bos_id
        self.tokens_per_call, self.segment_length, self.advance = tokens_per_call, segment_length, advance
        self.resumed = bool(kept.entries)

    def documents(self, name: str, max_tokens: int | None, reset_every: int | None = None) -> Streamed:
        """stream_documents over all of them, longest first, so that those side by side are about as long."""
        n_tokens = np.minimum(self.split.n_tokens, max_tokens or self.split.n_tokens.max())
        edges = position_edges(int(n_tokens.max()))
        n_documents = len(n_tokens)
        whole = Streamed(_nothing(n_documents, edges), _nothing(n_documents, place_edges(self.segment_length)))
        order = np.argsort(-n_tokens, kind="stable")
        for first in range(0, len(order), DOCS_PER_BATCH):
            group = order[first : first + DOCS_PER_BATCH]

            def read(point: EvalCheckpoint, group: np.ndarray = group) -> list[Streamed]:
                return [
                    stream_documents(
                        self.model,
                        DocumentSubset(self.split, group.tolist()),
                        self.bos_id,
                        tokens_per_call=self.tokens_per_call,
                        max_tokens=max_tokens,
                        reset_every=reset_every,
                        edges=edges,
                        segment_length=self.segment_length,
                        advance=self.advance,
                        points=point,
                    )
                ]

            (part,) = self._once(f"{name}/{first}", int(n_tokens[group].sum()), read)
            for of, its in ((whole.by_position, part.by_position), (whole.by_place, part.by_place)):
                of.nll[group], of.tokens[group] = its.nll, its.tokens
        return whole

    def foreign(self, max_tokens: int) -> tuple[Streamed, Streamed]:
        """stream_with_foreign_memory, in one piece: every document reads another's memory."""
        lengths = np.minimum(self.split.n_tokens, max_tokens)
        # The longest is read as far as the second longest.
        lengths[np.argmax(lengths)] = np.sort(lengths)[-2]

        def read(point: EvalCheckpoint) -> list[Streamed]:
            found = stream_with_foreign_memory(
                self.model,
                self.split,
                self.bos_id,
                max_tokens=max_tokens,
                advance=lambda n: self.advance(2 * n),
                points=point,
            )
            return list(found)

        own, foreign = self._once("foreign", 2 * int(lengths.sum()), read)
        return own, foreign

    def _once(self, name: str, work: int, read: Callable[[EvalCheckpoint], list[Streamed]]) -> list[Streamed]:
        """What `read` gives, or gave before it was stopped; stopped in the middle, it goes on from its last point."""
        entry = self.kept.entries.get(name)
        if entry is None:
            point = EvalCheckpoint(self.kept, name)
            parts = read(point)
            self.resumed |= point.before > 0
            self.kept.add(
                name,
                {
                    "seconds": point.seconds,
                    "by_position": [_plain(part.by_position) for part in parts],
                    "by_place": [_plain(part.by_place) for part in parts],
                    "growth": parts[0].growth,
                },
            )
            point.drop()
            return parts
        self.advance(work)
        # JSON gives back the very floats.
        return [
            Streamed(_binned(positions), _binned(places), entry["growth"])
            for positions, places in zip(entry["by_position"], entry["by_place"], strict=True)
        ]


def _nothing(n_documents: int, edges: list[int]) -> Binned:
    shape = (n_documents, len(edges) - 1)
    return Binned(edges, np.zeros(shape), np.zeros(shape, dtype=np.int64))


def _plain(binned: Binned) -> list[Any]:
    return [binned.edges, binned.nll.tolist(), binned.tokens.tolist()]


def _binned(stored: list[Any]) -> Binned:
    edges, nll, tokens = stored
    return Binned(edges, np.array(nll), np.array(tokens))


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
