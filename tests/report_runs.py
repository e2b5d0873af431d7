"""Small made-up records for the tests of reports."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import yaml

from infini.records import RunRecord

BOOKS = ("alpha", "beta", "gamma")
TOKENS = (1000, 2000, 4000)
EDGES = [0, 250, 500, 1000, 2000, 4000]


def report_settings() -> dict[str, Any]:
    """The report of Table 2 as the project declares it."""
    path = Path(__file__).parents[1] / "conf" / "report" / "table2_lm.yaml"
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def make_train(model: str, seed: int, **changes: Any) -> RunRecord:
    content: dict[str, Any] = {
        "run_id": f"train-{model}-{seed}",
        "verb": "train",
        "task": "pg19",
        "model": model,
        "scale": "laptop",
        "seed": seed,
        "parent": None,
        "command": "infini train task=pg19",
        "overrides": [],
        "config": {"model": {"name": model}, "dims": {"segment_length": 256}, "recipe": {"steps": 10}, "seed": seed},
        "config_hash": "0123456789ab",
        "started": f"2024-05-01T1{seed}:00:00+00:00",
        "environment": {
            "git_revision": "abcdef" * 6 + "abcd",
            "git_dirty": False,
            "hardware": {"cpu": "A & B CPU", "cores": 2, "memory_gb": 8.0, "accelerator": None, "has_amx": False},
        },
        "data": {"name": "pg19", "source": "folder", "revision": "f00d" * 8, "split": "train", "tokenizer": "bpe_4096"},
        "cost": {"tokens_seen": 1_000_000, "state_floats": 12_345},
    }
    return RunRecord(**{**content, **changes})


def make_eval(model: str, seed: int, loss: float = 4.0, knockouts: bool = False, **changes: Any) -> RunRecord:
    """An evaluation run that loses about `loss` nats a token on each of three books."""
    documents = []
    for index, (name, tokens) in enumerate(zip(BOOKS, TOKENS, strict=True)):
        nll = tokens * (loss + 0.01 * index + 0.001 * seed)
        entry: dict[str, Any] = {"name": name, "tokens": tokens, "words": tokens // 2, "bytes": tokens * 4, "nll": nll}
        if knockouts:
            entry |= {"nll_reset": nll + 0.1 * tokens + index, "nll_reset_base": nll, "reset_tokens": tokens}
            entry |= {"foreign_tokens": tokens // 2}
            entry |= {"nll_foreign_base": nll / 2, "nll_foreign": nll / 2 + 0.05 * tokens + 2 * index}
        documents.append(entry)
    total = sum(entry["nll"] for entry in documents)
    bins = [[max(0, min(stop, tokens) - start) for start, stop in itertools.pairwise(EDGES)] for tokens in TOKENS]
    content: dict[str, Any] = {
        "run_id": f"eval-{model}-{seed}",
        "verb": "eval",
        "parent": f"train-{model}-{seed}",
        "command": "infini eval task=pg19",
        "data": {**make_train(model, seed).data, "split": "test", "documents": 3, "tokens": sum(TOKENS)},
        "results": {
            "perplexity": {"value": math.exp(total / sum(TOKENS)), "n": sum(TOKENS)},
            "word_perplexity": {"value": 200.0, "n": 1},
            "bits_per_byte": {"value": 1.5, "n": 1},
        },
        "documents": documents,
        "series": {
            "gates": [[0.1, 0.9], [0.5, 0.49]],
            "nll_by_position": {
                "edges": EDGES,
                "tokens": bins,
                "nll": [
                    [count * entry["nll"] / entry["tokens"] for count in row]
                    for row, entry in zip(bins, documents, strict=True)
                ],
            },
        },
    }
    return make_train(model, seed, **{**content, **changes})


def synthetic(run: RunRecord) -> RunRecord:
    run.data["source"] = "synthetic"
    return run
