"""Files of injected models: what other programs of transformers' users find in them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close
from safetensors.torch import load_file, save_file
from tiny_llms import N, logits, logits_in_calls, prompt, tiny_base, tiny_llm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import infini
from infini.pretrained.llm import GATE_MODULES, inject, model_card, modeling, parameter_groups, saving, settings_of
from infini.pretrained.llm.cache import _layer_devices
from infini.pretrained.llm.language_model import without_adapters


def betas(model: Any) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("infini_gate.beta")]


def test_inject_adds_one_float32_beta_a_query_head_and_nothing_else() -> None:
    base = tiny_base("gemma3", torch.bfloat16)
    names = {name: tuple(p.shape) for name, p in base.named_parameters()}
    model = inject(base, N)
    assert model is base
    added = {name: p for name, p in model.named_parameters() if name not in names}
    assert {name: (tuple(p.shape), p.dtype) for name, p in added.items()} == {
        f"model.layers.{i}.self_attn.infini_gate.beta": ((4,), torch.float32) for i in (1, 2)
    }
    assert names.items() <= {name: tuple(p.shape) for name, p in model.named_parameters()}.items()
    assert not [name for name, _ in model.named_buffers() if "infini" in name]


def test_an_input_gate_has_a_vector_and_a_number_a_key_value_head(tmp_path: Path) -> None:
    """It is float32, trained with the gates, and kept in a folder. Untrained it changes no output, however calls are
    cut."""
    plain, model = (tiny_llm(dtype=torch.float32, **options) for options in ({}, {"input_gate": "sigmoid"}))
    ids = prompt(2, 3 * N + 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gate = model.get_submodule(name.rpartition(".")[0])
            if ".infini_gate.input" in name:
                parameter.copy_(next(value for own, value in gate.initial() if own is parameter))
    assert_close(model(ids).logits, plain(ids).logits, 1e-4, "untrained")
    model = model.to(torch.bfloat16)
    added = {name: p for name, p in model.named_parameters() if ".infini_gate.input" in name}
    assert sorted((tuple(p.shape), p.dtype) for p in added.values()) == 2 * [((2,), torch.float32)] + 2 * [
        ((2, 8), torch.float32)
    ]
    gates = next(group for group in parameter_groups(model, lr=1e-5, gate_lr=1e-2) if group["name"] == "gates")
    assert gates["lr"] == 1e-2 and set(added.values()) < set(gates["params"])
    assert "input gate" in model_card(model) and "input gate" not in model_card(plain)
    with torch.no_grad():
        for p in added.values():
            p.copy_(torch.arange(p.numel()).view(p.shape))
    model.save_pretrained(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in added.items())


def test_a_memory_that_decays_has_one_more_number_a_key_value_head(tmp_path: Path) -> None:
    """It stays in float32, is trained with the gates, and survives a folder without its weights."""
    model = tiny_llm(dtype=torch.float32, memory_decay=4).to(torch.bfloat16)
    decays = {name: p for name, p in model.named_parameters() if name.endswith("infini_gate.decay")}
    assert {(p.shape, p.dtype) for p in decays.values()} == {((2,), torch.float32)} and len(decays) == 2
    # Half-lives of one segment and of four.
    assert torch.allclose(torch.sigmoid(torch.stack(list(decays.values()))), torch.tensor([0.5, 0.5**0.25]))
    gates = next(group for group in parameter_groups(model, lr=1e-5, gate_lr=1e-2) if group["name"] == "gates")
    assert gates["lr"] == 1e-2 and set(decays.values()) < set(gates["params"])
    assert "memory decay" in model_card(model)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: x for name, x in weights.items() if not name.endswith("decay")},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = {name: p for name, p in loaded.named_parameters() if name in decays}
    assert found.keys() == decays.keys() and all(torch.equal(found[name], decays[name]) for name in decays)


def test_layers_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    tiny_llm(dtype=torch.float32, layers=np.arange(2)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["infini"]["layers"] == [0, 1]


def test_an_adapter_does_not_name_the_base_without_a_memory(tmp_path: Path) -> None:
    """It would load onto the base, and leave the gates out, without a word."""
    peft = pytest.importorskip("peft")
    tiny_base(dtype=torch.float32).save_pretrained(tmp_path / "base")
    model = inject(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), N)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["infini_gate"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match="load"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    # The injected model is loaded first, as the page on language models shows.
    again = inject(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), N)
    again.save_pretrained(tmp_path / "injected")
    injected = AutoModelForCausalLM.from_pretrained(tmp_path / "injected")
    peft.get_peft_model(injected, config).save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert loaded.get_base_model().config.infini["segment_length"] == N


def test_sharded(tmp_path: Path) -> None:
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_others_may_read_the_folder_where_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        tiny_llm(dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        path.name: 0o644 for path in tmp_path.iterdir()
    }


def test_the_card_names_weights_that_are_not_the_bases_own(tmp_path: Path) -> None:
    model = tiny_llm(dtype=torch.float32)
    assert "| weights |" not in model_card(model)
    model.config.base_weights = "GGUF a.gguf, dequantised"
    model.save_pretrained(tmp_path)
    # A model that is trained and saved again keeps it, too.
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert "| weights | GGUF a.gguf, dequantised |" in model_card(each)


def test_bfloat16_weights_with_float32_betas(tmp_path: Path) -> None:
    """Cast, saved and loaded; the memory is float32's, the logits the base's within a segment."""
    model, ids = tiny_llm(dtype=torch.float32, gate_init=-0.123456789), prompt(1, 3 * N)
    kept = [beta.clone() for beta in betas(model)]
    for cast in (model.bfloat16(), model.to(torch.float16), model.to(dtype=torch.bfloat16)):
        assert cast.lm_head.weight.dtype != torch.float32
        assert all(b.dtype == torch.float32 and torch.equal(b, k) for b, k in zip(betas(model), kept, strict=True))
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.dtype == torch.bfloat16 and loaded.lm_head.weight.dtype == torch.bfloat16
        assert all(b.dtype == torch.float32 and torch.equal(b, k) for b, k in zip(betas(loaded), kept, strict=True))
        assert torch.equal(logits(loaded, ids), logits(model, ids))
    cache = logits_in_calls(loaded, ids, [3 * N])[1]
    state = cache.layers[0].state
    assert state.memory.m_BGKV.dtype == torch.float32 and state.window.k_BGNK.dtype == torch.bfloat16
    base = LlamaForCausalLM.from_pretrained(tmp_path, config=tiny_base().config, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded, ids[:, :N]), logits(base, ids[:, :N]))


def test_device_map(tmp_path: Path) -> None:
    """accelerate places all modules on one device, or one layer on disk. The model is injected before and after."""
    pytest.importorskip("accelerate")
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "injected")
    tiny_base(dtype=torch.float32).save_pretrained(tmp_path / "base")
    parts = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    for device_map in ("auto", parts):
        options = {"device_map": device_map, "offload_folder": tmp_path / "offloaded"}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "injected", **options)
        assert torch.equal(logits(loaded, ids), expected)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
        assert torch.equal(logits(inject(base, N, gate_init=-0.5).eval(), ids), expected)
        assert torch.allclose(logits_in_calls(base, ids, [N + 1, 2 * N - 1])[0], expected, atol=1e-5)


def test_a_loaded_cache_is_where_the_layers_are(tmp_path: Path) -> None:
    """This also holds inside a model of peft, and where accelerate brings a layer's weights."""
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    model = tiny_llm(dtype=torch.float32)
    assert _layer_devices(model.config) == {}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert _layer_devices(lora) == {i: torch.device("cpu") for i in range(2)}
    accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    assert next(model.model.layers[1].parameters()).device.type == "meta"
    assert _layer_devices(model) == {i: torch.device("cpu") for i in range(2)}


