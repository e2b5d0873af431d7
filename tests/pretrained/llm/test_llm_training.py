"""Training injected models: gradients, the Trainer, mixed precision, gates, and a state carried between sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, relative_error
from ranks import group_of_one
from tiny_llms import ADDITIONS, GATE, N, logits, padded, prompt, tiny_base, tiny_llm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from infini.errors import InputError
from infini.nn.state import scale_memory
from infini.pretrained.llm import GATE_MODULES, InfiniCache, parameter_groups
from infini.pretrained.llm.language_model import PretrainedLM
from infini.training.additions.length_extension import extended_in_two_calls

RULES = pytest.mark.parametrize("rule", ["linear", "delta"])
OPTIONS = pytest.mark.parametrize("options", [{}, ADDITIONS], ids=["paper", "all"])


def kept_in_float32(name: str) -> bool:
    """Whether a parameter's gradient is rounded to float32, in a model of float64, too."""
    return "beta" in name or "infini_gate.input" in name


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_in_calls(model: Any, ids: torch.Tensor, calls: list[int], detach: bool = False) -> torch.Tensor:
    """The loss of all tokens, with the state carried from call to call."""
    cache, parts = InfiniCache(model), []
    for part in ids.split(calls, 1):
        parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        if detach:
            cache.detach()
    return torch.cat(parts, 1).square().mean()


@RULES
@OPTIONS
def test_a_carried_state_gives_the_gradients_of_one_call(rule: str, options: dict[str, Any]) -> None:
    """Unless it is detached, where they end; the loss is the same."""
    model, ids = tiny_llm(rule=rule, **options).train(), prompt(2, 4 * N + 3)
    loss = model(ids).logits.square().mean()
    expected = gradients(model, loss)
    for calls in ([2 * N, 2 * N + 3], [N + 3, 1, 3 * N - 1]):
        again = loss_in_calls(model, ids, calls)
        assert_close(again, loss, 1e-10, "loss")
        for name, gradient in gradients(model, again).items():
            assert_close(gradient, expected[name], 1e-6 if kept_in_float32(name) else 1e-10, f"{calls}: {name}")
        cut = loss_in_calls(model, ids, calls, detach=True)
        assert_close(cut, loss, 1e-10, "loss")
        assert relative_error(gradients(model, cut)["model.layers.0.self_attn.k_proj.weight"],
                              expected["model.layers.0.self_attn.k_proj.weight"]) > 1e-3  # fmt: skip


@OPTIONS
def test_a_carried_state_and_checkpointed_activations(options: dict[str, Any]) -> None:
    """The layers' second forward pass begins where the first did, and writes nothing twice."""
    model, ids = tiny_llm(**options).train(), prompt(2, 4 * N + 3)
    calls = [N + 3, 3 * N]
    loss = loss_in_calls(model, ids, calls)
    expected = gradients(model, loss)
    model.activation_checkpointing_enable()
    again = loss_in_calls(model, ids, calls)
    assert_close(again, loss, 1e-10, "loss")
    for name, gradient in gradients(model, again).items():
        assert_close(gradient, expected[name], 1e-10, name)
    cache = model(ids, past_key_values=InfiniCache(model), use_cache=True).past_key_values
    assert cache.lengths == [4 * N + 3] * 2
    with pytest.raises(ValueError, match="only where every layer has a memory"):
        some = tiny_llm("gemma3").train()
        some.activation_checkpointing_enable()
        some(ids, past_key_values=InfiniCache(some))


def test_training_keeps_no_state_unless_asked() -> None:
    model, ids = tiny_llm().train(), prompt(1, N)
    assert model(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, InfiniCache)
    assert isinstance(model.eval()(ids).past_key_values, InfiniCache)


def test_padded_rows_give_the_gradients_of_rows_apart() -> None:
    model = tiny_llm().train()
    for side in ("left", "right"):
        prompts, ids, mask = padded([5, 2 * N + 1, 3 * N], side=side)
        together = model(ids, attention_mask=mask).logits[mask.bool()]
        apart = torch.cat([model(one[None]).logits[0] for one in prompts])
        ours, theirs = (gradients(model, x.square().mean()) for x in (together, apart))
        for name, gradient in ours.items():
            assert_close(gradient, theirs[name], 1e-6 if kept_in_float32(name) else 1e-10, f"{side}: {name}")


