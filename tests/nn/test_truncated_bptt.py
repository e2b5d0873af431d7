"""Groups of segments that no gradient crosses, read side by side, against the same read segment by segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import SEGMENT, assert_close, assert_same_state, computing_in, make_model, random_ids

from infini.nn import recurrent
from infini.nn.state import detach
from infini.nn.truncated_bptt import schedule
from infini.training.activation_checkpointing import grouped

N = SEGMENT
MODELS: list[dict[str, Any]] = [
    {"name": "autocompressor", "summary_tokens": 2, "accumulated": 3},
    {"name": "rmt", "memory_tokens": 2},
]


def watched(model: Any) -> list[tuple[int, bool]]:
    """Filled with what the model reads from now on: rows beside each other, and whether with gradients."""
    reads: list[tuple[int, bool]] = []
    read = model.read_segment

    def reading(tokens_BQD: torch.Tensor, *rest: Any, **options: Any) -> Any:
        reads.append((tokens_BQD.shape[0], torch.is_grad_enabled()))
        return read(tokens_BQD, *rest, **options)

    model.read_segment = reading
    return reads


def one_by_one(model: Any) -> Any:
    """The model, made to read segment by segment."""
    model._falls_into_groups = lambda *_: False
    return model


def called(model: Any) -> list[bool]:
    """Filled with whether the model reads side by side, for each of its calls from now on."""
    calls: list[bool] = []
    falls = model._falls_into_groups

    def falling(*rest: Any) -> bool:
        calls.append(falls(*rest))
        return calls[-1]

    model._falls_into_groups = falling
    return calls


def outcome(
    model: Any, ids_BT: torch.Tensor, cuts: list[int], call: Any = None, **extras: torch.Tensor
) -> tuple[Any, ...]:
    """Hidden states, final state, and gradients of random projections of both, through calls cut at these columns."""
    model.zero_grad()
    state: Any = None
    parts = []
    for begin, stop in zip([0, *cuts], [*cuts, ids_BT.shape[1]], strict=True):
        beside = {key: given[:, begin:stop] for key, given in extras.items()}
        part = (call or model)(ids_BT[:, begin:stop], state, **beside)
        state = part.state
        parts.append(part.hidden_BTD)
    hidden, memory = torch.cat(parts, 1), state.layers[0].memory
    torch.manual_seed(5)
    ((hidden * torch.randn_like(hidden)).sum() + (memory * torch.randn_like(memory)).sum()).backward()
    return hidden, state, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_outcome(model: Any, ids_BT: torch.Tensor, cuts: list[int], **extras: torch.Tensor) -> list[bool]:
    """Returns whether each call was read side by side."""
    calls = called(model)
    hidden, state, gradients = outcome(model, ids_BT, cuts, **extras)
    wanted_hidden, wanted_state, wanted = outcome(one_by_one(model), ids_BT, cuts, **extras)
    assert_close(hidden, wanted_hidden, 1e-12, "hidden")
    assert_same_state(state, wanted_state, 1e-12)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(gradients[name], gradient, 1e-10, name)
    return calls


@pytest.mark.parametrize("positions", ["rotary", "t5"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("options", MODELS, ids=lambda options: options["name"])
def test_side_by_side_is_one_by_one(options: dict[str, Any], depth: int, positions: str) -> None:
    """Calls may end inside a group, whose gradient then goes back into the call before. Rows begin another document at
    different segments, so that their groups do too."""
    model = make_model({**options, "bptt_depth": depth, "positions": positions})
    resets = torch.zeros(3, 17 * N, dtype=torch.bool)
    resets[1, 4 * N] = resets[2, 9 * N] = resets[2, 13 * N] = True
    for cuts in ([], [5 * N, 13 * N]):
        assert all(assert_same_outcome(model, random_ids(3, 17 * N), cuts, reset_BT=resets))
        del model._falls_into_groups


def test_a_document_that_ends_in_padding_before_the_next() -> None:
    model = make_model({**MODELS[0], "bptt_depth": 1})
    resets, mask = torch.zeros(2, 8 * N, dtype=torch.bool), torch.ones(2, 8 * N, dtype=torch.bool)
    resets[1, 3 * N], mask[1, 3 * N - 2 : 3 * N] = True, False
    assert assert_same_outcome(model, random_ids(2, 8 * N), [], reset_BT=resets, mask_BT=mask) == [True]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padding", [slice(8 * N - 3, 8 * N), slice(7 * N, 8 * N), slice(0, 3), slice(0, N)])
def test_padding_of_all_rows_ends_no_segment(padding: slice, rows: int) -> None:
    """The padding is at the ends, less than a segment or a whole one, or at the beginnings; the next call continues."""
    model = make_model({**MODELS[0], "bptt_depth": 1})
    mask = torch.ones(rows, 16 * N, dtype=torch.bool)
    mask[:, padding] = False
    assert_same_outcome(model, random_ids(rows, 16 * N), [8 * N], mask_BT=mask)


def test_rows_that_stand_elsewhere_in_their_segments() -> None:
    """One row at the beginning of a segment, which is read side by side, two inside of one."""
    model = make_model({**MODELS[0], "bptt_depth": 1})
    mask = torch.ones(3, 9 * N, dtype=torch.bool)
    mask[1:, N - 2 : N] = False
    calls = assert_same_outcome(model, random_ids(3, 9 * N), [N], mask_BT=mask)
    assert calls == [False, True, False]


def test_parts_of_a_call_that_are_computed_again() -> None:
    """Each part has more than a group of segments: recipe.checkpoint_segments."""
    model = make_model({**MODELS[0], "bptt_depth": 1})
    calls = called(model)
    _, state, gradients = outcome(model, random_ids(2, 12 * N), [])
    model.zero_grad()
    again = outcome(model, random_ids(2, 12 * N), [], call=grouped(model, 5 * N))
    # The third part is one group. Parts are computed again from the last on.
    assert calls == [True, *[True, True, False], *[False, True, True]]
    assert_same_state(again[1], state, 1e-12)
    for name, gradient in gradients.items():
        assert_close(again[2][name], gradient, 1e-10, name)


@pytest.mark.parametrize("depth", [0, 2])
def test_one_group_is_done_one_after_the_other_with_gradients(depth: int) -> None:
    """However long the call; what is read without gradients are the segments before the last group."""
    model = make_model({**MODELS[0], "bptt_depth": depth})
    reads = watched(model)
    model(random_ids(2, 12 * N))
    groups = 12 // (depth + 1)
    assert reads == [(2, False)] * (12 - depth - 1) + [(2 * groups, True)] * (depth + 1)


def test_all_parameters_get_gradients_under_autocast() -> None:
    """About those of float64. Autocast may keep what it made of a weight without gradients."""
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        made = torch.float64 if dtype == torch.float64 else torch.float32
        model = make_model({**MODELS[0], "bptt_depth": 1, "positions": "t5"}, dtype=made)
        with computing_in(dtype):
            hidden = model(random_ids(2, 12 * N)).hidden_BTD
        hidden.double().square().sum().backward()
        found[dtype] = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    assert found[torch.float64].keys() == found[torch.bfloat16].keys()
    for name, wanted in found[torch.float64].items():
        assert (found[torch.bfloat16][name] - wanted).norm() < 0.1 * wanted.norm(), name


def test_what_autocast_kept_is_forgotten_before_the_reading_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch keep a weight that was cast without gradients."""
    model = make_model({**MODELS[0], "bptt_depth": 1})
    reads = watched(model)
    before: list[list[bool]] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: before.append([gradient for _, gradient in reads]))
    model(random_ids(2, 12 * N))
    assert before == [[False] * 10] and [gradient for _, gradient in reads] == [False] * 10 + [True] * 2


