"""Groups of segments that are computed again: same outputs, state, losses and gradients, and less memory."""

import torch
from helpers import SEGMENT, assert_close, make_model, models_by, random_ids, variants

from infini.nn.state import detach, leaves
from infini.training.activation_checkpointing import cut, grouped


@models_by(3, variants(), "segments", [1, 2, 5])
def test_a_model_called_by_groups_is_the_model(options, segments):
    model = make_model(options).train()
    ids = random_ids(2, 4 * SEGMENT + 3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4 * SEGMENT :] = False
    reset = torch.zeros_like(mask)
    reset[1, 2 * SEGMENT] = True
    state = detach(model(random_ids(2, 3 * SEGMENT, seed=3)).state)
    weights = [p for n, p in model.named_parameters() if n != "unembedding.weight"]
    found = []
    for call in (model, grouped(model, segments * SEGMENT)):
        torch.manual_seed(3)
        out = call(ids, state, mask_BT=mask, reset_BT=reset)
        probe = torch.randn(out.hidden_BTD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        loss = (out.hidden_BTD * probe * mask[..., None]).sum() + out.aux_loss
        found.append((out, torch.autograd.grad(loss, weights, allow_unused=True)))
    (plain, expected), (ours, gradients) = found
    assert_close(ours.hidden_BTD[mask], plain.hidden_BTD[mask], 1e-10, "hidden")
    for (path, leaf), (_, leaf_expected) in zip(leaves(ours.state), leaves(plain.state), strict=True):
        assert_close(leaf, leaf_expected, 1e-10, path)
    for a, b in zip(gradients, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, b, 1e-9, "gradient")


def test_auxiliary_losses_are_averaged_by_tokens():
    model = make_model({"name": "compressive"}).train()
    ids, half = random_ids(2, 6 * SEGMENT), 4 * SEGMENT
    first = model(ids[:, :half])
    second = model(ids[:, half:], first.state)
    assert first.aux_loss.item() > 0 and second.aux_loss.item() > 0
    expected = (4 * first.aux_loss + 2 * second.aux_loss) / 6
    ours = grouped(model, half)(ids).aux_loss
    assert_close(ours, expected, 1e-12, "loss")
    assert_close(ours, model(ids).aux_loss, 1e-12, "loss of one call")
    ours.backward()
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "compress_proj" in n)


def kept_for_backward(call, length):
    """Numbers that autograd keeps for the backward pass of a call, weights aside."""
    kept: dict[int, int] = {}

    def count(tensor):
        if not tensor.requires_grad or not tensor.is_leaf:
            kept[tensor.data_ptr()] = max(kept.get(tensor.data_ptr(), 0), tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        call(random_ids(1, length))
    return sum(kept.values())


def test_what_is_kept_hardly_grows_with_the_sequence():
    model = make_model({"name": "infini_linear"}).train()
    segments = [16, 48]
    plain = [kept_for_backward(model, n * SEGMENT) for n in segments]
    ours = [kept_for_backward(grouped(model, 4 * SEGMENT), n * SEGMENT) for n in segments]
    assert ours[1] - ours[0] < 0.2 * (plain[1] - plain[0])


def test_a_cut_sequence_has_the_same_values_and_gradients_of_its_parts_alone():
    """RMT over four segments in parts of two: the second part's gradient ends where it begins."""
    model = make_model({"name": "rmt"}).train()
    ids = random_ids(2, 4 * SEGMENT)
    weights = [p for n, p in model.named_parameters() if n != "unembedding.weight"]
    whole, parts = model(ids), cut(model, 2 * SEGMENT)(ids)
    assert_close(parts.hidden_BTD, whole.hidden_BTD, 1e-12, "hidden")
    first = model(ids[:, : 2 * SEGMENT])
    second = model(ids[:, 2 * SEGMENT :], detach(first.state))
    alone = torch.cat([first.hidden_BTD, second.hidden_BTD], 1)
    gradients = [torch.autograd.grad(hidden.square().sum(), weights) for hidden in (parts.hidden_BTD, alone)]
    for ours, expected in zip(*gradients, strict=True):
        assert_close(ours, expected, 1e-10, "gradient")
    through = torch.autograd.grad(whole.hidden_BTD.square().sum(), weights)
    assert any(not torch.allclose(a, b) for a, b in zip(through, gradients[0], strict=True))