def test_a_checkpoint_without_betas_begins_as_gate_init_says(tmp_path: Path) -> None:
    """The base's own files, with the config of an injected model."""
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    tiny_base(dtype=torch.float32).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, config=model.config)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_the_config_says_what_was_asked(tmp_path: Path) -> None:
    model = tiny_llm(rule="linear", window="previous", sinks=2, first_segment="zero", layers=[-1])
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "infini_llama" and stored["architectures"] == ["InfiniLlamaForCausalLM"]
    assert stored["infini"]["layers"] == [1] and stored["infini"]["window"] == "previous"
    config = AutoConfig.from_pretrained(tmp_path)
    assert settings_of(config) == model.model.infini_settings
    assert not hasattr(model.model.layers[0].self_attn, "infini_gate")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, "config.infini has format=99"),
        ({"layers": None}, "config.infini lacks layers: inject the base again"),
        ({"layers": [0, 2]}, r"config.infini has layers=\[0, 2\]: must be layers from 0 to 1"),
        ({"layers": []}, r"config.infini has layers=\[\]: must be"),
        ({"layers": "01"}, "config.infini has layers='01': must be"),
    ],
)
def test_a_damaged_config_is_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    tiny_llm().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["infini"] = {key: value for key, value in (stored["infini"] | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_another_process_reads_a_pickled_model(tmp_path: Path) -> None:
    """A worker that is given a model does this: the classes are made on request."""
    model, ids = tiny_llm("gemma3", dtype=torch.float32), prompt(1, 3 * N)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, logits(model, ids))))
    code = f"""
import pickle, torch
with open({str(tmp_path / "model.pickle")!r}, "rb") as file:
    model, expected = pickle.load(file)
with torch.no_grad():
    assert torch.equal(model(torch.tensor({ids.tolist()}), use_cache=False).logits, expected)
"""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # These alone: the causal model is made elsewhere, and a family's module holds other classes, too.
    assert modeling.InfiniOlmo2Model is type(tiny_llm("olmo2").model)
    for name in (
        "InfiniLlamaForCausalLM",
        "InfiniLlamaConfig",
        "InfiniPreTrainedModel",
        "InfiniCallable",
        "Olmo2Model",
    ):
        assert not hasattr(modeling, name), name


