"""Promises of every registered model. A new model file and its YAML must keep all of them, without a change here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import (
    BFLOAT16_ROUNDING,
    DEVICES,
    SEGMENT,
    TOLERANCE,
    VOCABULARY,
    assert_close,
    assert_same_state,
    make_model,
    marks,
    mixed,
    random_ids,
    relative_error,
    run_in_calls,
    tiny_dims,
    variant_id,
    variants,
)
from torch import nn

from infini.models import build_model
from infini.nn.attention import GateInit
from infini.nn.decoder import Decoder
from infini.nn.recurrent import Recurrence
from infini.nn.state import fork, leaves, memory_floats, select_rows, state_bytes

MIXED = [mixed("local", "delta", "xl"), mixed("infini_xl", "local", "linear")]
"""Decoders whose layers differ: what the whole declares is no longer what one layer does."""
pytestmark = pytest.mark.parametrize("options", [*variants(), *MIXED], ids=variant_id)
EXACT = TOLERANCE[torch.float64]


def test_nothing_before_a_changed_token_moves(options: dict[str, Any]) -> None:
    """Row t has token t changed: in one call across segments, and in calls of awkward lengths."""
    model = make_model(options)
    T = 2 * model.segment_length + 3
    ids = random_ids(1, T).expand(T, T).clone()
    ids.diagonal().add_(1).remainder_(VOCABULARY)
    plain = random_ids(1, T).expand(T, T)
    for lengths in ([T], [5, 1, 7]):
        moved = run_in_calls(model, ids, lengths)[0] != run_in_calls(model, plain, lengths)[0]
        moved = moved.any(-1)
        assert not moved.tril(-1).any(), f"token, output: {moved.tril(-1).nonzero()[0].tolist()}"
        assert moved.diagonal().all()


@pytest.mark.parametrize("lengths", [[1], [3, 5, 8, 2, 13, 1, 16]], ids=["token-by-token", "awkward"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_one_call_is_many_calls(options: dict[str, Any], dtype: torch.dtype, lengths: list[int]) -> None:
    """Values, state, and gradients through a state that is not detached."""
    model = make_model(options, dtype)
    ids = random_ids(2, 2 * model.segment_length + (5 if lengths == [1] else 21))
    probe = torch.randn(2, ids.shape[1], 16, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(calls: list[int]) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        hidden, state = run_in_calls(model, ids, calls)
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad((hidden * probe).sum(), parameters, allow_unused=True)
        return hidden, state, {n: g for n, g in zip(names, grads, strict=True) if g is not None}

    (one, one_state, one_grads), (many, many_state, many_grads) = run([ids.shape[1]]), run(lengths)
    assert_close(many, one, TOLERANCE[dtype], "hidden")
    assert_same_state(many_state, one_state, TOLERANCE[dtype])
    assert one_grads.keys() == many_grads.keys()
    if dtype == torch.float32:
        # A bias is one more weight of its input gate. Alone, its terms cancel to less than their rounding.
        one_grads, many_grads = ({n: with_bias(n, grads) for n in grads} for grads in (one_grads, many_grads))
    for name, grad in one_grads.items():
        assert_close(many_grads[name], grad, TOLERANCE[dtype], name)


def with_bias(name: str, grads: dict[str, torch.Tensor]) -> torch.Tensor:
    """A gradient; of an input gate those of its weights and its bias in one."""
    gate = name.removesuffix("weight").removesuffix("bias")
    parts = [grads[gate + part] for part in ("weight", "bias")] if gate.endswith("input_") else [grads[name]]
    return torch.cat([part.flatten() for part in parts])


def test_rows_are_independent(options: dict[str, Any]) -> None:
    model = make_model(options)
    T = 2 * model.segment_length + 3
    ids = random_ids(3, T)
    hidden, state, _ = model(ids)
    alone = model(ids[1:2])
    assert_close(hidden[1:2], alone.hidden_BTD, EXACT, "hidden of a row alone")
    assert_same_state(select_rows(state, torch.tensor([1])), alone.state, EXACT)
    ids[1] = (ids[1] + 1) % VOCABULARY
    changed = model(ids)
    others = torch.tensor([0, 2])
    assert torch.equal(changed.hidden_BTD[others], hidden[others])
    assert_same_state(select_rows(changed.state, others), select_rows(state, others), 0.0)
    assert not torch.equal(changed.hidden_BTD[1], hidden[1])


@pytest.mark.parametrize("reset", [False, True], ids=["plain", "reset"])
def test_prefill_leaves_the_state_of_a_call(options: dict[str, Any], reset: bool) -> None:
    model = make_model(options)
    N = model.segment_length
    ids = random_ids(2, 4 * N + 3)
    mask = marks(2, 4 * N + 3, 2 * N) if reset else None
    if mask is not None:
        mask[1] = False
    state = model.init_state(2)
    with torch.no_grad():
        for columns in (slice(0, 5), slice(5, N), slice(N, 4 * N + 3)):
            part = None if mask is None else mask[:, columns]
            prefilled, state = (
                model.prefill(ids[:, columns], state, part),
                model(ids[:, columns], state, reset_BT=part).state,
            )
            assert_same_state(prefilled, state, 0.0)


@pytest.mark.parametrize("tail", [0, 3], ids=["whole", "tail"])
def test_a_reset_forgets(options: dict[str, Any], tail: int) -> None:
    """A reset at a boundary inside a call, before whole segments or before an unfinished one; then more calls."""
    model = make_model(options)
    N = model.segment_length
    ids = random_ids(2, 4 * N + 5)
    cut = 3 * N if tail == 0 else 2 * N + tail
    reset = marks(2, cut, 2 * N)
    reset[1] = False
    out = model(ids[:, :cut], reset_BT=reset)
    later = model(ids[:, cut:], out.state)
    fresh, fresh_state = run_in_calls(model, ids[:1, 2 * N :], [4 * N])
    whole, _ = run_in_calls(model, ids[1:], [6 * N])
    hidden = torch.cat([out.hidden_BTD, later.hidden_BTD], 1)
    assert_close(hidden[:1, 2 * N :], fresh, EXACT, "after the reset")
    assert_same_state(select_rows(later.state, torch.tensor([0])), fresh_state, EXACT)
    assert_close(hidden[1:], whole, EXACT, "the row that was not reset")


def reset_inside_a_window(model: Any, cuts: list[int]) -> tuple[torch.Tensor, Any]:
    """A training stream resets at boundaries of dims.segment_length, whatever window a model has."""
    ids = random_ids(1, 6 * SEGMENT)
    return run_in_calls(model, ids, cuts, reset_BT=marks(1, 6 * SEGMENT, SEGMENT))


def test_a_reset_at_a_segment_boundary_does_not_depend_on_the_cuts(options: dict[str, Any]) -> None:
    model = make_model(options)
    (one, one_state), (cut, cut_state) = (reset_inside_a_window(model, cuts) for cuts in ([999], [SEGMENT, 999]))
    assert_close(cut, one, EXACT, "cut at the reset")
    assert_same_state(cut_state, one_state, EXACT)


@pytest.mark.parametrize("cuts", [[999], [SEGMENT, 999]], ids=["one-call", "cut-at-the-reset"])
def test_a_reset_at_a_segment_boundary_starts_afresh(options: dict[str, Any], cuts: list[int]) -> None:
    model = make_model(options)
    hidden, state = reset_inside_a_window(model, cuts)
    fresh = model(random_ids(1, 6 * SEGMENT)[:, SEGMENT:])
    assert_close(hidden[:, SEGMENT:], fresh.hidden_BTD, EXACT, "hidden")
    assert_same_state(state, fresh.state, EXACT)


def test_a_reset_in_the_first_column_forgets_an_unfinished_segment(options: dict[str, Any]) -> None:
    model = make_model(options)
    ids = random_ids(2, 30)
    before = model(ids[:, :13]).state
    reset = marks(2, 17, 0)
    reset[1] = False
    out = model(ids[:, 13:], before, reset_BT=reset)
    assert_close(out.hidden_BTD[:1], model(ids[:1, 13:]).hidden_BTD, EXACT, "the row that was reset")
    assert_close(out.hidden_BTD[1:], model(ids[1:]).hidden_BTD[:, 13:], EXACT, "the row that was not")


def test_ragged_rows_go_on_from_where_each_stands(options: dict[str, Any]) -> None:
    """Right padding, a row of nothing but padding included; then calls on rows that stand at different slots."""
    model = make_model(options)
    N = model.segment_length
    lengths = [5, N, 2 * N + 3, 0, 2 * N - 1]
    ids, more = random_ids(5, 2 * N + 3), random_ids(5, N + 6, seed=2)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    out = model(ids, mask_BT=mask)
    decoded, state = run_in_calls(model, more, [1, 1, 4, 7, N], state=out.state)
    for row, length in enumerate(lengths):
        alone = model.init_state(1)
        if length:
            hidden, alone = run_in_calls(model, ids[row : row + 1, :length], [length])
            assert_close(out.hidden_BTD[row : row + 1, :length], hidden, EXACT, f"row {row}")
        assert_same_state(select_rows(out.state, torch.tensor([row])), alone, EXACT)
        expected = model(more[row : row + 1], alone)
        assert_close(decoded[row : row + 1], expected.hidden_BTD, EXACT, f"row {row} decoding")
        assert_same_state(select_rows(state, torch.tensor([row])), expected.state, EXACT)


def test_left_padding_is_rolled_and_rolled_back(options: dict[str, Any]) -> None:
    """Calls start from a fresh state, or later from rows in the middle of a segment."""
    model = make_model(options)
    N = model.segment_length
    pads, T = [0, 3, N + 2], 2 * N + 3
    ids, more = random_ids(3, T), random_ids(3, T, seed=2)
    mask = torch.arange(T) >= torch.tensor(pads)[:, None]
    out = model(ids, mask_BT=mask)
    later = model(more, out.state, mask_BT=mask)
    for row, pad in enumerate(pads):
        both = torch.cat([ids[row : row + 1, pad:], more[row : row + 1, pad:]], 1)
        alone = model(both)
        got = torch.cat([out.hidden_BTD[row : row + 1, pad:], later.hidden_BTD[row : row + 1, pad:]], 1)
        assert_close(got, alone.hidden_BTD, EXACT, f"row {row}")
        assert_same_state(select_rows(later.state, torch.tensor([row])), alone.state, EXACT)


def test_padding_on_both_sides(options: dict[str, Any]) -> None:
    model = make_model(options)
    N = model.segment_length
    ids = random_ids(2, 2 * N)
    mask = marks(2, 2 * N, *range(2 * N))
    mask[0, :3] = mask[0, N + 1 :] = False
    out = model(ids, mask_BT=mask)
    alone = model(ids[:1, 3 : N + 1])
    assert_close(out.hidden_BTD[:1, 3 : N + 1], alone.hidden_BTD, EXACT, "padded row")
    assert_same_state(select_rows(out.state, torch.tensor([0])), alone.state, EXACT)


@pytest.mark.parametrize("cuts", [[999], [6, 5, 9]], ids=["one-call", "cut"])
def test_documents_in_a_stream_are_documents_apart(options: dict[str, Any], cuts: list[int]) -> None:
    """A document's last segment is padded to the boundary, where the next one resets; rows end at different places."""
    model = make_model(options)
    N = model.segment_length
    documents = [[N + 3, 5, N], [N - 1, 2 * N, 3]]
    ids = random_ids(2, 4 * N)
    mask, reset = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    places = []
    for row, lengths in enumerate(documents):
        start = 0
        for length in lengths:
            reset[row, start] = True
            mask[row, start : start + length] = True
            places.append((row, start, start + length))
            start += -(-length // N) * N
    hidden, state = run_in_calls(model, ids, cuts, mask_BT=mask, reset_BT=reset)
    for row, start, stop in places:
        alone = model(ids[row : row + 1, start:stop])
        assert_close(hidden[row : row + 1, start:stop], alone.hidden_BTD, EXACT, f"row {row}, columns {start}-{stop}")
    for row in (0, 1):
        _, start, stop = [p for p in places if p[0] == row][-1]
        last = model(ids[row : row + 1, start:stop]).state
        assert_same_state(select_rows(state, torch.tensor([row])), last, EXACT)


def test_checkpointed_gradients_are_plain_gradients(options: dict[str, Any]) -> None:
    """Checkpointed gradients also keep fewer activations."""
    model = make_model(options).train()
    ids = random_ids(2, 2 * model.segment_length + 3)

    def run(checkpointed: bool) -> tuple[int, dict[str, torch.Tensor]]:
        model.checkpoint_activations = checkpointed
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(ids)
            loss = model.head(out.hidden_BTD).logsumexp(-1).sum() + out.aux_loss
        model.zero_grad()
        loss.backward()
        return kept, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (plain_kept, plain), (kept, checkpointed) = run(False), run(True)
    assert plain.keys() == checkpointed.keys() and kept < plain_kept / 2
    for name, grad in plain.items():
        assert_close(checkpointed[name], grad, 1e-12, name)


def test_gradients_reach_as_far_back_as_declared(options: dict[str, Any]) -> None:
    """Segment s reads its own three tokens, so a token's embedding gradient says which segment it came through."""
    model = make_model(options)
    N, horizon = model.segment_length, model.gradient_horizon
    # A model may cut the gradient at every so many segments of the document: the last before a cut reaches farthest.
    S = 5 if not horizon else horizon + 1 + 5 // (horizon + 1) * (horizon + 1)
    ids = (3 * torch.arange(S).repeat_interleave(N) + torch.arange(S * N) % 3)[None]
    model(ids).hidden_BTD[:, -N:].square().sum().backward()
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    assert embedding.weight.grad is not None
    reached = embedding.weight.grad[: 3 * S].unflatten(0, (S, 3)).abs().amax((1, 2)) > 0
    horizon = S if horizon is None else horizon
    assert reached.tolist() == [S - 1 - s <= horizon for s in range(S)]


def test_state_is_as_large_as_declared(options: dict[str, Any]) -> None:
    model = make_model(options)
    for n_segments in (1, 2, 5):
        state = model(random_ids(1, n_segments * model.segment_length)).state
        assert memory_floats(state) == model.state_floats(n_segments)


def test_state_does_not_grow_and_holds_on_to_nothing(options: dict[str, Any]) -> None:
    """Its bytes, and the storage behind its leaves, are the same after 1 and 40 segments."""
    model = make_model(options)
    with torch.no_grad():
        states = [model(random_ids(1, n * model.segment_length)).state for n in (1, 40)]
    few, many = (state_bytes(state) for state in states)
    stored = sum(leaf.untyped_storage().nbytes() for _, leaf in leaves(states[1]))
    assert few == many == state_bytes(model.init_state(1))
    assert stored == many


def test_receptive_field_is_as_declared(options: dict[str, Any]) -> None:
    model = make_model(options)
    # More segments than the field of any tiny model, but for those that see everything.
    N, S = model.segment_length, 9
    ids = random_ids(1, S * N)
    last = model(ids).hidden_BTD[:, -N:]
    field = model.receptive_field(S)

    def change(position: int) -> float:
        other = ids.clone()
        other[0, position] = (other[0, position] + 1) % VOCABULARY
        return relative_error(model(other).hidden_BTD[:, -N:], last)

    assert change(S * N - field) > 0
    if field < S * N:
        assert change(S * N - field - 1) == 0


def test_two_calls_share_nothing(options: dict[str, Any]) -> None:
    """No state inside the module, and a state that was given is left as it was."""
    model = make_model(options)
    a, b = random_ids(2, 27), random_ids(2, 27, seed=2)
    state = model(a).state
    kept = fork(state)
    first = model(b, state)
    model(b)
    second = model(b, state)
    assert torch.equal(first.hidden_BTD, second.hidden_BTD)
    assert_same_state(state, kept, 0.0)
    assert_same_state(first.state, second.state, 0.0)


def test_tokens_that_write_nothing_are_not_remembered(options: dict[str, Any]) -> None:
    """A segment after tokens of write weight 0 reads an empty memory; its gradients stay finite."""
    if "first_segment" not in options:
        pytest.skip("the model has no compressive memory")
    model = make_model(options, torch.float32)
    N = model.segment_length
    ids = random_ids(2, 2 * N)
    weight = torch.cat([torch.zeros(2, N), torch.ones(2, N)], 1)
    out = model(ids, write_weight_BT=weight)
    first = model(ids[:, :N], write_weight_BT=weight[:, :N]).state
    written = [leaf for path, leaf in leaves(first.layers) if "memory" in path and "cache" not in path]
    assert len(written) == 2 * len(first.layers) and not any(leaf.any() for leaf in written)
    if options["name"] != "infini_xl":
        # An empty memory reads 0 unless there is a cache, and the gate mixes it in, as first_segment="zero" does.
        silent = make_model({**options, "first_segment": "zero"}, torch.float32)
        assert_close(out.hidden_BTD[:, N:], silent(ids[:, N:]).hidden_BTD, TOLERANCE[torch.float32], "second segment")
    out.hidden_BTD.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_first_segment_local_is_the_local_control(options: dict[str, Any]) -> None:
    """`local` with the same weights has the same outputs inside the first segment, and others after it."""
    if options.get("first_segment") != "local":
        pytest.skip("only where the first segment bypasses the gate")
    model = make_model(options)
    control = make_model({"name": "local", "positions": options.get("positions", "t5")})
    own = ("beta", "decay", "input_weight", "input_bias")
    control.load_state_dict({name: w for name, w in model.state_dict().items() if not name.endswith(own)})
    ids = random_ids(2, 2 * SEGMENT)
    ours, theirs = model(ids).hidden_BTD, control(ids).hidden_BTD
    assert_close(ours[:, :SEGMENT], theirs[:, :SEGMENT], 1e-14, "first segment")
    assert relative_error(ours[:, SEGMENT:], theirs[:, SEGMENT:]) > 1e-3


@pytest.mark.parametrize("gate_init", get_args(GateInit))
def test_rows_of_a_table_start_from_the_same_weights(options: dict[str, Any], gate_init: str) -> None:
    """Models of one seed that differ only in the memory start from the same weights."""
    if not isinstance(options.get("gate_init"), str):
        pytest.skip("the model has no gates, or the rest of it is pretrained")

    def initial(chosen: dict[str, Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return build_model(chosen, tiny_dims(), VOCABULARY).state_dict()

    ours, control = initial({**options, "gate_init": gate_init}), initial({"name": "local"})
    assert all(torch.equal(ours[name], weight) for name, weight in control.items())


def gradients(model: Any, hidden_BTD: torch.Tensor, state: Any) -> torch.Tensor:
    """Gradients of a random projection of outputs and state in all parameters, as one vector in float64."""
    outputs = [hidden_BTD, *(leaf for _, leaf in leaves(state) if leaf.requires_grad)]
    generator = torch.Generator().manual_seed(0)
    probes = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, list(model.parameters()), probes, materialize_grads=True)
    return torch.cat([grad.flatten().double() for grad in grads])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_bfloat16_is_as_near_to_float32_as_its_roundings_allow(options: dict[str, Any], half: str, device: str) -> None:
    """Outputs and state. A layer rounds a token's vector about 8 times in sequence (two norms, the projections, the
    attention weights, the read, the feed-forward layers). The state that a segment reads has passed through the layers
    once before; in a recurrent model, once for every segment. Independent errors of n roundings add up to sqrt(n) times
    one; the tolerance is twice that. Gradients are sums that cancel: their direction is the same."""
    n_segments = 5
    model = make_model(options, torch.float32).to(device)
    ids = random_ids(4, n_segments * model.segment_length + 3).to(device)
    expected = model(ids)
    direction = gradients(model, *expected[:2])
    if half == "weights":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    with torch.autocast(device, torch.bfloat16, enabled=half == "autocast"):
        out = model(ids)
    n_layers = len(options.get("layers") or ()) or tiny_dims().n_layers
    passes = n_layers * (n_segments + 1 if isinstance(model, Recurrence) else 2)
    tolerance = 2 * BFLOAT16_ROUNDING * math.sqrt(8 * passes)
    assert_close(out.hidden_BTD, expected.hidden_BTD, tolerance, "hidden")
    assert_same_state(out.state, expected.state, tolerance)
    if half == "autocast":
        floats = {leaf.dtype for _, leaf in leaves(out.state) if leaf.dtype.is_floating_point}
        assert floats == {torch.float32}
    cosine = torch.cosine_similarity(gradients(model, *out[:2]), direction, dim=0)
    assert cosine > 0.95, f"cosine of the gradients {cosine:.3f}"


def test_autocast_leaves_float64_as_it_is(options: dict[str, Any]) -> None:
    """Outputs, state and gradients stay in float64, as they do in torch's own products."""
    model, ids = make_model(options), random_ids(2, 21)
    expected = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
        grads = gradients(model, *out[:2])
    assert torch.equal(out.hidden_BTD, expected.hidden_BTD)
    assert_same_state(out.state, expected.state, 0)
    assert torch.equal(grads, gradients(model, *expected[:2]))


@pytest.mark.gpu
def test_a_gpu_computes_what_a_processor_computes(options: dict[str, Any]) -> None:
    """Outputs, state and gradients in float64, in calls that cut segments."""
    ids = random_ids(2, 45)
    found = []
    for device in ("cpu", "cuda"):
        model = make_model(options).to(device)
        hidden, state = run_in_calls(model, ids.to(device), [13, 19, 5])
        found.append((hidden.cpu(), state.to("cpu"), gradients(model, hidden, state).cpu()))
    (hidden, state, grads), (wanted, wanted_state, wanted_grads) = found[1], found[0]
    assert_close(hidden, wanted, EXACT, "hidden")
    assert_same_state(state, wanted_state, EXACT)
    assert_close(grads, wanted_grads, EXACT, "gradients")


def test_a_state_is_loaded_without_unpickling(options: dict[str, Any], tmp_path: Path) -> None:
    """torch.save and torch.load with weights_only=True give back the tree: the following call is the same."""
    model = make_model(options)
    state = model(random_ids(2, 21)).state.detach()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same_state(loaded, state, 0.0)
    more = random_ids(2, 5, seed=2)
    assert torch.equal(model(more, loaded).hidden_BTD, model(more, state).hidden_BTD)


def test_a_copy_computes_the_same(options: dict[str, Any]) -> None:
    """Nothing a model needs lies outside its parameters and buffers."""
    model = make_model(options)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    ids = random_ids(1, 20)
    assert torch.equal(model(ids).hidden_BTD, other(ids).hidden_BTD)


def test_a_state_of_another_segment_length_is_refused(options: dict[str, Any]) -> None:
    """The layer refused it. A model went on with positions and windows of the other length."""
    if not isinstance(make_model(options), Decoder):
        pytest.skip("a state of its own, which may not depend on the segments")
    for n_tokens in (5, 2 * SEGMENT):
        model = make_model(options)
        state = model(random_ids(2, n_tokens)).state
        model.resize_segments(2 * model.segment_length)
        for call in (model, model.prefill):
            with pytest.raises(ValueError, match="^state of another model: for one row, "):
                call(random_ids(2, 7), state)
            with pytest.raises(ValueError, match="^state is a tuple: it must be the one that a call returned$"):
                call(random_ids(2, 7), tuple(state))
    assert torch.isfinite(model(random_ids(2, 7), model.init_state(2)).hidden_BTD).all()


def test_no_rows_are_read_as_such(options: dict[str, Any]) -> None:
    if options["name"] == "llm":
        pytest.skip("transformers reads one row at least")
    model = make_model(options)
    state = select_rows(model(random_ids(2, 5)).state, torch.arange(0))
    for before in (None, state):
        hidden_BTD, after, _ = model(random_ids(2, 2 * SEGMENT)[:0], before)
        assert hidden_BTD.shape[:2] == (0, 2 * SEGMENT) and not after.clock.position_B.numel()
