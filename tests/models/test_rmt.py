"""RMT against a plain transformer that is given [memory; segment; memory] as one sequence, a segment at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    SEGMENT,
    VOCABULARY,
    assert_close,
    assert_same_gradients,
    bucket_of,
    make_model,
    random_ids,
    run_in_calls,
    tiny_dims,
)

from infini.errors import InputError
from infini.models import build_model
from infini.nn.state import memory_floats

N = SEGMENT
OPTIONS = {"name": "rmt", "memory_tokens": 3}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [L, heads, K] turned by its place: pair i by place / 10000^(2i / K)."""
    L, _, K = x.shape
    angle = torch.tensor([[t * 10000 ** (-2 * i / K) for i in range(K // 2)] for t in range(L)], dtype=x.dtype)
    a, b = x[..., : K // 2], x[..., K // 2 :]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain_transformer(model: Any, x: torch.Tensor, first: int = 0, last: int = 0) -> torch.Tensor:
    """Causal attention over the whole of x [L, D], layer by layer, head by head, by the model's own weights. The
    `first` vectors see each other, and so do the `last`."""
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    hidden[:first, :first] = False
    hidden[len(x) - last :, len(x) - last :] = False
    for block in model.blocks:
        at = block.attention
        h = block.attention_norm(x)
        q, k, v = (
            (h @ p.weight.T).unflatten(-1, (-1, size))
            for p, size in ((at.q_proj, at.d_key), (at.k_proj, at.d_key), (at.v_proj, at.d_value))
        )
        if at.positions == "rotary":
            q, k = rotated(q), rotated(k)
        heads = []
        for n in range(at.n_heads):
            g = n // (at.n_heads // at.n_kv_heads)
            scores = q[:, n] @ k[:, g].T / math.sqrt(at.d_key)
            if at.positions == "t5":
                table = at.bucket_bias.view(32, at.n_heads)[:, n]
                places = range(len(x))
                rows = [torch.stack([table[bucket_of(max(i - j, 0))] for j in places]) for i in places]
                scores = scores + torch.stack(rows)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, g])
        x = x + torch.cat(heads, 1) @ at.o_proj.weight.T
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x)


def oracle(model: Any, ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of a document, and its memory after the last whole segment."""
    p = model.memory_tokens
    memory = model.first_memory.view(p, -1)
    outputs = []
    for begin in range(0, len(ids_T), N):
        tokens = model.embedding(ids_T[begin : begin + N])
        hidden = plain_transformer(model, torch.cat([memory, tokens, memory]), p, p)
        outputs.append(hidden[p : p + len(tokens)])
        if len(tokens) == N:
            memory = hidden[p + N :]
    return torch.cat(outputs), memory


@pytest.mark.parametrize("positions", ["rotary", "t5"])
@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("cuts", [[999], [5, 7, 1, 9]], ids=["one-call", "cut"])
def test_the_model_is_a_transformer_over_memory_segment_memory(groups: int, cuts: list[int], positions: str) -> None:
    """Outputs, memory, and gradients of every weight through three segments and a bit."""
    model = make_model({**OPTIONS, "positions": positions}, n_kv_heads=groups)
    ids = random_ids(1, 3 * N + 3)
    expected, memory = oracle(model, ids[0])
    hidden, state = run_in_calls(model, ids, cuts)
    got = hidden[0]
    assert_close(got, expected, 1e-12, "hidden")
    assert_close(state.layers[0].memory[0], memory, 1e-12, "memory")
    wanted = {n: p for n, p in model.named_parameters() if n != "unembedding.weight"}
    assert_same_gradients(got, expected, wanted)


@pytest.mark.parametrize("cuts", [[999], [N], [3]], ids=["one-call", "segments", "cut"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_the_gradient_goes_back_as_far_as_asked_within_its_group(depth: int, cuts: list[int]) -> None:
    """Segment s reads tokens of its own: what of them gets a gradient from the last segment's outputs. Segment s of a
    document reaches s mod (depth + 1) segments back, so `depth` at most."""
    torch.manual_seed(0)
    model = build_model({**OPTIONS, "bptt_depth": depth}, tiny_dims(), VOCABULARY).double()
    assert model.gradient_horizon == depth
    for S in range(1, 2 * depth + 3):
        ids = (3 * torch.arange(S).repeat_interleave(N) + torch.arange(S * N) % 3)[None]
        model.zero_grad()
        run_in_calls(model, ids, cuts)[0][:, -N:].square().sum().backward()
        reached = model.embedding.weight.grad[: 3 * S].unflatten(0, (S, 3)).abs().amax((1, 2)) > 0
        assert reached.tolist() == [S - 1 - s <= (S - 1) % (depth + 1) for s in range(S)], S


def test_a_cut_gradient_changes_no_value() -> None:
    ids = random_ids(2, 4 * N + 3)
    models = [make_model({**OPTIONS, "bptt_depth": depth}) for depth in (None, 1)]
    assert torch.equal(models[0](ids).hidden_BTD, models[1](ids).hidden_BTD)


def test_with_a_depth_as_long_as_the_call_nothing_is_cut() -> None:
    ids = random_ids(1, 4 * N)
    grads = []
    for depth in (None, 3):
        model = make_model({**OPTIONS, "bptt_depth": depth})
        model(ids).hidden_BTD.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_the_memory_is_100_vectors_to_2048_tokens_unless_it_is_named() -> None:
    assert build_model({"name": "rmt"}, tiny_dims(segment_length=2048), VOCABULARY).memory_tokens == 100
    assert build_model({"name": "rmt"}, tiny_dims(segment_length=8), VOCABULARY).memory_tokens == 1
    model = build_model({"name": "rmt", "memory_tokens": 100}, tiny_dims(), VOCABULARY)
    # p d_model must be carried; the paper prints p d_model l 2.
    assert memory_floats(model.init_state(2)) == model.state_floats(7) == 100 * 16


@pytest.mark.parametrize(("key", "value"), [("memory_tokens", 0), ("bptt_depth", -1), ("bptt_depth", 1.5)])
def test_wrong_options_are_one_line(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key}={value}: must be"):
        build_model({"name": "rmt", key: value}, tiny_dims(), VOCABULARY)
