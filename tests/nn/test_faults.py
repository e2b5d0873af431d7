"""Faults of other implementations of Infini-attention. Each test is named after the implementation that had it.

The gates that hardly move (Hugging Face's failed experiment, and Adafactor's parameter scale) are tested with the
recipes: they are a matter of optimisers.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from helpers import (
    TOLERANCE,
    VOCABULARY,
    assert_close,
    assert_on,
    assert_same_state,
    computing_in,
    make_layer,
    make_model,
    oracle_layer,
    random_ids,
    relative_error,
    run_in_calls,
    set_gates,
    show_heads,
    variants,
)

from infini import InfiniAttention
from infini.nn.attention import GateInit, LocalAttention
from infini.nn.ops import memory
from infini.nn.state import State, leaves, select_rows, state_bytes

EXACT = TOLERANCE[torch.float64]
RULES = pytest.mark.parametrize("rule", ["linear", "delta"])
MODELS = [options for options in variants() if options.get("first_segment") == "local"]
INFINI = pytest.mark.parametrize("options", MODELS, ids=[options["name"] for options in MODELS])


def inputs(n_rows: int, n_tokens: int, d_model: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_rows, n_tokens, d_model, generator=torch.Generator().manual_seed(seed)).double()


def memory_of(state: State) -> memory.Memory:
    return state.layers[0].memory


def with_memory(state: State, m: torch.Tensor, z: torch.Tensor) -> State:
    """The state of a single layer with another memory in it."""
    return state._replace(layers=(state.layers[0]._replace(memory=memory.Memory(m, z)),))


# Beomi/InfiniTransformer


@RULES
def test_beomi_memory_is_not_detached_between_segments(rule: str) -> None:
    """The last segment's gradient in the first segment's input is what moving it does, however calls are cut."""
    layer = make_layer(update_rule=rule)
    x = inputs(1, 32)
    step = torch.cat([inputs(1, 8, seed=1), torch.zeros(1, 24, 12)], 1) * 1e-5

    def loss(x: torch.Tensor, length: int) -> torch.Tensor:
        state, outputs = None, []
        for part in x.split(length, 1):
            y, state = layer(part, state)
            outputs.append(y)
        return torch.cat(outputs, 1)[:, 24:].square().sum()

    moved = loss(x + step, 32) - loss(x - step, 32)
    assert moved.abs() > 1e-7
    for length in (32, 8, 3):
        (grad,) = torch.autograd.grad(loss(leaf := x.clone().requires_grad_(), length), leaf)
        assert_close(2 * (grad * step).sum(), moved, 1e-6, f"calls of {length}")


@RULES
@pytest.mark.parametrize("group", [0, 1])
def test_beomi_grouped_query_heads_read_their_own_memory(rule: str, group: int) -> None:
    """Heads 0 and 1 read the memory of key-value head 0, heads 2 and 3 that of head 1; the window alike."""
    layer = show_heads(make_layer(12, 4, 6, update_rule=rule, n_kv_heads=2, d_value=3))
    _, state = layer(inputs(1, 16))
    m, z = (leaf.clone() for leaf in memory_of(state))
    m[:, group] += 1
    more = inputs(1, 5, seed=1)
    by_memory = layer(more, with_memory(state, m, z))[0] - layer(more, state)[0]
    before, _ = layer(more)
    with torch.no_grad():
        layer.v_proj.weight[3 * group : 3 * group + 3] += 1
    for change in (by_memory, layer(more)[0] - before):
        moved = change.unflatten(-1, (4, 3)).abs().amax((0, 1, 3)) > 1e-3
        assert moved.tolist() == [group == 0, group == 0, group == 1, group == 1]


@RULES
def test_beomi_memory_is_read_while_decoding(rule: str) -> None:
    """Token by token, inside a segment whose memory does not move, what the memory holds still comes out."""
    layer = make_layer(update_rule=rule)
    x = inputs(1, 23)
    whole, _ = layer(x)
    _, prompt = layer(x[:, :16])
    state, blind = prompt, with_memory(prompt, *map(torch.zeros_like, memory_of(prompt)))
    for t in range(16, 23):
        y, state = layer(x[:, t : t + 1], state)
        without, blind = layer(x[:, t : t + 1], blind)
        assert_close(y[:, 0], whole[:, t], EXACT, f"token {t}")
        assert relative_error(without, y) > 0.05
        assert torch.equal(memory_of(state).z_BGK, memory_of(prompt).z_BGK)


@RULES
@pytest.mark.parametrize("n_segments", [1, 3])
def test_beomi_prompt_of_whole_segments_is_written_once(rule: str, n_segments: int) -> None:
    """z is the sum of sigma(k), every token once, and the next token writes nothing."""
    layer = make_layer(update_rule=rule)
    x = inputs(1, 8 * n_segments + 1)
    _, prompt = layer(x[:, :-1])
    once = memory.sigma(layer.k_proj(x[:, :-1])).sum(1).unflatten(-1, (2, 6))
    assert_close(memory_of(prompt).z_BGK, once, EXACT, "z")
    _, m, _ = oracle_layer(layer, x)
    assert_close(memory_of(prompt).m_BGKV, m, EXACT, "M")
    _, after = layer(x[:, -1:], prompt)
    assert_same_state(memory_of(after), memory_of(prompt), 0.0)


@RULES
def test_beomi_large_values_do_not_overflow_in_bf16(rule: str) -> None:
    """An M far beyond float16's 65,504 stays finite and right."""
    layer = make_layer(segment=64, update_rule=rule)
    with torch.no_grad():
        layer.v_proj.weight.mul_(1e5)
    x = inputs(1, 512)
    expected, m, z = oracle_layer(layer, x)
    layer, narrow = layer.float(), x.float().requires_grad_()
    with computing_in(torch.bfloat16):
        y, state = layer(narrow)
    y.float().square().mean().backward()
    assert m.abs().max() > 65_504
    assert_close(memory_of(state).m_BGKV, m, TOLERANCE[torch.bfloat16], "M")
    assert_close(memory_of(state).z_BGK, z, TOLERANCE[torch.bfloat16], "z")
    assert_close(y, expected, TOLERANCE[torch.bfloat16], "y")
    assert all(p.grad.isfinite().all() for p in (narrow, *layer.parameters()))


