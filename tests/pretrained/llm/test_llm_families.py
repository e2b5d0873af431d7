"""Families by properties: every cell of the table is a test."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, assert_close
from tiny_llms import (
    ADDITIONS,
    FAMILIES,
    VARIANTS,
    N,
    greedy,
    greedy_by_hand,
    logits,
    logits_in_calls,
    padded,
    prompt,
    tiny_base,
    tiny_llm,
)
from transformers import AutoModelForCausalLM

from infini.pretrained.llm import GATE_MODULES, inject

ALL = pytest.mark.parametrize("name", VARIANTS)
EACH = pytest.mark.parametrize("name", FAMILIES)
_OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "previous": {"window": "previous"},
    "sinks": {"sinks": 2},
    "decay": {"memory_decay": 2.5},
    "input": {"input_gate": "sigmoid"},
    "all": {**ADDITIONS, "sinks": 3},
}
# One family with each option, every family without any and with all.
_CHOICES = [(name, kind) for name in FAMILIES for kind in _OPTIONS if name == "llama" or kind in ("paper", "all")]
_ODD = ("llama", "gemma3", "phi3")
"""Families that differ most: one as plain as can be, one with sliding layers, one with fused weights and partial
rotation. The others have options in slow tests alone."""


def with_rules(names: Iterable[str]) -> Any:
    """Every name with Delta, one with Linear too; the others with Linear are slow."""
    return pytest.mark.parametrize(
        ("name", "rule"),
        [
            pytest.param(name, rule, id=f"{rule}-{name}", marks=_slow(rule == "linear" and name != "llama"))
            for rule in ("linear", "delta")
            for name in names
        ],
    )


def with_options(plain_is_slow: bool) -> Any:
    """Every family with and without options. plain_is_slow: another test has every family without."""
    return pytest.mark.parametrize(
        ("name", "options"),
        [
            pytest.param(
                name,
                _OPTIONS[kind],
                id=f"{name}-{kind}",
                marks=_slow(plain_is_slow if kind == "paper" else name not in _ODD),
            )
            for name, kind in _CHOICES
        ],
    )


def _slow(yes: bool) -> Any:
    return [pytest.mark.slow] if yes else []


def tolerance(name: str, dtype: torch.dtype = torch.float64) -> float:
    """Gemma 2's own kernel takes the softmax in float32."""
    return TOLERANCE[torch.float32 if name == "gemma2" else dtype]


@ALL
def test_equals_the_base_within_a_segment(name: str) -> None:
    """Bit for bit in float64, and to 1e-5 in float32, whatever the gates say."""
    ids = prompt(2, N)
    for dtype, most in ((torch.float64, 0.0), (torch.float32, 1e-5)):
        model, base = tiny_llm(name, dtype=dtype, gate_init=3.0), tiny_base(name, dtype)
        for length in (1, N - 1, N):
            ours, theirs = logits(model, ids[:, :length]), logits(base, ids[:, :length])
            assert (ours - theirs).abs().max() <= most, f"{length} tokens in {dtype}"
    assert (logits(model, prompt(2, 3 * N)) - logits(base, prompt(2, 3 * N)))[:, N:].abs().max() > 0.1


@with_options(plain_is_slow=True)
def test_options_equal_the_base_within_what_attention_sees(name: str, options: dict[str, Any]) -> None:
    """One segment, or two with window=previous. The cosines of other positions differ by float32's rounding."""
    ids = prompt(2, 2 * N if "window" in options else N)
    ours, theirs = logits(tiny_llm(name, gate_init=3.0, **options), ids), logits(tiny_base(name), ids)
    assert (ours - theirs).abs().max() < 1e-5


@with_rules(FAMILIES)
def test_shut_gates_are_the_base_with_segment_local_attention(name: str, rule: str) -> None:
    """Every segment as the base reads it alone, from position 0. Here every layer is local."""
    base = tiny_base(name, sliding_window=4 * N) if "gemma" in name else tiny_base(name)
    ids = prompt(2, 3 * N + 3)
    alone = torch.cat([logits(base, part) for part in ids.split(N, 1)], 1)
    layers = range(base.config.num_hidden_layers)
    shut = inject(copy.deepcopy(base), N, rule, layers, gate_init=-1e4).eval()
    assert_close(logits(shut, ids), alone, tolerance(name), "whole")
    assert_close(logits_in_calls(shut, ids, [1] * ids.shape[1])[0], alone, tolerance(name), "token by token")


@with_rules(VARIANTS)
def test_decode_equals_forward_at_every_position(name: str, rule: str) -> None:
    """Token by token, and in calls that end before, on and behind boundaries."""
    ids = prompt(2, 3 * N + 3)
    one_by_one = [1] * ids.shape[1]
    cuts = [one_by_one, [N - 1, 1, 2 * N, 3], [N + 1, N + 1, 1, N]]
    for dtype, ways in ((torch.float64, cuts), (torch.float32, [one_by_one])):
        model = tiny_llm(name, rule, dtype)
        whole = logits(model, ids)
        for calls in ways:
            assert_close(logits_in_calls(model, ids, calls)[0], whole, tolerance(name, dtype), f"{calls} in {dtype}")


