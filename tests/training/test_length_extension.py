"""Form B of the length extension: what it leaves alone, what it dilutes, and that gradients pass through it."""

import numpy as np
import pytest
import torch
from helpers import SEGMENT, assert_close, make_model, mixed, random_ids, variants

from infini.nn.state import detach, leaves, scale_memory
from infini.training.additions.length_extension import draw, extended_call, extended_in_two_calls

# The memories that are sums: what infini_xl has beside one cannot be scaled.
WITH_MEMORY = [options for options in variants() if options["name"] in ("infini_linear", "infini_delta")]
IDS = [pytest.param(options, id=f"{options['name']}-{options['first_segment']}") for options in WITH_MEMORY]


@pytest.mark.parametrize("options", IDS)
def test_a_factor_of_one_changes_nothing(options):
    model = make_model(options)
    ids = random_ids(2, 3 * SEGMENT + 3)
    plain = model(ids)
    extended = extended_call(model, ids, None, None, None, 2 * SEGMENT, torch.ones(2))
    assert_close(extended.hidden_BTD, plain.hidden_BTD, 1e-10, "hidden")


@pytest.mark.parametrize("begun", [False, True], ids=["fresh", "begun"])
@pytest.mark.parametrize("options", IDS)
def test_one_call_is_two_calls_with_the_memory_scaled_between_them(options, begun):
    """Outputs, state, and gradients of every weight, with ragged rows and a state from before."""
    model = make_model(options)
    factor = torch.tensor([50.0, 4000.0], dtype=torch.float64)
    ids, cut = random_ids(2, 4 * SEGMENT + 3), 2 * SEGMENT
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 3 * SEGMENT + 1 :] = False
    state = detach(model(random_ids(2, 3 * SEGMENT, seed=3)).state) if begun else None
    one = extended_call(model, ids, state, mask, None, cut, factor)
    second = extended_in_two_calls(model, ids, state, mask, None, cut, factor)
    hidden = second.hidden_BTD
    assert_close(one.hidden_BTD[mask], hidden[mask], 1e-9, "hidden")
    for (path, leaf), (_, expected) in zip(leaves(one.state.layers), leaves(second.state.layers), strict=True):
        assert_close(leaf, expected, 1e-9, path)
    probe = torch.randn(hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask[..., None]
    names, weights = zip(*((n, p) for n, p in model.named_parameters() if n != "unembedding.weight"), strict=True)
    ours, theirs = (torch.autograd.grad((h * probe).sum(), weights) for h in (one.hidden_BTD, hidden))
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert_close(a, b, 1e-8, name)


@pytest.mark.parametrize("options", IDS)
def test_what_was_read_before_reads_the_same_and_what_comes_later_is_diluted(options):
    """The segment after the boundary sees the same memory: numerator and denominator scale alike. Later ones do not."""
    model = make_model(options)
    ids = random_ids(2, 4 * SEGMENT)
    plain = model(ids).hidden_BTD
    extended = extended_call(model, ids, None, None, None, 2 * SEGMENT, torch.tensor([50.0, 400.0])).hidden_BTD
    assert_close(extended[:, : 3 * SEGMENT], plain[:, : 3 * SEGMENT], 1e-10, "up to the segment after the boundary")
    assert (extended[:, 3 * SEGMENT :] - plain[:, 3 * SEGMENT :]).abs().max() > 1e-4


def test_linear_a_repeated_past_is_what_the_factor_stands_for():
    """Linear: a memory scaled by 3 is, to the last bit of the read, the same past read three times."""
    model = make_model({"name": "infini_linear", "first_segment": "local"}, n_layers=1)
    past, following = random_ids(1, SEGMENT), random_ids(1, 2 * SEGMENT, seed=2)
    once = model(past).state
    thrice = scale_memory(once, torch.tensor([3.0]))
    # If there is one layer, keys and values depend on the segment alone, so three readings add three equal terms.
    read = model(torch.cat([past] * 3, 1)).state
    assert_close(
        model(following, thrice._replace(clock=read.clock)).hidden_BTD, model(following, read).hidden_BTD, 1e-10, "read"
    )


def test_only_memory_leaves_are_scaled_each_row_by_its_own():
    model = make_model(WITH_MEMORY[0])
    state = model(random_ids(2, 2 * SEGMENT + 3)).state
    scaled = scale_memory(state, torch.tensor([1.0, 10.0]))
    for (path, before), (_, after) in zip(leaves(state), leaves(scaled), strict=True):
        assert torch.equal(before[0], after[0])
        factor = 10 if "memory" in path else 1
        assert torch.allclose(before[1] * factor, after[1])


@pytest.mark.parametrize("options", IDS)
def test_what_is_carried_on_is_what_was_read(options):
    """Hidden states and gradients as with the factor, the state as without: it must not grow with every sequence."""
    model = make_model(options)
    factor, cut = torch.tensor([50.0, 4000.0], dtype=torch.float64), 2 * SEGMENT
    ids = random_ids(2, 4 * SEGMENT)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4 * SEGMENT - 3 :] = False
    reset = torch.zeros_like(mask)
    reset[1, 3 * SEGMENT] = True
    state = detach(model(random_ids(2, 3 * SEGMENT, seed=3)).state)
    carried = extended_in_two_calls(model, ids, state, mask, reset, cut, factor, carry=True)
    extended = extended_call(model, ids, state, mask, reset, cut, factor)
    assert_close(carried.hidden_BTD[mask], extended.hidden_BTD[mask], 1e-9, "hidden")
    plain = model(ids, state, mask_BT=mask, reset_BT=reset)
    assert (carried.hidden_BTD - plain.hidden_BTD)[mask].abs().max() > 1e-4
    for (path, leaf), (_, expected) in zip(leaves(carried.state), leaves(plain.state), strict=True):
        assert_close(leaf, expected, 1e-10, path)
    weights = [p for n, p in model.named_parameters() if n != "unembedding.weight"]
    probe = torch.randn(extended.hidden_BTD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        torch.autograd.grad((out.hidden_BTD * probe * mask[..., None]).sum(), weights) for out in (carried, extended)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-8, "gradient")


