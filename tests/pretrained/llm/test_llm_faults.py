"""Faults of other implementations of Infini-attention inside language models, each in a test named after the
implementation that had it; and the traps of transformers that lead there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, relative_error
from tiny_llms import ADDITIONS, VOCABULARY, N, greedy, logits, logits_in_calls, padded, prompt, tiny_base, tiny_llm
from transformers import AutoModelForCausalLM

from infini.nn.ops import memory
from infini.nn.state import leaves, map_state
from infini.pretrained.llm import InfiniCache, inject

EXACT = 1e-10
RULES = pytest.mark.parametrize("rule", ["linear", "delta"])


def read(model: Any, ids: torch.Tensor) -> InfiniCache:
    return logits_in_calls(model, ids, [ids.shape[1]])[1]


def with_memory(cache: InfiniCache, change: Any) -> InfiniCache:
    """A fork whose layers' memories, pending ones too, are changed."""
    other = cache.fork()
    for layer in other.memory_layers.values():
        s = layer.state
        layer.state = s._replace(memory=map_state(change, s.memory), pending=map_state(change, s.pending))
    return other


def first_layer_output(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """The input of the first output projection [B, T, H, K]."""
    found = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=cache is not None)
    hook.remove()
    return found[0].unflatten(-1, (4, 8))


# Beomi/InfiniTransformer


@RULES
def test_beomi_memory_is_not_detached_between_segments(rule: str) -> None:
    """The last segment's gradient in the first segment's input is what moving it does."""
    model = tiny_llm(rule=rule).train()
    for layer in model.model.layers:
        # transformers' norms compute in float32, too coarse for a difference.
        layer.input_layernorm = layer.post_attention_layernorm = torch.nn.Identity()
    model.model.norm = torch.nn.Identity()
    embeds = model.get_input_embeddings()(prompt(1, 4 * N)).detach()
    step = torch.zeros_like(embeds)
    step[:, :N] = torch.randn(1, N, 32, generator=torch.Generator().manual_seed(0)).double() * 1e-6

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=x).logits[:, 3 * N :].square().mean()

    moved = loss(embeds + step) - loss(embeds - step)
    (gradient,) = torch.autograd.grad(loss(leaf := embeds.clone().requires_grad_()), leaf)
    assert gradient[:, :N].abs().max() > 1e-6
    assert_close(2 * (gradient * step).sum(), moved, 1e-4, "gradient")


@pytest.mark.parametrize("group", [0, 1])
def test_beomi_grouped_query_heads_read_their_own_memory(group: int) -> None:
    """Heads 0 and 1 read the memory of key-value head 0, heads 2 and 3 that of head 1."""
    model = tiny_llm()
    cache, ids = read(model, prompt(1, 2 * N)), prompt(1, 3, seed=1)

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, group] += 1
        return x

    plain = first_layer_output(model, ids, cache.fork())
    moved = (first_layer_output(model, ids, with_memory(cache, change)) - plain).abs().amax((0, 1, 3)) > 1e-6
    assert moved.tolist() == [group == 0, group == 0, group == 1, group == 1]


@RULES
def test_beomi_memory_is_read_while_decoding(rule: str) -> None:
    """Inside a segment, whose memory does not move, what it holds still comes out at every token."""
    model, ids = tiny_llm(rule=rule), prompt(1, 3 * N)
    cache = read(model, ids[:, : 2 * N])
    blind = with_memory(cache, torch.zeros_like)
    whole = logits(model, ids)
    for t in range(2 * N, 3 * N - 1):
        seen, _ = logits_in_calls(model, ids[:, t : t + 1], [1], cache)
        unseen, _ = logits_in_calls(model, ids[:, t : t + 1], [1], blind)
        assert_close(seen[:, 0], whole[:, t], EXACT, f"token {t}")
        assert relative_error(unseen, seen) > 0.01