@RULES
def test_mixed_precision(rule: str) -> None:
    """Autocast to bfloat16: near float32, gates in float32, finite gradients, checkpointed or not."""
    model, ids = tiny_llm(rule=rule, dtype=torch.float32).train(), prompt(2, 4 * N)
    expected = gradients(model, model(ids, labels=ids).loss)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        found = gradients(model, loss)
        assert found.keys() == expected.keys()
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())
        ours, theirs = (torch.cat([g.flatten() for g in x.values()]) for x in (found, expected))
        assert relative_error(ours, theirs) < 0.1
        model.activation_checkpointing_enable()


def test_gates_have_a_rate_of_their_own_and_no_decay() -> None:
    """1,000 gradients of one sign move every beta by more than 1, as no gate moves at the model's rate."""
    model = tiny_llm("gemma3", dtype=torch.float32)
    groups = parameter_groups(model, lr=1e-5, gate_lr=1e-2, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    gates = next(group for group in groups if group["name"] == "gates")
    assert gates["lr"] == 1e-2 and gates["weight_decay"] == 0 and len(gates["params"]) == 2
    optimizer = torch.optim.AdamW(groups)
    for _ in range(1000):
        for beta in gates["params"]:
            beta.grad = torch.full_like(beta, -1e-4)
        optimizer.step()
    assert all((beta - GATE > 1).all() for beta in gates["params"])
    model.requires_grad_(False)
    gates["params"][0].requires_grad_()
    assert [group["name"] for group in parameter_groups(model, lr=1e-5)] == ["gates"]


def test_a_rate_of_gates_that_are_all_frozen_is_refused() -> None:
    """An adapter without GATE_MODULES is such a case: its gates would stay shut without a message."""
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    lora = peft.get_peft_model(tiny_llm(dtype=torch.float32), peft.LoraConfig(**options))
    with pytest.raises(ValueError, match=r"gate_lr=0.01: all gates .*LoraConfig\(modules_to_save=GATE_MODULES\)"):
        parameter_groups(lora, lr=1e-3, gate_lr=1e-2)
    # Who trains adapters alone names no rate; a model without a memory has no gates.
    assert [group["name"] for group in parameter_groups(lora, lr=1e-3)] == ["matrices"]
    assert parameter_groups(tiny_base(dtype=torch.float32), lr=1e-3, gate_lr=1e-2)
    lora = peft.get_peft_model(tiny_llm(dtype=torch.float32), peft.LoraConfig(**options, modules_to_save=GATE_MODULES))
    assert {group["name"]: group["lr"] for group in parameter_groups(lora, lr=1e-3, gate_lr=1e-2)}["gates"] == 1e-2


def test_trainer_of_transformers(tmp_path: Path) -> None:
    """Trains, saves, resumes; with checkpointed activations and gates in their own group."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in prompt(8, 3 * N)]

    def trainer(model: Any, steps: int) -> Trainer:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=2, report_to=[], save_steps=2, use_cpu=True,
            gradient_checkpointing=True, disable_tqdm=True, logging_strategy="no", seed=1,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule))

    model = tiny_llm(dtype=torch.float32)
    trainer(model, 4).train()
    resumed = tiny_llm(dtype=torch.float32)
    trainer(resumed, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ids = prompt(1, 4 * N)
    assert_close(logits(resumed.eval(), ids), logits(model.eval(), ids), 1e-6, "resumed")
    betas = [p for name, p in model.named_parameters() if name.endswith("beta")]
    assert all((b - GATE).abs().max() > 0.01 for b in betas)
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_generation_in_a_checkpointed_training_says_what_to_do() -> None:
    """Layers without a memory lose their cache there: transformers takes it away from every layer."""
    model, ids = tiny_llm("gemma3"), prompt(1, 3 * N + 2)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.activation_checkpointing_enable()
    model.train()
    with pytest.raises(
        InputError, match=r"layers=\[1, 2\] of 3; generate in evaluation mode .*, or with use_cache=False"
    ):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False), expected)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=3, do_sample=False), expected)


@OPTIONS
def test_reentrant_checkpointing_leaves_the_windows_of_a_cache(options: dict[str, Any]) -> None:
    """Its first pass has no gradients and would write into windows that the second one reads."""
    found = []
    for reentrant in (None, True):
        model, ids = tiny_llm(**options).train(), prompt(1, 4 * N)
        with torch.no_grad():
            cache = model(ids[:, :3], use_cache=True, past_key_values=InfiniCache(model)).past_key_values
        if reentrant:
            model.activation_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        loss = model(ids[:, 3:], labels=ids[:, 3:], past_key_values=cache, use_cache=True).loss
        found.append(gradients(model, loss))
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, rtol=1e-9, atol=1e-12), name


def test_reentrant_checkpointing_cuts_no_gradient_silently() -> None:
    """A layer's first pass has no gradients, so the state that it leaves has none: the next call says so."""
    model, ids = tiny_llm().train(), prompt(1, 4 * N)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    cache = InfiniCache(model)
    model(ids[:, :N], past_key_values=cache, use_cache=True).logits.sum().backward()
    with pytest.raises(
        ValueError, match="use_reentrant=True computes no gradient for the cache: pass use_reentrant=False"
    ):
        model(ids[:, N:], past_key_values=cache, use_cache=True)
    # A gradient that ends there is not missed, and an evaluation needs none.
    with torch.no_grad():
        model(ids[:, N:], past_key_values=cache.fork(), use_cache=True)
    model(ids[:, N:], past_key_values=cache.detach(), use_cache=True).logits.sum().backward()
    # If nothing is trained, no gradient is missing.
    model = tiny_llm().train().requires_grad_(False)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    cache = InfiniCache(model)
    for part in ids.split(2 * N, 1):
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values


@pytest.mark.parametrize("tokens", [N - 2, N, N + 3])
def test_every_gate_has_a_gradient_whatever_the_length(tokens: int) -> None:
    """0 where nothing read depends on it: DistributedDataParallel takes None for an error."""
    model = tiny_llm(**ADDITIONS).train()
    model(prompt(2, tokens)).logits.square().mean().backward()
    gates = {name: parameter.grad for name, parameter in model.named_parameters() if "infini_gate" in name}
    assert len(gates) == 4 * len(model.model.layers)
    assert [name for name, gradient in gates.items() if gradient is None] == []
    if tokens <= N:
        assert all(not gradient.any() for gradient in gates.values())  # type: ignore[union-attr]


def test_length_extension_in_a_loop_of_ones_own() -> None:
    """The loop is that of docs/how-to/llm.md, and its outcome that of the suite."""
    model, ids, factor_B = tiny_llm(rule="linear", input_gate="sigmoid"), prompt(2, 4 * N), torch.tensor([50.0, 400.0])
    cache = InfiniCache(model)
    parts = [model.model(ids[:, :N], past_key_values=cache, use_cache=True).last_hidden_state]
    for layer in cache.memory_layers.values():
        layer.map(lambda state: scale_memory(state, factor_B))
    parts.append(model.model(ids[:, N:], past_key_values=cache, use_cache=True).last_hidden_state)
    expected = extended_in_two_calls(PretrainedLM(model, N), ids, None, None, None, N, factor_B).hidden_BTD
    assert_close(torch.cat(parts, 1), expected, 1e-10, "hidden")
    assert relative_error(expected, model.model(ids).last_hidden_state) > 1e-3


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, "segment"), (torch.bfloat16, "previous")])
def test_layers_that_fsdp2_shards_keep_their_states(dtype: torch.dtype, window: Any, tmp_path: Path) -> None:
    """Layer by layer, as accelerate shards a model of transformers. torch gives a layer copies of the dataclasses among
    its arguments: the state of all but the first layer was lost after the call, without a word."""
    model = tiny_llm(dtype=dtype, window=window)
    ids = prompt(2, 3 * N)
    expected = model(ids, labels=ids, use_cache=True)
    expected.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    follows = model(ids[:, :5], past_key_values=expected.past_key_values).logits.detach()
    model.zero_grad()
    with group_of_one(tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            if dtype != torch.float32:
                # Gates are float32, and FSDP2 wants weights of one type together.
                fully_shard(layer.self_attn.infini_gate, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = model(ids, labels=ids, use_cache=True)
        found.loss.backward()
        assert_close(found.loss, expected.loss, 1e-6, "loss")
        for name, parameter in model.named_parameters():
            if name in gradients:
                assert_close(parameter.grad.full_tensor(), gradients[name], 1e-5, name)
        with torch.no_grad():
            after = model(ids[:, :5], past_key_values=found.past_key_values).logits
        assert_close(after, follows, 1e-5, "logits after the cache")
