"""States that older versions wrote with torch.save, whose classes have other names now."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_same_state, make_model, random_ids

from infini.nn.attention import AttentionLeaves
from infini.nn.state import State

FORMER_LEAVES = {
    "compressive": "CompressiveLeaves",
    "infini_xl": "InfiniXLLeaves",
    "memorizing": "MemorizingLeaves",
    "transformer_xl": "XLLeaves",
}
"""Model -> the class of its layers' states in versions that had one for each model."""


@pytest.mark.parametrize("name", FORMER_LEAVES)
def test_they_are_loaded_without_unpickling(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_model({"name": name})(random_ids(2, 21)).state.detach()
    module = importlib.import_module(f"infini.models.{name}")
    fields = [(field, Any) for field in AttentionLeaves._fields]
    former = NamedTuple(FORMER_LEAVES[name], fields)  # type: ignore[misc]
    former.__module__ = module.__name__
    as_written = State(state.clock, tuple(former(*layer) for layer in state.layers))
    with monkeypatch.context() as patch:
        patch.setattr(module, former.__name__, former, raising=False)
        torch.save(as_written, tmp_path / "state.pt")
    assert not hasattr(module, former.__name__)
    assert_same_state(torch.load(tmp_path / "state.pt", weights_only=True), state, 0.0)