@RULES
def test_beomi_a_normaliser_of_zero_divides_nothing(rule: str) -> None:
    """Keys so far below 0 that float32 holds none of what they write: the memory reads 0, with finite gradients."""
    layer = show_heads(make_layer(update_rule=rule)).float()
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.k_proj.weight.zero_()
        layer.k_proj.weight[:, 0] = -200
    x = inputs(1, 24).float()
    x[..., 0] = 1
    x.requires_grad_()
    y, state = set_gates(layer, 40)(x)
    assert not memory_of(state).z_BGK.any() and not y[:, 8:].any()
    y.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *layer.parameters()))


@RULES
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (4, 1)])
def test_beomi_grouped_query_heads_are_heads_with_copied_keys_and_values(rule: str, heads: int, groups: int) -> None:
    """Sharing a key-value head is having copies of it, side by side: in the window and in the memory."""
    layer = make_layer(12, heads, 6, update_rule=rule, n_kv_heads=groups)
    plain = make_layer(12, heads, 6, update_rule=rule)
    weights = layer.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (groups, 6)).repeat_interleave(heads // groups, 0).flatten(0, 1)
    plain.load_state_dict(weights)
    x = inputs(2, 29)
    assert_close(layer(x)[0], plain(x)[0], EXACT, "y")


# lucidrains/infini-transformer-pytorch


@INFINI
def test_lucidrains_prompt_is_not_dropped(options: dict[str, Any]) -> None:
    """The first eight tokens of a prompt of several segments change the tokens that follow it."""
    model = make_model(options)
    ids = random_ids(1, 8 * 4 + 3)
    other = ids.clone()
    other[:, :8] = (other[:, :8] + 1) % VOCABULARY
    after = [run_in_calls(model, prompt, [32, 1])[0][:, 32:] for prompt in (ids, other)]
    assert relative_error(*after) > 1e-3


@RULES
def test_lucidrains_gate_weights_the_memory(rule: str) -> None:
    """sigmoid(beta) is the weight of the memory: at 1 nothing local is left, at 0 nothing of the memory."""
    layer = show_heads(make_layer(update_rule=rule))
    x = inputs(1, 12)
    sq = memory.sigma(layer.q_proj(x[:, 8:]).unflatten(-1, (2, 6))).transpose(1, 2)
    _, past = layer(x[:, :8])
    m, z = memory_of(past)
    read = ((sq @ m) / (sq @ z[..., None])).transpose(1, 2).flatten(2)
    assert_close(set_gates(layer, 40)(x)[0][:, 8:], read, EXACT, "open")
    local = show_heads(LocalAttention(12, 2, 6, 8).double())
    local.load_state_dict({name: w for name, w in layer.state_dict().items() if name != "beta"})
    assert_close(set_gates(layer, -800)(x)[0][:, 8:], local(x)[0][:, 8:], EXACT, "shut")
    half = (read + local(x)[0][:, 8:]) / 2
    assert_close(set_gates(layer, 0)(x)[0][:, 8:], half, EXACT, "half open")


@INFINI
@pytest.mark.parametrize("gate_init", get_args(GateInit))
def test_lucidrains_gate_is_not_saturated_at_the_start(options: dict[str, Any], gate_init: Any) -> None:
    """Every gate starts where both sides are heard and its gradient is not vanishing."""
    torch.manual_seed(0)
    layer = InfiniAttention(12, 6, 6, 8, options["update_rule"], gate_init=gate_init)
    shares = torch.sigmoid(layer.beta)
    assert ((shares > 0.02) & (shares < 0.98)).all()
    layer(inputs(2, 24).float())[0].square().sum().backward()
    assert layer.beta.grad is not None and layer.beta.grad.abs().min() > 1e-5


# dingo-actual/infini-transformer


@RULES
@pytest.mark.parametrize("first", ["local", "zero"])
def test_dingo_no_leak_across_segments(rule: str, first: str) -> None:
    """64 tokens, 8 segments: row t has token t changed, and every output from there on moves, none before."""
    layer = make_layer(update_rule=rule, first_segment=first)
    x = inputs(1, 64)
    changed = x.repeat(64, 1, 1)
    changed.diagonal().add_(1)
    moved = (layer(changed)[0] - layer(x.expand(64, -1, -1))[0]).abs().amax(-1)
    assert not moved.tril(-1).any()
    assert (moved.diagonal() > 1e-6).all() and (moved[0] > 1e-9).all()


def test_dingo_state_on_the_inputs_device() -> None:
    """Nothing falls back on the default device, here one that holds no numbers."""
    layer = make_layer(update_rule="delta", n_kv_heads=1)
    x = inputs(2, 21)
    mask = torch.arange(21) < torch.tensor([[21], [10]])

    def calls() -> tuple[torch.Tensor, State]:
        _, state = layer(x, mask_BT=mask)
        return layer(x, state)

    # Once before, because rotary tables are made where they are cheapest and kept.
    expected, _ = calls()
    with torch.device("meta"):
        y, state = calls()
    assert {leaf.device for _, leaf in leaves(state)} == {x.device}
    assert torch.equal(y, expected)
    assert_on(layer.init_state(2, "meta"), "meta")


# jlamprou/Infini-Attention


@RULES
def test_jlamprou_rotary_not_in_memory(rule: str) -> None:
    """A segment writes the same memory whatever the order of its tokens, and a token reads the same at any slot."""
    layer = set_gates(make_layer(update_rule=rule), 40)
    x = inputs(1, 16)
    shuffled = torch.cat([x[:, torch.randperm(8)], x[:, 8:].flip(1)], 1)
    (y, state), (y2, state2) = layer(x), layer(shuffled)
    assert_close(memory_of(state2).m_BGKV, memory_of(state).m_BGKV, EXACT, "M")
    assert_close(y2[:, 8:].flip(1), y[:, 8:], EXACT, "y")


def test_jlamprou_delta_is_enabled() -> None:
    """The layer's option enables it, and so does a model's name alone."""
    x = inputs(1, 32)
    linear, delta = (make_layer(update_rule=rule) for rule in ("linear", "delta"))
    assert torch.equal(linear(x)[0][:, :16], delta(x)[0][:, :16])
    assert relative_error(delta(x)[0][:, 16:], linear(x)[0][:, 16:]) > 0.05
    ids = random_ids(1, 32)
    named = {name: make_model({"name": name})(ids).hidden_BTD for name in ("infini_linear", "infini_delta")}
    assert relative_error(named["infini_delta"][:, 16:], named["infini_linear"][:, 16:]) > 1e-3


def test_jlamprou_one_beta_per_head() -> None:
    """Each gate moves only its query head, even if key-value heads are shared."""
    layer = show_heads(make_layer(12, 4, 6, n_kv_heads=2, d_value=3))
    x = inputs(1, 16)
    before, _ = layer(x)
    assert layer.beta.shape == (4,)
    for head in range(4):
        with torch.no_grad():
            layer.beta[head] += 1
        after, _ = layer(x)
        changed = (after - before)[:, 8:].unflatten(-1, (4, 3)).abs().amax((0, 1, 3)) > 1e-6
        assert changed.tolist() == [h == head for h in range(4)]
        before = after


@RULES
def test_jlamprou_state_not_shared_across_batch(rule: str) -> None:
    """Rows with different pasts remember their own, though they read the same tokens next."""
    layer = make_layer(update_rule=rule)
    past, more = inputs(2, 16), inputs(1, 4, seed=1).expand(2, -1, -1)
    _, state = layer(past)
    y, _ = layer(more, state)
    assert relative_error(y[0], y[1]) > 0.05
    for row in (0, 1):
        alone, _ = layer(more[:1], layer(past[row : row + 1])[1])
        assert_close(y[row : row + 1], alone, EXACT, f"row {row}")
    assert all(leaf.shape[0] == 2 for _, leaf in leaves(state))


def test_jlamprou_local_attention_is_causal() -> None:
    layer = LocalAttention(12, 2, 6, 8).double()
    x = inputs(1, 8).requires_grad_()
    y, _ = layer(x)
    for t in range(8):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert not grad[0, t + 1 :].any() and (grad[0, : t + 1].abs().amax(-1) > 0).all()


# vmarinowski/infini-attention


@RULES
def test_vmarinowski_heads_are_not_slices_of_time(rule: str) -> None:
    """A layer of two heads is two layers of one head side by side, each over the whole of time."""
    layer = show_heads(make_layer(update_rule=rule))
    x = inputs(2, 27)
    y, state = layer(x)
    for head in range(2):
        part = slice(6 * head, 6 * head + 6)
        single = make_layer(12, 1, 6, update_rule=rule)
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(single, name).weight.copy_(getattr(layer, name).weight[part])
            single.o_proj.weight.copy_(torch.eye(12)[:, :6])
            single.beta.copy_(layer.beta[head : head + 1])
        alone, alone_state = single(x)
        assert_close(y[..., part], alone[..., :6], EXACT, f"head {head}")
        assert_close(memory_of(state).m_BGKV[:, head : head + 1], memory_of(alone_state).m_BGKV, EXACT, "M")


@RULES
def test_vmarinowski_normaliser_is_one_number_a_key_dimension(rule: str) -> None:
    """z has the shape of a key, not of a batch of tokens, and every query is divided by its own sigma(q) z."""
    layer = show_heads(make_layer(12, 2, 4, update_rule=rule, d_value=6))
    with torch.no_grad():
        # If every key has the same value, reading it back is exact only with the right normaliser.
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, 0] = torch.arange(12.0) + 1
    x = inputs(3, 16)
    x[..., 0] = 1
    y, state = set_gates(layer, 40)(x)
    assert memory_of(state).z_BGK.shape == (3, 2, 4)
    assert_close(y[:, 8:], (torch.arange(12.0).double() + 1).expand(3, 8, 12), EXACT, "constant value")


