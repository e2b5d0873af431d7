"""The evaluation of a running-text task: perplexity over whole documents, and knock-outs of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from infini.config.compose import cache_folder
from infini.config.lengths import parse_part
from infini.config.schema import Config
from infini.errors import InputError
from infini.evaluation import perplexity
from infini.evaluation.perplexity import Binned, DocumentSubset, SavedStream, Streamed, stream_documents
from infini.evaluation.result_cache import ResultCache, cache_path, identity_of_reader, name_of_model
from infini.evaluation.saved_reading import SavedReadings
from infini.nn.protocols import carried_floats, optional
from infini.records import RunRecord
from infini.system.progress import Advance, plain_console
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import documents_of, extents, tokenise


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Stream the report's split through the model and fill the record.

    Returns the files that belong beside the record (none), and a function to call once the record is on disk. An
    evaluation that was stopped resumes when the same configuration is started again, with the same numbers bit for bit.
    Raises InputError when the data cannot be loaded, and PartDone at the end of a part.
    """
    split_name = _split(cfg)
    documents = documents_of(cfg, split_name)
    split = tokenise(documents, tokenizer, cache_folder(cfg))
    console = plain_console()
    console.print(f"evaluating {name_of_model(record)} on {len(split)} documents")

    N = cfg.dims.segment_length
    limit = cfg.scale.eval_max_tokens
    knock_limit = min(cfg.scale.knockout_max_tokens, limit or cfg.scale.knockout_max_tokens)
    knockouts = cfg.scale.knockouts and optional(model, "gates")() is not None and len(split) > 1
    work = _work(split.n_tokens, limit, knock_limit if knockouts else None)
    total = sum(tokens for name, tokens in work.items() if name.startswith("read/"))
    identity = (identity_of_reader(record), N, split.data_record(), split_name, limit, knock_limit)
    # Results of a version with other fields are in another file.
    path = cache_path(cfg.results_dir, cfg.task.name, *identity, _FIELDS)
    cache = ResultCache(path, _FIELDS, record, parse_part(cfg.part))
    resumed = bool(cache.entries)
    if resumed:
        console.print(f"{len(cache.entries)} of {len(work)} results were there before")
    own = {name: work[name] for name in cache.share(list(work))}
    call = perplexity.tokens_of_a_call(cfg.scale.eval_segments_per_call, N, "base" in cfg.model)
    # The time left follows from the pace of this process.
    left = sum(tokens for name, tokens in own.items() if name not in cache.entries)
    title = f"{cfg.model['name']} on {split_name}"
    saved = SavedReadings(cache)
    with cache.measuring(title, left, cfg.parallel.precision, device) as advance:
        passes = _Passes(cache, set(own), model, split, tokenizer.bos_id, call, N, advance, saved)
        streamed = passes.read("read", limit)
        if knockouts:
            # The pass takes all documents at once, because every document reads another's memory.
            options: dict[str, Any] = {"max_tokens": knock_limit, "advance": lambda n: advance(2 * n)}
            knocked = (
                *passes.once(
                    "foreign", partial(perplexity.stream_with_foreign_memory, model, split, tokenizer.bos_id, **options)
                ),
                passes.read("reset", knock_limit, reset_every=N),
                passes.read("base", knock_limit),
            )
    cache.end_part(work)
    seconds = sum(entry["seconds"] for name, entry in cache.entries.items() if name.startswith("read/"))

    n_words, n_bytes = extents(documents, split, tokenizer, streamed.tokens)
    record.data = split.data_record()
    record.results = perplexity.metrics(streamed, n_words, n_bytes)
    record.documents = [
        {"name": name, "tokens": tokens, "words": words, "bytes": size, "nll": nll}
        for name, tokens, words, size, nll in zip(
            split.names, streamed.tokens, n_words, n_bytes, streamed.nll, strict=True
        )
    ]
    for name, binned in (("nll_by_position", streamed.by_position), ("nll_by_place", streamed.by_place)):
        record.series[name] = {"edges": binned.edges, "nll": np.round(binned.nll, 3), "tokens": binned.tokens}
    if knockouts:
        _add_knockouts(record, *knocked)
    record.cost = {
        "streaming_seconds": seconds,
        "tokens_per_second": total / seconds,
        "tokens_seen": int(streamed.tokens.sum()),
        "state_floats": model.state_floats(int(max(split.n_tokens)) // N),
        # The size after the longest part that was read of a document; its last segment may be a short one.
        "carried_floats": carried_floats(model, -(-int(streamed.tokens.max()) // N)),
        "resumed": resumed or saved.taken,
    }
    cache.record_commits(record, list(cache.entries))
    return {}, lambda: cache.drop(list(cache.entries))


_FIELDS = ("seconds", "by_position", "by_place", "growth")


def _split(cfg: Config) -> str:
    """The split that the report evaluates."""
    if "split" not in cfg.report:
        name, task = cfg.report.get("name"), cfg.task.name
        raise InputError(
            f"report={name}: has no evaluation split for task={task}; choose a report that has one, for example "
            "table2_lm"
        )
    return str(cfg.report["split"])


def _work(n_tokens: np.ndarray, limit: int | None, knock_limit: int | None) -> dict[str, int]:
    """Name of each result -> tokens to read for it. limit, knock_limit: most tokens of a document, without and with a
    knock-out; knock_limit None: there are no knock-outs."""

    def of_pass(name: str, most: int | None) -> dict[str, int]:
        lengths = np.minimum(n_tokens, most or n_tokens.max())
        return {f"{name}/{first}": int(lengths[batch].sum()) for first, batch in perplexity.document_batches(lengths)}

    work = of_pass("read", limit)
    if knock_limit is not None:
        lengths = np.minimum(n_tokens, knock_limit)
        # The longest document reads another's memory only as far as the second longest goes.
        lengths[np.argmax(lengths)] = np.sort(lengths)[-2]
        work["foreign"] = 2 * int(lengths.sum())
        work |= of_pass("reset", knock_limit) | of_pass("base", knock_limit)
    return work


@dataclass
class _Passes:
    """Passes over the documents of a split; results that the cache holds are not computed again."""

    cache: ResultCache
    own: set[str]
    """Results that this process gives. Those of other parts stay 0."""
    model: Any
    split: Any
    bos_id: int
    tokens_per_call: int
    segment_length: int
    advance: Advance
    saved: SavedReadings

    def read(self, name: str, max_tokens: int | None, reset_every: int | None = None) -> Streamed:
        """stream_documents over all documents."""

        def read(first: int, documents: DocumentSubset, edges: list[int]) -> tuple[Streamed, ...]:
            options: dict[str, Any] = {"max_tokens": max_tokens, "reset_every": reset_every, "edges": edges}
            options |= {"tokens_per_call": self.tokens_per_call, "segment_length": self.segment_length}
            saved = SavedStream(self.saved, f"{name}/{first}", self.advance.skip)
            options |= {"advance": self.advance, "saved": saved}
            made = partial(stream_documents, self.model, documents, self.bos_id, **options)
            return self.once(f"{name}/{first}", made, lambda: saved.earlier)

        return perplexity.stream_in_batches(self.split, max_tokens, self.segment_length, read)

    def once(
        self,
        name: str,
        read: Callable[[], Streamed | tuple[Streamed, Streamed]],
        earlier: Callable[[], float] = lambda: 0.0,
    ) -> tuple[Streamed, ...]:
        """The result of `read`, from the cache where it is there; empty for a result of another part. earlier: seconds
        that other processes spent on it, known once it is read."""
        if name not in self.own:
            return ()
        entry = self.cache.entries.get(name)
        if entry is None:
            started = time.perf_counter()
            result = read()
            parts = result if isinstance(result, tuple) else (result,)
            made: dict[str, Any] = {"seconds": earlier() + time.perf_counter() - started}
            for field in ("by_position", "by_place"):
                binned = [getattr(part, field) for part in parts]
                made[field] = [[each.edges, each.nll.tolist(), each.tokens.tolist()] for each in binned]
            self.cache.add(name, made | {"growth": parts[0].growth})
            return parts
        # JSON returns exactly the same floats.
        positions, places = (
            [Binned(edges, np.array(nll), np.array(tokens)) for edges, nll, tokens in entry[field]]
            for field in ("by_position", "by_place")
        )
        return tuple(Streamed(*binned, entry["growth"]) for binned in zip(positions, places, strict=True))


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
