"""Questions on long inputs, answered greedily: the prompts and scores are those of lm-evaluation-harness."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from infini.config.lengths import format_length, parse_lengths, parse_part
from infini.config.schema import Config
from infini.errors import InputError
from infini.evaluation.decoding import Reader, generate
from infini.evaluation.result_cache import ResultCache, cache_path, identity_of_reader, name_of_model
from infini.records import RunRecord
from infini.report.intervals import proportion_interval
from infini.system.devices import peak_memory_bytes
from infini.system.progress import plain_console
from infini.tasks.long_context.config import NEEDLES, LongContextConfig
from infini.tasks.long_context.prompts import Prompt, make_prompts, revision
from infini.tasks.text.data_module import ResumableDataModule
from infini.tasks.text.documents import TextTokenizer

TOKENS_PER_CALL = 2048
"""About how many tokens of a prompt one call reads."""
DECODE_COST = 32
"""Tokens that are read in about the time of generating one; for the progress bar."""
_FIELDS = ("subtask", "length", "score", "distant", "read_seconds", "tokens_read", "peak_memory_bytes")


class DataModule(ResumableDataModule):
    """No training reads these prompts: they are test sets of other papers."""

    def revision(self, split: str) -> str:
        return revision()

    def setup(self, stage: str | None = None) -> None:
        raise InputError(f"task={self.cfg.task.name}: has no training data")


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Ask task.examples prompts of every subtask and length, and fill the record.

    Returns the files that belong beside the record by suffix (the answers), and a function to call once all of them
    are on disk. Every answer is written to disk at once: an evaluation that was stopped asks the remaining prompts when
    the same command is started again. Raises InputError when the prompts cannot be made, and PartDone at the end of a
    part.
    """
    task, lengths, N = cast(LongContextConfig, cfg.task), parse_lengths(cfg.length), cfg.dims.segment_length
    console = plain_console()
    version = revision()
    console.print(f"making {task.examples} prompts for each of {len(task.subtasks) * len(lengths)} cells")
    prompts = [
        prompt
        # The shortest first, because the peak of memory is that of the evaluation so far.
        for length in sorted(lengths)
        for name in task.subtasks
        for prompt in make_prompts(name, length, task.examples, tokenizer, cfg.seed)
    ]
    # The model and the prompts decide the answers.
    identity = (identity_of_reader(record), tokenizer.name, N, cfg.seed, version)
    cache = ResultCache(cache_path(cfg.results_dir, task.name, *identity), _FIELDS, record, parse_part(cfg.part))
    missing = [prompt for prompt in cache.share(prompts) if prompt.name not in cache.entries]
    console.print(
        f"asking {name_of_model(record)} {len(missing):,} questions"
        + (f" ({len(cache.entries):,} were answered before)" if cache.entries else "")
    )
    of_cell: dict[tuple[str, int], list[str]] = defaultdict(list)
    for prompt in prompts:
        of_cell[prompt.subtask, prompt.length].append(prompt.name)
    total = sum(len(prompt.ids) + DECODE_COST * prompt.max_new_tokens for prompt in missing)
    title = f"{cfg.model['name']} on {task.name}"
    with cache.measuring(title, max(total, 1), cfg.parallel.precision, device) as advance:
        for prompt in missing:
            entry = _answer(model, tokenizer, prompt, N, advance)
            cache.add(prompt.name, entry | {"peak_memory_bytes": peak_memory_bytes(device)})
            names = of_cell[prompt.subtask, prompt.length]
            if all(name in cache.entries for name in names):
                console.print(_line(_cell(prompt.subtask, prompt.length, [cache.entries[name] for name in names])))
    cache.end_part([prompt.name for prompt in prompts])
    entries = [cache.entries[prompt.name] for prompt in prompts]
    cells = [_cell(*cell, [cache.entries[name] for name in names]) for cell, names in of_cell.items()]
    record.data = {
        "name": task.name,
        "split": "test",
        # Only RULER's first needle uses generated text.
        "source": "generated" if set(task.subtasks) <= {NEEDLES[0]} else "hub",
        "revision": version,
        "tokenizer": tokenizer.name,
        "documents": len(prompts),
        "tokens": sum(len(prompt.ids) for prompt in prompts),
    }
    record.series["cells"] = cells
    record.results["accuracy"] = {
        "value": float(np.mean([entry["score"] for entry in entries])),
        "n": len(entries),
        "unit": "fraction",
        "higher_is_better": True,
    }
    record.cost = {
        "tokens_seen": sum(entry["tokens_read"] for entry in entries),
        "state_floats": model.state_floats(max(lengths) // N),
        "resumed": len(missing) < len(prompts),
    }
    return cache.hand_over(record, [prompt.name for prompt in prompts])


def details(record: RunRecord) -> Iterator[str]:
    """A line for each subtask and length."""
    return map(_line, record.series["cells"])


def _answer(
    model: Any, tokenizer: TextTokenizer, prompt: Prompt, segment_length: int, advance: Callable[[float], None]
) -> dict[str, Any]:
    started = time.perf_counter()
    reader = Reader.begin(model, tokenizer.bos_id).read([prompt.ids], TOKENS_PER_CALL, advance)
    read_seconds = time.perf_counter() - started
    tokens: list[int] = []
    score = 0.0
    sampled = generate(reader, prompt.max_new_tokens, 0.0, 1.0, torch.Generator(), tokenizer.stop_ids)
    for token, _ in sampled:
        tokens.append(token)
        score = prompt.score(tokenizer.decode(tokens))
        # More text cannot change a full score.
        if score == 1:
            break
    advance(DECODE_COST * prompt.max_new_tokens)
    # The beginning-of-document token precedes the prompt, whose last token is read with the question's segment.
    question = len(prompt.ids) // segment_length
    return {
        "subtask": prompt.subtask,
        "length": prompt.length,
        "index": prompt.index,
        "answers": list(prompt.answers),
        "given": tokenizer.decode(tokens),
        "score": score,
        "needle": prompt.needle,
        "distant": None if prompt.needle is None else (prompt.needle + 1) // segment_length < question,
        "tokens_read": len(prompt.ids),
        "read_seconds": round(read_seconds, 3),
    }


def _cell(subtask: str, length: int, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {"subtask": subtask, "length": length, "examples": len(entries)} | _accuracy(entries)
    # The other answers end in the segment of the question, or their place is unknown.
    distant = [entry for entry in entries if entry["distant"]]
    found["distant"] = {"examples": len(distant)} | (_accuracy(distant) if distant else {})
    return found | {
        "read_seconds": max(entry["read_seconds"] for entry in entries),
        "peak_memory_bytes": max(entry["peak_memory_bytes"] for entry in entries),
    }


def _accuracy(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean score, with its 95 % interval (Clopper-Pearson)."""
    total = sum(entry["score"] for entry in entries)
    low, high = proportion_interval(total, len(entries))
    return {"accuracy": total / len(entries), "low": low, "high": high}


def _line(cell: dict[str, Any]) -> str:
    text = (
        f"{format_length(cell['length']):>6} {cell['subtask']:<14} accuracy {100 * cell['accuracy']:5.1f} % "
        f"[{100 * cell['low']:.1f}, {100 * cell['high']:.1f}], n = {cell['examples']}"
    )
    distant = cell["distant"]
    if distant["examples"]:
        text += f"; answer in an earlier segment: {100 * distant['accuracy']:.1f} %, n = {distant['examples']}"
    return text + f"; slowest prompt read in {cell['read_seconds']:.1f} s"
