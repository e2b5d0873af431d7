"""lm-evaluation-harness takes an injected folder with its stock `hf` model type, as docs/how-to/llm.md says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

from tiny_llms import write_tiny_base
from transformers import AutoTokenizer, LlamaForCausalLM

from infini.pretrained.llm import inject

pytestmark = pytest.mark.slow
DOCS = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "llm.md"
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


def documented() -> list[str]:
    """The words of the one command in the page, from `--model` on."""
    command = re.search(r"^lm_eval ((?:.*\\\n)*.*)", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None
    return command[1].replace("\\\n", " ").split()


def evaluate(folder: Path, tasks: Path, out: Path) -> dict[str, Any]:
    """Results by task of the documented command, in a process that does not import infini by itself."""
    words = [word.replace("qwen-infini", str(folder)) for word in documented()]
    words[words.index("--tasks") + 1] = "tiny_choice,tiny_text"
    words += ["--include_path", str(tasks), "--output_path", str(out), "--device", "cpu", "--batch_size", "4"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words], env=env, capture_output=True, text=True, timeout=280, cwd=tasks
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = out.rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]
    return results


def test_a_folder_is_evaluated_as_it_is(tmp_path: Path) -> None:
    """Its scores are those of its base in one segment, and others over several segments of a text."""
    base = write_tiny_base(tmp_path / "base")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = tasks / "data.jsonl"
    rows = [
        {"question": f"{'so it goes and ' * (n + 2)} {n} is", "choices": [" red", " blue", " old"], "answer": n % 3}
        for n in range(8)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tasks / "choice.yaml").write_text(CHOICE.format(data=data))
    (tasks / "text.yaml").write_text(ROLLING.format(data=data))
    found = {}
    for name, segment_length in (("stock", None), ("long", 2048), ("short", 16)):
        model = LlamaForCausalLM.from_pretrained(base)
        if segment_length is not None:
            inject(model, segment_length, gate_init=0.0)
        model.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / name)
        found[name] = evaluate(tmp_path / name, tasks, tmp_path / f"{name}_out")
    stock, long, short = (found[name]["tiny_text"]["byte_perplexity,none"] for name in ("stock", "long", "short"))
    assert long == pytest.approx(stock, rel=1e-4) and abs(short - stock) > 1e-3 * stock
    assert found["long"]["tiny_choice"]["acc,none"] == found["stock"]["tiny_choice"]["acc,none"]
