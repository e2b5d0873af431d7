"""AutoCompressors against a plain transformer that is given [summaries; segment; summary tokens] as one sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    SEGMENT,
    VOCABULARY,
    assert_close,
    assert_same_gradients,
    make_model,
    random_ids,
    run_in_calls,
    tiny_dims,
)
from test_rmt import plain_transformer

from infini.errors import InputError
from infini.models import build_model
from infini.state import memory_floats

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


@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
def test_the_model_is_a_transformer_over_summaries_segment_summary_tokens(cuts: list[int]) -> None:
    """Outputs, memory and gradients through five segments and a bit: the oldest summaries are dropped by then."""
    model = make_model(OPTIONS)
    ids = random_ids(1, 5 * N + 3)
    expected, memory = oracle(model, ids[0], [N] * 6)
    hidden, state = run_in_calls(model, ids, cuts)
    assert_close(hidden[0], expected, 1e-12, "hidden")
    assert_close(state.layers[0].memory[0], memory, 1e-12, "memory")
    assert state.layers[0].writes_B.tolist() == [5]
    wanted = {n: p for n, p in model.named_parameters() if n != "unembedding.weight"}
    assert_same_gradients(hidden[0], expected, wanted)


@pytest.mark.parametrize("cuts", [[999], [N], [3], [1]], ids=["one-call", "segments", "cut", "token-by-token"])
def test_segments_of_random_lengths_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    model = make_model(OPTIONS).train()
    ids = random_ids(2, 12 * N)
    model.random_segments = True
    places = [model._segments_at(_piece(index), 0) for index in range(12)]
    lengths = [last - first for cell in places for first, last in cell]
    assert len(set(lengths)) > 2 and sum(lengths) == 12 * N and 12 < len(lengths) < 24
    expected, memory = oracle(model, ids[0], lengths)
    hidden, state = run_in_calls(model, ids, cuts)
    assert_close(hidden[0], expected, 1e-12, "hidden")
    assert_close(state.layers[0].memory[0], memory, 1e-12, "memory")
    assert state.layers[0].writes_B.tolist() == [len(lengths)] * 2


def _piece(index: int) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(index_BS=torch.tensor([[index]]))


def test_outside_of_training_segments_have_one_length() -> None:
    model = make_model({**OPTIONS, "random_segments": True})
    ids = random_ids(1, 6 * N)
    assert model(ids).state.layers[0].writes_B.tolist() == [6]
    assert model.train()(ids).state.layers[0].writes_B.tolist() != [6]
    model.random_segments = False
    assert model(ids).state.layers[0].writes_B.tolist() == [6]


def test_the_gradient_stops_after_two_compressions_unless_it_is_told() -> None:
    assert build_model({"name": "autocompressor"}, tiny_dims(), VOCABULARY).gradient_horizon == 2


def test_the_footprint_is_what_is_kept_of_summaries() -> None:
    model = build_model({"name": "autocompressor"}, tiny_dims(segment_length=2048), VOCABULARY)
    assert model.summary_tokens == 51
    model = build_model({"name": "autocompressor", "summary_tokens": 50, "accumulated": 7}, tiny_dims(), VOCABULARY)
    # p m d_model must be carried; Table 1 has p (m + 1) d_model l.
    assert memory_floats(model.init_state(2)) == model.state_floats(9) == 50 * 7 * 16


@pytest.mark.parametrize(("key", "value"), [("summary_tokens", 0), ("accumulated", 0), ("bptt_depth", True)])
def test_wrong_options_are_one_line(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key}={value}: must be"):
        build_model({"name": "autocompressor", key: value}, tiny_dims(), VOCABULARY)
