"""The evaluation of the summarization task: each book is read, a summary is sampled and compared with human ones."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from infini.config.compose import cache_folder
from infini.config.lengths import format_length, parse_lengths, parse_part
from infini.config.schema import Config
from infini.errors import InputError, require
from infini.evaluation.decoding import Reader, generate
from infini.evaluation.result_cache import ResultCache, cache_path, identity_of_reader, name_of_model
from infini.pretrained.seq2seq import Seq2Seq, SourceReader
from infini.records import RunRecord
from infini.system.devices import peak_memory_bytes
from infini.system.progress import plain_console, progress_bar
from infini.tasks.booksum import references
from infini.tasks.booksum.books import BookSplit, open_books
from infini.tasks.booksum.config import BooksumConfig
from infini.tasks.booksum.data import Frame, frame_of
from infini.tasks.booksum.metrics import OVERALL, TYPES, over_books, rouge, scorable
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.token_cache import tokenise

TOKENS_PER_CALL = 4096
DECODE_COST = 128
"""Tokens that are read in about the time of generating one; for the progress bar."""
_FIELDS = ("summary", "tokens_read", "tokens_drawn", "read_seconds", "draw_seconds", "peak_memory_bytes")


def evaluate(
    cfg: Config, model: Any, tokenizer: TextTokenizer, record: RunRecord, device: torch.device
) -> tuple[dict[str, bytes], Callable[[], None]]:
    """Summarize the beginning of every book of `task.split`, at each length, and fill the record.

    Returns the files that belong beside the record by suffix (the summaries), and a function to call once all of them
    are on disk.
    Every summary is written to disk at once: an evaluation that was stopped summarizes the remaining books when the
    same configuration is started again. Raises InputError when the data cannot be loaded, and PartDone at the end of a
    part.
    """
    task = cast(BooksumConfig, cfg.task)
    books = open_books(cfg, task.split)
    asked = any(text.lstrip("+").startswith("length=") for text in record.overrides)
    lengths = parse_lengths(cfg.length if asked else [task.input_length])
    frame = frame_of(tokenizer, task.chat, cfg.model)
    # Tokens that are read beside the book. The first of a text is not counted.
    around = 0 if isinstance(model, Seq2Seq) else len(frame) - 1
    for length in lengths:
        allowed = f"must be at least {around + 1}; {around} tokens are read beside the book"
        require(length > around, "length" if asked else "task.input_length", length, allowed)
    opened = tokenise(books.documents, tokenizer, cache_folder(cfg))
    # The model's options are included, because an evaluation may change those of an encoder-decoder.
    options, chat = sorted(cfg.model.items()), ["chat"] if task.chat else []
    decides = (identity_of_reader(record), cfg.dims.segment_length, cfg.seed, books.revision, options, *chat)
    sampling = (cfg.decoding.max_new_tokens, cfg.decoding.temperature, cfg.decoding.top_p)
    path = cache_path(cfg.results_dir, task.name, *decides, *sampling)
    cache = ResultCache(path, _FIELDS, record, parse_part(cfg.part))
    own = cache.share(range(len(opened)))
    wanted = {_name(length, opened.names[index]): (length, index) for length in lengths for index in range(len(opened))}
    missing = [pair for name, pair in wanted.items() if pair[1] in own and name not in cache.entries]
    console = plain_console()
    console.print(
        f"summarizing with {name_of_model(record)}: {len(missing)} summaries"
        + (f" ({found} were there before)" if (found := len(wanted.keys() & cache.entries.keys())) else "")
    )
    total = DECODE_COST * cfg.decoding.max_new_tokens * len(missing)
    total += sum(_read(model, min(length, int(opened.n_tokens[index]) + around)) for length, index in missing)
    title = f"{cfg.model['name']} on {task.name}"
    with cache.measuring(title, max(total, 1), cfg.parallel.precision, device) as advance:
        for length, index in missing:
            ids = opened.ids(index)[: length - around]
            seed = _seed(cfg.seed, opened.names[index])
            entry = summarise(model, tokenizer, ids, frame, cfg, seed, advance)
            entry["peak_memory_bytes"] = peak_memory_bytes(device)
            cache.add(_name(length, opened.names[index]), entry)
    cache.end_part(wanted)
    with progress_bar("comparing summaries", len(wanted), console.is_terminal) as advance:
        cells = [_cell(length, books, cache, task.references, advance) for length in lengths]
    longest = max(cells, key=lambda cell: int(cell["length"]))
    record.data = opened.data_record() | {"revision": books.revision}
    record.results = _results(longest, _note_of_unscored(books.documents.names, books.summaries))
    record.series["cells"] = cells
    entries = [cache.entries[name] for name in wanted]
    # A book may be shorter than every length.
    longest_read = min(max(lengths), int(opened.n_tokens.max()) + around)
    record.cost = {
        "tokens_seen": sum(entry["tokens_read"] for entry in entries),
        "tokens_drawn": sum(entry["tokens_drawn"] for entry in entries),
        "state_floats": model.state_floats(longest_read // cfg.dims.segment_length),
        "resumed": len(missing) < len(wanted),
    }
    return cache.hand_over(record, list(wanted))


def evaluate_reference(cfg: Config, record: RunRecord) -> dict[str, bytes]:
    """Score the summaries of `task.reference`, which need no model, and fill the record.

    Returns the files that belong beside the record (none). Books without the needed summaries are left out: a second
    human one for `human`, and one that ROUGE can score. Raises InputError when `human` finds no book with two.
    """
    task = cast(BooksumConfig, cfg.task)
    assert task.reference is not None
    books = open_books(cfg, task.split)
    human = task.reference == "human"
    # The second human summary is scored against the first.
    compared = {
        name: texts[:1] if human else texts
        for name, texts in zip(books.documents.names, books.summaries, strict=True)
        if len(texts) > 1 or not human
    }
    if not compared:
        raise InputError(f"task.reference={task.reference!r}: no book of {task.split} has two summaries")
    scored = []
    with progress_bar(f"{task.reference} on {task.name}", len(books.documents)) as advance:
        for index, name in enumerate(books.documents.names):
            if texts := scorable(compared.get(name, ())):
                if human:
                    made = books.summaries[index][1]
                else:
                    made = _without_model(task, books.documents[index].text, texts, _seed(cfg.seed, name))
                scores = rouge(made, texts, task.references)
                scored.append({"name": name, **{metric: round(value, 4) for metric, value in scores.items()}})
            advance(1)
    record.data = {
        "name": books.documents.name,
        "split": task.split,
        "source": books.documents.source,
        "revision": books.revision,
        "documents": len(books.documents),
    }
    cell = _means(scored)
    record.series["cells"] = [cell]
    record.results = _results(cell, _note_of_unscored(list(compared), list(compared.values())))
    return {}


def details(record: RunRecord) -> Iterator[str]:
    """One line per input length: tokens read, and the overall score."""
    for cell in record.series["cells"]:
        if cell.get("length") and cell["books"]:
            read = np.mean([book["tokens_read"] for book in cell["books"]])
            yield (
                f"at most {format_length(cell['length'])} of a book ({read:,.0f} tokens on average): "
                f"overall {cell['overall']:.4f}"
            )


def _without_model(task: BooksumConfig, text: str, texts: Sequence[str], seed: int) -> str:
    if task.reference == "lead":
        return references.lead(text, task.reference_words)
    if task.reference == "random":
        return references.random_sentences(text, task.reference_words, seed)
    # The oracle picks for the first summary.
    return references.oracle(text, texts[0], task.reference_words)


def summarise(
    model: Any,
    tokenizer: TextTokenizer,
    book: np.ndarray,
    frame: Frame,
    cfg: Config,
    seed: int,
    advance: Callable[[float], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Read a book, a language model in its frame, and sample a summary by `cfg.decoding`.

    Returns the summary, the numbers of tokens read and generated, and the seconds of both. advance is called with the
    number of tokens read, and with DECODE_COST for each generated one and each that an early end saved.
    """
    started = time.perf_counter()
    reader: Reader | SourceReader
    if isinstance(model, Seq2Seq):
        model.check_target("decoding.max_new_tokens", cfg.decoding.max_new_tokens)
        reader = SourceReader.begin(model, book, tokenizer.bos_id, advance)
        read = _read(model, len(book))
    else:
        chunks = [frame.begin[1:], book, frame.middle]
        reader = Reader.begin(model, int(frame.begin[0])).read(chunks, TOKENS_PER_CALL, advance)
        read = sum(map(len, chunks))
    read_seconds = time.perf_counter() - started
    options = cfg.decoding
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    tokens = []
    sampling = (options.max_new_tokens, options.temperature, options.top_p)
    # A chat's end of a turn is the template's; a model may end the text otherwise.
    for token, _ in generate(reader, *sampling, generator, {frame.end, *tokenizer.stop_ids}):
        tokens.append(token)
        advance(DECODE_COST)
    advance(DECODE_COST * (options.max_new_tokens - len(tokens)))
    return {
        "summary": tokenizer.decode(tokens),
        "tokens_read": read,
        "tokens_drawn": len(tokens),
        "read_seconds": round(read_seconds, 3),
        "draw_seconds": round(time.perf_counter() - started, 3),
    }


