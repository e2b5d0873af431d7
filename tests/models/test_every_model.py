"""Every model that ships trains, and is evaluated on every task that takes it, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from books import write_books
from command_runner import Runner, read_by
from helpers import one_in
from tiny_runs import SUMMARIES

from infini.models import kind_of, registered

CONF = Path(__file__).parents[2] / "conf" / "model"
SHIPPED = sorted(path.stem for path in CONF.glob("*.yaml"))
MODELS = [name for name in SHIPPED if name != "llm"]
"""Those that are trained from scratch; test_llm_commands.py has the pretrained one."""
LANGUAGE_MODELS = [name for name in MODELS if kind_of(name) == "language_model"]
COMPRESSIVE = ("infini_linear", "infini_delta", "infini_xl")
"""Models with a compressive memory."""
GATED = (*COMPRESSIVE, "memorizing")

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")


def test_every_registered_model_ships_a_yaml() -> None:
    assert sorted(registered()) == SHIPPED


@pytest.mark.parametrize("name", one_in(2, LANGUAGE_MODELS))
def test_running_text(infini: Runner, name: str) -> None:
    """Perplexity, with knock-outs where there are gates, and a text that is continued."""
    words = [f"model={name}", "recipe.steps=2", "scale.eval_max_tokens=96", "scale.knockout_max_tokens=64"]
    infini("train", *read_by(["train"], words))
    infini("eval", *read_by(["eval"], words))
    (run,) = infini.records("eval")
    assert run.results["perplexity"]["n"] > 0
    assert ("foreign_delta" in run.results) == ("gates" in run.series) == (name in GATED)
    assert infini("generate", *words[:2], "prompt=abc", "decoding.max_new_tokens=2", "decoding.temperature=1")


@pytest.mark.parametrize("name", one_in(2, LANGUAGE_MODELS[1:] + LANGUAGE_MODELS[:1]))
def test_pass_keys(infini: Runner, name: str) -> None:
    """Trained with all that recipes add; the answers are in the record, and a half-dilution length if there is one."""
    words = ["task=passkey", f"model={name}", "recipe.steps=2", "recipe.curriculum=null", "recipe.batch_size=1"]
    words += ["recipe.segments_per_sequence=12", "recipe.length_extension=100", "recipe.length_extension_share=1"]
    words += ["recipe.long_history=[2,2]", "recipe.sparse_writes=0.1", "task.examples=1"]
    words += ["recipe.short_sequences=[10,0.5]"]
    infini("train", *read_by(["train"], words))
    infini("eval", *read_by(["eval"], words), "length=192", "depth=start")
    (run,) = infini.records("eval")
    assert run.results["exact_match"]["n"] == 1
    assert ("half_dilution" in run.results) == (name in COMPRESSIVE)


@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_summaries(infini: Runner, tmp_path: Path, name: str) -> None:
    if name not in LANGUAGE_MODELS:
        pytest.importorskip("transformers")
    words = ["task=booksum", *SUMMARIES, f"model={name}", f"task.data_dir={write_books(tmp_path / 'data')}"]
    words += ["recipe.steps=2", "decoding.max_new_tokens=2"]
    words += [] if name in LANGUAGE_MODELS else ["model.window=32", "model.k=16"]
    infini("train", *read_by(["train"], words))
    infini("eval", *read_by(["eval"], words), "length=64")
    (run,) = infini.records("eval")
    assert run.results["overall"]["n"] == 2
