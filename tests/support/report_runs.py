"""Small made-up records for the tests of reports."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import yaml

from infini.records import RunRecord
from infini.report.text_report import Report

BOOKS = ("alpha", "beta", "gamma")
TOKENS = (1000, 2000, 4000)
EDGES = [0, 250, 500, 1000, 2000, 4000]


def report_settings() -> dict[str, Any]:
    """The report of Table 2 as the project declares it."""
    path = Path(__file__).parents[2] / "conf" / "report" / "table2_lm.yaml"
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
        "config": {
            "model": {"name": model},
            "dims": {"segment_length": 16},
            "recipe": {"steps": 1200},
            "scale": {"eval_max_tokens": 65536},
            "seed": seed,
        },
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


def pair(
    model: str = "infini_linear",
    recipe: str = "passkey_laptop",
    seed: int = 1,
    accuracy: float = 1.0,
    lengths: Any = (2**15, 2**17, 2**18, 2**19, 2**20),
    name: str = "",
    examples: int = 50,
    tokenizer: str = "wordlevel-57",
    trained: dict[str, Any] | None = None,
    asked: dict[str, Any] | None = None,
) -> list[RunRecord]:
    """A passkey training and its evaluation. trained, asked: dotted settings in which either differs from the row."""
    task = {
        "name": "passkey",
        "digits": 5,
        "distractors": 0,
        "filler": "block",
        "knockout": "none",
        "examples": examples,
    }
    config: dict[str, Any] = {
        "task": task if recipe != "pg19_laptop" else {"name": "pg19"},
        "model": {"name": model, "gate_init": "specialised"},
        "dims": {"segment_length": 128},
        "recipe": {
            "name": recipe,
            "segments_per_sequence": 5,
            "curriculum": [[128, 256]],
            "length_extension": 1e4 if recipe.endswith(("_extended", "_updates")) else None,
            "sparse_loss_scale": 0.05 if recipe == "passkey_laptop" else None,
            "sparse_writes": 0.1 if recipe.endswith(("passkey_laptop", "_extended", "_updates")) else None,
        },
        "optimizer": {"gate_lr": 0.03},
        "init_from": None,
        "seed": seed,
    }
    _change(config, trained)
    stem = f"{name}{model}-{recipe}-{seed}"
    data = {**make_train(model, seed).data, "tokenizer": tokenizer}
    training = make_train(model, seed, run_id=f"train-{stem}", config=config, task=config["task"]["name"], data=data)
    evaluation = copy.deepcopy(config) | {"task": copy.deepcopy(task)}
    _change(evaluation, asked)
    cells = [
        {
            "length": length,
            "depth": depth,
            "token_accuracy": accuracy,
            "exact_match": accuracy,
            "examples": examples,
            "same_segment": float(depth == "end"),
        }
        for length in lengths
        for depth in ("start", "middle", "end")
    ]
    made = make_train(
        model,
        seed,
        run_id=f"eval-{stem}",
        verb="eval",
        parent=training.run_id,
        task="passkey",
        config=evaluation,
        data=data,
        series={"cells": cells},
    )
    return [training, made]


def _change(config: dict[str, Any], settings: dict[str, Any] | None) -> None:
    for key, value in (settings or {}).items():
        group, _, name = key.partition(".")
        if name:
            config[group] = {**config[group], name: value}
        else:
            config[group] = value


def variants_report(settings: object, **more: object) -> Report:
    """Table 2 with a second Linear row."""
    rows = {"infini_linear": "Linear", "other": "Linear, otherwise", "local": "Local"}
    variant = {"model": "infini_linear", "settings": settings, **more}
    own = {"models": rows, "memory_baseline": None, "paper": {}, "name": "others", "variants": {"other": variant}}
    return Report.from_config(report_settings() | own)