@with_options(plain_is_slow=True)
def test_options_decode_as_they_forward(name: str, options: dict[str, Any]) -> None:
    ids = prompt(2, 4 * N + 3)
    model = tiny_llm(name, **options)
    whole = logits(model, ids)
    for calls in ([1] * ids.shape[1], [1, N - 2, N + 3, 2 * N + 1]):
        assert_close(logits_in_calls(model, ids, calls)[0], whole, tolerance(name), f"{calls}")


@with_options(plain_is_slow=False)
def test_padded_rows_are_as_alone(name: str, options: dict[str, Any]) -> None:
    """A batch of many lengths gives the tokens of stock generate(), and logits with padding on either side."""
    model = tiny_llm(name, **options)
    prompts, ids, mask = padded([3, N, 2 * N + 1, 3 * N - 1])
    # Every row passes the end of a segment.
    drawn = greedy(model, ids, N, attention_mask=mask)
    for row, one in zip(drawn, prompts, strict=True):
        assert torch.equal(row[-N:], greedy(model, one[None], N)[0, -N:]), f"{len(one)} tokens"
    for side in ("left", "right"):
        prompts, ids, mask = padded([5, 2 * N + 1, N], side=side)
        together = logits(model, ids, attention_mask=mask)
        # Layers that slide stay the base's, whose cosines of absolute positions have float32's rounding.
        most = TOLERANCE[torch.float32] if name == "gemma3" else tolerance(name)
        for row, real, one in zip(together, mask.bool(), prompts, strict=True):
            assert_close(row[real], logits(model, one[None])[0], most, f"{side}, {len(one)} tokens")


@EACH
def test_beams_are_those_of_whole_forward_passes(name: str) -> None:
    """The cache's rows are reordered, padded ones too."""
    model = tiny_llm(name)
    _, ids, mask = padded([N + 3, 2 * N])
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    # The shorter row passes the end of its second segment.
    drawn, again = (greedy(model, ids, N - 2, use_cache=cached, **options) for cached in (True, False))
    assert torch.equal(drawn, again)


@EACH
def test_prefill_in_chunks(name: str) -> None:
    model = tiny_llm(name)
    ids = prompt(1, 3 * N + 2)
    expected = greedy(model, ids, 2)
    for size in (3, N, N + 1, 100):
        assert torch.equal(greedy(model, ids, 2, prefill_chunk_size=size), expected), f"chunks of {size}"


@EACH
@pytest.mark.parametrize("tokens", [pytest.param(2 * N + d, id=f"2N{d:+}", marks=_slow(d != 0)) for d in (-1, 0, 1)])
def test_greedy_is_that_of_whole_forward_passes(name: str, tokens: int) -> None:
    """Prompts around boundaries are drawn from by default in test_llm_generation.py, in two families."""
    model, ids = tiny_llm(name), prompt(2, tokens)
    assert torch.equal(greedy(model, ids, N + 2), greedy_by_hand(model, ids, N + 2))


@EACH
def test_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    """AutoModelForCausalLM loads it with gates where they were moved to; the stock class finds the base's weights."""
    model, ids = tiny_llm(name, "linear", torch.float32, sinks=1), prompt(1, 3 * N)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith("beta")):
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.config.infini == model.config.infini
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    base = tiny_base(name, torch.float32)
    stock = type(base).from_pretrained(tmp_path, config=base.config)
    assert torch.equal(logits(stock, ids), logits(base, ids))


def gradients(model: Any, ids: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **options).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EACH
def test_checkpointed_activations_give_the_same_gradients(name: str) -> None:
    """Every beta gets a gradient, too."""
    model, ids = tiny_llm(name).train(), prompt(2, 3 * N + 3)
    expected = gradients(model, ids)
    assert len([n for n in expected if n.endswith("beta")]) == len(model.config.infini["layers"])
    model.activation_checkpointing_enable()
    again = gradients(model, ids)
    assert again.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(again[key], value, 1e-10, key)


@EACH
def test_lora_trains_adapters_gates_and_norms_alone(name: str, tmp_path: Path) -> None:
    """The files that it saves give the same logits again."""
    peft = pytest.importorskip("peft")
    base = tiny_llm(name, dtype=torch.float32, memory_decay=2.5, input_gate="sigmoid")
    projections = "qkv_proj" if name == "phi3" else "q_proj"
    config = peft.LoraConfig(r=2, target_modules=[projections], modules_to_save=[*GATE_MODULES, "norm"])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in n or "infini_gate.modules_to_save." in n or "norm.modules_to_save." in n for n in trained)
    assert sum(n.endswith(".beta") for n in trained) == len(base.config.infini["layers"])
    ids, optimizer = prompt(1, 3 * N), torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    start = dict(base.named_parameters())
    for n, p in model.named_parameters():
        if ".modules_to_save." in n and ".infini_gate." in n:
            own = n.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            assert (p != start[own]).all(), n
    model.eval().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert not torch.equal(logits(loaded, ids), logits(base, ids))
