"""The evaluation of the passkey task: answers to every example of every cell, and the accuracy of each cell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from infini.config.lengths import format_length, parse_depths, parse_lengths, parse_part
from infini.config.schema import Config
from infini.evaluation.dilution import half_dilution
from infini.evaluation.result_cache import ResultCache, cache_path, identity_of_reader, name_of_model
from infini.evaluation.saved_reading import SavedReadings
from infini.records import RunRecord
from infini.report.intervals import proportion_interval
from infini.system.devices import begin_peak_memory, peak_memory_bytes
from infini.system.progress import plain_console, progress_bar
from infini.tasks.passkey.answers import Answer, answer_questions, make_questions, tokens_to_read
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.passkey.prompt import PasskeyTemplate, input_ids, make_template
from infini.tasks.text.documents import TextTokenizer

DILUTION_PROMPTS = 16
DILUTION_STREAM = 4
"""The stream of the seed's random numbers from which these prompts are drawn."""
TOKENS_PER_CALL = 2048
"""About how many tokens of a prompt one call reads."""


def check_evaluation(cfg: Config, tokenizer: TextTokenizer) -> None:
    """Raise InputError for a length that has no room for the prompts."""
    task = cast(PasskeyConfig, cfg.task)
    template, _ = make_template(cfg, tokenizer, "test")
    short = [length for length in parse_lengths(cfg.length) if length < template.shortest(training=False)]
    for _ in make_questions(template, short, parse_depths(cfg.depth), task.examples, cfg.seed):
        pass


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Ask cfg.task.examples prompts of every length and depth, and fill the record.

    Returns the files that belong beside the record by suffix (the examples), and a function to call once all of them
    are on disk. Every answer is written to disk at once: an evaluation that was stopped asks the remaining prompts when
    the same configuration is started again. Raises PartDone at the end of a part.
    """
    task = cast(PasskeyConfig, cfg.task)
    template, data = make_template(cfg, tokenizer, "test")
    lengths, depths = parse_lengths(cfg.length), parse_depths(cfg.depth)
    questions = list(make_questions(template, lengths, depths, task.examples, cfg.seed))
    N, peaks = cfg.dims.segment_length, []

    def begin_part() -> None:
        peaks.append(peak_memory_bytes(device))
        begin_peak_memory(device)

    # Measured first: an error in them must not follow hours of answers.
    state_floats = model.state_floats(max(lengths) // N)
    # In a memory that decays, a token's weight depends on how long ago it was written.
    lasting = cfg.model.get("memory_decay") is None
    diluted = task.knockout == "none" and cfg.part is None and lasting
    dilution = measure_dilution(template, model, tokenizer.bos_id, cfg.seed) if diluted else []
    # The model and the prompts decide the answers; `data` has the text of their filler.
    prompts = {key: getattr(task, key) for key in ("digits", "fill", "as_printed", "distractors", "filler", "knockout")}
    identity = (identity_of_reader(record), prompts, N, cfg.seed, data)
    cache = ResultCache(cache_path(cfg.results_dir, task.name, *identity), _FIELDS, record, parse_part(cfg.part))
    # Parts share examples: the prompts of an example at several lengths begin alike, which is read once.
    own = set(cache.share(list(dict.fromkeys((each.depth, each.index) for each in questions))))
    missing = [each for each in questions if (each.depth, each.index) in own and each.name not in cache.entries]
    console = plain_console()
    console.print(
        f"asking {name_of_model(record)} ({cfg.recipe.name}) {len(missing):,} questions"
        + (f" ({len(cache.entries):,} were answered before)" if cache.entries else "")
    )
    names: dict[tuple[int, str], list[str]] = {(length, depth): [] for length in lengths for depth in depths}
    for question in questions:
        names[question.length, question.depth].append(question.name)
    total = tokens_to_read(missing, task.rows_per_call) if missing else 0
    title = f"{cfg.model['name']} on {task.name}"
    saved = SavedReadings(cache)
    with cache.measuring(title, total, cfg.parallel.precision, device) as advance:
        for answer in answer_questions(
            model,
            missing,
            tokenizer.bos_id,
            tokens_per_call=max(1, TOKENS_PER_CALL // N) * N,
            rows_per_call=task.rows_per_call,
            knock_out=task.knockout == "reset",
            advance=advance,
            skip=advance.skip,
            saved=saved,
            before_reading=begin_part,
        ):
            question = answer.question
            cache.add(question.name, _entry(answer, tokenizer, N, peak_memory_bytes(device)))
            of_cell = names[question.length, question.depth]
            if all(name in cache.entries for name in of_cell):
                cell = _cell(question.length, question.depth, [cache.entries[name] for name in of_cell])
                console.print(_line(cell))
    cache.end_part([question.name for question in questions])
    # The cache may also hold answers to prompts that this configuration does not ask.
    entries = [cache.entries[question.name] for question in questions]
    cells = [_cell(*cell, [cache.entries[name] for name in of_cell]) for cell, of_cell in names.items()]
    record.data = data | {"documents": len(questions), "tokens": sum(len(question.prompt) for question in questions)}
    record.results = _results(entries)
    record.series["cells"] = cells
    if dilution:
        record.series["half_dilution"] = dilution
        record.results["half_dilution"] = {
            "value": max(value for layer in dilution for value in layer),
            "n": DILUTION_PROMPTS,
            "unit": "tokens, the longest of the heads",
            "higher_is_better": True,
        }
    # All questions count, however many were answered by an earlier process or in parts.
    seen = tokens_to_read(questions, task.rows_per_call)
    resumed = saved.taken or len(missing) < len(questions)
    record.cost = {"tokens_seen": seen, "state_floats": state_floats, "resumed": resumed}
    record.cost["peak_memory_bytes"] = max([*peaks, peak_memory_bytes(device)])
    return cache.hand_over(record, [question.name for question in questions])


def measure_dilution(template: PasskeyTemplate, model: Any, bos_id: int, seed: int) -> list[list[float]]:
    """Half-dilution lengths [layers][heads] in tokens: the amount of filler that weighs as much as the key's sentence
    in the reads at the answer. They are measured on prompts of a few segments with the key at their start; empty
    without a memory."""
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
        # The beginning-of-document token precedes the prompt.
        begin = prompt.key_position + 1
        end = begin + len(template.key_tokens(prompt.key))
        needle_BT[row, begin:end] = True
        # The rest of the key's own segment is left out: it attends to the key and does not grow with the prompt.
        filler_BT[row, -(-end // N) * N : (len(prompt) // N - 1) * N] = True
        query_BT[row, len(prompt) : len(ids)] = True
    device = next(model.parameters()).device
    asked, needle, filler, query = (
        torch.from_numpy(array).to(device) for array in (ids_BT, needle_BT, filler_BT, query_BT)
    )
    with progress_bar("measuring half-dilution", len(prompts), plain_console().is_terminal) as advance:
        return half_dilution(model, asked, needle, filler, query, advance)


_FIELDS = (
    *("length", "depth", "key", "answer", "right", "tokens", "same_segment"),
    *("seconds", "generator_seconds", "tokens_read"),
)


def _entry(answer: Answer, tokenizer: TextTokenizer, segment_length: int, peak: int) -> dict[str, Any]:
    prompt = answer.question.prompt
    return {
        "length": answer.question.length,
        "depth": answer.question.depth,
        "index": answer.question.index,
        "key": prompt.key,
        "answer": tokenizer.decode(answer.given).strip(),
        "right": answer.n_right,
        "tokens": answer.n_tokens,
        "digits_right": _digits_right(answer, tokenizer),
        "log_probability": round(answer.log_probability, 4),
        "prompt_tokens": len(prompt),
        "blocks": list(prompt.blocks),
        "same_segment": prompt.in_one_segment(segment_length),
        "seconds": round(answer.seconds, 3),
        "generator_seconds": round(answer.generator_seconds, 4),
        "tokens_read": answer.tokens_read,
        "peak_memory_bytes": peak,
    }


def _cell(length: int, depth: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n, tokens = len(entries), sum(entry["tokens"] for entry in entries)
    accuracy = sum(entry["right"] for entry in entries) / tokens
    # Tokens are the paper's measure. If a tokenizer puts a separator before the key, every answer of the right form has
    # that token right; if it joins digits, a place is not a digit.
    digits = 0
    for entry in entries:
        # Older answers have only their text. A tokenizer of words decodes with spaces between the digits.
        text = "".join(entry["answer"].split())
        digits += int(entry.get("digits_right", sum(map(operator.eq, entry["key"], text))))
    exact = sum(entry["right"] == entry["tokens"] for entry in entries)
    # The tokens of an answer depend on each other, so the interval counts prompts.
    low, high = proportion_interval(accuracy * n, n)
    exact_low, exact_high = proportion_interval(exact, n)
    return {
        "length": length,
        "depth": depth,
        "examples": n,
        "tokens": tokens,
        "token_accuracy": accuracy,
        "digit_accuracy": digits / sum(len(entry["key"]) for entry in entries),
        "low": low,
        "high": high,
        "exact_match": exact / n,
        "exact_low": exact_low,
        "exact_high": exact_high,
        # Key and question in one segment: the answer needs no memory.
        "same_segment": float(np.mean([entry["same_segment"] for entry in entries])),
        "seconds": max(entry["seconds"] for entry in entries),
        "generator_share": max(entry["generator_seconds"] / entry["seconds"] for entry in entries),
        "tokens_per_second": float(np.median([entry["tokens_read"] / entry["seconds"] for entry in entries])),
        "peak_memory_bytes": max(entry["peak_memory_bytes"] for entry in entries),
    }


def _digits_right(answer: Answer, tokenizer: TextTokenizer) -> int:
    """The number of digits of the key that are right at their place in an answer.

    Where the tokens of the key are its digits, each token is a place. Otherwise digits are compared in the order of the
    text, because tokens may join them. Letters and marks of a token are one wrong place, so that the digits behind them
    keep theirs; in the place of a separator before the key they are none.
    """
    key, expected = answer.question.prompt.key, answer.question.prompt.answer
    # The text of each token, without white space.
    said, wanted = (["".join(tokenizer.decode([each]).split()) for each in ids] for ids in (answer.given, expected))
    if wanted == list(key):
        return sum(map(operator.eq, key, said))
    marked = (re.sub(r"[^0-9]+", "?" if right else "", text) for text, right in zip(said, wanted, strict=True))
    return sum(map(operator.eq, key, "".join(marked)))


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{format_length(cell['length']):>6} {cell['depth']:<6} token accuracy {100 * cell['token_accuracy']:5.1f} % "
        f"[{100 * cell['low']:.1f}, {100 * cell['high']:.1f}], digits {100 * cell['digit_accuracy']:.1f} %, "
        f"exact match {100 * cell['exact_match']:5.1f} % "
        f"[{100 * cell['exact_low']:.1f}, {100 * cell['exact_high']:.1f}], n = {cell['examples']}, "
        f"slowest prompt read in {cell['seconds']:.1f} s"
    )


def _results(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Accuracy over all cells, as a record's results."""
    every, unit = _cell(0, "", entries), {"unit": "fraction", "higher_is_better": True}
    digits = sum(len(entry["key"]) for entry in entries)
    return {
        "token_accuracy": {"value": every["token_accuracy"], "n": every["tokens"], **unit},
        "digit_accuracy": {"value": every["digit_accuracy"], "n": digits, **unit},
        "exact_match": {"value": every["exact_match"], "n": len(entries), **unit},
    }
