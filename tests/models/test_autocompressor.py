"""AutoCompressors against a plain transformer that is given [summaries; segment; summary tokens] as one sequence."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    SEGMENT,
    VOCABULARY,
    assert_close,
    assert_same_gradients,
    bools,
    make_model,
    random_ids,
    run_in_calls,
    tiny_dims,
)
from test_rmt import plain_transformer

from infini.errors import InputError
from infini.models import build_model
from infini.nn.state import map_state, memory_floats

N = SEGMENT
OPTIONS = {"name": "autocompressor", "summary_tokens": 2, "accumulated": 3, "bptt_depth": None}


def oracle(model: Any, ids_T: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of a document whose segments have these lengths, and the summaries after the last whole one."""
    summaries: list[torch.Tensor] = []
    outputs, begin = [], 0
    for length in lengths:
        tokens = model.embedding(ids_T[begin : begin + length])
        prefix = torch.cat(summaries) if summaries else tokens[:0]
        asked = model.summaries.view(model.summary_tokens, -1)
        hidden = plain_transformer(model, torch.cat([prefix, tokens, asked]))
        outputs.append(hidden[len(prefix) : len(prefix) + len(tokens)])
        if len(tokens) == length:
            summaries = [*summaries, hidden[len(prefix) + length :]][-model.accumulated :]
        begin += length
    return torch.cat(outputs), torch.cat(summaries)


@pytest.mark.parametrize("positions", ["rotary", "t5"])
@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
def test_the_model_is_a_transformer_over_summaries_segment_summary_tokens(cuts: list[int], positions: str) -> None:
    """Outputs, memory and gradients through five segments and a bit: the oldest summaries are dropped by then."""
    model = make_model({**OPTIONS, "positions": positions})
    ids = random_ids(1, 5 * N + 3)
    expected, memory = oracle(model, ids[0], [N] * 6)
    hidden, state = run_in_calls(model, ids, cuts)
    assert_close(hidden[0], expected, 1e-12, "hidden")
    assert_close(state.layers[0].memory[0], memory, 1e-12, "memory")
    assert state.layers[0].writes_B.tolist() == [5]
    wanted = {n: p for n, p in model.named_parameters() if n != "unembedding.weight"}
    assert_same_gradients(hidden[0], expected, wanted)


def drawn(seed: int, places: int) -> list[int]:
    """The lengths of the segments that a model in training draws for so many places of the grid."""
    model = make_model(OPTIONS).train()
    model.random_segments = True
    torch.manual_seed(seed)
    whole = SimpleNamespace(offset=0, commits=True)
    return [last - first for _ in range(places) for first, last in model._drawn_segments(whole)]


def training(seed: int) -> Any:
    """The model, about to draw what drawn(seed) gave."""
    model = make_model(OPTIONS).train()
    model.random_segments = True
    torch.manual_seed(seed)
    return model


@pytest.mark.parametrize("cuts", [[999], [N], [3 * N]], ids=["one-call", "segments", "groups"])
def test_segments_of_random_lengths_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    """Cut at the ends of segments, as training cuts; two rows, of which one begins a document on the way."""
    ids = random_ids(2, 12 * N)
    lengths = drawn(3, 12)
    assert len(set(lengths)) > 2 and sum(lengths) == 12 * N and 12 < len(lengths) < 24
    model = training(3)
    expected, memory = oracle(model, ids[0], lengths)
    hidden, state = run_in_calls(
        model, ids, cuts, reset_BT=bools([[0] * 12 * N, [0] * 9 * N + [1] + [0] * (3 * N - 1)])
    )
    assert_close(hidden[0], expected, 1e-12, "hidden")
    assert_close(state.layers[0].memory[0], memory, 1e-12, "memory")
    before = next(n for n in range(len(lengths)) if sum(lengths[:n]) == 9 * N)
    assert state.layers[0].writes_B.tolist() == [len(lengths), len(lengths) - before]


def test_segments_of_random_lengths_are_drawn_anew_each_time() -> None:
    """Another seed, and the next call of the same training, end other segments elsewhere; the same seed the same."""
    assert drawn(3, 12) == drawn(3, 12) != drawn(4, 12)
    model, ids = training(3), random_ids(1, 12 * N)
    assert not torch.equal(model(ids).hidden_BTD, model(ids).hidden_BTD)


