"""Documents and tokenizers: sources of text, and its conversion to token ids.

A corpus is a folder of UTF-8 files, a Hugging Face data set, or a small synthetic corpus for machines with neither.
`Documents` reads it lazily and has a content hash, the `revision`, by which everything derived from the text is cached.
A `TextTokenizer` is a byte-level BPE trained on the train split, or any tokenizer of the hub.
"""

import codecs
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infini.config.compose import data_folder
from infini.config.data_files import TEXT_LAYOUT, no_data, text_files
from infini.errors import InputError
from infini.records import write_atomically
from infini.system.paths import is_file
from infini.system.progress import plain_console, progress_bar, warn

SPLITS = ("train", "validation", "test")
SYNTHETIC = "synthetic"
BOS, PAD, END = "<s>", "<pad>", "</s>"
BEGINNINGS = (BOS, "<|begin_of_text|>", "<bos>", PAD, "<|endoftext|>")
"""Tokens before a document, the first special one that a vocabulary has: this project's, Llama 3's, Gemma's, T5's
(whose models start with the pad token), and that between the documents of GPT-2, Qwen, OLMo and SmolLM."""
ENDINGS = (END, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Tokens after an answer, the first special one that a vocabulary has."""
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>")
"""Other special tokens after which no text follows."""

_SAMPLE_CHARACTERS = 16 << 20
_PIECE_CHARACTERS = 1 << 16
_ENCODE_CHARACTERS = 1 << 14
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A byte of a character that is not in the vocabulary, as SentencePiece tokenizers write it."""
# A piece may end only at these four: Python and the tokenizers disagree on other white space.
_CUT = re.compile(r"(?<=\S)[ \t\r\n]")
_CUT_AT_SPACE = re.compile(r"(?<=\S) (?=\S)")
"""The same where a tokenizer puts a space before every text."""


@dataclass(frozen=True)
class Document:
    """One text, and its name in records."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """The documents of one split in a fixed order; texts are read on demand."""

    name: str
    split: str
    source: str
    """"folder", "hub" or "synthetic"."""
    revision: str
    """Content hash: equal revisions mean equal texts under equal names."""
    names: Sequence[str]
    read: Callable[[int], str]
    """Index to text. Raises InputError naming the document when it is not UTF-8 text."""
    total_bytes: int | None = None
    """Size of all texts as UTF-8; None if it is unknown before reading."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Document:
        """The document at `index`; InputError when it is empty."""
        text = self.read(index)
        if not text.strip():
            raise InputError(f"{self.split} document {self.names[index]} of {self.name} is empty: remove it")
        return Document(self.names[index], text)

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))


