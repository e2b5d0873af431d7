"""Memorizing Transformers against a loop over tokens and heads, and its search against sorting."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from helpers import (
    SEGMENT,
    VOCABULARY,
    assert_close,
    assert_same_gradients,
    assert_same_state,
    layer_in_calls,
    make_model,
    random_ids,
    run_in_calls,
)
from test_transformer_xl import bucket_of
from torch.utils._python_dispatch import TorchDispatchMode

from infini.errors import InputError
from infini.models.memorizing import MemorizingAttention, NormalisedAttention
from infini.nn.ops import nearest as search
from infini.nn.ops.relative import T5_BUCKETS
from infini.nn.state import memory_floats

D, H, K, V, N = 12, 4, 6, 4, SEGMENT


def make(groups: int = H, **options: Any) -> Any:
    torch.manual_seed(0)
    chosen = {"memory_segments": 2, "neighbours": 5, **options}
    layer = MemorizingAttention(D, H, K, N, d_value=V, n_kv_heads=groups, **chosen).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return layer


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum().sqrt()


def oracle(layer: Any, x_TD: torch.Tensor) -> torch.Tensor:
    """Token by token, head by head; every score of the memory is computed and sorted."""
    G = layer.n_kv_heads
    keys = [(layer.k_proj.weight @ x).view(G, K) for x in x_TD]
    values = [(layer.v_proj.weight @ x).view(G, V) for x in x_TD]
    outputs = []
    for t in range(len(x_TD)):
        begin = t // N * N
        heads = []
        for h in range(H):
            g, s = h // (H // G), layer.head_scale[h]
            q = unit((layer.q_proj.weight @ x_TD[t]).view(H, K)[h])

            def cached(tensor: torch.Tensor, j: int, begin: int = begin) -> torch.Tensor:
                return tensor.detach() if j < begin else tensor

            near = range(max(0, begin - N), t + 1)
            bias = layer.bucket_bias.view(T5_BUCKETS, H)
            scores = [s * (q @ cached(unit(keys[j][g]), j) + bias[bucket_of(t - j), h]) for j in near]
            a = torch.softmax(torch.stack(scores), 0) @ torch.stack([cached(values[j][g], j) for j in near])
            stored = range(max(0, begin - layer.memory_segments * N), begin)
            if stored:
                scores = [s * (q @ unit(keys[j][g]).detach()) for j in stored]
                best = sorted(range(len(stored)), key=lambda i: -scores[i].item())[: layer.neighbours]
                weights = torch.softmax(torch.stack([scores[i] for i in best]), 0)
                found = weights @ torch.stack([values[stored[i]][g].detach() for i in best])
                gate = torch.sigmoid(layer.beta[h])
                a = gate * found + (1 - gate) * a
            heads.append(a)
        outputs.append(layer.o_proj.weight @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
def test_the_layer_is_the_paper(groups: int, cuts: list[int]) -> None:
    """Outputs and gradients over four segments and a bit, with a memory of two and fewer neighbours than it holds."""
    layer = make(groups)
    x = inputs(4 * N + 3).requires_grad_()
    expected = oracle(layer, x)
    got, _ = layer_in_calls(layer, x, cuts)
    assert_close(got, expected, 1e-12, "output")
    wanted = {"x": x, **dict(layer.named_parameters())}
    assert_same_gradients(got, expected, wanted)


@pytest.mark.parametrize("cuts", [[999], [N], [3]], ids=["one-call", "segments", "cut"])
def test_a_memory_of_everything_and_all_neighbours_is_attention_over_everything(cuts: list[int]) -> None:
    """If gates shut out the layer's own attention, it is plain attention over all tokens before the segment."""
    layer = make(memory_segments=5, neighbours=999)
    with torch.no_grad():
        layer.beta.fill_(800.0)
    x = inputs(6 * N)
    q, k = ((x @ p.weight.T).view(-1, H, K) for p in (layer.q_proj, layer.k_proj))
    q, k = (torch.nn.functional.normalize(z, dim=-1) for z in (q, k))
    v = (x @ layer.v_proj.weight.T).view(-1, H, V)
    got, _ = layer_in_calls(layer, x, cuts)
    for begin in range(N, 6 * N, N):
        scores = torch.einsum("qhk,lhk->hql", q[begin : begin + N], k[:begin]) * layer.head_scale[:, None, None]
        a = torch.einsum("hql,lhv->qhv", scores.softmax(-1), v[:begin])
        assert_close(got[begin : begin + N], a.flatten(1) @ layer.o_proj.weight.T, 1e-12, f"segment {begin // N}")


def test_documents_begin_with_an_empty_memory() -> None:
    layer = make()
    x = inputs(4 * N)
    reset = torch.zeros(1, 4 * N, dtype=torch.bool)
    reset[0, 2 * N] = True
    y = layer(x[None], reset_BT=reset)[0][0]
    assert_close(y[: 2 * N], layer(x[None, : 2 * N])[0][0], 1e-14, "first")
    assert_close(y[2 * N :], layer(x[None, 2 * N :])[0][0], 1e-14, "second")


