"""One layer inside a whole model against the oracle in float64: outputs, gradients and state, and each option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, assert_close
from tiny_llms import ADDITIONS, N, padded, prompt, tiny_llm

from infini.nn.ops import reference
from infini.pretrained.llm import InfiniCache

EXACT = TOLERANCE[torch.float64]
THETA = 10000.0
RULES = pytest.mark.parametrize("rule", ["linear", "delta"])
H, G, K = 4, 2, 8


def exact_model(rule: str, **options: Any) -> Any:
    """A model whose cosines are float64's: transformers has float32's."""
    model = tiny_llm("llama", rule, **options)
    with torch.no_grad():
        for gate in (p for n, p in model.named_parameters() if n.endswith("beta")):
            gate.copy_(torch.linspace(-1, 1, H))
        for decay in (p for n, p in model.named_parameters() if n.endswith("decay")):
            decay.copy_(torch.linspace(-0.5, 1.5, G))
        # Logits on both sides of 0; the last lies below the bound of -20 for half of the keys.
        for weight in (p for n, p in model.named_parameters() if n.endswith("input_weight")):
            weight.copy_(torch.linspace(-2, 3, G * K).view(G, K) * torch.tensor([[1.0], [9.0]]))
        for bias in (p for n, p in model.named_parameters() if n.endswith("input_bias")):
            bias.copy_(torch.linspace(-0.5, 0.5, G))
    positions = model.model.infini_settings.positions
    angle = torch.outer(torch.arange(positions).double(), THETA ** (-torch.arange(0, K, 2).double() / K))
    tables = {None: (angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))}
    model.model._infini_tables = {(torch.device("cpu"), torch.float64): tables}
    return model


def oracle(
    q_TK: torch.Tensor,
    k_TK: torch.Tensor,
    v_TV: torch.Tensor,
    beta: torch.Tensor,
    remains: torch.Tensor,
    writes_T: torch.Tensor,
    rule: str,
    depth: int,
    sinks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row and head, segment by segment: attention over the sinks, `depth` segments; the memory of what is older."""
    m, z = q_TK.new_zeros(K, v_TV.shape[1]), q_TK.new_zeros(K)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs = []
    for s, start in enumerate(range(0, len(q_TK), N)):
        stop = min(start + N, len(q_TK))
        first = max(0, start - (depth - 1) * N)
        seen = list(range(first, stop))
        if s >= depth:
            seen = list(range(sinks)) + seen
        own = len(seen) - (stop - start)
        q, k = reference.rotary(q_TK[start:stop], own, THETA), reference.rotary(k_TK[seen], 0, THETA)
        score = q @ k.T / math.sqrt(K)
        future = torch.ones_like(score, dtype=torch.bool).triu(own + 1)
        a = torch.softmax(score.masked_fill(future, -math.inf), -1) @ v_TV[seen]
        if s >= depth:
            share = torch.sigmoid(beta)
            a = share * reference.retrieve(q_TK[start:stop], *past[s - depth]) + (1 - share) * a
        outputs.append(a)
        if stop - start == N:
            k_NK, v_NV, weight_N = k_TK[start:stop], v_TV[start:stop], writes_T[start:stop]
            if rule == "linear":
                m, z = reference.update_linear(m, z, k_NK, v_NV, weight_N)
            else:
                m, z = reference.update_delta(m, z, k_NK, v_NV, weight_N, s == 0)
            m, z = remains * m, remains * z
            past.append((m, z))
    return torch.cat(outputs), m, z


def writes_by_oracle(gate: Any, k_TK: torch.Tensor, g: int) -> torch.Tensor:
    """The factor on what each token of key-value head g writes."""
    if not gate.settings.input_gate:
        return k_TK.new_ones(len(k_TK))
    return reference.input_gate(k_TK, gate.input_weight[g].double(), gate.input_bias[g].double())