def load_documents(
    name: str,
    split: str,
    data_dir: str | Path | None,
    hub_id: str,
    cache_dir: Path | None = None,
    max_documents: int | None = None,
) -> Documents:
    """The documents of `split`, from the first of: `data_dir`, $INFINI_DATA_DIR/`name`, the hub's `hub_id`.

    `data_dir` "synthetic" selects the synthetic corpus. `cache_dir` holds the hashes of files, so that a large folder
    is hashed once, and texts from the hub. The first `max_documents` of the hub's train split are used (None: all); a
    folder is always used whole. Raises InputError (one line) when a named folder is missing or empty, or when neither
    folder nor hub can be read.
    """
    if split not in SPLITS:
        raise InputError(f"split={split!r}: one of {', '.join(SPLITS)}")
    if data_dir == SYNTHETIC:
        return synthetic_documents(split)
    if (found := data_folder(name, data_dir)) is not None:
        return _folder_documents(name, split, *found, cache_dir)
    from infini.tasks.text.hub import hub_documents

    try:
        return hub_documents(name, split, hub_id, max_documents if split == "train" else None, cache_dir)
    except InputError:
        raise
    except Exception as error:  # every layer below (network, hub, parser) raises its own kinds
        raise no_data(name, TEXT_LAYOUT, hub_id, error) from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, unchanged but for a byte-order mark, which some editors write before it; InputError
    naming the file when it is not UTF-8 text."""
    # Decoded from bytes: text mode would turn \r\n into \n.
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): convert or remove it") from None
    # UTF-16 of plain English is also valid UTF-8, with zero bytes.
    if (zero := text.find("\0")) >= 0:
        raise InputError(f"{path} is not text (character {zero} is a zero byte): convert or remove it")
    return text.removeprefix("\ufeff")


def _folder_documents(name: str, split: str, data_dir: Path, setting: str, cache_dir: Path | None) -> Documents:
    folder, paths = data_dir / split, text_files(data_dir, split, setting)
    for path in (path for path in paths if not path.is_file()):
        raise InputError(f"{path}: a folder or a broken link, not a text: remove it")

    def read(index: int) -> str:
        if not (text := read_text(paths[index])).strip():
            raise InputError(f"{paths[index]} is empty: remove it")
        # Its tokens are cached under the hash of the text that was there when the folder was opened.
        if hashlib.sha256(text.encode()).hexdigest() != hashes[index]:
            raise InputError(f"{paths[index]}: was changed while it was read; start again")
        return text

    revision, hashes = hashlib.sha256(), _file_hashes(folder, paths, cache_dir)
    if cache_dir is not None:
        _say_shared(data_dir, split, dict(zip(hashes, paths, strict=True)), cache_dir)
    for path, digest in zip(paths, hashes, strict=True):
        revision.update(f"{_printable(path.name)}\0{digest}\n".encode())
    total_bytes = sum(path.stat().st_size for path in paths)
    names = [_printable(path.stem) for path in paths]
    if len(set(names)) < len(names):
        # a.txt and a.tex: names must differ, because runs are compared by document name. Cached tokens hold them too.
        names = [_printable(path.name) for path in paths]
        revision.update(b"with suffixes")
    # Names may still be alike where one has bytes that are not UTF-8.
    return distinct(Documents(name, split, "folder", revision.hexdigest(), names, read, total_bytes))


def distinct(documents: Documents) -> Documents:
    """The documents under names that differ, because runs are compared by them; unchanged where they do."""
    names: dict[str, None] = {}
    for index, name in enumerate(documents.names):
        while name in names:
            name = f"{name}-{index}"
        names[name] = None
    if list(names) == list(documents.names):
        return documents
    # Cached tokens hold the names.
    revision = hashlib.sha256(f"{documents.revision} with places".encode()).hexdigest()
    return replace(documents, names=list(names), revision=revision)


def _printable(name: str) -> str:
    """A file's name for records, with bytes that are not UTF-8 written as \\xe9."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


def _file_hashes(folder: Path, paths: Sequence[Path], cache_dir: Path | None) -> list[str]:
    """SHA-256 of each file's text, cached in `cache_dir` while the file's _stamp stays the same.

    A file and the same with a byte-order mark are one text.
    """
    memo = None if cache_dir is None else _memo(folder, cache_dir)
    known = {} if memo is None else _known(memo)
    entries: dict[str, list[Any]] = {}
    for path in paths:
        stamp, entry = _stamp(path), known.get(path.name)
        if not isinstance(entry, list) or entry[:-1] != stamp:
            entry = [*stamp, hashlib.sha256(path.read_bytes().removeprefix(codecs.BOM_UTF8)).hexdigest()]
        entries[path.name] = entry
    if memo is not None and entries != known:
        try:
            write_atomically(memo, json.dumps(entries).encode())
        except OSError as error:
            # A read-only cache may have all else that is needed; files are then hashed again each time.
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
    return [entry[-1] for entry in entries.values()]


def _memo(folder: Path, cache_dir: Path) -> Path:
    """The file with the hashes of a folder's files."""
    # Older versions hashed byte-order marks, too; their hashes have the name of the folder alone.
    key = hashlib.sha256(os.fsencode(folder.resolve()) + b"\0text").hexdigest()[:16]
    return cache_dir / "hashes" / f"{key}.json"


