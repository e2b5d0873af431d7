"""Kernels of attention inside segments: fused ones where the code means them, never the fallback by accident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infini.nn.ops import attention, relative
from infini.nn.ops.cross_entropy import summed_cross_entropy

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
FUSED_ON_GPU = {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "cudnn", "efficient")}
MATRICES = {"bmm", "baddbmm", "_softmax", "_safe_softmax"}
"""The operators of attention without a fused kernel."""
SIZES = pytest.mark.parametrize(
    "sizes",
    [
        {"d_key": d_key, "d_value": d_value, "n_heads": 4, "n_kv_heads": n_kv_heads}
        for d_key, d_value, n_kv_heads in [(16, 16, 4), (16, 8, 4), (8, 16, 4), (16, 16, 2), (16, 8, 1)]
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Kernels(TorchDispatchMode):
    """Records the operators of attention called inside a `with` block, each with the dtype of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in MATRICES or name.startswith("_scaled_dot_product"):
            self.called[name] = args[1].dtype if name == "baddbmm" else args[0].dtype
        return func(*args, **(kwargs or {}))


def attend(
    n_queries: int,
    length: int,
    dtype: torch.dtype,
    *,
    trained: bool = False,
    d_key: int = 16,
    d_value: int = 16,
    n_heads: int = 4,
    n_kv_heads: int = 4,
    device: str = "cpu",
) -> dict[str, torch.dtype]:
    """The kernels of attention in segments of this length, of two where they are whole; trained: backward, too."""
    S = 2 if n_queries == length else 1
    q, k, v = (
        torch.randn(1, S, tokens, heads, size, dtype=dtype, device=device).requires_grad_(trained)
        for tokens, heads, size in (
            (n_queries, n_heads, d_key),
            (length, n_kv_heads, d_key),
            (length, n_kv_heads, d_value),
        )
    )
    with Kernels() as kernels:
        out = attention.local_attention(q, k, v, scale=d_key**-0.5, rope_base=10000.0)
        if trained:
            out.sum().backward()
    assert out.shape == (1, S, n_queries, n_heads, d_value) and out.dtype == dtype
    return kernels.called


@DTYPES
@SIZES
@pytest.mark.parametrize("n_queries", [300, 7, 1], ids=["whole", "unfinished", "one token"])
def test_long_segments_take_the_fused_kernel(n_queries: int, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """They keep their dtype, whatever the sizes of keys and values, the heads that share them, and the mask."""
    assert attend(n_queries, 300, dtype, **sizes) == {FUSED: dtype}
    assert attend(n_queries, 300, dtype, trained=True, **sizes) == {FUSED: dtype, f"{FUSED}_backward": dtype}


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("n_queries", [16, 5])
def test_short_segments_take_it_where_keys_and_values_have_one_size(n_queries: int, n_kv_heads: int) -> None:
    float32 = torch.float32
    found = attend(n_queries, 16, float32, trained=True, n_kv_heads=n_kv_heads)
    assert found == {FUSED: float32, f"{FUSED}_backward": float32}


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_other_short_segments_take_plain_products(whole: bool, extra: int) -> None:
    """Up to SHORT_SEGMENT tokens; from there on zeros make the sizes equal."""
    length = attention.SHORT_SEGMENT + extra
    found = attend(length if whole else 7, length, torch.float32, d_value=8)
    assert found.keys() == ({FUSED} if extra else {"bmm", "_safe_softmax"})


@SIZES
@pytest.mark.parametrize(("amx", "longest"), [(True, 128), (False, 256)])
def test_training_in_bfloat16_has_a_kernel_of_its_own(
    amx: bool, longest: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused one's backward pass is slow for whole segments up to a length that depends on the processor. Other
    queries of such segments take the fused kernel in float32."""
    monkeypatch.setattr(attention, "HAS_AMX", amx)
    half, float32 = torch.bfloat16, torch.float32
    for length in (attention.MIN_SHORT_ATTENTION, longest):
        found = attend(length, length, half, trained=True, **sizes)
        # Scores in float32, products with values in bfloat16.
        assert (found.keys(), found["baddbmm"]) == ({"baddbmm", "_softmax", "bmm"}, float32)
    assert attend(longest + 1, longest + 1, half, trained=True, **sizes) == {FUSED: half, f"{FUSED}_backward": half}
    assert attend(7, longest, half, trained=True, **sizes) == {FUSED: float32, f"{FUSED}_backward": float32}
    assert attend(longest, longest, half, **sizes) == {FUSED: half if amx else float32}


@pytest.mark.gpu
@pytest.mark.parametrize("n_queries", [2048, 1])
@pytest.mark.parametrize(("d_value", "n_kv_heads"), [(128, 8), (64, 8), (128, 2)])
def test_a_gpu_takes_flash_attention_for_the_papers_sizes(
    n_queries: int, d_value: int, n_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 heads of 128 in segments of 2,048 tokens. The question is asked for the very arguments of the call."""
    real = torch.nn.functional.scaled_dot_product_attention
    asked: list[bool] = []

    def asking(q: Any, k: Any, v: Any, attn_mask: Any, is_causal: bool, scale: float, enable_gqa: bool) -> Any:
        parameters = torch.backends.cuda.SDPAParams(q, k, v, attn_mask, 0.0, is_causal, enable_gqa)
        asked.append(torch.backends.cuda.can_use_flash_attention(parameters, debug=True))
        return real(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", asking)
    sizes = {"d_key": 128, "d_value": d_value, "n_heads": 8, "n_kv_heads": n_kv_heads}
    for trained in (False, True):
        found = attend(n_queries, 2048, torch.bfloat16, trained=trained, device="cuda", **sizes)
        assert not found.keys() & MATRICES and found.keys() & FUSED_ON_GPU
    assert asked == [True, True]


@pytest.mark.gpu
def test_a_gpu_has_a_fused_kernel_for_unfinished_segments() -> None:
    """Their mask rules out flash attention."""
    sizes = {"d_key": 128, "d_value": 128, "n_heads": 8, "n_kv_heads": 8}
    found = attend(700, 2048, torch.bfloat16, trained=True, device="cuda", **sizes)
    assert not found.keys() & MATRICES and found.keys() & FUSED_ON_GPU


@pytest.mark.parametrize("way", ["t5", "short", "loss"])
def test_second_derivatives_are_refused_where_the_first_pass_took_constants(way: str) -> None:
    """They would be wrong without a word."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 4, requires_grad=True)
    if way == "t5":
        y = relative._Biased.apply(x, x, x, torch.zeros(1, 3, 8, 8), 1.0)
    elif way == "short":
        y = attention._ShortAttention.apply(*3 * (x.flatten(0, 1),), 1.0)
    else:
        y = summed_cross_entropy(x.flatten(1, 2), torch.randn(5, 4), torch.randint(5, (2, 24)), 8)[0]
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* has no second derivatives"):
        torch.autograd.grad(y.square().sum() + x.pow(4).sum(), x, create_graph=True)
