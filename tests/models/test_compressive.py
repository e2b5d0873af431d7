"""The Compressive Transformer against a loop over segments, tokens and heads, written from Rae et al. 2020."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from helpers import SEGMENT, TOLERANCE, assert_close, assert_same_gradients, layer_in_calls, make_model, random_ids

from infini.models.compressive import Compression, CompressiveAttention
from infini.nn.grid import plan
from infini.nn.state import State, memory_floats, select_rows

D, H, G, K, V, N = 12, 4, 2, 6, 4, SEGMENT
KINDS = pytest.mark.parametrize("kind", get_args(Compression))


def make(kind: Any, rate: int = 2, memory: int = 2, compressed: int = 1, scale: Any = "d_key") -> Any:
    torch.manual_seed(0)
    layer = CompressiveAttention(
        D,
        H,
        K,
        N,
        d_value=V,
        n_kv_heads=G,
        compression=kind,
        rate=rate,
        memory_segments=memory,
        compressed_segments=compressed,
        attention_scale=scale,
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return layer.train()


def inputs(segments: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(int(segments * N), D, dtype=torch.float64, generator=generator)


def weights_of(layer: Any, queries: torch.Tensor, keys: torch.Tensor, width: int) -> torch.Tensor:
    """Attention weights [H, Q, L]: query i, which stands at key L - Q + i, sees the keys up to itself.

    width: the scores are divided by its root.
    """
    Q, L = len(queries), len(keys)
    asked = [(layer.q_proj.weight @ query).view(H, K) for query in queries]
    projected = torch.stack([(layer.k_proj.weight @ key).view(G, K) for key in keys])
    angles = [[distance * 10000 ** (-2 * d / D) for d in range(D // 2)] for distance in range(L)]
    R = torch.tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles], dtype=torch.float64)
    far = torch.stack([(layer.r_proj.weight @ position).view(H, K) for position in R])
    u, v = layer.u.view(H, K), layer.v.view(H, K)
    rows = []
    for h in range(H):
        for i in range(Q):
            q, last = asked[i][h], L - Q + i
            # Key j is last - j tokens away.
            by_content, by_distance = projected[: last + 1, h // (H // G)], far[: last + 1, h].flip(0)
            scores = by_content @ (q + u[h]) + by_distance @ (q + v[h])
            weights = torch.softmax(scores / math.sqrt(width), 0)
            rows.append(torch.cat([weights, torch.zeros(L - len(scores), dtype=torch.float64)]))
    return torch.stack(rows).view(H, Q, L)


def compress(layer: Any, old: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Memories [N, D] that fall out -> [N / rate, D]; used: the attention each of them got."""
    r = layer.rate
    if layer.compression == "most_used":
        return old[sorted(sorted(range(len(old)), key=lambda i: -used[i].item())[: len(old) // r])]
    made = []
    for i in range(0, len(old), r):
        if layer.compression == "mean":
            made.append(sum(old[i + j] for j in range(r)) / r)
        elif layer.compression == "max":
            made.append(torch.stack([old[i + j] for j in range(r)]).max(0).values)
        else:
            places = range(i, i + r) if layer.compression == "convolution" else (i - r, i, i + r)
            W = layer.compress_proj.weight.view(D, -1, D)
            made.append(sum(W[:, tap] @ old[p] for tap, p in enumerate(places) if 0 <= p < len(old)))
    return torch.stack(made)


def oracle(
    layer: Any, x_TD: torch.Tensor, width: int = K
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, the sum of the reconstruction losses, and what is in memory and compressed memory at the end."""
    memory: list[torch.Tensor] = []
    compressed: list[torch.Tensor] = []
    outputs, losses = [], []
    for begin in range(0, len(x_TD), N):
        x = x_TD[begin : begin + N]
        keys = torch.stack([m.detach() for m in (*compressed, *memory)] + list(x))
        a = weights_of(layer, x, keys, width)
        values = torch.stack([(layer.v_proj.weight @ key).view(G, V) for key in keys])
        mixed = torch.stack([a[h] @ values[:, h // (H // G)] for h in range(H)], 1)
        outputs.append(mixed.flatten(1) @ layer.o_proj.weight.T)
        if len(x) < N:
            break
        memory += list(x.detach())
        if len(memory) > layer.memory_segments * N:
            old = torch.stack(memory[:N])
            used = a.mean((0, 1))[len(compressed) : len(compressed) + N]
            new = compress(layer, old, used)
            losses.append(reconstruction(layer, x.detach(), old, new, width))
            memory = memory[N:]
            compressed = [*compressed, *new.detach()][-layer.chunks * N // layer.rate :]
    return torch.cat(outputs), sum(losses, torch.zeros((), dtype=torch.float64)), memory, compressed


def reconstruction(layer: Any, x: torch.Tensor, old: torch.Tensor, new: torch.Tensor, width: int) -> torch.Tensor:
    """Mean square of attn(x, old) - attn(x, new): no positions, no mask, no gradient but through `new`."""
    total = torch.zeros((), dtype=torch.float64)
    Wq, Wk, Wv = (p.weight.detach() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    for h in range(H):
        g = h // (H // G)

        def attn(memories: torch.Tensor, h: int = h, g: int = g) -> torch.Tensor:
            q, k = (x @ Wq.T).view(N, H, K)[:, h], (memories @ Wk.T).view(-1, G, K)[:, g]
            return torch.softmax(q @ k.T / math.sqrt(width), 1) @ (memories @ Wv.T).view(-1, G, V)[:, g]

        total = total + (attn(old.detach()) - attn(new)).square().sum()
    return total / (H * N * V)


@KINDS
@pytest.mark.parametrize(
    ("cuts", "memory_segments", "compressed_segments", "rate", "scale"),
    [
        ([999], 1, 1, 2, "d_key"),
        ([5, 7, 1, 9, 30], 2, 1, 2, "d_key"),
        ([30, 25], 1, 2, 4, "d_model"),
    ],
    ids=["one-call", "cut", "fourfold"],
)
def test_the_layer_is_the_paper(
    kind: str, cuts: list[int], memory_segments: int, compressed_segments: int, rate: int, scale: str
) -> None:
    """Outputs, memories and gradients over many segments and a bit: compressed memory has dropped some by then."""
    layer = make(kind, rate, memory_segments, compressed_segments, scale)
    kept = memory_segments + rate * compressed_segments
    x = inputs(kept + 2.5).requires_grad_()
    expected, _, memory, compressed = oracle(layer, x, {"d_key": K, "d_model": D}[scale])
    assert len(compressed) == compressed_segments * N, "full, and some fell out of it"
    got, state = layer_in_calls(layer, x, cuts)
    assert_close(got, expected, 1e-12, "output")
    assert_close(state.layers[0].memory.recent_BMD[0], torch.stack(memory), 1e-12, "memory")
    assert_close(state.layers[0].memory.compressed_BCD[0], torch.stack(compressed), 1e-12, "compressed memory")
    wanted = {"x": x, **{n: p for n, p in layer.named_parameters() if n != "compress_proj.weight"}}
    assert_same_gradients(got, expected, wanted)


@pytest.mark.parametrize("kind", ["convolution", "dilated"])
@pytest.mark.parametrize("rate", [2, 4])
@pytest.mark.parametrize("memory", [1, 2, 3])
def test_the_compression_is_trained_by_the_reconstruction_loss_alone(kind: str, rate: int, memory: int) -> None:
    layer = make(kind, rate, memory)
    x = inputs(memory + 2).requires_grad_()
    y, _, loss = run_with_loss(layer, x)
    # The first two segments fall out at the ends of the last two. The mean is over all.
    assert_close(loss, oracle(layer, x)[1] / (memory + 2), 1e-12, "loss")
    (expected,) = torch.autograd.grad(oracle(layer, x)[1] / (memory + 2), layer.compress_proj.weight)
    named = dict(layer.named_parameters())
    grads = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True, retain_graph=True)
    reached = {name for name, g in zip(["x", *named], grads, strict=True) if g is not None}
    assert reached == {"compress_proj.weight"}
    assert_close(grads[1 + list(named).index("compress_proj.weight")], expected, 1e-11, "gradient")
    # The task's loss does not train it.
    assert torch.autograd.grad(y.sum(), layer.compress_proj.weight, allow_unused=True) == (None,)


def run_with_loss(layer: Any, x_TD: torch.Tensor) -> Any:
    state = layer.init_state(1)
    grid = plan(state.clock, len(x_TD), N, None, None, None)
    y, leaves, loss = layer.attend_with_loss(x_TD[None], state.layers[0], grid)
    return y, leaves, loss


def test_without_weights_or_outside_of_training_there_is_no_loss() -> None:
    x = inputs(3)
    assert run_with_loss(make("mean"), x)[2] is None
    assert run_with_loss(make("convolution").eval(), x)[2] is None


def test_the_models_loss_is_the_sum_of_its_layers() -> None:
    model = make_model({"name": "compressive"}).train()
    ids = random_ids(2, 4 * N)
    losses: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, result: losses.append(result[2]))
    out = model(ids)
    assert len(losses) == 2 and float(out.aux_loss) == pytest.approx(float(sum(losses)), rel=1e-12)
    out.aux_loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert trained == {f"blocks.{i}.attention.compress_proj.weight" for i in range(2)}


def test_documents_do_not_share_memories_nor_count_in_each_others_loss() -> None:
    """A row that resets half-way: the loss is that of its two documents."""
    layer = make("convolution", memory=1)
    x = inputs(6)
    reset = torch.zeros(1, 6 * N, dtype=torch.bool)
    reset[0, 3 * N] = True
    state = layer.init_state(1)
    grid = plan(state.clock, 6 * N, N, None, reset, None)
    y, _, loss = layer.attend_with_loss(x[None], state.layers[0], grid)
    first, second = (run_with_loss(layer, part) for part in (x[: 3 * N], x[3 * N :]))
    assert_close(y, torch.cat([first[0], second[0]], 1), TOLERANCE[torch.float64], "output")
    assert float(loss) == pytest.approx((float(first[2]) + float(second[2])) / 2, rel=1e-10)


@pytest.mark.parametrize("cuts", [[3 * N, 3 * N], [5, N, 6 * N - 5 - N], [N] * 6], ids=str)
def test_the_loss_does_not_depend_on_the_cuts(cuts: list[int]) -> None:
    """Parts of a call, averaged by their tokens, as training on groups of segments does, also where they end within
    one."""
    layer = make("convolution", memory=1)
    x = inputs(6)
    whole, leaves, parts, start = run_with_loss(layer, x)[2], None, 0.0, 0
    state = layer.init_state(1)
    for length in cuts:
        grid = plan(state.clock, length, N, None, None, None)
        _, leaves, loss = layer.attend_with_loss(x[None, start : start + length], state.layers[0], grid)
        state = State(grid.clock, (leaves,))
        parts += 0.0 if loss is None else float(loss) * length / len(x)
        start += length
    assert float(whole) == pytest.approx(parts, rel=1e-12) and parts > 0


def test_the_loss_of_rows_at_different_slots_is_the_mean_of_theirs() -> None:
    model = make_model({"name": "compressive"}).train()
    mask = torch.ones(2, 3 * N, dtype=torch.bool)
    mask[1, 3 * N - 3 :] = False
    state = model(random_ids(2, 3 * N), mask_BT=mask).state
    ids = random_ids(2, 2 * N, seed=2)
    alone = [float(model(ids[row : row + 1], select_rows(state, torch.tensor([row]))).aux_loss) for row in range(2)]
    assert min(alone) > 0
    assert float(model(ids, state).aux_loss) == pytest.approx(sum(alone) / 2, rel=1e-12)


def test_a_segment_that_padding_cut_short_has_no_loss() -> None:
    """Nothing falls out at its end, for it has none: five segments and a bit have the loss of five."""
    layer = make("convolution", memory=1)
    x = inputs(6)
    mask = torch.ones(1, 6 * N, dtype=torch.bool)
    mask[0, 6 * N - 3 :] = False
    state = layer.init_state(1)
    grid = plan(state.clock, 6 * N, N, mask, None, None)
    loss = layer.attend_with_loss(x[None], state.layers[0], grid)[2]
    assert float(loss) * 6 == pytest.approx(float(run_with_loss(layer, x[: 5 * N])[2]) * 5, rel=1e-12)


@pytest.mark.parametrize("compression", ["convolution", "dilated"])
def test_padding_before_a_reset_has_no_loss(compression: Compression) -> None:
    """Two documents in one row, as a stream packs them, have the losses of each read alone, whatever the padding is."""
    layer = make(compression, memory=1)
    x, ends = inputs(9), 4 * N + 3
    x[5 * N :] = inputs(4)
    mask = torch.ones(1, 9 * N, dtype=torch.bool)
    mask[0, ends : 5 * N] = False
    reset = torch.zeros(1, 9 * N, dtype=torch.bool)
    reset[0, 5 * N] = True
    found = []
    for padding in (0.0, 5.0):
        x[ends : 5 * N] = padding
        state = layer.init_state(1)
        grid = plan(state.clock, 9 * N, N, mask, reset, None)
        found.append(float(layer.attend_with_loss(x[None], state.layers[0], grid)[2]) * 9)
    alone = sum(float(run_with_loss(layer, part)[2]) * 4 for part in (x[: 4 * N], x[5 * N :]))
    assert found == pytest.approx([alone, alone], rel=1e-12)


def test_the_footprint_is_both_memories() -> None:
    layer = CompressiveAttention(1024, 8, 128, 512, rate=2, memory_segments=1, compressed_segments=1)
    # Rae et al. for PG19: window, memory and compressed memory of 512 each.
    assert layer.memory_floats() == 1024 * (512 + 512)
    assert memory_floats(layer.init_state(3)) == layer.memory_floats()


def test_a_rate_that_does_not_divide_the_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="rate=3: must divide segments of 8 tokens"):
        make("mean", rate=3)
    model = make_model({"name": "compressive", "rate": 4})
    with pytest.raises(ValueError, match="rate=4: must divide segments of 6 tokens"):
        model.resize_segments(6)