def test_what_does_not_fall_into_groups_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(2, 9 * N)

    def reads(columns: int = 9 * N, gradients: bool = True, **changes: Any) -> list[tuple[int, bool]]:
        model = make_model({**MODELS[0], "bptt_depth": 1, "random_segments": changes.pop("drawn", False)})
        for name, value in changes.items():
            setattr(model, name, value)
        made = watched(model.train())
        with torch.set_grad_enabled(gradients):
            model(ids[:, :columns])
        return made

    assert max(reads())[0] > 2
    assert reads(gradients=False) == [(2, False)] * 9
    assert reads(checkpoint_activations=True) == [(2, True)] * 9
    assert reads(gradient_horizon=None) == [(2, True)] * 9
    assert reads(columns=8 * N + 1) == [(2, True)] * 9, "a segment that continues"
    assert reads(columns=2 * N) == [(2, True)] * 2, "one group"
    assert len(reads(drawn=True)) > 9 and set(reads(drawn=True)) == {(2, True)}
    model = make_model({**MODELS[0], "bptt_depth": 1})
    begun = detach(model(ids[:, :3]).state)
    made = watched(model)
    model(ids[:, 3:], begun)
    assert made == [(2, True)] * 9, "the rest of a segment"
    size = 2 * N * model.embedding.weight.shape[1]
    monkeypatch.setattr(recurrent, "MAX_NUMEL", size)
    assert max(reads())[0] > 2
    monkeypatch.setattr(recurrent, "MAX_NUMEL", size - 1)
    assert reads() == [(2, True)] * 9, "large segments"


def test_the_schedule_counts_writes_and_places_of_groups() -> None:
    """Two rows, groups of three; the second begins another document at the fifth segment."""
    resets = [None] * 4 + [np.array([False, True])] + [None] * 2
    plan = schedule(torch.tensor([4, 6]), resets, 3)
    assert plan.writes_RB.T.tolist() == [[4, 5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 0, 1, 2]]
    assert plan.round_RB.T.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 0, 0, 1, 2]]


def test_without_outputs_the_same_is_written() -> None:
    model = make_model(MODELS[0])
    memory = torch.randn(2, model.memory_size, model.embedding.weight.shape[1]).double()
    tokens, writes = model.embedding(random_ids(2, N)), torch.tensor([1, 5])
    hidden, written, _ = model.read_segment(tokens, model.tables(), memory, writes)
    nothing, same, _ = model.read_segment(tokens, model.tables(), memory, writes, outputs=False)
    assert hidden.shape[1] == N and nothing.shape[1] == 0
    assert_close(same, written, 1e-14, "written")