@pytest.mark.slow
def test_a_process_that_never_imported_us(tmp_path: Path) -> None:
    """It loads the file beside the weights if the user trusts it; otherwise a message says so."""
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    model.save_pretrained(tmp_path / "saved")
    torch.save(logits(model, ids), tmp_path / "expected.pt")
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
assert not any(name.startswith("infini") for name in sys.modules)
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path / "saved")!r}, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("loaded")
for trust in (True, None):    # once loaded, the class is known
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "saved")!r}, trust_remote_code=trust)
    ids = torch.tensor({ids.tolist()})
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, torch.load({str(tmp_path / "expected.pt")!r}))
model.save_pretrained({str(tmp_path / "again")!r})
"""
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("saved", "again")]
    assert names[0] == names[1] >= {"modeling_infini.py", "README.md", "model.safetensors", "config.json"}


def test_model_card(tmp_path: Path) -> None:
    """Names the base, the segment length, the rule and the training; one that the user wrote stays."""
    base = tiny_base(dtype=torch.float32)
    base.config._name_or_path = "someone/tiny-llama"
    model = inject(base, N, "linear", sinks=1, gate_init=0.0)
    model.config.infini["training"] = "3 steps on nothing"
    card = model_card(model)
    for line in (
        "base_model: someone/tiny-llama",
        "| base | someone/tiny-llama |",
        "| segment length | 8 tokens |",
        "| update rule | linear (Eq. 4) |",
        "| gates, sigmoid(beta) | 8, from 0.500 to 0.500 |",
        "| sinks (an addition to the paper unless 0) | 1 |",
        "| training | 3 steps on nothing |",
    ):
        assert f"{line}\n" in card
    # The model is the same.
    assert torch.equal(logits_in_calls(model, ids := prompt(1, 9), [9])[0], logits(model, ids))
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("first_segment", ["local", "zero"])
def test_the_card_calls_a_model_its_base_only_where_it_is(first_segment: Any) -> None:
    """A first segment that reads zeros passes the gate, and has a part of its base's attention alone."""
    model, ids = tiny_llm(first_segment=first_segment), prompt(1, N)
    equal = torch.allclose(logits(model, ids), logits(tiny_base(), ids))
    assert ("the model equals its base" in model_card(model)) == equal == (first_segment == "local")
    assert "quality depends on the training" in " ".join(model_card(model).lower().split())


def test_a_card_of_ours_is_that_of_the_weights_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is written again with them; one that the user wrote, or took over, stays, and a line says so."""
    card = tmp_path / "README.md"
    for gate, shown in ((-4.0, "0.018"), (0.0, "0.500")):
        tiny_llm(dtype=torch.float32, gate_init=gate).save_pretrained(tmp_path)
        assert f"| gates, sigmoid(beta) | 8, from {shown} to {shown} |\n" in card.read_text()
    assert not caplog.records
    mine = card.read_text().replace(f"{saving.OWN_CARD}\n", "").encode() + b"\xff"
    card.write_bytes(mine)
    tiny_llm(dtype=torch.float32).save_pretrained(tmp_path)
    assert card.read_bytes() == mine
    assert [record.getMessage() for record in caplog.records] == [
        f"{card} was not written by infini and stays as it is"
    ]


def test_the_card_calls_no_model_untrained_that_may_be_trained(tmp_path: Path) -> None:
    """Weights do not say that a loop or a merged adapter has changed them. The user's description survives a folder."""
    model = tiny_llm(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert "| training | not recorded |\n" in model_card(model)
    model.config.infini["training"] = "one step"
    model.save_pretrained(tmp_path)
    assert "| training | one step |\n" in model_card(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_model_in_bfloat16_with_merged_adapters_is_the_one_of_its_folder(name: str, tmp_path: Path) -> None:
    """Its weights are float32 then, and so are constants that no file of weights has."""
    peft = pytest.importorskip("peft")
    tiny_llm(name, dtype=torch.float32).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False), model)
    merged = without_adapters(model)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    constants = dict(loaded.named_buffers())
    for kind, constant in merged.named_buffers():
        assert torch.equal(constant, constants[kind]) and constant.dtype == torch.float32, kind
    ids = prompt(2, N + 3)
    assert torch.equal(logits(loaded, ids), logits(merged, ids))


