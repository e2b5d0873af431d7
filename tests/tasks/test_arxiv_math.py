"""LaTeX source of mathematics, from a folder of .tex files to a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_runner import Runner
from tiny_runs import DOCUMENTS

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """Documents of some KB, {train,validation,test}/*.tex below arxiv_math, and a note that is none of them."""
    rng = np.random.default_rng(0)
    parts = [
        r"\begin{lemma}",
        r"\end{lemma}",
        r"$\alpha_{n+1} \leq \sum_k x_k^2$",
        r"\cite{a}",
        "% a comment\n",
        "Hence ",
    ]
    for split, count in DOCUMENTS.items():
        folder = tmp_path / "data" / "arxiv_math" / split
        folder.mkdir(parents=True)
        for number in range(count):
            text = " ".join(rng.choice(parts, size=150 + 20 * number))
            (folder / f"{split}{number}.tex").write_text(rf"\documentclass{{article}}{text}", encoding="utf-8")
        (folder / "note.md").write_text("not a document")
    return tmp_path / "data"


def test_train_evaluate_and_tabulate_mathematics(infini: Runner, papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINI_DATA_DIR", str(papers))
    words = ["task=arxiv_math", "task.data_dir=null"]
    infini("train", *words)
    infini("eval", *words)
    trained, evaluated = infini.records()
    assert (trained.task, trained.config["recipe"]["name"]) == ("arxiv_math", "arxiv_math_laptop")
    for run, split in ((trained, "train"), (evaluated, "test")):
        seen = run.data
        assert (seen["name"], seen["source"], seen["split"]) == ("arxiv_math", "folder", split)
        size = sum(path.stat().st_size for path in papers.glob(f"arxiv_math/{split}/*.tex"))
        assert (seen["documents"], seen["bytes"]) == (DOCUMENTS[split], size)
    assert [entry["name"] for entry in evaluated.documents] == ["test0", "test1", "test2"]
    perplexity = evaluated.metric("perplexity")
    assert perplexity is not None and evaluated.parent == trained.run_id
    out = infini("table", "full=true")
    assert f"{perplexity:.2f} †" in out and "Arxiv-math, yours: 1 evaluation run; data arxiv_math test (folder" in out
    # A model trained on mathematics is evaluated on mathematics alone.
    assert "was trained on task=arxiv_math" in infini.error("eval", f"checkpoint={trained.run_id}")