@RULES
@pytest.mark.parametrize("n_segments", [1, 3])
def test_beomi_prompt_of_whole_segments_is_written_once(rule: str, n_segments: int) -> None:
    """z is the sum of sigma(k), every token once, and the first drawn token writes nothing to what is read."""
    model, ids = tiny_llm(rule=rule), prompt(1, n_segments * N + 1)
    cache = read(model, ids[:, :-1])
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.get_input_embeddings()(ids[:, :-1]))
    once = memory.sigma(layer.self_attn.k_proj(x)).sum(1).unflatten(-1, (2, 8))
    before = cache.layers[0].state.memory
    assert_close(before.z_BGK, once, EXACT, "z")
    after = logits_in_calls(model, ids[:, -1:], [1], cache)[1].layers[0].state.memory
    assert torch.equal(after.z_BGK, before.z_BGK) and torch.equal(after.m_BGKV, before.m_BGKV)


@RULES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_beomi_memory_in_half_precision_does_not_overflow(rule: str, dtype: torch.dtype) -> None:
    """An M beyond float16's 65,504 stays finite and right, in one call and token by token, and so do gradients."""
    exact = tiny_llm(rule=rule)
    with torch.no_grad():
        for layer in exact.model.layers:
            layer.self_attn.v_proj.weight.mul_(3e3)
            layer.self_attn.o_proj.weight.div_(3e3)
    # The same numbers in both, so that rounding of weights is no error.
    exact = exact.to(dtype).double()
    narrow = inject(tiny_base(), N, rule, gate_init=-0.5).eval()
    narrow.load_state_dict(exact.state_dict())
    narrow = narrow.to(dtype)
    ids = prompt(1, 40 * N)
    for calls in ([40 * N], [36 * N - 3] + [1] * (4 * N + 3)):
        found, cache = logits_in_calls(narrow, ids, calls)
        state = cache.layers[0].state.memory
        assert found.isfinite().all() and state.m_BGKV.isfinite().all()
        expected = read(exact, ids).layers[0].state.memory
        assert expected.m_BGKV.abs().max() > 65_504 and state.m_BGKV.dtype == torch.float32
        assert_close(state.m_BGKV, expected.m_BGKV, 2e-2, "M")
        assert_close(state.z_BGK, expected.z_BGK, 2e-2, "z")
    narrow.train()(ids[:, : 10 * N]).logits.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in narrow.parameters() if p.grad is not None)