def test_gradients_pass_the_boundary():
    model = make_model(WITH_MEMORY[0])
    ids = random_ids(1, 3 * SEGMENT)
    seen = []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(output))
    out = extended_call(model, ids, None, None, None, SEGMENT, torch.tensor([7.0]))
    gradient = torch.autograd.grad(out.hidden_BTD[:, -1].sum(), seen[0])[0]
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("n_segments", [3, 4])
@pytest.mark.parametrize("options", IDS)
def test_every_boundary_that_is_drawn_changes_what_is_read(options, n_segments):
    """Behind the last boundary nothing that is written is read, so a factor there would change nothing."""
    model, ids = make_model(options), random_ids(2, n_segments * SEGMENT)
    plain = model(ids).hidden_BTD
    for seed in range(12):
        boundary, factor = draw(np.random.default_rng(seed), 2, n_segments, 1e6)
        extended = extended_call(model, ids, None, None, None, boundary * SEGMENT, factor).hidden_BTD
        assert (extended - plain).abs().max() > 1e-4, boundary


def test_factors_are_log_uniform_and_boundaries_inside():
    drawn = [draw(np.random.default_rng(seed), 64, 5, 1000.0) for seed in range(40)]
    assert {boundary for boundary, _ in drawn} == {1, 2, 3}
    logs = torch.cat([factors for _, factors in drawn]).log() / np.log(1000.0)
    assert 0 <= logs.min() and logs.max() <= 1
    assert logs.mean().item() == pytest.approx(0.5, abs=0.03)
    assert logs.std().item() == pytest.approx(12**-0.5, abs=0.02)


def test_the_loss_of_a_layer_is_that_of_one_call():
    """Two calls have the losses of two parts; their sum was about twice the loss of the whole."""
    model, ids = make_model(mixed("compressive", "linear")).train(), random_ids(2, 5 * SEGMENT)
    plain = model(ids).aux_loss
    two = extended_in_two_calls(model, ids, None, None, None, 3 * SEGMENT, torch.ones(2))
    assert plain > 0
    assert_close(two.aux_loss, plain, 1e-10, "loss")
