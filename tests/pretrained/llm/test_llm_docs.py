"""The Python of docs/how-to/llm.md, in order, on a tiny random model in place of the one it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tiny_llms import write_tiny_base

from infini.config.compose import compose
from infini.report.load import load_report
from infini.runs.common import with_base

DOCS = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "llm.md"
BASE = '"Qwen/Qwen3-0.6B"'


def test_the_recipe_that_retrieved_is_that_of_the_table(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    (command,) = re.findall(r"^infini train (experiment=llm_find_keys)$", page, re.MULTILINE)
    report = load_report(compose(["report=llm_passkey"]).report)
    row = report.rows["linear_input_gate"]
    named = ["task=passkey", f"recipe={row.recipe.format(scale='laptop')}", f"model={row.model}"]
    recipe, code = compose([command]), " ".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert recipe == compose([*named, *row.overrides])
    base = f"model.base={write_tiny_base(tmp_path / 'base')}"
    # Its segments are as long as those that models from scratch have without being told.
    both = [with_base(compose(words), words) for words in ([command, base], [*named, *row.overrides, base])]
    assert both[0] == both[1] and both[0].dims.segment_length == 128
    for shown in (
        f"segment_length={recipe.dims.segment_length}",
        f'update_rule="{recipe.model["update_rule"]}"',
        f'input_gate="{recipe.model["input_gate"]}"',
        f"gate_init={recipe.model['gate_init']}",
        f"parameter_groups(finder, lr=1e-4, gate_lr={recipe.optimizer.gate_lr})",
        f"math.log({recipe.recipe.length_extension:.0f})",
    ):
        assert shown in code
    assert (recipe.optimizer.lr, recipe.recipe.steps, recipe.recipe.length_extension_share) == (1e-4, 400, 0.75)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_tiny_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL))
    assert BASE in code
    code = code.replace(BASE, repr(str(base))).replace("segment_length=2048", "segment_length=64")
    assert "max_new_tokens=20" in code
    code = code.replace("max_new_tokens=20", "max_new_tokens=3")
    names: dict[str, object] = {}
    exec(compile(code, "docs/how-to/llm.md", "exec"), names)
    said = capsys.readouterr().out
    # Only the answer is printed, whatever its length.
    assert "Answer:" not in said
    assert "What fell in torrents?" in said and "MB for 2,360 tokens" in said
    gates = [p for name, p in names["model"].named_parameters() if "modules_to_save" in name and name.endswith("beta")]  # type: ignore[attr-defined]
    assert len(gates) == 2 and all(bool((gate != -4).all()) for gate in gates)