@RULES
def test_beomi_a_normaliser_of_zero_divides_nothing(rule: str) -> None:
    """Keys so far below 0 that float32 holds none of what they write: finite logits and gradients, cut as you like."""
    model = tiny_llm("qwen2", rule, torch.float32, gate_init=3.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.fill_(-300.0)
    ids = prompt(1, 3 * N + 3)
    cache = read(model, ids)
    assert not cache.layers[0].state.pending.z_BGK.any()
    for calls in ([3 * N + 3], [1] * (3 * N + 3)):
        model.zero_grad()
        carried, parts = InfiniCache(model), []
        for part in ids.split(calls, 1):
            parts.append(model.train()(part, past_key_values=carried).logits)
        torch.cat(parts, 1).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# lucidrains/infini-transformer-pytorch


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("chunks", [None, 5])
def test_lucidrains_prompt_segments_are_not_dropped(name: str, chunks: int | None) -> None:
    """The first tokens of a prompt of several segments change what generate() draws from."""
    model, ids = tiny_llm(name), prompt(1, 4 * N + 3)
    other = ids.clone()
    other[:, :N] = (other[:, :N] - 1) % (VOCABULARY - 2) + 2
    options = {"return_dict_in_generate": True, "output_logits": True, "prefill_chunk_size": chunks}
    a, b = (greedy(model, x, 2, **options).logits[0] for x in (ids, other))
    assert relative_error(a, b) > 1e-3


def test_lucidrains_gate_weights_the_memory() -> None:
    """sigmoid(beta) is the weight of the memory: open gates read it alone, shut gates do not see it."""
    model, ids = tiny_llm(), prompt(1, 3, seed=1)
    cache = read(model, prompt(1, 2 * N))
    far = with_memory(cache, lambda x: x * (torch.arange(x.shape[-1]).double() + 1) if x.dim() == 4 else x)
    for beta, changes in ((40.0, True), (-1e4, False)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(beta) if name.endswith("beta") else None
        a, b = (first_layer_output(model, ids, c.fork()) for c in (cache, far))
        scaled = a * (torch.arange(8).double() + 1)
        assert_close(b, scaled if changes else a, 1e-6, f"beta {beta}")


def test_lucidrains_gate_is_not_saturated_at_the_start() -> None:
    """Every beta of a model from inject has a gradient that moves it."""
    model = inject(tiny_base(), N).train()
    ids = prompt(2, 4 * N)
    model(ids, labels=ids).loss.backward()
    betas = [p for name, p in model.named_parameters() if name.endswith("beta")]
    assert all((0.01 < p.sigmoid()).all() and (p.sigmoid() < 0.99).all() and (p.grad != 0).all() for p in betas)


# dingo-actual/infini-transformer


@pytest.mark.parametrize("options", [{}, ADDITIONS], ids=["paper", "all"])
def test_dingo_no_leak_across_segments(options: dict[str, Any]) -> None:
    """Row t has token t changed: every logit from there on moves, none before."""
    model, ids = tiny_llm(**options), prompt(1, 4 * N)
    changed = ids.repeat(4 * N, 1)
    changed.diagonal().add_(1).clamp_(max=VOCABULARY - 1)
    changed = torch.where(changed == ids, changed - 1, changed)
    changed = torch.where(torch.eye(4 * N).bool(), changed, ids)
    moved = (logits(model, changed) - logits(model, ids.expand(4 * N, -1))).abs().amax(-1)
    assert moved.tril(-1).max() < 1e-12 and (moved.diagonal() > 1e-6).all() and (moved[0] > 1e-9).all()


def test_dingo_state_on_the_inputs_device() -> None:
    """Nothing falls back on the default device, here one that holds no numbers."""
    model, (_, ids, mask) = tiny_llm(window="previous", sinks=2), padded([2 * N + 1, 3])
    with torch.no_grad():
        expected = [model(ids, attention_mask=mask).logits, logits(model, ids)]
        with torch.device("meta"):
            found = [model(ids, attention_mask=mask), model(ids, use_cache=False)]
    states = [layer.state for layer in found[0].past_key_values.layers]
    assert {leaf.device.type for state in states for _, leaf in leaves(state)} == {"cpu"}
    assert all(torch.equal(a.logits, b) for a, b in zip(found, expected, strict=True))


# jlamprou/Infini-Attention


@RULES
def test_jlamprou_rotary_not_in_memory(rule: str) -> None:
    """A layer writes the same memory whatever the order of a segment's tokens."""
    model, ids = tiny_llm(rule=rule), prompt(1, N)
    states = [read(model, x).layers[0].state.memory for x in (ids, ids.flip(1))]
    assert_close(states[0].m_BGKV, states[1].m_BGKV, EXACT, "M")


def test_jlamprou_delta_is_enabled() -> None:
    ids = prompt(1, 3 * N)
    linear, delta = (logits(tiny_llm(rule=rule), ids) for rule in ("linear", "delta"))
    assert torch.equal(linear[:, : 2 * N], delta[:, : 2 * N])
    assert relative_error(delta[:, 2 * N :], linear[:, 2 * N :]) > 1e-3


def test_jlamprou_one_beta_a_query_head() -> None:
    model, ids = tiny_llm(), prompt(1, 2 * N)
    before = first_layer_output(model, ids)
    for head in range(4):
        with torch.no_grad():
            model.model.layers[0].self_attn.infini_gate.beta[head] += 1
        after = first_layer_output(model, ids)
        changed = (after - before)[:, N:].abs().amax((0, 1, 3)) > 1e-6
        assert changed.tolist() == [h == head for h in range(4)]
        before = after


def test_jlamprou_state_not_shared_across_batch() -> None:
    model, past, more = tiny_llm(), prompt(2, 2 * N + 1), prompt(1, 4, seed=1).repeat(2, 1)
    found, _ = logits_in_calls(model, more, [4], read(model, past))
    assert relative_error(found[0], found[1]) > 0.01
    for row in (0, 1):
        alone, _ = logits_in_calls(model, more[:1], [4], read(model, past[row : row + 1]))
        assert_close(found[row : row + 1], alone, EXACT, f"row {row}")


# NousResearch/infini-attention, huggingface/nanotron


@RULES
def test_nous_padding_reaches_no_memory(rule: str) -> None:
    """M and z of a padded row are those of the row alone, bit for bit whatever stands in the padding."""
    model = tiny_llm(rule=rule)
    prompts, ids, mask = padded([N + 3, 3 * N + 1])
    with torch.no_grad():
        first = model(ids, attention_mask=mask).past_key_values
        ids = torch.where(mask.bool(), ids, 5)
        second = model(ids, attention_mask=mask).past_key_values
    for i in first.memory_layers:
        a, b = (cache.layers[i].state.pending for cache in (first, second))
        assert torch.equal(a.m_BGKV, b.m_BGKV) and torch.equal(a.z_BGK, b.z_BGK)
        for row, one in enumerate(prompts):
            alone = read(model, one[None]).layers[i].state.pending
            assert_close(a.m_BGKV[row : row + 1], alone.m_BGKV, EXACT, "M")
            assert_close(a.z_BGK[row : row + 1], alone.z_BGK, EXACT, "z")


def test_nous_decoding_uses_the_cache() -> None:
    """Drawing a token reads one token."""
    model, widths = tiny_llm(), []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    greedy(model, prompt(1, 2 * N + 1), 5)
    hook.remove()
    assert widths == [2 * N + 1, 1, 1, 1, 1]


def test_nanotron_memory_is_carried_from_call_to_call() -> None:
    model, ids = tiny_llm(), prompt(1, 6 * N)
    whole, cache = logits(model, ids), read(model, ids[:, : 4 * N])
    carried, _ = logits_in_calls(model, ids[:, 4 * N :], [2 * N], cache)
    assert_close(carried, whole[:, 4 * N :], EXACT, "carried")
    assert relative_error(logits(model, ids[:, 4 * N :]), whole[:, 4 * N :]) > 1e-2


# transformers


def test_transformers_attn_implementation_does_not_replace_the_memory(tmp_path: Any) -> None:
    """Both the loading option and the call are tested."""
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    model.save_pretrained(tmp_path)
    for kind in ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kind)
        loaded.set_attn_implementation(kind)
        assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_transformers_continued_segments_see_all_their_keys() -> None:
    """Several queries behind more keys, without a mask: the stock kernel would cut the keys."""
    for kernel in ("sdpa", "eager"):
        model, ids = tiny_llm(local_attention=kernel, dtype=torch.float32), prompt(1, 2 * N)
        found, _ = logits_in_calls(model, ids, [3, 4, 2, 7])
        assert_close(found, logits(model, ids), 1e-5, kernel)


def test_transformers_phi3_keeps_its_cache_beyond_its_original_length() -> None:
    model, widths = tiny_llm("phi3_longrope"), []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    ids = prompt(1, 62)
    drawn = greedy(model, ids, 6)
    hook.remove()
    assert widths == [62, 1, 1, 1, 1, 1]
    assert_close(logits_in_calls(model, drawn, [66, 1, 1])[0], logits(model, drawn), EXACT, "logits")
