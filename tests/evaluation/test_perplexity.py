"""Streamed perplexity and the knock-outs, against whole documents in one call of a float64 model."""

from __future__ import annotations

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SEGMENT, VOCABULARY, make_model, models_by, variant_id, variants, with_memory
from report_runs import make_eval

from infini.evaluation.perplexity import (
    Binned,
    Streamed,
    exchange_memory,
    metrics,
    place_edges,
    position_edges,
    stream_documents,
    stream_with_foreign_memory,
)
from infini.nn.state import State, is_memory, leaves
from infini.tasks.text.document_evaluation import _add_knockouts

BOS = VOCABULARY - 1
OF_MEMORY = re.compile(r"\d\.memory\.(\w+\.)?z_BGK")
LENGTHS = (37, 8, 1, 16, 21)
MODELS = pytest.mark.parametrize("options", variants(), ids=variant_id)
WITH_MEMORY = pytest.mark.parametrize("options", with_memory(), ids=variant_id)


class Books:
    """Documents of random tokens, of the dtype the token cache has; `of` makes them from given ones."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(BOS, size=length).astype(np.uint16) for length in lengths]

    @classmethod
    def of(cls, *tokens: np.ndarray) -> Books:
        books = cls(())
        books.tokens = list(tokens)
        return books

    @property
    def n_tokens(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.tokens], dtype=np.int64)

    def ids(self, index: int) -> np.ndarray:
        return self.tokens[index]


def inputs_and_targets(tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Input t is target t - 1, the first is the mark; both [1, T]."""
    ids = torch.tensor([[BOS, *tokens.tolist()]])
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def nll_and_state(
    model: Any, inputs: torch.Tensor, targets: torch.Tensor, state: State | None = None
) -> tuple[np.ndarray, State]:
    """-log p of each target in one call, the probabilities taken from the head over the whole vocabulary."""
    out = model(inputs, state)
    log_p = torch.log_softmax(model.head(out.hidden_BTD), -1)
    return -log_p.gather(-1, targets[..., None])[0, :, 0].numpy(), out.state


