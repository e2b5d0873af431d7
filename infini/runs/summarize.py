"""`infini summarize`: streams a book of any length through a trained model, and prints its summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini.commands import verbs
from infini.config.schema import Config
from infini.errors import InputError
from infini.models import base_of
from infini.records import value_at, write_atomically
from infini.runs.common import find_model, keep_large_buffers, open_model, with_base
from infini.runs.generate import TOKENS_PER_CALL, check_writable, is_same_file, open_text
from infini.system.devices import autocast, pick_device
from infini.system.paths import home_expanded
from infini.system.progress import progress_bar
from infini.tasks.text.epub import epub_text
from infini.training.checkpoint import read_description

if TYPE_CHECKING:
    import numpy as np

    from infini.evaluation.decoding import Reader
    from infini.pretrained.seq2seq import SourceReader

EPUB = ".epub"


def run(cfg: Config, overrides: list[str], paths: list[str], texts: dict[str, str | None]) -> int:
    """Print the summary of a book, or write it to a file; progress goes to standard error.

    paths: the book. texts: `output` as it was typed. Raises InputError when there is not exactly one book, when book or
    checkpoint cannot be read, or when the output cannot be written.
    """
    if len(paths) != 1:
        given = f"{' '.join(paths)!r}" if paths else "no book"
        raise InputError(f"{given}: give one book, a text or an EPUB: infini summarize book.txt")
    output = texts.get("output")
    path = home_expanded("book", paths[0])
    text, size = _book(path)
    written = None if output is None else home_expanded("output", output)
    if written is not None:
        check_writable("output", written)
        if is_same_file(written, path.stat()):
            raise InputError(f"output={output!r}: is the book itself, which would be overwritten; name another file")
    # The seed is for sampling; it does not select the model.
    wanted = [text for text in overrides if not text.startswith("seed=")]
    cfg = with_base(cfg, overrides)
    folder = find_model(cfg, wanted, any_model=True)
    if folder is not None:
        read_description(folder)
    # Imported late: they take seconds, and the checks above come first.
    import numpy as np
    import torch

    from infini.evaluation.decoding import Reader, generate
    from infini.pretrained.seq2seq import Seq2Seq, SourceReader
    from infini.tasks.booksum.data import frame_of

    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    settings = [text for text in overrides if text not in verbs()["summarize"].fixed_settings]
    opened = open_model(cfg, settings, folder, device)
    model, tokenizer = opened.model, opened.tokenizer
    reader: Reader | SourceReader
    read, total, shown = 0, 0, sys.stderr.isatty()

    def pieces(advance: Callable[[float], None]) -> Iterator[np.ndarray]:
        nonlocal read
        for ids, part in tokenizer.encode_stream(text):
            yield ids
            read += len(ids)
            advance(len(part.encode()))

    with autocast(cfg.parallel.precision, device):
        with progress_bar(f"reading {paths[0]}", max(size, 1), shown) as advance:
            ends = tokenizer.stop_ids
            if isinstance(model, Seq2Seq):
                model.check_target("decoding.max_new_tokens", cfg.decoding.max_new_tokens)
                book = np.concatenate(list(pieces(advance)))
            else:
                # The frame is that of the training. An untrained pretrained model answers in its chat template, if any.
                base, trained = base_of(cfg.model), opened.config
                chat = value_at(trained, "task.chat") if trained else bool(base and base.tokenizer.chat_template)
                frame = frame_of(tokenizer, chat, trained.get("model", cfg.model))
                ends = ends | {frame.end}
                reader = Reader.begin(model, int(frame.begin[0])).read([frame.begin[1:]], TOKENS_PER_CALL)
                streamed = reader.read(pieces(advance), TOKENS_PER_CALL)
                reader = streamed.read([frame.middle], TOKENS_PER_CALL)
        if isinstance(model, Seq2Seq):
            read, total = model.source_tokens(read), read
            with progress_bar(f"encoding {paths[0]}", read, shown) as advance:
                reader = SourceReader.begin(model, book, tokenizer.bos_id, advance)
        options, generator = cfg.decoding, torch.Generator().manual_seed(cfg.seed)
        decode_token, said = tokenizer.stream_decoder(), []
        # A printed summary needs no progress bar.
        silent: Any = nullcontext(lambda tokens: None)
        bar = silent if written is None else progress_bar("summarizing", max(options.max_new_tokens, 1), shown)
        with bar as advance:
            for token, _ in generate(
                reader, options.max_new_tokens, options.temperature, options.top_p, generator, ends
            ):
                said.append(decode_token(token))
                advance(1)
                if written is None:
                    print(said[-1], end="", flush=True)
    if written is None:
        print()
    else:
        write_atomically(written, ("".join(said).strip() + "\n").encode())
    where = f"; summary in {written}" if written is not None else ""
    of_all = f" of {total:,}" if total > read else ""
    print(f"{read:,}{of_all} tokens read by {opened.name}{opened.note}{where}", file=sys.stderr)
    return 0


def _book(path: Path) -> tuple[Iterator[str], int]:
    """The text of a book in pieces, and its size in bytes. Raises InputError for a bad file."""
    if path.suffix.lower() != EPUB:
        return open_text(path, repr(str(path)))
    text = epub_text(path)
    if not text:
        raise InputError(f"{str(path)!r}: is empty")
    return iter([text]), len(text.encode())