def _known(memo: Path) -> dict[str, Any]:
    """File name -> its stamp and its hash, as they were."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(memo.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _say_shared(data_dir: Path, split: str, paths: Mapping[str, Path], cache_dir: Path) -> None:
    """Print that texts of the split, by their hashes, are in another one, as far as its hashes are cached."""
    for folder in (data_dir / other for other in SPLITS if other != split):
        there: dict[str, Path] = {}
        for name, entry in _known(_memo(folder, cache_dir)).items():
            if isinstance(entry, list) and is_file(folder / name) and entry[:-1] == _stamp(folder / name):
                there[entry[-1]] = folder / name
        if shared := sorted(paths.keys() & there.keys()):
            first, second = sorted(str(path) for path in (paths[shared[0]], there[shared[0]]))
            more = f" (and {len(shared) - 1} more)" if len(shared) > 1 else ""
            warn_once(f"{first} is the same text as {second}{more}; remove it from one of the splits")


@cache
def warn_once(text: str) -> None:
    """Print a warning, once a process."""
    warn(plain_console(), text)


def _stamp(path: Path) -> list[int]:
    """Values that change with a file. A program can restore the modification time, but not that of the last change."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def synthetic_documents(split: str, seed: int = 0) -> Documents:
    """A small corpus made from `seed`: 40 train, 4 validation and 4 test documents of about 100 KB each.

    Words follow Zipf's law over a shared vocabulary. Each document also has its own cast: names that occur in no other
    document, each always followed by the same words, so that memory of a document's beginning makes its end easier to
    predict.
    """
    count = 40 if split == "train" else 4
    vocabulary = _made_words(np.random.default_rng(seed), 3000)
    texts = [
        _synthetic_text(np.random.default_rng([seed, SPLITS.index(split), index]), vocabulary) for index in range(count)
    ]
    names = [f"synthetic-{split}-{index:02d}" for index in range(count)]
    revision = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    total_bytes = sum(len(text.encode()) for text in texts)
    return Documents(SYNTHETIC, split, SYNTHETIC, revision, names, texts.__getitem__, total_bytes)