def _read(model: Any, length: int) -> int:
    """The number of tokens that the model reads of `length`; an encoder-decoder may have a limit."""
    return model.source_tokens(length) if isinstance(model, Seq2Seq) else length


def _cell(
    length: int, books: BookSplit, cache: ResultCache, references: str, advance: Callable[[float], None]
) -> dict[str, Any]:
    """The scores at one input length: means over books with intervals, and the scores of each book."""
    scored = []
    for name, texts in zip(books.documents.names, books.summaries, strict=True):
        entry = cache.entries[_name(length, name)]
        if scorable(texts):
            scores = {metric: round(value, 4) for metric, value in rouge(entry["summary"], texts, references).items()}
            scored.append({"name": name, "tokens_read": entry["tokens_read"], **scores})
        advance(1)
    return {"length": length, **_means(scored)}


def _means(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and interval of each metric, None where no book has scores; and the books."""
    if not scored:
        return {name: None for metric in (*TYPES, OVERALL) for name in (metric, f"{metric}_interval")} | {"books": []}
    means, intervals = {}, {}
    for metric, (value, low, high) in over_books(scored).items():
        means[metric] = round(value, 4)
        intervals[f"{metric}_interval"] = None if low is None or high is None else [round(low, 4), round(high, 4)]
    return {**means, **intervals, "books": scored}


def _results(cell: dict[str, Any], note: str) -> dict[str, dict[str, Any]]:
    entry = {"n": len(cell["books"]), "unit": "per cent", "higher_is_better": True} | ({"note": note} if note else {})
    return {name: {"value": cell[name], **entry} for name in (OVERALL, *TYPES)}


def _note_of_unscored(names: Sequence[str], summaries: Sequence[Sequence[str]]) -> str:
    """A note on human summaries that ROUGE cannot score; empty where there are none."""
    total = sum(map(len, summaries))
    usable = [len(scorable(texts)) for texts in summaries]
    if sum(usable) == total:
        return ""
    unscored = [name for name, count in zip(names, usable, strict=True) if not count]
    note = f"{total - sum(usable)} of {total} summaries by people have no word of a-z or 0-9; ROUGE counts no others"
    few = ", ".join(unscored[:5]) + (f" and {len(unscored) - 5} more" if len(unscored) > 5 else "")
    return note + (f"; not scored: {len(unscored)} of {len(names)} books ({few})" if unscored else "")


def _name(length: int, book: str) -> str:
    return f"{format_length(length)}/{book}"


def _seed(seed: int, book: str) -> int:
    """A seed for each book, independent of the other books."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{book}".encode()).digest()[:6], "big")