# NousResearch/infini-attention


@INFINI
def test_nous_padding_mask_is_respected(options: dict[str, Any]) -> None:
    """The contents of the padding change nothing, and a padded row gives the same result as alone."""
    model = make_model(options)
    ids = random_ids(2, 21)
    mask = torch.arange(21) < torch.tensor([[21], [13]])
    other = ids.clone()
    other[1, 13:] = (other[1, 13:] + 1) % VOCABULARY
    a, b = model(ids, mask_BT=mask), model(other, mask_BT=mask)
    assert torch.equal(a.hidden_BTD[mask], b.hidden_BTD[mask])
    assert_same_state(a.state, b.state, 0.0)
    alone = model(ids[1:, :13])
    assert_close(a.hidden_BTD[1:, :13], alone.hidden_BTD, EXACT, "padded row")
    assert_same_state(select_rows(a.state, torch.tensor([1])), alone.state, EXACT)


@INFINI
def test_nous_decoding_uses_a_state(options: dict[str, Any]) -> None:
    """A decoded token is computed from itself and a state of constant size, and equals the full forward pass."""
    model = make_model(options)
    ids = random_ids(1, 29)
    whole = model(ids).hidden_BTD
    state = model(ids[:, :11]).state
    size = state_bytes(state)
    for t in range(11, 29):
        hidden, state, _ = model(ids[:, t : t + 1], state)
        assert_close(hidden[:, 0], whole[:, t], EXACT, f"token {t}")
        assert state_bytes(state) == size


