"""`infini generate`: streams a prompt of any length through a trained model, and prints its continuation."""

from __future__ import annotations

import codecs
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from infini.config.schema import Config
from infini.errors import InputError
from infini.runs.common import find_model, keep_large_buffers, open_model, with_base
from infini.system.devices import autocast, pick_device
from infini.system.paths import check_name, check_place, home_expanded, is_file, is_folder
from infini.system.progress import progress_bar
from infini.training.checkpoint import checkpoint_folder, read_description

TOKENS_PER_CALL = 4096
_BYTES = 1 << 20
"""Bytes of the prompt that are read at a time."""
_NAMES_A_MODEL = ("checkpoint=", "task=", "model=", "recipe=", "scale=")
"""Beginnings of settings that select the model."""


def run(cfg: Config, overrides: list[str], texts: dict[str, str | None] | None = None) -> int:
    """Print the continuation of `cfg.prompt`, token by token; progress and speed go to standard error.

    texts: prompt, save_state and load_state as they were typed. Raises InputError when prompt, state or checkpoint
    cannot be read, or when there is neither prompt nor state.
    """
    for key, value in (texts or {}).items():
        setattr(cfg, key, value)
    if cfg.prompt is None and cfg.load_state is None:
        raise InputError("prompt=null: give a text, @ and a file, or - for standard input; or load_state=<file>")
    text, size = _open(cfg.prompt)
    save_state, load_state = (
        None if name is None else home_expanded(key, name)
        for key, name in (("save_state", cfg.save_state), ("load_state", cfg.load_state))
    )
    if save_state is not None:
        check_writable("save_state", save_state)
        if (source := _stat_of(cfg.prompt)) is not None and is_same_file(save_state, source):
            raise InputError(
                f"save_state={cfg.save_state!r}: is the file of the prompt, which would be overwritten; "
                "name another file"
            )
    cfg = with_base(cfg, overrides)
    folder = _find_model(cfg, overrides, load_state)
    if folder is not None:
        read_description(folder)
    # Imported late: they take seconds, and the checks above come first.
    import torch

    from infini.evaluation.decoding import Reader, fingerprint, generate, load_reader, save_reader
    from infini.pretrained.seq2seq import Seq2Seq

    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    opened = open_model(cfg, overrides, folder, device)
    model, tokenizer = opened.model, opened.tokenizer
    if isinstance(model, Seq2Seq):
        raise InputError(f"checkpoint={str(folder)!r}: an encoder-decoder does not continue text; use infini summarize")
    print(f"{opened.name}{opened.note} continues", file=sys.stderr)
    about = {"model": opened.name, "tokenizer": tokenizer.hash}
    if not opened.config:
        # Two folders may have one name, and one folder other weights than yesterday.
        about["weights"] = fingerprint(model)
    with autocast(cfg.parallel.precision, device):
        reader = Reader.begin(model, tokenizer.bos_id)
        if load_state is not None:
            reader = load_reader(load_state, model, about)
        started, read = time.perf_counter(), 0
        shown = (size is None or size > 100_000) and sys.stderr.isatty()
        with progress_bar("reading the prompt (bytes)", size, shown=shown) as advance:
            for ids, part in tokenizer.encode_stream(text):
                reader = reader.read([ids], TOKENS_PER_CALL)
                read += len(ids)
                advance(len(part.encode()))
        seconds = time.perf_counter() - started
        if save_state is not None:
            save_reader(reader, save_state, about)
        generator = torch.Generator().manual_seed(cfg.seed)
        started, new = time.perf_counter(), 0
        decode_token = tokenizer.stream_decoder()
        options = cfg.decoding
        sampled = generate(
            reader, options.max_new_tokens, options.temperature, options.top_p, generator, tokenizer.stop_ids
        )
        for token, _ in sampled:
            new += 1
            print(decode_token(token), end="", flush=True)
        if new:
            print()
    spent = time.perf_counter() - started
    read_speed = f"{read:,} tokens read in {seconds:.1f} s" if read else "nothing read"
    saved = f"; state in {save_state}" if save_state is not None else ""
    generated = f"; {new:,} tokens generated, {1000 * spent / new:.1f} ms each" if new else ""
    print(f"{read_speed}{generated}{saved}", file=sys.stderr)
    return 0