def test_rows_do_not_decide_where_the_segments_of_others_end() -> None:
    """A row that stands elsewhere in its document than the rows beside it is read as it is alone."""
    ids = random_ids(2, 8 * N)
    older = training(5)(ids[:1, : 5 * N]).state
    fresh = training(5).init_state(1)
    both = map_state(lambda a, b: torch.cat([a, b]), older, fresh)
    together = training(6)(ids, both).hidden_BTD
    alone = training(6)(ids[1:], fresh).hidden_BTD
    assert_close(together[1:], alone, 1e-12, "a row beside another")


def test_a_segment_that_no_call_reads_whole_is_not_cut() -> None:
    model, ids = training(3), random_ids(1, 12 * N)
    _, state = run_in_calls(model, ids, [3])
    assert state.layers[0].writes_B.tolist() == [12]
    assert_close(run_in_calls(model, ids, [3])[0], model.eval()(ids).hidden_BTD, 1e-12, "hidden")


def test_segments_of_random_lengths_are_halves_of_the_time_cut_anywhere_in_the_middle_half() -> None:
    """torch's generator decides: it draws two numbers a place of the grid, for whether it is cut and where."""
    torch.manual_seed(7)
    numbers = [torch.rand(2).tolist() for _ in range(400)]
    expected = []
    for one, at in numbers:
        cut = [N // 4 + i for i in range(N // 2 + 1)][int(at * (N // 2 + 1))]
        expected += [N] if one < 0.5 else [cut, N - cut]
    assert drawn(7, 400) == expected
    cuts = [first for first, rest in itertools.pairwise(expected) if first + rest == N]
    assert set(cuts) == set(range(N // 4, N - N // 4 + 1)), "every place of the middle half"
    assert 540 < len(expected) < 660, "about every second one is cut"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_gradient_stops_where_it_should_in_training_with_random_lengths_too(depth: int) -> None:
    """The last segment's outputs give a gradient to the tokens of as many segments before it as its place in its
    group of depth + 1, and to none before them. Tokens of a segment are its own."""
    for seed in range(6):
        lengths = drawn(seed, 5)
        model = make_model({**OPTIONS, "bptt_depth": depth, "accumulated": 20}).train()
        model.random_segments = True
        S = len(lengths)
        ids = torch.cat([torch.full((length,), s) for s, length in enumerate(lengths)])[None]
        torch.manual_seed(seed)
        model(ids).hidden_BTD[:, -lengths[-1] :].square().sum().backward()
        reached = model.embedding.weight.grad[:S].abs().amax(1) > 0
        assert reached.tolist() == [S - 1 - s <= (S - 1) % (depth + 1) for s in range(S)], (seed, lengths)


def test_outside_of_training_segments_have_one_length() -> None:
    model, ids = training(3), random_ids(1, 12 * N)
    assert model(ids).state.layers[0].writes_B.tolist() == [len(drawn(3, 12))] != [12]
    assert model.eval()(ids).state.layers[0].writes_B.tolist() == [12]
    model.random_segments = False
    assert model.train()(ids).state.layers[0].writes_B.tolist() == [12]


def test_the_gradient_stops_after_two_compressions_unless_it_is_told() -> None:
    assert build_model({"name": "autocompressor"}, tiny_dims(), VOCABULARY).gradient_horizon == 2


def test_the_footprint_is_what_is_kept_of_summaries() -> None:
    model = build_model({"name": "autocompressor"}, tiny_dims(segment_length=2048), VOCABULARY)
    assert model.summary_tokens == 50
    model = build_model({"name": "autocompressor", "summary_tokens": 50, "accumulated": 7}, tiny_dims(), VOCABULARY)
    # p m d_model must be carried; Table 1 has p (m + 1) d_model l.
    assert memory_floats(model.init_state(2)) == model.state_floats(9) == 50 * 7 * 16


@pytest.mark.parametrize(("key", "value"), [("summary_tokens", 0), ("accumulated", 0), ("bptt_depth", True)])
def test_wrong_options_are_one_line(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key}={value}: must be"):
        build_model({"name": "autocompressor", key: value}, tiny_dims(), VOCABULARY)
