"""Perplexity over whole documents, streamed with the memory carried, and knock-outs of the memory.

Shared by all tasks of running text. Works with any infini.nn.protocols.LanguageModel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from infini.evaluation.saved_reading import Reading, SavedReadings
from infini.nn.host import to_device
from infini.nn.ops.cross_entropy import token_nll
from infini.nn.state import State, is_memory, leaves, map_state, move, select_rows

LOSS_CHUNK = 2048
TOKENS_OF_A_BASE = 2048
"""Most tokens of a row in a call of a pretrained model, if its segments are not longer. It bounds the memory of a
call's activations, which grows with the width of the model."""
MAX_BYTES_PER_WORD = 100
"""Average bytes per word above which white space is assumed to separate sentences, as in Chinese, so that there is no
word perplexity. Languages that separate words have 5 to 30."""
Advance = Callable[[int], None]


class Documents(Protocol):
    """Interface of a tokenized split (see infini.tasks.text.token_cache)."""

    @property
    def n_tokens(self) -> np.ndarray: ...

    def ids(self, index: int) -> np.ndarray: ...


def position_edges(longest: int, first: int = 64) -> list[int]:
    """Bin edges for token positions: 0, then powers of two from `first` and their midpoints, up to past `longest`."""
    edges, width = [0], first
    while edges[-1] < max(longest, 1):
        edges += [width, width * 3 // 2] if width > 1 else [width]
        width *= 2
    return edges


def place_edges(segment_length: int) -> list[int]:
    """Bin edges for token places in a segment: those of position_edges, with the segment's end as the last."""
    return [*(edge for edge in position_edges(segment_length, 1) if edge < segment_length), segment_length]


class DocumentSubset:
    """Some of the documents, in a given order."""

    def __init__(self, documents: Documents, chosen: Sequence[int]) -> None:
        self.documents, self.chosen = documents, list(chosen)

    @property
    def n_tokens(self) -> np.ndarray:
        return np.asarray(self.documents.n_tokens)[self.chosen]

    def ids(self, index: int) -> np.ndarray:
        return self.documents.ids(self.chosen[index])


@dataclass
class Binned:
    """Loss in nats and tokens of each document by bin, [documents, bins]; edges: bin edges."""

    edges: list[int]
    nll: np.ndarray
    tokens: np.ndarray


@dataclass
class Streamed:
    """Sums over each document. nll, tokens: [documents]."""

    by_position: Binned
    """Loss by position in the document."""
    by_place: Binned
    """Loss by place in the segment."""
    growth: list[list[float]] = field(default_factory=list)
    """Highest growth max_i dz_i / z_i of the normaliser in one segment, [layers][heads]; empty if not measured."""

    @property
    def nll(self) -> np.ndarray:
        return self.by_position.nll.sum(1)

    @property
    def tokens(self) -> np.ndarray:
        return self.by_position.tokens.sum(1)


class _Sums:
    """Loss and tokens of documents by bins."""

    def __init__(self, n_documents: int, edges: list[int], device: Any) -> None:
        self.edges, self.n_bins = edges, len(edges) - 1
        self.inner = torch.tensor(edges[1:-1], dtype=torch.int64, device=device)
        self.nll = torch.zeros(n_documents, self.n_bins, dtype=torch.float64, device=device)
        self.tokens = torch.zeros_like(self.nll)

    def add(self, documents: torch.Tensor, where_T: torch.Tensor, nll_BT: torch.Tensor, asked_BT: torch.Tensor) -> None:
        bins = torch.bucketize(where_T, self.inner, right=True)
        into = torch.nn.functional.one_hot(bins, self.n_bins).double()
        self.nll.index_add_(0, documents, nll_BT.double() @ into)
        self.tokens.index_add_(0, documents, asked_BT.double() @ into)

    def result(self) -> Binned:
        return Binned(self.edges, self.nll.cpu().numpy(), self.tokens.cpu().numpy().astype(np.int64))


class _Rows:
    """A batch of documents, longest first; a row leaves when its document ends."""

    def __init__(
        self,
        documents: Documents,
        lengths: Sequence[int] | np.ndarray,
        bos_id: int,
        edges: list[int],
        segment_length: int,
        device: Any,
    ) -> None:
        self.documents, self.bos_id, self.device = documents, bos_id, device
        self.lengths = np.asarray(lengths)
        self.order = np.argsort(-self.lengths, kind="stable")
        self.segment_length = segment_length
        self.by_position = _Sums(len(lengths), edges, device)
        self.by_place = _Sums(len(lengths), place_edges(segment_length), device)

    def active(self, position: int) -> np.ndarray:
        """Documents with tokens at `position`, longest first."""
        return self.order[self.lengths[self.order] > position]

    def batch(self, rows: np.ndarray, position: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [B, T], and targets [B, T] on the host (-100 after a document's end); input t is target t - 1."""
        ids = np.full((len(rows), width + 1), self.bos_id, dtype=np.int64)
        targets = np.full((len(rows), width), -100, dtype=np.int64)
        for row, document in enumerate(rows):
            stop = min(position + width, self.lengths[document])
            tokens = self.documents.ids(int(document))[max(position - 1, 0) : stop]
            ids[row, (position == 0) : (position == 0) + len(tokens)] = tokens
            targets[row, : stop - position] = ids[row, 1 : stop - position + 1]
        return to_device(ids[:, :-1], self.device), torch.from_numpy(targets)

    def add(self, rows: np.ndarray, position: int, nll_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
        """Add a call's losses to their documents, by position and by place."""
        column = torch.arange(position, position + nll_BT.shape[1], device=self.device)
        index, asked_BT = to_device(rows.copy(), self.device), to_device(targets_BT, self.device) != -100
        self.by_position.add(index, column, nll_BT, asked_BT)
        self.by_place.add(index, column % self.segment_length, nll_BT, asked_BT)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums so far, by name."""
        sums = {"by_position": self.by_position, "by_place": self.by_place}
        return {f"{name}.{field}": getattr(of, field) for name, of in sums.items() for field in ("nll", "tokens")}

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set the sums to those that another process had."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])

    def result(self) -> Streamed:
        return Streamed(self.by_position.result(), self.by_place.result())


def tokens_of_a_call(segments: int, segment_length: int, pretrained: bool) -> int:
    """Tokens of a row that stream_documents reads in one call: so many segments; of a pretrained model at most
    TOKENS_OF_A_BASE, or one segment. Losses do not depend on it."""
    tokens = segments * segment_length
    return min(tokens, max(segment_length, TOKENS_OF_A_BASE)) if pretrained else tokens


@torch.inference_mode()
def stream_documents(
    model: Any,
    documents: Documents,
    bos_id: int,
    *,
    tokens_per_call: int,
    max_tokens: int | None = None,
    reset_every: int | None = None,
    edges: list[int] | None = None,
    segment_length: int | None = None,
    advance: Advance = lambda tokens: None,
    saved: SavedStream | None = None,
) -> Streamed:
    """Read every document from its first token to its last (or to max_tokens), state carried, in constant memory.

    Every token is scored, the first after bos_id. reset_every: forget after this many tokens, as if a document began
    (the `reset` knock-out). edges: position bins; None: those of the longest document. segment_length: of the place
    bins; None: the model's, whose window may be several segments. advance is called with the number of tokens read.
    saved: where the state is saved from time to time, and that of an earlier process, which was stopped.
    """
    device = next(model.parameters()).device
    lengths = [int(min(n, max_tokens or n)) for n in documents.n_tokens]
    edges = edges or position_edges(max(lengths))
    rows = _Rows(documents, lengths, bos_id, edges, segment_length or model.segment_length, device)
    state: State | None = None
    first = 0
    if saved is not None and (found := saved.take(max(lengths))) is not None:
        first, state = found.tokens, move(found.state, device)
        rows.fill(found.measured)
        saved.skip(sum(min(length, first) for length in lengths))
    for position in range(first, max(lengths), tokens_per_call):
        active = rows.active(position)
        if state is not None and len(active) < len(state.clock.position_B):
            state = select_rows(state, torch.arange(len(active)))
        ids, targets = rows.batch(active, position, tokens_per_call)
        if len(active) == 1:
            # Nothing to line up with: the last document ends where it ends, and runs without padding.
            width = int(np.count_nonzero(targets.numpy() != -100))
            ids, targets = ids[:, :width], targets[:, :width]
        mask = targets != -100
        reset = None
        if reset_every is not None:
            column = torch.arange(position, position + ids.shape[1])
            reset = (column % reset_every == 0) & mask
        out = model(ids, state, mask_BT=None if mask.numpy().all() else mask, reset_BT=reset)
        state = out.state
        rows.add(active, position, token_nll(out.hidden_BTD, model.output_weight, targets, LOSS_CHUNK), targets)
        advance(int(mask.numpy().sum()))
        if saved is not None:
            saved.keep(min(position + tokens_per_call, max(lengths)), state, rows.tensors)
    return rows.result()


class SavedStream:
    """The state of one batch of documents on disk. name: that of its result; store: the evaluation's states."""

    def __init__(self, store: SavedReadings, name: str, skip: Advance) -> None:
        self.skip = skip
        self._store, self._name, self._started = store, name, time.perf_counter()
        self.earlier = 0.0
        """Seconds in which earlier processes read what is not read again."""

    def take(self, longest: int) -> Reading | None:
        """What an earlier process had read of these documents, the longest of which has so many tokens."""
        found = self._store.take("documents", 1, 0, longest, lambda _: [self._name])
        if found is not None:
            self.earlier = found.measured["seconds"]
        return found

    def keep(self, tokens: int, state: State, sums: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Save the state if it is time to. tokens: read of the longest document."""
        if self._store.due():
            seconds = self.earlier + time.perf_counter() - self._started
            moved = {name: tensor.cpu() for name, tensor in sums().items()}
            self._store.save("documents", [self._name], Reading(tokens, state, {"seconds": seconds, **moved}))


DOCS_PER_BATCH = 16
"""Documents read in one batch, so that memory does not grow with their number. Parts of an evaluation share
batches: others would change the last bits."""


def document_batches(lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The documents of each batch after the place of its first. The longest come first, so that those of a batch have
    similar lengths."""
    order = np.argsort(-lengths, kind="stable")
    for first in range(0, len(order), DOCS_PER_BATCH):
        yield first, order[first : first + DOCS_PER_BATCH]


def stream_in_batches(
    documents: Documents,
    max_tokens: int | None,
    segment_length: int,
    read: Callable[[int, DocumentSubset, list[int]], Sequence[Streamed]],
) -> Streamed:
    """Join what `read` returns for each batch of documents.

    read is called with the place of the batch's first document, its documents and the position bins of all; it returns
    stream_documents of them, or nothing for a batch that is left out. segment_length: that of the place bins.
    """
    lengths = np.minimum(documents.n_tokens, max_tokens or max(documents.n_tokens))
    edges = position_edges(int(lengths.max()))
    whole = Streamed(_zeros(len(lengths), edges), _zeros(len(lengths), place_edges(segment_length)))
    for first, batch in document_batches(lengths):
        for made in read(first, DocumentSubset(documents, batch.tolist()), edges):
            for target, source in ((whole.by_position, made.by_position), (whole.by_place, made.by_place)):
                target.nll[batch], target.tokens[batch] = source.nll, source.tokens
    return whole


def _zeros(n_documents: int, edges: list[int]) -> Binned:
    shape = (n_documents, len(edges) - 1)
    return Binned(edges, np.zeros(shape), np.zeros(shape, dtype=np.int64))


def exchange_memory(state: State, donor_B: torch.Tensor) -> State:
    """Each row with the memory of another row, and its own clock and window."""
    donated = select_rows(state, donor_B)
    paths = iter([path for path, _ in leaves(state)])
    return map_state(lambda own, other: other if is_memory(next(paths)) else own, state, donated)


@torch.inference_mode()
def stream_with_foreign_memory(
    model: Any,
    documents: Documents,
    bos_id: int,
    *,
    max_tokens: int | None = None,
    advance: Advance = lambda tokens: None,
) -> tuple[Streamed, Streamed]:
    """The `foreign` knock-out: (own, foreign) over the same tokens.

    Every segment is also read by a copy of each row with another document's memory after equally many tokens. The copy
    is then discarded, and the row continues with its own memory. The donor of a document is the next longer one. The
    longest is read as far as the second longest, which is its donor. advance: as for stream_documents.
    """
    device = next(model.parameters()).device
    lengths = np.array([min(int(n), max_tokens or int(n)) for n in documents.n_tokens])
    if len(lengths) < 2:
        raise ValueError("a foreign memory needs at least two documents")
    order = np.argsort(-lengths, kind="stable")
    lengths[order[0]] = lengths[order[1]]
    edges = position_edges(int(lengths.max()))
    own, foreign = (_Rows(documents, lengths, bos_id, edges, model.segment_length, device) for _ in range(2))
    state: State | None = None
    growth: torch.Tensor | None = None
    N = model.segment_length
    for position in range(0, int(lengths.max()), N):
        active = own.active(position)
        if state is not None:
            state = select_rows(state, torch.arange(len(active)))
        ids, targets = own.batch(active, position, N)
        mask = targets != -100
        mask_BT = None if mask.numpy().all() else mask
        if state is not None:
            # The longest row is active with its donor, every other row with the row before it.
            donor = torch.arange(len(active)) - 1
            donor[0] = 1
            swapped = model(ids, exchange_memory(state, donor), mask_BT=mask_BT)
            nll = token_nll(swapped.hidden_BTD, model.output_weight, targets, LOSS_CHUNK)
            foreign.add(active, position, nll, targets)
        out = model(ids, state, mask_BT=mask_BT)
        nll = token_nll(out.hidden_BTD, model.output_weight, targets, LOSS_CHUNK)
        own.add(active, position, nll, targets)
        if state is None:
            foreign.add(active, position, nll, targets)  # no memory yet: both are the same
        else:
            grown = _growth(state, out.state)
            growth = grown if growth is None else torch.maximum(growth, grown)
        state = out.state
        advance(int(mask.numpy().sum()))
    result = own.result()
    if growth is not None:
        result.growth = [[value for value in layer if value != -math.inf] for layer in growth.tolist()]
    return result, foreign.result()


def _growth(before: State, after: State) -> torch.Tensor:
    """max over rows and dimensions of dz / z by layer and head [L, G], for layers with a normaliser z; minus infinity
    pads layers with fewer heads."""
    ratios = []
    for (path, z), (_, grown) in zip(leaves(before.layers), leaves(after.layers), strict=True):
        # In a layer of a pretrained model, only the memory of all finished segments counts.
        if path.endswith("z_BGK") and not {"pending", "before"} & set(path.split(".")):
            ratios.append(((grown - z) / z.clamp(min=1e-30)).amax((0, 2)))
    # Layers may have different numbers of heads.
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ratios, batch_first=True, padding_value=-math.inf) if ratios else torch.zeros(0)


def metrics(streamed: Streamed, n_words: np.ndarray, n_bytes: np.ndarray) -> dict[str, dict[str, Any]]:
    """Perplexity = exp(total NLL / total tokens) over the split, word perplexity, and bits per byte.

    n_words, n_bytes: of the scored text. A missing measure is None, with a note: for a text without tokens, words or
    bytes, for one whose white space does not separate words (see MAX_BYTES_PER_WORD), or where a number is not finite.
    """
    nll, tokens = float(streamed.nll.sum()), int(streamed.tokens.sum())
    words, size = int(n_words.sum()), int(n_bytes.sum())

    def entry(value: float | None, n: int, unit: str, why_none: str) -> dict[str, Any]:
        finite = value is not None and math.isfinite(value)
        found = {"value": value if finite else None, "n": n, "unit": unit, "higher_is_better": False}
        return found if finite else found | {"note": why_none if n == 0 or math.isfinite(nll) else not_finite}

    of_words = words > 0 and size <= MAX_BYTES_PER_WORD * words
    no_tokens, too_large = "no token was scored", "too large for a floating-point number"
    not_finite = "the loss of a token is not a finite number"
    no_words = f"white space separates no words here: {words:,} in {size:,} bytes"
    return {
        "nll_per_token": entry(_ratio(nll, tokens), tokens, "nats/token", no_tokens),
        "perplexity": entry(_exponential(_ratio(nll, tokens)), tokens, "per token", too_large if tokens else no_tokens),
        "word_perplexity": entry(
            _exponential(_ratio(nll, words)) if of_words else None,
            words,
            "per word",
            too_large if of_words else no_words,
        ),
        "bits_per_byte": entry(_ratio(nll / math.log(2), size), size, "bits/byte", "what was scored has no bytes"),
    }


def _ratio(total: float, n: int) -> float | None:
    return total / n if n else None


def _exponential(value: float | None) -> float | None:
    try:
        found = None if value is None else math.exp(value)
    except OverflowError:
        return None
    return found if found is not None and math.isfinite(found) else None
