"""The chunked loss is torch's cross entropy, without its matrix of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import TOLERANCE, assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infini.nn.ops.cross_entropy import IGNORE, summed_cross_entropy, token_nll

B, T, D, W = 2, 13, 6, 23


def example(dtype: torch.dtype = torch.float64, ignored: str = "some") -> tuple[Any, Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(W, D, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(W, (B, T), generator=generator)
    if ignored != "none":
        target[:, : 3 if ignored == "some" else T] = IGNORE
    return hidden, weight, target


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """torch's loss, from the whole matrix of logits."""
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), ignore_index=IGNORE, reduction=reduction)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest result of any operation had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_value_and_gradients(chunk: int, ignored: str) -> None:
    hidden, weight, target = example(ignored=ignored)
    total, n = summed_cross_entropy(hidden, weight, target, chunk)
    expected = torch_loss(hidden, weight, target, "sum")
    assert n == int((target != IGNORE).sum())
    assert_close(total, expected, 1e-12, "loss")
    # A factor, because the loss is divided by the number of targets before it is differentiated.
    ours, theirs = (torch.autograd.grad(loss * 0.37, (hidden, weight)) for loss in (total, expected))
    assert_close(ours[0], theirs[0], 1e-12, "gradient of the hidden states")
    assert_close(ours[1], theirs[1], 1e-12, "gradient of the output embedding")


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_either_side_may_be_frozen(frozen: str) -> None:
    hidden, weight, target = example()
    both = torch.autograd.grad(summed_cross_entropy(hidden, weight, target, 5)[0], (hidden, weight))
    sides = {"hidden": hidden, "weight": weight}
    sides[frozen] = sides[frozen].detach()
    total, _ = summed_cross_entropy(sides["hidden"], sides["weight"], target, 5)
    index, other = (1, weight) if frozen == "hidden" else (0, hidden)
    assert_close(torch.autograd.grad(total, other)[0], both[index], 1e-12, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_a_smaller_dtype(dtype: torch.dtype) -> None:
    """Autocast gives hidden states in bfloat16 and weights in float32."""
    hidden, weight, target = example()
    expected, _ = summed_cross_entropy(hidden, weight, target, 1000)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    small, single = hidden.detach().to(dtype).requires_grad_(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        total, _ = summed_cross_entropy(small, single, target, 3)
    assert total.dtype == torch.float32
    ours = torch.autograd.grad(total, (small, single))
    assert [grad.dtype for grad in ours] == [dtype, torch.float32]
    for name, a, b in zip(("loss", "hidden", "weight"), (total, *ours), (expected, *theirs), strict=True):
        assert_close(a, b, TOLERANCE[dtype], name)


def test_logits_exist_for_a_chunk_at_a_time() -> None:
    hidden, weight, target = example()
    with Largest() as plain:
        torch_loss(hidden, weight, target, "mean")
    assert plain.numbers == B * T * W
    for loss in (summed_cross_entropy, token_nll):
        with Largest() as chunked:
            out = loss(hidden, weight, target, 3)
            if loss is summed_cross_entropy:
                out[0].backward()
        assert chunked.numbers == max(B * T * D, W * D, 3 * W)


def test_very_large_logits_stay_finite() -> None:
    hidden, weight, target = example(torch.float32, "none")
    total, _ = summed_cross_entropy(hidden * 1e4, weight, target, 4)
    total.backward()
    assert total.isfinite() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_token_nll(chunk: int) -> None:
    hidden, weight, target = example()
    nll = token_nll(hidden, weight, target, chunk)
    expected = torch_loss(hidden, weight, target, "none")
    assert_close(nll, expected.view(B, T), 1e-12, "nll")
    assert not nll.requires_grad and not nll[:, :3].any()
    assert_close(nll.sum(), summed_cross_entropy(hidden, weight, target, chunk)[0], 1e-12, "sum")
