"""A model file that cannot be imported: one line that names it, whichever model was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from command_runner import Runner

from infini import models
from infini.errors import InputError
from infini.models import build_model, register, registered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = none_such\n", "mine.py, line 2: NameError: name 'none_such' is not defined"),
        ("def f(:\n", "mine.py, line 1: SyntaxError: "),
        ("import none_such\n", "mine.py, line 1: ModuleNotFoundError: No module named 'none_such'"),
        (
            "from infini.models import register\n\n\n@register('full', dict)\ndef build(config, dims, vocab_size):\n"
            "    return None\n",
            "mine.py, line 4: ValueError: model 'full' is registered twice",
        ),
    ],
    ids=["name", "syntax", "import", "twice"],
)
def test_a_broken_model_file_is_one_line_that_names_it(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    registered()
    (tmp_path / "mine.py").write_text(text, "utf-8")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    message = infini.error("train", "task=pg19", "task.data_dir=synthetic", "model=local")
    assert message.startswith(f"{tmp_path}/{said}") and "\n" not in message
    assert not infini.records()
    (tmp_path / "mine.py").unlink()
    assert "local" in registered()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=rmt", "model.memory_tokens=1.5"], "model.memory_tokens=1.5: must be an integer or null"),
        (["model=rmt", "model.memory_tokens=abc"], "model.memory_tokens='abc': must be an integer or null"),
        (
            ["model=autocompressor", "model.summary_tokens=true"],
            "model.summary_tokens=True: must be an integer or null",
        ),
        (["model=infini_linear", "model.memory_decay=a"], "model.memory_decay='a': must be a number or null"),
        (
            [
                *("task=passkey", "model=compressive", "recipe.segments_per_sequence=12"),
                *("recipe.short_sequences=null", "recipe.curriculum=[[17,192]]"),
            ],
            "recipe.curriculum=[[17, 192]]: rate=2: must divide segments of 17 tokens",
        ),
    ],
    ids=["part", "text", "truth", "decay", "stage"],
)
def test_an_option_that_a_model_cannot_have_is_one_line(infini: Runner, words: list[str], said: str) -> None:
    assert infini.error("train", "task=pg19", "task.data_dir=synthetic", *words).startswith(said)
    assert not infini.records()


@dataclass
class Listed:
    kernel: list[int]
    width: int | None = None


def test_an_option_may_be_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not one of its numbers."""
    registered()
    for name in ("_REGISTRY", "_KINDS", "_BASES"):
        monkeypatch.setattr(models, name, dict(getattr(models, name)))
    register("listed", Listed, "seq2seq")(lambda config, dims, vocab_size: config)
    assert build_model({"name": "listed", "kernel": [1, 2]}, None, 8) == Listed([1, 2])
    with pytest.raises(InputError, match="^model.width=\\[1\\]: must be an integer or null$"):
        build_model({"name": "listed", "kernel": [1, 2], "width": [1]}, None, 8)