def asked(tokens: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of 3 segments in 2 rows, keys, and a window of keys a segment: one empty, one of a single key."""
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, 4, H, K, generator=g), torch.randn(2, tokens, 2, K, generator=g)
    return q, k, torch.tensor([[20, 5, 10], [7, 19, 39]]), torch.tensor([20, 30, 40])


def by_sorting(q: torch.Tensor, k: torch.Tensor, low: torch.Tensor, high: torch.Tensor, n: int) -> list[set[int]]:
    found = []
    for b, s, i, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:4])).tolist():
        places = range(int(low[b, s]), int(high[s]))
        scores = {p: float(q[b, s, i, h] @ k[b, p, h // 2]) for p in places}
        found.append(set(sorted(places, key=lambda p, scores=scores: -scores[p])[:n]))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize(("block", "scores"), [(1, 1), (7, 1), (1, 96 * 9), (1024, 1)])
@pytest.mark.parametrize("n", [1, 6, 99])
def test_the_search_is_sorting(together: int, block: int, scores: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have 1, 7 and 9 keys (of all 96 queries) or all keys, of one segment, two and all three."""
    monkeypatch.setattr(search, "SEGMENTS_PER_BATCH", together)
    monkeypatch.setattr(search, "BLOCK", block)
    monkeypatch.setattr(search, "SCORES", scores)
    q, k, low, high = asked()
    assert q.shape[:-1].numel() == 96
    found = search.nearest(q, k, low, high, n, "exact")
    assert found.shape == (2, 3, 4, H, min(n, 50))
    assert [{p for p in row if p >= 0} for row in found.flatten(0, 3).tolist()] == by_sorting(q, k, low, high, n)


@pytest.mark.parametrize("n", [1, 6, 19, 20])
def test_the_highest_scores_are_the_same_of_packed_integers(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive and negative, zeros of both signs, masked and equal ones; whichever processor this is."""
    scores = torch.randn(7, 3, 20, generator=torch.Generator().manual_seed(4)).bfloat16()
    scores[:2, :, 5:], scores[2, :, ::2], scores[3, :, ::2], scores[3, :, 1::2] = -math.inf, 0.5, 0.0, -0.0
    wanted = scores.topk(n, -1).values
    monkeypatch.setattr(search, "MIN_PACKED_SCORES", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    if n < 20:
        monkeypatch.setattr(torch.Tensor, "topk", None)
    best, order = search._highest(scores, n)
    assert torch.equal(best.sort(-1, descending=True).values, wanted)
    assert torch.equal(scores.gather(-1, order), best)
    assert all(len(set(row)) == n for row in order.flatten(0, 1).tolist())


def test_the_approximate_search_finds_most_of_it() -> None:
    """It finds keys in its own windows, never one twice, and all of them if they are few."""
    pytest.importorskip("faiss")
    q, k, low, high = asked()
    assert torch.equal(
        search.nearest(q, k, low, high, 6, "approximate").sort(-1).values,
        search.nearest(q, k, low, high, 6, "exact").sort(-1).values,
    )
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 2, 8, H, 8, generator=g), torch.randn(1, 3000, H, 8, generator=g)
    low, high = torch.tensor([[0, 500]]), torch.tensor([2500, 3000])
    near, exact = (search.nearest(q, k, low, high, 16, kind) for kind in ("approximate", "exact"))
    assert ((near >= low[..., None, None, None]) & (near < high[:, None, None, None])).all()
    common = [
        len(set(a) & set(b)) for a, b in zip(near.flatten(0, 3).tolist(), exact.flatten(0, 3).tolist(), strict=True)
    ]
    assert all(len(set(row)) == 16 for row in near.flatten(0, 3).tolist())
    assert sum(common) / (16 * len(common)) > 0.5


def test_the_approximate_search_sees_only_its_own_keys() -> None:
    """Whatever lies outside of a segment's window, and wherever the line begins: the same keys are found."""
    pytest.importorskip("faiss")
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 2, 8, H, 8, generator=g), torch.randn(1, 3000, H, 8, generator=g)
    low, high = torch.tensor([[0, 500]]), torch.tensor([2500, 3000])
    near = search.nearest(q, k, low, high, 16, "approximate")
    changed = torch.cat([k[:, :2500], torch.randn(1, 500, H, 8, generator=g)], 1)
    assert torch.equal(search.nearest(q, changed, low, high, 16, "approximate")[:, 0], near[:, 0])
    later = search.nearest(q[:, 1:], k[:, 500:], low[:, 1:] - 500, high[1:] - 500, 16, "approximate")
    assert torch.equal(later + 500, near[:, 1:])


@pytest.mark.parametrize("cuts", [[N], [5, 7, 1, 30]], ids=str)
def test_a_model_with_the_approximate_search_is_causal_and_has_no_cuts(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds from the first segments on, with more cells than a memory of training has."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(search, "BLOCK", 4)
    monkeypatch.setattr(search, "KEYS_PER_CELL", 3)
    model = make_model({"name": "memorizing", "search": "approximate", "memory_segments": 2, "neighbours": 5})
    ids = random_ids(2, 9 * N)
    hidden, state = run_in_calls(model, ids, [9 * N])
    assert bool(hidden.isfinite().all())
    cut, cut_state = run_in_calls(model, ids, cuts)
    assert_close(cut, hidden, 1e-10, "hidden")
    assert_same_state(cut_state, state, 1e-10)
    other = ids.clone()
    other[:, 8 * N :] = (other[:, 8 * N :] + 1) % VOCABULARY
    assert torch.equal(model(other).hidden_BTD[:, : 8 * N], hidden[:, : 8 * N])
    assert_close(model(ids[1:]).hidden_BTD, hidden[1:], 1e-10, "a row alone")


def test_the_approximate_search_goes_on_where_its_cells_hold_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in two tight bundles: the cells that a query looks into first may hold a handful, and it asks for 900."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(search, "BLOCK", 64)
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 1, 8, H, 8, generator=g), torch.randn(1, 1000, H, 8, generator=g) * 0.01
    k[:, :, :, 0] += torch.where(torch.arange(1000) % 7 > 0, 1.0, -1.0)[:, None]
    found = search.nearest(q, k, torch.tensor([[0]]), torch.tensor([1000]), 900, "approximate")
    assert all(len(set(row)) == 900 and min(row) >= 0 for row in found.flatten(0, 3).tolist())


@pytest.mark.parametrize("kind", ["exact", "approximate"])
def test_where_fewer_keys_are_allowed_than_asked_for_there_is_none(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 keys behind the first 50 and 130 asked for: each of the 100 once, and no key outside."""
    if kind == "approximate":
        pytest.importorskip("faiss")
    monkeypatch.setattr(search, "BLOCK", 64)
    monkeypatch.setattr(search, "SCORES", 1)
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 1, 8, H, 8, generator=g), torch.randn(1, 200, H, 8, generator=g)
    found = search.nearest(q, k, torch.tensor([[50]]), torch.tensor([150]), 130, kind)
    for row in found.flatten(0, 3).sort(-1).values.tolist():
        assert row == [-1] * 30 + list(range(50, 150))


@pytest.mark.parametrize(("kind", "at_a_time"), [("exact", 64), ("exact", 128), ("approximate", 64)])
def test_no_search_has_all_scores_at_once(kind: Any, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes some of 4,096 keys at a time: its largest tensor holds their scores and the best so far."""
    if kind == "approximate":
        pytest.importorskip("faiss")
    monkeypatch.setattr(search, "BLOCK", 64)
    monkeypatch.setattr(search, "SCORES", 256 * H * at_a_time)
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 1, 256, H, 8, generator=g), torch.randn(1, 4096, H, 8, generator=g)
    largest = 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            tensors = made if isinstance(made, (tuple, list)) else [made]
            largest = max(largest, *(x.numel() for x in tensors if isinstance(x, torch.Tensor)), 0)
            return made

    with Watching():
        search.nearest(q, k, torch.tensor([[0]]), torch.tensor([4096]), 8, kind)
    assert 0 < largest <= max(256 * H * (at_a_time + 8), k.numel()) < 256 * H * 4096


def test_without_its_package_the_approximate_search_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    q, k, low, high = asked()
    with pytest.raises(InputError, match="model.search='approximate': needs the package faiss-cpu; or take exact"):
        search.nearest(q, k, low, high, 6, "approximate")


def test_the_memory_is_in_the_9th_layer_of_12() -> None:
    model = make_model({"name": "memorizing", "memory_segments": 1}, n_layers=12)
    kinds = [type(block.attention) for block in model.blocks]
    assert [kind is MemorizingAttention for kind in kinds] == [layer == 9 for layer in range(1, 13)]
    assert all(issubclass(kind, NormalisedAttention) for kind in kinds)
    assert len(model.gates()) == 1 and len(model.gates()[0]) == 2


def test_the_footprint_is_the_memory_and_the_segments_before() -> None:
    """65,536 x 8 x 256 in one layer; the paper prints 65,000 entries and 12 caches of 2,048: 183M."""
    sizes = (1024, 8, 128, 2048)
    plain, large = NormalisedAttention(*sizes), MemorizingAttention(*sizes, memory_segments=32)
    assert large.memory_floats() - plain.memory_floats() == 65_536 * 8 * 256
    assert 65_000 * 8 * 256 + 12 * plain.memory_floats() == 183_451_648
    model = make_model({"name": "memorizing", "memory_segments": 2})
    state = model(random_ids(1, 3)).state
    assert memory_floats(state) == model.state_floats(1) == 2 * (4 * N + 2 * N) * (6 + 4)