# huggingface/nanotron


@INFINI
@pytest.mark.parametrize("side", ["left", "right"])
def test_nanotron_padding_allowed(options: dict[str, Any], side: str) -> None:
    """A padded batch trains: the gradients are those of the rows apart."""
    model = make_model(options)
    ids, length = random_ids(2, 21), 13
    place = torch.arange(21)
    kept = place < length if side == "right" else place >= 21 - length
    mask = torch.stack([torch.ones_like(kept), kept])
    together = [model(ids, mask_BT=mask).hidden_BTD[mask]]
    apart = [model(row[m][None]).hidden_BTD[0] for row, m in zip(ids, mask, strict=True)]
    parameters = [p for name, p in model.named_parameters() if "unembedding" not in name]
    losses = ((torch.cat(hidden).square() * torch.arange(16.0)).sum() for hidden in (together, apart))
    ours, theirs = (torch.autograd.grad(loss, parameters) for loss in losses)
    assert all(relative_error(a, b) <= EXACT for a, b in zip(ours, theirs, strict=True))


@INFINI
def test_nanotron_streaming_memory_is_carried(options: dict[str, Any]) -> None:
    """A second forward pass continues from the first one's state; without it, it starts again."""
    model = make_model(options)
    ids = random_ids(1, 48)
    whole, first = model(ids).hidden_BTD, model(ids[:, :32])
    carried, anew = model(ids[:, 32:], first.state).hidden_BTD, model(ids[:, 32:]).hidden_BTD
    assert_close(carried, whole[:, 32:], EXACT, "carried")
    assert relative_error(anew, whole[:, 32:]) > 1e-2


