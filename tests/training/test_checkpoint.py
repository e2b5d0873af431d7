"""Trained models on disk, and the precision they are trained and run in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, make_model, tiny_dims, variant_id, with_memory

from infini.errors import InputError
from infini.models import registered
from infini.nn.state import leaves
from infini.system import devices as precision
from infini.training.checkpoint import load_model, load_weights, read_description, save_model, sha256_of

MODELS = sorted(set(registered("language_model")) - {"llm"})
"""Those that are trained from scratch."""
WITH_MEMORY = with_memory()
CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_holds_the_model(tmp_path: Path, name: str, tied: bool) -> None:
    options = {"name": name, "tie_embeddings": tied}
    model = make_model(options, torch.float32)
    description = {"run_id": "r", "model": options, "dims": vars(tiny_dims()), "vocab_size": VOCABULARY}
    save_model(tmp_path / "c", model, description)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]
    loaded, read = load_model(tmp_path / "c", torch.device("cpu"))
    assert read.pop("weights_sha256") == sha256_of(tmp_path / "c" / "model.safetensors")
    assert read == description
    assert not loaded.training
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.head(loaded(ids).hidden_BTD), model.head(model(ids).hidden_BTD))


def test_others_may_read_a_checkpoint_where_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        modes = {path.name: path.stat().st_mode & 0o777 for path in saved(tmp_path / "c").iterdir()}
    finally:
        os.umask(before)
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}


@pytest.mark.parametrize("damage", ["missing", "{", "[]", '{"run_id": "r"}'])
def test_a_damaged_description_is_one_line(tmp_path: Path, damage: str) -> None:
    if damage != "missing":
        (tmp_path / "config.json").write_text(damage)
    expected = "has no config.json: not a checkpoint" if damage == "missing" else "config.json is damaged"
    with pytest.raises(InputError, match=expected) as error:
        read_description(tmp_path)
    assert "\n" not in str(error.value)


def saved(folder: Path) -> Path:
    description = {"run_id": "r", "model": WITH_MEMORY[0], "dims": vars(tiny_dims()), "vocab_size": VOCABULARY}
    save_model(folder, make_model(WITH_MEMORY[0], torch.float32), description)
    return folder


@pytest.mark.parametrize("bit", range(0, 8 * 600, 97))
def test_a_flipped_bit_of_a_description_is_found(tmp_path: Path, bit: int) -> None:
    path = saved(tmp_path) / "config.json"
    content = bytearray(path.read_bytes())
    assert len(content) > 600
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    try:
        read = read_description(tmp_path)
    except InputError as error:
        assert "config.json is damaged" in str(error)
    else:
        # White space between values may be other white space.
        path.unlink()
        assert read == read_description(saved(tmp_path))


@pytest.mark.parametrize("place", [0.0, 0.01, 0.5, 0.999])
def test_a_flipped_bit_of_the_weights_is_found(tmp_path: Path, place: float) -> None:
    path = saved(tmp_path) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    with pytest.raises(InputError, match="model.safetensors is damaged: its checksum"):
        load_model(tmp_path, CPU)


def test_a_truncated_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match="model.safetensors is damaged"):
        load_model(tmp_path, CPU)
    path.unlink()
    with pytest.raises(InputError, match="model.safetensors cannot be read"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("gone", [("weights_sha256", "description_sha256"), ("description_sha256",)])
def test_a_checkpoint_without_checksums_is_refused(tmp_path: Path, gone: tuple[str, ...]) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in held.items() if key not in gone}))
    with pytest.raises(InputError, match="config.json is damaged .it has no checksum"):
        load_model(tmp_path, CPU)


def test_weights_of_other_sizes_are_one_line(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(InputError, match="does not fit this model") as error:
        load_weights(make_model(WITH_MEMORY[0], torch.float32, d_ff=40), tmp_path, read_description(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "fast", "expected"),
    [("fp32", True, False), ("bf16", False, True), ("auto", True, True), ("auto", False, False)],
)
def test_bfloat16_where_asked_or_fast(asked: str, fast: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast)
    assert precision.uses_bfloat16(asked, CPU) == expected
    a = torch.ones(2, 2)
    with precision.autocast(asked, CPU):
        assert (a @ a).dtype == (torch.bfloat16 if expected else torch.float32)
    assert (a @ a).dtype == torch.float32
    assert (precision.emulated_bfloat16(asked, CPU) is not None) == (expected and not fast), "said before it is slow"


@pytest.mark.parametrize("options", WITH_MEMORY, ids=variant_id)
def test_parameters_gradients_and_memory_stay_float32(options: dict[str, Any]) -> None:
    model = make_model(options, torch.float32)
    with precision.autocast("bf16", CPU):
        out = model(torch.arange(20)[None])
    assert {leaf.dtype for path, leaf in leaves(out.state) if "memory" in path} == {torch.float32}
    out.hidden_BTD.float().sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precision.pick_device("auto") == precision.pick_device("cpu") == CPU
    with pytest.raises(InputError, match="parallel.accelerator='gpu': no GPU found; use auto or cpu"):
        precision.pick_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.pick_device("auto") == precision.pick_device("gpu") == torch.device("cuda")
    assert precision.pick_device("cpu") == CPU


def test_float32_products_are_whole() -> None:
    """The environment may have chosen TF32 before, as NVIDIA's containers do."""
    torch.backends.cuda.matmul.allow_tf32 = True
    precision.pick_device("cpu")
    assert not torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
