"""One place says which members a model must have and which it may have, and everything else asks there."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, make_model, mixed, tiny_dims

from infini import models
from infini.errors import InputError
from infini.models import build_model
from infini.nn.protocols import LanguageModel, OptionalMembers, missing_members, optional

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = [name for name in vars(OptionalMembers) if not name.startswith("_")]


class Declares(torch.nn.Module):
    """A module whose declarations are of every kind: a class attribute, a property, a method, and a wrong one."""

    memory_is_a_sum = True

    @property
    def summary_vectors(self) -> int:
        return 3

    def gates(self) -> list[list[float]]:
        return [[0.5]]

    @property
    def memory_layers(self) -> Any:
        return self.not_there


def test_what_a_model_has_counts_and_else_the_default() -> None:
    bare = torch.nn.Module()
    assert optional(bare, "gates")() is None
    assert [optional(bare, name) for name in ("memory_layers", "memory_is_a_sum", "summary_vectors")] == [(), False, 0]
    made = Declares()
    assert optional(made, "gates")() == [[0.5]]
    assert optional(made, "memory_is_a_sum") and optional(made, "summary_vectors") == 3
    assert optional(SimpleNamespace(summary_vectors=2), "summary_vectors") == 2


def test_an_error_inside_a_declaration_is_not_taken_for_its_absence() -> None:
    with pytest.raises(AttributeError):
        optional(Declares(), "memory_layers")


def test_only_what_the_protocol_names_can_be_asked_for() -> None:
    with pytest.raises(AttributeError):
        optional(make_model({"name": "local"}), "has_memories")


def test_this_projects_models_lack_nothing() -> None:
    recurrent, decoder = make_model({"name": "rmt", "memory_tokens": 2}), make_model(mixed("local", "delta"))
    assert missing_members(recurrent) == missing_members(decoder) == []
    assert [optional(model, "summary_vectors") for model in (recurrent, decoder)] == [2, 0]
    assert optional(decoder, "memory_is_a_sum") and len(optional(decoder, "gates")()) == 1


def test_a_model_that_lacks_a_member_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before any training. Each member is tested by itself."""
    required = missing_members(object())
    assert set(required) >= {"prefill", "checkpoint_activations", "init_state", "receptive_field", "segment_length"}
    assert not set(required) & set(OPTIONAL)
    complete: dict[str, Any] = dict.fromkeys(required, 1)

    class Config:
        pass

    for name in required:
        kept = {key: value for key, value in complete.items() if key != name}
        built = SimpleNamespace(**kept)
        monkeypatch.setitem(models._REGISTRY, "other", (Config, lambda *_, built=built: built))
        monkeypatch.setitem(models._KINDS, "other", "language_model")
        message = f"model=other: lacks {name}; see infini.nn.protocols.LanguageModel"
        with pytest.raises(InputError) as error:
            build_model({"name": "other"}, tiny_dims(), VOCABULARY)
        assert str(error.value) == message


def test_nothing_else_is_asked_of_a_model_with_a_default() -> None:
    """`getattr(model, ..., default)` and `hasattr(model, ...)` would make a second protocol."""
    sources = [path for folder in ("infini", "tasks") for path in (ROOT / folder).rglob("*.py")]
    found = []
    for path in sources:
        # The latter two look into the models of a library.
        if path.name in ("protocols.py", "unlimiformer.py") or path.parent.name == "llm":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                with_default = node.func.id == "hasattr" or len(node.args) == 3
                if with_default and ast.unparse(node.args[0]).split(".")[-1] == "model":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_the_page_lists_what_is_optional() -> None:
    page = (ROOT / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1].removesuffix("()") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(OPTIONAL)
    assert LanguageModel.__name__ in page