def layer_by_oracle(model: Any, embeds_BTD: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input of the first layer's output projection [B, T, H K], and M, z by key-value head."""
    settings, layer = model.model.infini_settings, model.model.layers[0]
    x, attention = layer.input_layernorm(embeds_BTD), layer.self_attn
    q, k, v = (p(x).unflatten(-1, (-1, K)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    beta = attention.infini_gate.beta.double()
    decays = settings.memory_decay is not None
    remains = torch.sigmoid(attention.infini_gate.decay.double()) if decays else x.new_ones(G)
    rows, ms, zs = [], [], []
    for b in range(len(x)):
        heads = []
        for h in range(H):
            g = h // (H // G)
            writes = writes_by_oracle(attention.infini_gate, k[b, :, g], g)
            of_head = (q[b, :, h], k[b, :, g], v[b, :, g], beta[h], remains[g], writes)
            heads.append(oracle(*of_head, rule, settings.depth, settings.sinks))
        rows.append(torch.cat([a for a, _, _ in heads], 1))
        ms.append(torch.stack([m for _, m, _ in heads[:: H // G]]))
        zs.append(torch.stack([z for _, _, z in heads[:: H // G]]))
    return torch.stack(rows), torch.stack(ms), torch.stack(zs)


def layer_by_model(model: Any, embeds_BTD: torch.Tensor, **options: Any) -> torch.Tensor:
    found = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(inputs_embeds=embeds_BTD, **options)
    hook.remove()
    return found[0]


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"window": "previous"}, {"sinks": 3}, {"window": "previous", "sinks": 2}, {"memory_decay": 4},
                {"input_gate": "sigmoid"}, ADDITIONS],
    ids=["paper", "previous", "sinks", "both", "decay", "input", "all"],
)  # fmt: skip


@RULES
@OPTIONS
def test_outputs_gradients_and_state_are_the_oracles(rule: str, options: dict[str, Any]) -> None:
    model = exact_model(rule, **options)
    embeds = torch.randn(2, 4 * N + 3, 32, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    expected, m, z = layer_by_oracle(model, embeds, rule)
    cache = InfiniCache(model)
    with torch.no_grad():
        assert_close(layer_by_model(model, embeds, past_key_values=cache), expected, EXACT, "with a cache")
    state = cache.layers[0].state
    assert_close(state.memory.m_BGKV, m, EXACT, "M")
    assert_close(state.memory.z_BGK, z, EXACT, "z")
    attention = model.model.layers[0].self_attn
    gate = dict(attention.infini_gate.named_parameters())
    leaves = [embeds, *gate.values(), *(p.weight for p in (attention.q_proj, attention.k_proj))]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    output = layer_by_model(model, embeds, use_cache=False)
    assert_close(output, expected, EXACT, "without one")
    ours = torch.autograd.grad((output * weight).sum(), leaves)
    for name, a, b in zip(("input", *gate, "q_proj", "k_proj"), ours, theirs, strict=True):
        # The gate and the decay are kept in float32.
        assert_close(a, b, 1e-6 if name in gate else EXACT, name)


@RULES
@OPTIONS
def test_the_state_is_the_oracles_however_calls_are_cut(rule: str, options: dict[str, Any]) -> None:
    """Token by token, across rows that stand at different places of their segments."""
    model = exact_model(rule, **options)
    prompts, ids, mask = padded([N + 2, 3, 2 * N])
    more = prompt(3, 2 * N + 1, seed=9)
    cache = InfiniCache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for t in range(more.shape[1]):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            model(more[:, t : t + 1], attention_mask=mask, past_key_values=cache)
        for row, one in enumerate(prompts):
            read = torch.cat([one, more[row]])[None]
            assert cache.lengths[row] == read.shape[1]
            _, m, z = layer_by_oracle(model, model.get_input_embeddings()(read), rule)
            state = cache.layers[0].state
            assert_close(state.memory.m_BGKV[row : row + 1], m, EXACT, f"M of row {row}")
            assert_close(state.memory.z_BGK[row : row + 1], z, EXACT, f"z of row {row}")


@OPTIONS
def test_calls_of_several_tokens_are_one_call(options: dict[str, Any]) -> None:
    """Cut inside the first segment, inside others and at their ends."""
    model, ids = exact_model("delta", **options), prompt(2, 4 * N + 3)
    cache, start, logits = InfiniCache(model), 0, []
    with torch.no_grad():
        for length in (1, 2, N - 3, N, 3, 2 * N):
            logits.append(model(ids[:, start : start + length], past_key_values=cache).logits)
            start += length
        assert_close(torch.cat(logits, 1), model(ids, use_cache=False).logits, EXACT, "logits")


def test_first_segment_zero_reads_nothing(rule: str = "delta") -> None:
    """The gate takes its share of local attention all the same."""
    model = exact_model(rule, first_segment="zero")
    embeds = torch.randn(1, N, 32, generator=torch.Generator().manual_seed(1)).double()
    local, _, _ = layer_by_oracle(model, embeds, rule)
    share = 1 - torch.sigmoid(model.model.layers[0].self_attn.infini_gate.beta.double())
    assert_close(layer_by_model(model, embeds), local * share.repeat_interleave(K), 1e-6, "output")