def test_the_card_has_the_gates_that_an_adapter_trains(tmp_path: Path) -> None:
    """peft keeps a copy of each gate (modules_to_save), the current one."""
    peft = pytest.importorskip("peft")
    model = tiny_llm(dtype=torch.float32, gate_init=0.0)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=GATE_MODULES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".modules_to_save." in name:
                parameter.fill_(-4.0)
    model.save_pretrained(tmp_path)
    assert {"adapter_model.safetensors", "README.md"} <= {path.name for path in tmp_path.iterdir()}
    assert "| gates, sigmoid(beta) | 8, from 0.018 to 0.018 |\n" in (tmp_path / "README.md").read_text()


def test_gates_that_are_on_disk_are_not_in_the_card(tmp_path: Path) -> None:
    """Some or all layers are fetched by accelerate; their weights are saved."""
    pytest.importorskip("accelerate")
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    model.save_pretrained(tmp_path / "saved")
    for there, row in (({"1"}, "| gates, sigmoid(beta) | 4, from 0.378 to 0.378 |"), ({"0", "1"}, None)):
        places = {f"model.layers.{i}": "disk" if i in there else "cpu" for i in ("0", "1")}
        places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
        again = tmp_path / f"again{len(there)}"
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options).save_pretrained(again)
        card = (again / "README.md").read_text()
        assert row in card if row else "sigmoid(beta)" not in card
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(again), ids), logits(model, ids))


def test_weights_that_other_processes_hold_are_saved_by_state_dict(tmp_path: Path) -> None:
    """ZeRO-3 leaves parameters empty, except where they are gathered."""
    model, ids = tiny_llm(dtype=torch.float32), prompt(1, 3 * N)
    expected, gathered = logits(model, ids), {name: x.clone() for name, x in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), expected)
    assert "sigmoid(beta)" not in (tmp_path / "README.md").read_text()


def test_files_are_written_where_the_base_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main process writes them, and only if the path is no file; nothing is uploaded otherwise."""
    monkeypatch.setattr(saving, "push_to_hub", lambda *_, **__: pytest.fail("uploads"))
    (tmp_path / "file").write_text("mine")
    for folder, main in ((tmp_path / "other", False), (tmp_path / "file", True)):
        tiny_base(dtype=torch.float32).save_pretrained(folder, is_main_process=main)
        stock = sorted(path.name for path in tmp_path.rglob("*"))
        for push_to_hub in (False, True):
            tiny_llm(dtype=torch.float32).save_pretrained(folder, is_main_process=main, push_to_hub=push_to_hub)
            assert sorted(path.name for path in tmp_path.rglob("*")) == stock
    assert (tmp_path / "file").read_text() == "mine"


def test_the_base_is_named_without_its_place(tmp_path: Path) -> None:
    tiny_base().save_pretrained(tmp_path / "tiny")
    for given, base in ((None, "tiny"), ("mine", "mine")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
        assert settings_of(inject(loaded, N, base=given).config).base == base


@pytest.mark.parametrize("card", [None, "# Mine", saving.OWN_CARD], ids=["no card", "a user's", "an older one"])
def test_push_to_hub(card: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads what is saved, the card too unless the user wrote the one that is there. The hub is mocked."""
    sent: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: Any = None) -> None:
            sent["token"] = token

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})

        def file_exists(self, repo_id: str, name: str, **options: Any) -> bool:
            return card is not None

        def hf_hub_download(self, repo_id: str, name: str, **options: Any) -> str:
            (tmp_path / name).write_text(str(card), encoding="utf-8")
            return str(tmp_path / name)

        def upload_folder(self, folder_path: str, **options: Any) -> Any:
            sent.update(options, names={path.name for path in Path(folder_path).iterdir()})
            sent["card"] = (Path(folder_path) / "README.md").read_text(encoding="utf-8")
            return type("Commit", (), {"commit_url": "address"})

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert tiny_llm().push_to_hub("model", token="t", private=True) == "address"
    assert sent["repo_id"] == "me/model" and sent["token"] == "t"
    assert sent["names"] >= {"README.md", "modeling_infini.py", "model.safetensors"}
    assert sent["ignore_patterns"] == (["README.md"] if card == "# Mine" else None)
    # The same by the other way, with what is said about it.
    sent.clear()
    said = {"tags": ["books"], "commit_description": "why"}
    tiny_llm().save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="model", token="t", **said)
    assert sent["repo_id"] == "me/model" and sent["token"] == "t" and sent["commit_description"] == "why"
    assert sent["names"] >= {"README.md", "modeling_infini.py", "model.safetensors"}
    assert sent["card"].splitlines()[2] == "tags: [infini-attention, long-context, books]"


def test_import_infini_stays_cheap() -> None:
    """It imports neither torch nor transformers; `from infini import inject` brings both."""
    code = "import sys, infini; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert infini.inject is inject
