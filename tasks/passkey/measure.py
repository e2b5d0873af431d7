"""The evaluation of the passkey task: every example of every cell answered, kept as it comes, and summed up a cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from infini.config.lengths import format_length, parse_depths, parse_lengths
from infini.config.schema import Config
from infini.evaluation.dilution import half_dilution
from infini.evaluation.result_cache import EvalCheckpoint, ResultCache, cache_path, line_of
from infini.records import RunRecord
from infini.report.intervals import proportion_interval
from infini.system.devices import autocast
from infini.system.memory_use import peak_memory_bytes
from infini.system.progress import progress_bar
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.data import input_ids
from infini.tasks.passkey.evaluation import Answer, answer_questions
from infini.tasks.passkey.plan import Question, make_questions, tokens_to_read
from infini.tasks.passkey.prompt import PasskeyTemplate
from infini.tasks.passkey.template import make_template
from infini.tasks.text.documents import TextTokenizer

DILUTION_PROMPTS = 16
DILUTION_STREAM = 4
"""Which stream of the seed's random numbers these prompts come from."""
CALL_TOKENS = 2048
"""Tokens of a prompt that a call reads, about."""


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Answer cfg.task.examples prompts of every length and depth, and fill the record.

    Returns what is to lie beside the record by suffix (the examples), and what to call when both are on the disk.

    Every answer is appended to a file as soon as it is there, and how far the others have been read is put down every
    20 seconds; started again with the same configuration, the evaluation goes on from there.
    """
    task = cast(PasskeyConfig, cfg.task)
    template, data = make_template(cfg, tokenizer, "test")
    lengths, depths = parse_lengths(cfg.length), parse_depths(cfg.depth)
    questions = list(make_questions(template, lengths, depths, task.examples, cfg.seed))
    N = cfg.dims.segment_length
    # Before the first answer: what a model cannot give must not stop an evaluation behind the last one.
    state_floats = model.state_floats(max(lengths) // N)
    dilution = measure_dilution(template, model, tokenizer.bos_id, cfg.seed) if task.knockout == "none" else []
    kept = ResultCache(_kept_path(cfg, record, data), _FIELDS, record)
    missing = [question for question in questions if question.name not in kept.entries]
    console = Console(stderr=True)
    console.print(
        f"asking {record.parent} ({cfg.recipe.name}) {len(missing):,} questions"
        + (f" ({len(kept.entries):,} were answered before)" if kept.entries else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    names = _names_by_cell(questions)
    total = tokens_to_read(missing, task.rows_per_call) if missing else 0
    point = EvalCheckpoint(kept, "prompts")
    with (
        kept,
        progress_bar(f"{cfg.model['name']} on passkey", total, console.is_terminal) as advance,
        autocast(cfg.parallel.precision, device),
    ):
        for answer in answer_questions(
            model,
            missing,
            tokenizer.bos_id,
            tokens_per_call=max(1, CALL_TOKENS // N) * N,
            rows_per_call=task.rows_per_call,
            knock_out=task.knockout == "reset",
            advance=advance,
            points=point,
        ):
            question = answer.question
            kept.add(question.name, _entry(answer, tokenizer, N, peak_memory_bytes(device)))
            asked = names[question.length, question.depth]
            if all(name in kept.entries for name in asked):
                shown = _cell(question.length, question.depth, [kept.entries[name] for name in asked])
                console.print(_line(shown), markup=False, highlight=False, soft_wrap=True)
        point.drop()
    # A larger evaluation may have been stopped here before: only what was asked for now counts.
    entries = [kept.entries[question.name] for question in questions]
    cells = [
        _cell(length, depth, [kept.entries[name] for name in names[length, depth]])
        for length in lengths
        for depth in depths
    ]
    record.data = data | {"documents": len(questions), "tokens": sum(len(question.prompt) for question in questions)}
    record.results = _results(entries)
    record.series["cells"] = cells
    if dilution:
        record.series["half_dilution"] = dilution
        longest = max(value for layer in dilution for value in layer)
        record.results["half_dilution"] = {
            "value": longest,
            "n": DILUTION_PROMPTS,
            "unit": "tokens, the longest of the heads",
            "higher_is_better": True,
        }
    record.cost = {
        "tokens_seen": total,
        "state_floats": state_floats,
        "resumed": len(missing) < len(questions) or point.before > 0,
    }
    kept.tell(record, [entry["name"] for entry in entries])
    beside = {".jsonl": b"".join(map(line_of, entries))}
    return beside, lambda: kept.drop(entry["name"] for entry in entries)


def measure_dilution(template: PasskeyTemplate, model: Any, bos_id: int, seed: int) -> list[list[float]]:
    """Half-dilution lengths [layers][heads]: how many tokens of filler weigh as much, where the answer is asked, as the
    sentence that gives the key; over prompts of a few segments with the key at their start. Empty without a memory."""
    N = model.segment_length
    length = max(8 * N, 2 * template.shortest(training=False))
    rng = np.random.default_rng([seed, DILUTION_STREAM])
    prompts = [template.example(length, 0.0, rng, training=False) for _ in range(DILUTION_PROMPTS)]
    width = max(len(prompt) + len(prompt.answer) for prompt in prompts)
    ids_BT = np.full((len(prompts), width), bos_id, dtype=np.int64)
    needle_BT, filler_BT, query_BT = (np.zeros(ids_BT.shape, dtype=bool) for _ in range(3))
    for row, prompt in enumerate(prompts):
        ids = input_ids(prompt, bos_id)
        ids_BT[row, : len(ids)] = ids
        # One mark stands before the prompt.
        begin = prompt.key_position + 1
        end = begin + len(template.key_tokens(prompt.key))
        needle_BT[row, begin:end] = True
        # Not the rest of the key's own segment: it saw the key, writes of it, and does not grow with the prompt.
        filler_BT[row, -(-end // N) * N : (len(prompt) // N - 1) * N] = True
        query_BT[row, len(prompt) : len(ids)] = True
    masks = (torch.from_numpy(array).to(next(model.parameters()).device) for array in (needle_BT, filler_BT, query_BT))
    return half_dilution(model, torch.from_numpy(ids_BT).to(next(model.parameters()).device), *masks)


def _kept_path(cfg: Config, record: RunRecord, data: dict[str, Any]) -> Path:
    """Named after what decides the answers: model, prompts, precision."""
    decides = {key: value for key, value in asdict(cfg.task).items() if key not in ("examples", "rows_per_call")}
    parts = (record.parent, decides, cfg.dims.segment_length, cfg.parallel.precision, cfg.seed, data)
    return cache_path(cfg.results_dir, "passkey", *parts)


def _names_by_cell(questions: Iterable[Question]) -> dict[tuple[int, str], list[str]]:
    names: dict[tuple[int, str], list[str]] = defaultdict(list)
    for question in questions:
        names[question.length, question.depth].append(question.name)
    return names


_FIELDS = {"length", "depth", "right", "tokens", "same_segment", "seconds", "generator_seconds", "tokens_read"}


def _entry(answer: Answer, tokenizer: TextTokenizer, segment_length: int, peak: int) -> dict[str, Any]:
    prompt = answer.question.prompt
    # One mark stands before the prompt; the last token that is fed is the answer's last but one.
    key, last = prompt.key_again + 1, len(prompt) + answer.n_tokens - 1
    return {
        "length": answer.question.length,
        "depth": answer.question.depth,
        "index": answer.question.index,
        "key": prompt.key,
        "answer": tokenizer.decode(answer.given).strip(),
        "right": answer.n_right,
        "tokens": answer.n_tokens,
        "log_probability": round(answer.log_probability, 4),
        "prompt_tokens": len(prompt),
        "blocks": list(prompt.blocks),
        "same_segment": key // segment_length == last // segment_length,
        "seconds": round(answer.seconds, 3),
        "generator_seconds": round(answer.generator_seconds, 4),
        "tokens_read": answer.tokens_read,
        "peak_memory_bytes": peak,
    }


def _cell(length: int, depth: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n = len(entries)
    accuracy = sum(entry["right"] for entry in entries) / sum(entry["tokens"] for entry in entries)
    exact = sum(entry["right"] == entry["tokens"] for entry in entries)
    # Tokens of an answer depend on each other: prompts are what is counted.
    low, high = proportion_interval(accuracy * n, n)
    exact_low, exact_high = proportion_interval(exact, n)
    return {
        "length": length,
        "depth": depth,
        "examples": n,
        "tokens": sum(entry["tokens"] for entry in entries),
        "token_accuracy": accuracy,
        "low": low,
        "high": high,
        "exact_match": exact / n,
        "exact_low": exact_low,
        "exact_high": exact_high,
        # Key and question in one segment: no memory is needed.
        "same_segment": float(np.mean([entry["same_segment"] for entry in entries])),
        "seconds": max(entry["seconds"] for entry in entries),
        "generator_share": max(entry["generator_seconds"] / entry["seconds"] for entry in entries),
        "tokens_per_second": float(np.median([entry["tokens_read"] / entry["seconds"] for entry in entries])),
        "peak_memory_bytes": max(entry["peak_memory_bytes"] for entry in entries),
    }


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{format_length(cell['length']):>6} {cell['depth']:<6} token accuracy {100 * cell['token_accuracy']:5.1f} % "
        f"[{100 * cell['low']:.1f}, {100 * cell['high']:.1f}], exact match {100 * cell['exact_match']:5.1f} % "
        f"[{100 * cell['exact_low']:.1f}, {100 * cell['exact_high']:.1f}], n = {cell['examples']}, "
        f"slowest prompt read in {cell['seconds']:.1f} s"
    )


def _results(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Over all cells, as a record's results want them."""
    unit = {"unit": "fraction", "higher_is_better": True}
    tokens = sum(entry["tokens"] for entry in entries)
    right = sum(entry["right"] for entry in entries)
    whole = sum(entry["right"] == entry["tokens"] for entry in entries)
    return {
        "token_accuracy": {"value": right / tokens, "n": tokens, **unit},
        "exact_match": {"value": whole / len(entries), "n": len(entries), **unit},
    }