def _made_words(rng: np.random.Generator, count: int, syllables: tuple[int, int] = (1, 4)) -> list[str]:
    onsets = ["b", "br", "c", "d", "dr", "f", "g", "gr", "h", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w"]
    rhymes = ["a", "ai", "an", "ar", "e", "el", "en", "er", "i", "in", "o", "on", "or", "ou", "u", "un"]
    words: dict[str, None] = {}
    while len(words) < count:
        length = int(rng.integers(*syllables))
        drawn = zip(rng.integers(len(onsets), size=length), rng.integers(len(rhymes), size=length), strict=True)
        words["".join(onsets[onset] + rhymes[rhyme] for onset, rhyme in drawn)] = None
    return list(words)


def _zipf(rng: np.random.Generator, size: int, count: int) -> list[int]:
    """`count` ranks below `size`, rank r with probability proportional to 1 / (r + 1)."""
    cumulative = np.cumsum(1.0 / np.arange(1, size + 1))
    return np.searchsorted(cumulative, rng.random(count) * cumulative[-1]).tolist()


def _synthetic_text(rng: np.random.Generator, vocabulary: Sequence[str]) -> str:
    cast = []
    for name in _made_words(rng, 30, syllables=(3, 5)):
        epithet = " ".join(vocabulary[rank] for rank in rng.integers(len(vocabulary), size=2))
        cast.append(f"{name.capitalize()} of the {epithet}")
    n_words = 16_000
    words = [vocabulary[rank] for rank in _zipf(rng, len(vocabulary), n_words)]
    for position, member in zip(np.flatnonzero(rng.random(n_words) < 0.06), _zipf(rng, 30, n_words), strict=False):
        words[position] = cast[member]
    parts = []
    start = 0
    for draw in rng.integers(5, 25, size=n_words):
        sentence = words[start : start + draw]
        if not sentence:
            break
        start += draw
        for comma in range(6, len(sentence) - 2, 7):
            sentence[comma] += ","
        sentence[0] = sentence[0][0].upper() + sentence[0][1:]
        parts.append(" ".join(sentence) + (".\n\n" if draw % 5 == 0 else ".\n"))
    return "".join(parts)


class TextTokenizer:
    """Text to token ids and back, around a `tokenizers.Tokenizer`.

    Text never produces the special tokens: a book that contains "<s>" gets the tokens of these characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a `tokenizers.Tokenizer`; InputError when its vocabulary has no beginning-of-document token."""
        # Some tokenizer.json cut or fill every text, for the inputs of one model.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        serialised = tokenizer.to_str()
        self.hash = hashlib.sha256(serialised.encode()).hexdigest()
        """SHA-256 of the tokenizer's JSON: equal hashes mean equal tokens."""
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.name = f"{type(tokenizer.model).__name__.lower()}-{self.vocab_size}-{self.hash[:8]}"
        # Gemma's vocabulary has "<s>" and "</s>" as tags of HTML, which begin and end nothing.
        special = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        of_marks = [
            [get(mark) for get in (special.get, tokenizer.token_to_id) for mark in marks]
            for marks in (BEGINNINGS, ENDINGS)
        ]
        begin, end = (next((index for index in found if index is not None), None) for found in of_marks)
        if begin is None:
            raise InputError(f"tokenizer {self.name} has none of {', '.join(BEGINNINGS)} to begin a document with")
        self.bos_id: int = begin
        """Id of the token before the first one of a document."""
        self.end_id: int = self.bos_id if end is None else end
        """Id of the token after the last one of a summary; bos_id where the vocabulary has no end token."""
        ends = (special[mark] for mark in (*ENDINGS, *ENDS_OF_TEXT) if mark in special)
        self.stop_ids = {self.bos_id, self.end_id, *ends}
        """Ids of the tokens at which a text that a model continues is over."""
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint16 (uint32 for large vocabularies), without special tokens.

        Long texts are encoded in pieces, on all cores. A piece ends before a space, tab or line end that follows other
        characters. Neither this project's byte-level BPE nor a tokenizer that first splits at white space (T5's) has
        tokens across such a place, so the result equals that of the whole text; for other tokenizers (Qwen's and
        Llama 3's have one token for a full stop and a line end) the pieces define the result. Tokenizers that put a
        space before every text (T5's, Llama 2's, Mistral's) get pieces that end at single spaces, without these.
        """
        pieces = [piece for piece, _ in self._pieces([text])]
        encodings = self._tokenizer.encode_batch_fast(pieces or [""], add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, dtype=self.dtype) for encoding in encodings])

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, str]]:
        """The token ids of `encode` for the whole text, in parts, each with its text. Holds one piece and one part."""
        for piece, space in self._pieces(pieces):
            ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
            yield np.array(ids, dtype=self.dtype), space + piece

    def extent(self, text: str, n_tokens: int) -> tuple[int, int]:
        """Words (separated by white space) and UTF-8 bytes of the part of `text` that its first tokens cover.

        A token may end inside a character: the bytes up to there count, and a word that is cut counts as one. Where a
        tokenizer drops or changes characters, those of `text` count. All tokens cover all of `text`.
        """
        words = size = 0
        for piece, space in self._pieces([text]):
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            size += len(space) * (n_tokens > 0)
            if len(encoding.ids) > n_tokens:
                characters, behind = self._covered(piece, encoding, n_tokens)
                return words + len(piece[:characters].split()), size + behind
            # Pieces end at the end of a word.
            words, size, n_tokens = words + len(piece.split()), size + len(piece.encode()), n_tokens - len(encoding.ids)
        return words, size

    def _covered(self, piece: str, encoding: Any, n_tokens: int) -> tuple[int, int]:
        """Characters (the last may be incomplete) and bytes of a piece that its first tokens, but not all, cover."""
        end = max((stop for _, stop in encoding.offsets[:n_tokens]), default=0)
        begin = encoding.offsets[n_tokens][0]
        if begin >= end:
            return end, len(piece[:end].encode())
        # The next token starts inside the same character, some of whose bytes are covered.
        sharing = [index for index in range(n_tokens) if encoding.offsets[index][1] > begin]
        before = len(piece[encoding.offsets[sharing[0]][0] : begin].encode())
        shared = sum(self._token_bytes(encoding.ids[index]) for index in sharing) - before
        return end, len(piece[:begin].encode()) + min(max(shared, 0), len(piece[begin:end].encode()))

    def _token_bytes(self, index: int) -> int:
        """UTF-8 bytes of one token."""
        token = str(self._tokenizer.id_to_token(index))
        if _BYTE_TOKEN.fullmatch(token):
            return 1
        # A character of a byte-level vocabulary is one byte.
        return len(token) if self._of_bytes else len(token.encode())

    def _pieces(self, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The text in pieces that are encoded by themselves, each with the space that was cut off before it."""
        for index, part in enumerate(_parts(texts, _CUT_AT_SPACE if self._prepends else _CUT)):
            yield (part[1:], part[0]) if index and self._prepends else (part, "")

    @cached_property
    def _prepends(self) -> bool:
        """Whether a text is encoded with a space before it."""
        tokens = self._tokenizer.encode("a", add_special_tokens=False).tokens
        return "".join(tokens).startswith("\N{LOWER ONE EIGHTH BLOCK}")

    @cached_property
    def _of_bytes(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])

    def stream_decoder(self) -> Callable[[int], str]:
        """A function from token ids, one by one, to the text that each completes."""
        # Not DecodeStream of tokenizers, which raises an error where a byte that is no text follows others.
        # printed: the last tokens with a text. Without one before it a token may lose its space.
        printed: list[int] = []
        pending: list[int] = []

        def step(token: int) -> str:
            nonlocal printed, pending
            pending.append(token)
            before, text = self.decode(printed), self.decode(printed + pending)
            if text.endswith("\ufffd"):
                # The character may go on.
                return ""
            # A byte that is no text spoils also those before it, which are printed.
            new = text[len(before) :] if text.startswith(before) else self.decode(pending)
            printed, pending = pending, []
            return new

        return step

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`. Byte-level BPE is lossless; T5's tokenizer turns line ends into spaces."""
        return str(self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False))

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file, atomically."""
        write_atomically(Path(path), self._tokenizer.to_str().encode())

    @classmethod
    def load(cls, path: str | Path) -> "TextTokenizer":
        """Load a saved tokenizer; InputError naming the file when it is missing or damaged."""
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"tokenizer {path} cannot be read: {str(error).splitlines()[0]}") from error


def _parts(pieces: Iterable[str], cut: re.Pattern[str]) -> Iterator[str]:
    """The text of these pieces, cut where encoding may be; see TextTokenizer.encode."""
    held = ""
    for piece in pieces:
        held, start = held + piece, 0
        while match := cut.search(held, start + _ENCODE_CHARACTERS):
            yield held[start : match.start()]
            start = match.start()
        held = held[start:]
    if held:
        yield held


def bpe_tokenizer(
    documents: Documents, vocab_size: int, cache_dir: Path, sample_characters: int = _SAMPLE_CHARACTERS
) -> TextTokenizer:
    """The byte-level BPE of a train split, trained once and cached in `cache_dir`/tokenizers.

    It is trained on at most `sample_characters`: evenly spaced pieces of 64K characters, the same number from each
    document (with more documents than pieces, one piece from each of evenly spaced documents). The same documents and
    parameters give the same tokenizer on every machine. A small corpus may give fewer than `vocab_size` tokens.
    """
    if vocab_size < 258:
        raise InputError(f"scale.vocab_size={vocab_size}: at least 258 (256 bytes, {BOS} and {PAD})")
    recipe = json.dumps([documents.revision, vocab_size, sample_characters, _PIECE_CHARACTERS, [BOS, PAD]])
    path = cache_dir / "tokenizers" / f"{hashlib.sha256(recipe.encode()).hexdigest()[:16]}-{vocab_size}.json"
    if path.exists():
        try:
            return TextTokenizer.load(path)
        except InputError as error:
            warn(plain_console(), f"{error}; it is made again")
    _train_bpe(_sample(documents, sample_characters), vocab_size).save(path)
    return TextTokenizer.load(path)


def _sample(documents: Documents, sample_characters: int) -> Iterator[str]:
    n_pieces = max(1, sample_characters // _PIECE_CHARACTERS)
    n_documents = len(documents)
    chosen = [index * n_documents // n_pieces for index in range(n_pieces)] if n_documents > n_pieces else None
    per_document = max(1, n_pieces // n_documents)
    read = chosen or range(n_documents)
    with progress_bar(f"vocabulary of {documents.name}", len(read), sys.stderr.isatty()) as advance:
        for index in read:
            text = documents[index].text
            pieces = per_document if len(text) > per_document * _PIECE_CHARACTERS else 0
            if not pieces:
                yield text
            for piece in range(pieces):
                middle = (2 * piece + 1) * len(text) // (2 * per_document)
                start = middle - _PIECE_CHARACTERS // 2
                yield text[start : start + _PIECE_CHARACTERS]
            advance(1)


def _train_bpe(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer)
