"""`infini generate`: a prompt of any length is streamed through a trained model, which then goes on."""

from __future__ import annotations

import codecs
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from infini.config.schema import Config
from infini.errors import InputError
from infini.evaluation.decoding import Reader, generate, load_reader, save_reader, saved_by
from infini.models import kind_of
from infini.runs.common import asked_of_model, find_checkpoint, keep_large_buffers, load_tokenizer, trained_on
from infini.system.devices import autocast, pick_device
from infini.system.paths import check_name, home_expanded, is_file, is_folder
from infini.system.progress import progress_bar
from infini.training.checkpoint import checkpoint_folder, load_model

TOKENS_PER_CALL = 4096
_BYTES = 1 << 20
"""Of the prompt, held at the same time."""
_NAMES_A_MODEL = ("checkpoint=", "task=", "model=", "recipe=", "scale=")
"""How overrides begin that say which model is to go on."""


def run(cfg: Config, overrides: list[str], texts: dict[str, str | None] | None = None) -> int:
    """Print the continuation of `cfg.prompt`, token by token; what was read and how fast goes to standard error.

    texts: prompt, save_state and load_state as they were typed. Raises InputError when prompt, state or checkpoint
    cannot be read, or there is nothing to go on from.
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
    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    folder = _find_model(cfg, overrides, load_state)
    model, description = load_model(folder, device, asked_of_model(cfg, overrides, folder))
    if kind_of(description["model"]["name"]) == "seq2seq":
        raise InputError(f"checkpoint={str(folder)!r}: an encoder-decoder goes on from no text; use infini summarize")
    tokenizer = load_tokenizer(folder, description)
    print(f"{description['run_id']}{trained_on(description)} goes on", file=sys.stderr)
    about = {"model": str(description["run_id"]), "tokenizer": tokenizer.hash}
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
        speak = tokenizer.stream_decoder()
        options = cfg.decoding
        drawn = generate(
            reader, options.max_new_tokens, options.temperature, options.top_p, generator, tokenizer.bos_id
        )
        for token, _ in drawn:
            new += 1
            print(speak(token), end="", flush=True)
        if new:
            print()
    spent = time.perf_counter() - started
    read_speed = f"{read:,} tokens read in {seconds:.1f} s" if read else "nothing read"
    saved = f"; state in {save_state}" if save_state is not None else ""
    drawing = f"; {new:,} drawn, {1000 * spent / new:.1f} ms each" if new else ""
    print(f"{read_speed}{drawing}{saved}", file=sys.stderr)
    return 0


def _find_model(cfg: Config, overrides: list[str], load_state: Path | None) -> Path:
    """The checkpoint's folder: a saved state's own model, where nothing on the command line names one."""
    if load_state is not None and not any(text.startswith(_NAMES_A_MODEL) for text in overrides):
        run_id = saved_by(load_state)
        if run_id and Path(run_id).name == run_id and is_folder(checkpoint_folder(cfg.results_dir, run_id)):
            return checkpoint_folder(cfg.results_dir, run_id)
    # Here the seed decides what is drawn, not which model goes on.
    return find_checkpoint(cfg, [text for text in overrides if not text.startswith("seed=")])


def _open(prompt: str | None) -> tuple[Iterator[str], int | None]:
    """The prompt in pieces, and its bytes, None where nobody knows them beforehand. InputError for a bad file."""
    if prompt is None:
        return iter(()), 0
    if prompt == "-":
        # Python's own standard input may let bytes pass that are no text, and turns line ends into others.
        raw = getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))
        return _pieces(raw, "prompt=-"), None
    if not prompt.startswith("@"):
        if is_file(prompt):
            print(f"prompt={prompt!r} is taken for a text; the file of that name is @{prompt}", file=sys.stderr)
        try:
            return iter((prompt,)), len(prompt.encode())
        except UnicodeEncodeError as error:
            raise InputError(f"prompt={prompt!r}: is not UTF-8 text") from error
    return open_text(home_expanded("prompt", prompt[1:]), f"prompt={prompt!r}")


def open_text(path: Path, where: str) -> tuple[Iterator[str], int]:
    """A UTF-8 file in pieces, and its bytes. where: what messages call it. Raises InputError for a file that cannot be
    read, and while it is read for one that is no text or has nothing in it."""
    try:
        size = path.stat().st_size
        file = open(path, "rb")  # noqa: SIM115 - it is read while it is streamed
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', error)})") from error
    return _pieces(file, where), size


def check_writable(key: str, path: Path) -> None:
    """Before a long text is read: raises InputError where the file that `key` names cannot be made, or would replace
    something that is no file, as a device."""
    check_name(key, path)
    standing = next(folder for folder in path.absolute().parents if folder.exists())
    if (path.exists() and not path.is_file()) or not standing.is_dir():
        raise InputError(f"{key}={str(path)!r}: {path if standing.is_dir() else standing} is in the way; name a file")
    try:
        with tempfile.TemporaryFile(dir=standing):
            pass
    except OSError as error:
        raise InputError(f"{key}={str(path)!r}: {standing} may not be written ({error.strerror})") from error


def _pieces(file: BinaryIO, where: str) -> Iterator[str]:
    """The text of UTF-8 bytes, line ends as they are, without a mark of the order of bytes before it."""
    decoder, first = codecs.getincrementaldecoder("utf-8")(), 0
    begun = filled = False
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
        # UTF-16 of plain English is UTF-8 too, by its letter; no text has zeros.
        if (zero := block.find(b"\0")) >= 0:
            raise InputError(f"{where}: is not text (byte {first + zero} is zero)")
        first += len(block)
        if piece:
            piece, begun = piece if begun else piece.removeprefix("\ufeff"), True
            filled = filled or bool(piece.strip())
            yield piece
        if not block:
            break
    if not filled:
        raise InputError(f"{where}: there is nothing in it")