# Found here


@pytest.mark.parametrize("options", [{}, {"memory_decay": 100.0}], ids=["sum", "decay"])
@RULES
def test_a_document_that_is_not_finite_ends_at_the_reset(rule: str, options: dict[str, Any]) -> None:
    """One call equals two that are cut there. 0 times NaN is NaN, so a product cannot clear a memory."""
    layer = make_layer(update_rule=rule, **options)
    N = layer.segment_length
    x, reset = inputs(2, 4 * N + 3), torch.zeros(2, 4 * N + 3, dtype=torch.bool)
    x[0, N + 2], reset[0, 3 * N] = math.nan, True
    x.requires_grad_()
    y, state = layer(x, reset_BT=reset)
    alone, last = layer(x[:1, 3 * N :])
    assert_close(y[:1, 3 * N :], alone, EXACT, "outputs")
    assert_same_state(State(state.clock, select_rows(state, torch.tensor([0])).layers).layers, last.layers, EXACT)
    (gradient,) = torch.autograd.grad(y[:, 3 * N :].sum(), x)
    assert torch.isfinite(gradient[:, 3 * N :]).all() and torch.isfinite(gradient[1]).all()


@RULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_memory_of_half_precision_weights_decays(rule: str, dtype: torch.dtype) -> None:
    """The sigmoid of a long half-life, 0.9993, is 1 in bfloat16: such a head never forgot."""
    layer = make_layer(update_rule=rule, memory_decay=1000.0).to(dtype)
    torch.nn.init.constant_(layer.decay, 7.25)
    N = layer.segment_length
    x = inputs(1, 501 * N, layer.d_model).to(dtype)
    before = layer(x[:, :N])[1]
    after = layer(x[:, N:], before, write_weight_BT=torch.zeros(1, 500 * N))[1]
    expected = torch.sigmoid(layer.decay.double()) ** 500
    kept = (memory_of(after).z_BGK / memory_of(before).z_BGK)[0].double().mean(-1)
    assert_close(kept, expected, 1e-3, "what remains")