def _find_model(cfg: Config, overrides: list[str], load_state: Path | None) -> Path | None:
    """The checkpoint's folder: the model of a saved state, unless the command line selects a model; see find_model."""
    if load_state is not None and not any(text.startswith(_NAMES_A_MODEL) for text in overrides):
        from infini.evaluation.decoding import saved_by

        run_id = saved_by(load_state)
        if run_id and Path(run_id).name == run_id and is_folder(checkpoint_folder(cfg.results_dir, run_id)):
            return checkpoint_folder(cfg.results_dir, run_id)
    # The seed is for sampling; it does not select the model.
    return find_model(cfg, [text for text in overrides if not text.startswith("seed=")])


def _open(prompt: str | None) -> tuple[Iterator[str], int | None]:
    """The prompt in pieces, and its size in bytes, None for standard input. InputError for a bad file."""
    if prompt is None:
        return iter(()), 0
    if prompt == "-":
        # Not through sys.stdin, which may accept bytes that are not UTF-8, and converts line ends.
        raw = getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))
        return _pieces(raw, "prompt=-"), None
    if not prompt.startswith("@"):
        if is_file(prompt):
            print(f"prompt={prompt!r} is taken as text; to read the file, write @{prompt}", file=sys.stderr)
        try:
            return iter((prompt,)), len(prompt.encode())
        except UnicodeEncodeError as error:
            raise InputError(f"prompt={prompt!r}: is not UTF-8 text") from error
    return open_text(home_expanded("prompt", prompt[1:]), f"prompt={prompt!r}")


def open_text(path: Path, where: str) -> tuple[Iterator[str], int]:
    """A UTF-8 file in pieces, and its size in bytes. where: its name in messages.

    Raises InputError for a file that cannot be read; while it is read, for one that is empty or not text.
    """
    try:
        size = path.stat().st_size
        file = open(path, "rb")  # noqa: SIM115 - it is read while it is streamed
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', error)})") from error
    return _pieces(file, where), size


def _stat_of(prompt: str | None) -> os.stat_result | None:
    """The file that the prompt is read from, also as standard input; None where it is read from none."""
    try:
        if prompt == "-":
            return os.fstat(sys.stdin.fileno())
        return home_expanded("prompt", prompt[1:]).stat() if prompt and prompt.startswith("@") else None
    except (OSError, ValueError):
        # Standard input may be closed, or not a file.
        return None


def is_same_file(path: Path, read: os.stat_result) -> bool:
    """Whether writing `path` would overwrite the file `read`."""
    # Resolved: folders of a path that do not exist are made before it is written, as none in none/../book.txt.
    found = Path(os.path.realpath(path))
    return found.exists() and os.path.samestat(found.stat(), read)


def check_writable(key: str, path: Path) -> None:
    """Raises InputError where the file that `key` names cannot be created, or exists and is not a regular file."""
    check_name(key, path)
    if path.exists() and not path.is_file():
        raise InputError(f"{key}={str(path)!r}: exists and is not a regular file; name another file")
    check_place(key, path)


def _pieces(file: BinaryIO, where: str) -> Iterator[str]:
    """The text of UTF-8 bytes, with unchanged line ends and without a byte-order mark."""
    decoder, first = codecs.getincrementaldecoder("utf-8")(), 0
    bom_removed = has_text = False
    while True:
        try:
            block = file.read(_BYTES)
        except OSError as error:
            raise InputError(f"{where}: cannot be read ({error.strerror})") from error
        held = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: is not UTF-8 text (byte {first - held + error.start})") from error
        # UTF-16 of plain English is also valid UTF-8, with zero bytes.
        if (zero := block.find(b"\0")) >= 0:
            raise InputError(f"{where}: is not text (byte {first + zero} is zero)")
        first += len(block)
        if piece:
            piece, bom_removed = piece if bom_removed else piece.removeprefix("\ufeff"), True
            has_text = has_text or bool(piece.strip())
            yield piece
        if not block:
            break
    if not has_text:
        raise InputError(f"{where}: is empty")