def direct(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The loss of each token of a document, read in one call."""
    return nll_and_state(model, *inputs_and_targets(tokens))[0]


def segments(model: Any, tokens: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of a document's segments."""
    inputs, targets = inputs_and_targets(tokens)
    N = model.segment_length
    return list(zip(inputs.split(N, 1), targets.split(N, 1), strict=True))


def states_before(model: Any, tokens: np.ndarray) -> list[State]:
    """The state before each segment of a document, read segment by segment."""
    states = [model.init_state(1)]
    for inputs, targets in segments(model, tokens):
        states.append(nll_and_state(model, inputs, targets, states[-1])[1])
    return states


def with_memory_of(state: State, other: State) -> State:
    """`state` with the memory of `other`, layer by layer; with window=previous also with the one that is read."""

    def mixed(own: Any, donor: Any) -> Any:
        own = own._replace(memory=donor.memory)
        before = getattr(own, "before", ())
        return own._replace(before=before._replace(memory=donor.before.memory)) if before else own

    pairs = zip(state.layers, other.layers, strict=True)
    return state._replace(layers=tuple(mixed(own, donor) for own, donor in pairs))


def memories_of_a_layer(options: dict[str, Any]) -> int:
    """Leaves of a layer that are memory: M and z, and what a cache or the segment before adds."""
    return 4 if options["name"] == "infini_xl" or options.get("window") == "previous" else 2


def assert_streamed(streamed: Streamed, expected: list[np.ndarray]) -> None:
    """Total loss, number of tokens, and both by position and by place are those of the expected losses a token."""
    np.testing.assert_allclose(streamed.nll, [nll.sum() for nll in expected], rtol=1e-10)
    assert streamed.tokens.tolist() == [len(nll) for nll in expected]
    for row, nll in enumerate(expected):
        position = np.arange(len(nll))
        for binned, where in (
            (streamed.by_position, position),
            (streamed.by_place, position % streamed.by_place.edges[-1]),
        ):
            for column, (start, stop) in enumerate(itertools.pairwise(binned.edges)):
                there = nll[(where >= start) & (where < stop)]
                assert binned.tokens[row, column] == len(there)
                np.testing.assert_allclose(binned.nll[row, column], there.sum(), rtol=1e-10)


@models_by(5, variants(), "tokens_per_call", [5, 1, SEGMENT, 3 * SEGMENT, 13, 1000])
def test_streaming_is_reading_the_whole_document(options: dict[str, Any], tokens_per_call: int) -> None:
    model, books = make_model(options), Books()
    streamed = stream_documents(model, books, BOS, tokens_per_call=tokens_per_call)
    assert_streamed(streamed, [direct(model, ids) for ids in books.tokens])


@MODELS
@pytest.mark.parametrize("length", [1, SEGMENT, SEGMENT + 3])
def test_a_single_document(options: dict[str, Any], length: int) -> None:
    model, books = make_model(options), Books((length,))
    assert_streamed(stream_documents(model, books, BOS, tokens_per_call=SEGMENT), [direct(model, books.ids(0))])


@pytest.mark.parametrize("max_tokens", [1, 11, 16, 500])
def test_max_tokens_scores_the_beginning_of_each_document(max_tokens: int) -> None:
    model, books = make_model(variants()[0]), Books()
    streamed = stream_documents(model, books, BOS, tokens_per_call=2 * SEGMENT, max_tokens=max_tokens)
    assert_streamed(streamed, [direct(model, ids)[:max_tokens] for ids in books.tokens])


def test_the_first_and_the_last_token_are_scored() -> None:
    model, books = make_model(variants()[0]), Books((19,))

    def nll(ids: np.ndarray) -> float:
        return float(stream_documents(model, Books.of(ids), BOS, tokens_per_call=SEGMENT).nll[0])

    ids = books.ids(0)
    inputs, targets = inputs_and_targets(ids)
    with torch.no_grad():
        log_p = torch.log_softmax(model.head(model(inputs).hidden_BTD), -1)[0]
    last = ids.copy()
    last[-1] = (last[-1] + 1) % BOS
    # Nothing comes after the last token, so its own loss is all that can change.
    expected = float(log_p[-1, int(ids[-1])] - log_p[-1, int(last[-1])])
    assert nll(last) - nll(ids) == pytest.approx(expected, rel=1e-9)
    assert nll(ids[:1]) == pytest.approx(-float(log_p[0, int(ids[0])]), rel=1e-10)


@MODELS
def test_the_other_documents_do_not_matter(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books()
    together = stream_documents(model, books, BOS, tokens_per_call=13)
    backwards = stream_documents(model, Books.of(*books.tokens[::-1]), BOS, tokens_per_call=13)
    np.testing.assert_allclose(backwards.nll[::-1], together.nll, rtol=1e-10)
    for index, ids in enumerate(books.tokens):
        alone = stream_documents(model, Books.of(ids), BOS, tokens_per_call=13)
        np.testing.assert_allclose(alone.nll[0], together.nll[index], rtol=1e-10)


def test_calls_are_bounded_and_finished_documents_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model, books = make_model(variants()[0]), Books()
    shapes: list[tuple[int, ...]] = []
    done: list[int] = []
    forward = model.forward

    def watched(ids_BT: torch.Tensor, *arguments: Any, **extras: Any) -> Any:
        shapes.append(tuple(ids_BT.shape))
        return forward(ids_BT, *arguments, **extras)

    monkeypatch.setattr(model, "forward", watched)
    stream_documents(model, books, BOS, tokens_per_call=SEGMENT, advance=done.append)
    assert shapes == [(5, 8), (3, 8), (2, 8), (1, 8), (1, 5)]
    assert sum(done) == sum(LENGTHS)


@pytest.mark.parametrize("longest", [1, 63, 64, 65, 96, 97, 5000])
def test_position_edges_cover_every_token_in_order(longest: int) -> None:
    edges = position_edges(longest)
    assert edges[0] == 0 and edges[-1] >= longest
    assert edges == sorted(set(edges))
    assert edges == position_edges(5000)[: len(edges)]


def test_positions_sum_to_the_whole() -> None:
    model, books = make_model(variants()[0]), Books((200, 64, 65, 3))
    streamed = stream_documents(model, books, BOS, tokens_per_call=24)
    assert streamed.by_position.edges == [0, 64, 96, 128, 192, 256, 384]
    assert streamed.by_place.edges == [0, 1, 2, 3, 4, 6, SEGMENT]
    assert_streamed(streamed, [direct(model, ids) for ids in books.tokens])
    for binned in (streamed.by_position, streamed.by_place):
        np.testing.assert_allclose(binned.nll.sum(), streamed.nll.sum(), rtol=1e-12)


@pytest.mark.parametrize("length", [5, 1])
def test_places_may_be_of_shorter_segments_than_the_models(length: int) -> None:
    """A window of attention may be several segments long; its losses are told apart as those of other models."""
    model, books = make_model(variants()[0]), Books((200, 64, 65, 3))
    streamed = stream_documents(model, books, BOS, tokens_per_call=24, segment_length=length)
    assert streamed.by_place.edges == list(range(length + 1))
    assert_streamed(streamed, [direct(model, ids) for ids in books.tokens])


@pytest.mark.parametrize(("length", "edges"), [(1, [0, 1]), (2, [0, 1, 2]), (20, [0, 1, 2, 3, 4, 6, 8, 12, 16, 20])])
def test_place_edges_end_with_the_segment(length: int, edges: list[int]) -> None:
    assert place_edges(length) == edges


def test_metrics_by_hand() -> None:
    binned = Binned([0, 64, 96], np.array([[30.0, 10.0], [8.0, 0.0]]), np.array([[12, 4], [4, 0]]))
    streamed = Streamed(binned, binned)
    found = metrics(streamed, np.array([6, 2]), np.array([50, 14]))
    assert {name: (entry["value"], entry["n"]) for name, entry in found.items()} == {
        "nll_per_token": (48 / 20, 20),
        "perplexity": (pytest.approx(11.0231763806), 20),  # exp(2.4)
        "word_perplexity": (pytest.approx(403.428793493), 8),  # exp(6)
        "bits_per_byte": (pytest.approx(0.75 / math.log(2)), 64),
    }
    assert not any(entry["higher_is_better"] for entry in found.values())
    assert found["bits_per_byte"]["unit"] == "bits/byte"


def test_perplexity_pools_tokens_and_not_documents() -> None:
    binned = Binned([0, 64, 96], np.array([[90.0, 0.0], [1.0, 0.0]]), np.array([[9, 0], [1, 0]]))
    streamed = Streamed(binned, binned)
    found = metrics(streamed, np.array([1, 1]), np.array([1, 1]))
    assert found["perplexity"]["value"] == pytest.approx(math.exp(9.1))


def test_an_untrained_model_of_uniform_output_has_the_vocabulary_as_perplexity() -> None:
    model, books = make_model(variants()[0]), Books()
    with torch.no_grad():
        model.output_weight.zero_()
    streamed = stream_documents(model, books, BOS, tokens_per_call=SEGMENT)
    found = metrics(streamed, np.array([5]), np.array([100]))
    assert found["perplexity"]["value"] == pytest.approx(VOCABULARY)


@models_by(3, variants(), "tokens_per_call", [5, SEGMENT, 4 * SEGMENT])
def test_reset_reads_every_segment_as_a_document(options: dict[str, Any], tokens_per_call: int) -> None:
    model, books = make_model(options), Books()
    N = model.segment_length
    reset = stream_documents(model, books, BOS, tokens_per_call=tokens_per_call, reset_every=N)
    expected = [
        np.concatenate([nll_and_state(model, *segment)[0] for segment in segments(model, ids)]) for ids in books.tokens
    ]
    assert_streamed(reset, expected)


@pytest.mark.parametrize("options", [v for v in variants() if v["name"] == "local"], ids=variant_id)
def test_reset_costs_local_nothing(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books()
    plain = stream_documents(model, books, BOS, tokens_per_call=2 * SEGMENT)
    reset = stream_documents(model, books, BOS, tokens_per_call=2 * SEGMENT, reset_every=SEGMENT)
    np.testing.assert_allclose(reset.nll, plain.nll, rtol=1e-12)


@WITH_MEMORY
def test_reset_costs_a_model_with_memory_something(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books()
    plain = stream_documents(model, books, BOS, tokens_per_call=SEGMENT)
    reset = stream_documents(model, books, BOS, tokens_per_call=SEGMENT, reset_every=SEGMENT)
    several = books.n_tokens > SEGMENT
    assert (np.abs(reset.nll - plain.nll)[several] > 1e-6).all()
    np.testing.assert_allclose(reset.nll[~several], plain.nll[~several], rtol=1e-12)


@MODELS
def test_foreign_leaves_the_own_stream_alone(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books()
    own, foreign = stream_with_foreign_memory(model, books, BOS)
    # The longest document (37) is read as far as its donor (21) goes.
    assert_streamed(own, [direct(model, ids)[:21] for ids in books.tokens])
    assert foreign.tokens.tolist() == own.tokens.tolist() == [21, 8, 1, 16, 21]
    assert own.by_position.edges == foreign.by_position.edges


@MODELS
def test_the_memory_of_an_identical_document_costs_exactly_nothing(options: dict[str, Any]) -> None:
    model, ids = make_model(options), Books((37,)).ids(0)
    own, foreign = stream_with_foreign_memory(model, Books.of(ids, ids.copy()), BOS)
    assert np.array_equal(own.by_position.nll, foreign.by_position.nll)


@models_by(
    3,
    with_memory(),
    "read",
    [
        ((37, 30), (1, 0), None),
        ((16, 37), (1, 0), None),
        ((20, 37, 29), (2, 2, 1), None),
        ((20, 37, 29), (1, 0, 1), 18),
    ],
)
def test_foreign_by_hand(options: dict[str, Any], read: tuple[tuple[int, ...], tuple[int, ...], int | None]) -> None:
    """Before every segment, a document gets the donor's memory after equally many tokens of the donor."""
    lengths, donors, max_tokens = read
    model, books = make_model(options), Books(lengths)
    second = sorted(lengths)[-2]
    cut = [ids[: min(second, max_tokens or second)] for ids in books.tokens]
    states = [states_before(model, ids) for ids in cut]
    expected = []
    for own, donor, ids in zip(states, donors, cut, strict=True):
        mixed = [with_memory_of(a, b) for a, b in zip(own, states[donor], strict=False)]
        losses = [nll_and_state(model, *segment, s)[0] for segment, s in zip(segments(model, ids), mixed, strict=False)]
        expected.append(np.concatenate(losses))
    own_streamed, foreign = stream_with_foreign_memory(model, books, BOS, max_tokens=max_tokens)
    assert_streamed(foreign, expected)
    # The first segment reads no memory; after it another book's memory is not one's own.
    reads = [len(ids) > (2 if options.get("window") == "previous" else 1) * SEGMENT for ids in cut]
    assert ((np.abs(foreign.nll - own_streamed.nll) > 1e-6) == reads).all()


@WITH_MEMORY
def test_exchange_takes_memory_and_nothing_else(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books((12, 12))
    ids = torch.cat([inputs_and_targets(ids)[0] for ids in books.tokens])
    with torch.no_grad():
        state = model(ids).state
    exchanged = exchange_memory(state, torch.tensor([1, 0]))
    n_memory = 0
    for (path, before), (_, after) in zip(leaves(state), leaves(exchanged), strict=True):
        n_memory += is_memory(path)
        assert torch.equal(after, before.flip(0) if is_memory(path) else before), path
    assert n_memory == memories_of_a_layer(options) * len(state.layers)


def test_the_cost_of_a_knock_out_is_a_mean_over_tokens() -> None:
    record = make_eval("infini_linear", 1)
    tokens, nll = np.array([1000, 2000, 4000]), np.array([10.0, 20.0, 40.0])
    own, base = (SimpleNamespace(tokens=tokens, nll=nll + more, growth=[[0.5]]) for more in (1.0, 2.0))
    foreign, reset = (SimpleNamespace(tokens=tokens, nll=nll + np.array(more)) for more in ([8, 1, 1], [2, 2, 72]))
    _add_knockouts(record, own, foreign, reset, base)
    assert record.results["foreign_delta"]["value"] == pytest.approx(7 / 7000)
    assert record.results["reset_delta"]["value"] == pytest.approx(70 / 7000)
    names = ("nll_foreign", "nll_foreign_base", "nll_reset", "nll_reset_base", "foreign_tokens", "reset_tokens")
    assert [record.documents[2][name] for name in names] == [41, 41, 112, 42, 4000, 4000]
    assert record.series["normaliser_growth"] == [[0.5]]


def test_foreign_needs_two_documents() -> None:
    with pytest.raises(ValueError, match="at least two documents"):
        stream_with_foreign_memory(make_model(variants()[0]), Books((9,)), BOS)


def test_foreign_counts_the_tokens_of_one_pass() -> None:
    done: list[int] = []
    own, _ = stream_with_foreign_memory(make_model(variants()[0]), Books(), BOS, advance=done.append)
    assert sum(done) == own.tokens.sum()


@WITH_MEMORY
def test_the_growth_of_the_normaliser_is_watched(options: dict[str, Any]) -> None:
    model, books = make_model(options), Books((37, 29, 16))
    own, foreign = stream_with_foreign_memory(model, books, BOS)
    highest = np.zeros((2, 2))
    for ids in (books.ids(0)[:29], books.ids(1), books.ids(2)):
        z_SLGK = [
            torch.stack(
                [leaf[0] for path, leaf in leaves(state.layers) if re.fullmatch(r"\d\.memory\.(\w+\.)?z_BGK", path)]
            )
            for state in states_before(model, ids)[1:]
        ]
        for before, after in itertools.pairwise(z_SLGK):
            highest = np.maximum(highest, ((after - before) / before).amax(-1).numpy())
    np.testing.assert_allclose(own.growth, highest, rtol=1e-10)
    assert (highest > 0).all()
    assert foreign.growth == []


@pytest.mark.parametrize("options", [v for v in variants() if v["name"] in ("local", "full")], ids=variant_id)
def test_a_model_without_memory_has_no_growth(options: dict[str, Any]) -> None:
    own, foreign = stream_with_foreign_memory(make_model(options), Books(), BOS)
    assert own.growth == []
    assert np.array_equal(own.nll, foreign.nll)
