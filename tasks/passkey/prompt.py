"""The passkey prompt of the paper's appendix, as token spans: a prompt of ten million tokens is a few small arrays.

Every prompt is head, x blocks of filler, key, y blocks of filler, question; the answer follows. A span is a range of an
array that is repeated without end, so that no long array exists. `make_template` makes the prompts of a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np

from infini.config.compose import cache_folder
from infini.config.schema import Config
from infini.errors import InputError
from infini.tasks.passkey.config import PasskeyConfig
from infini.tasks.text.documents import BOS, PAD, TextTokenizer
from infini.tasks.text.token_cache import documents_of, tokenise

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
BLOCK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
BLOCK_AS_PRINTED = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and ack again."
"""The block after the key as the paper prints it, with what is probably a misprint."""
KEY = " The pass key is {key}. Remember it. {key} is the pass key."
DISTRACTOR = " The {colour} key is {key}. Remember it. {key} is the {colour} key."
COLOURS = ("green", "blue", "yellow")
QUESTION = " What is the pass key? The pass key is"

# The digit sum of a key is a multiple of _KEY_MODULUS in evaluation and never in training; every digit of both is
# uniform. Likewise x + 3 y is a multiple of _FILLER_MODULUS in evaluation and never in training.
_KEY_MODULUS, _FILLER_MODULUS = 5, 7

TRAINING_STREAM, VALIDATION_STREAM, EVALUATION_STREAM = range(3)
"""Independent streams of a seed's random numbers."""
LONGEST_TRAINING = 8192
"""Up to this length, training and evaluation never have the same filler counts, however long training prompts are."""
BOOK_TOKENS = 1 << 24
"""Most tokens of books that serve as filler."""
APPENDIX = "appendix"
"""Revision of prompts with the sentences of the paper's appendix as filler."""
UNKNOWN = "<unk>"


@cache
def word_tokenizer() -> TextTokenizer:
    """The word-level tokenizer, for models trained on nothing else: all words of the prompt and its variants, full stop
    and question mark, ten digits, and three special tokens."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    distractors = [DISTRACTOR.format(colour=colour, key="") for colour in COLOURS]
    text = " ".join([HEAD, BLOCK, BLOCK_AS_PRINTED, KEY.format(key=""), *distractors, QUESTION])
    words = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", text)))
    vocabulary = [BOS, PAD, UNKNOWN, *"0123456789", *words]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return TextTokenizer(tokenizer)


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of `tokens` repeated without end."""

    tokens: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, offset: int, count: int) -> np.ndarray:
        """At most `count` tokens from `offset` (counted from the span's start)."""
        first, size = self.start + offset, len(self.tokens)
        count, inside = min(count, self.stop - first), first % size
        if inside + count <= size:
            return self.tokens[inside : inside + count]
        if inside + count <= 2 * size:
            return np.concatenate([self.tokens[inside:], self.tokens[: inside + count - size]])
        return np.tile(self.tokens, -(-(inside + count) // size))[inside : inside + count]


@dataclass(frozen=True)
class Prompt:
    """One example: the spans of its prompt, and the answer."""

    spans: tuple[Span, ...]
    answer: np.ndarray
    """Token ids of the key as they follow the prompt."""
    key: str
    key_position: int
    """Tokens before the key's sentence."""
    second_mention: int
    """Tokens before the second mention of the key."""
    key_end: int
    """Tokens up to the end of the key's sentence."""
    blocks: tuple[int, int]
    """x and y, blocks before and after the key."""

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)

    def in_one_segment(self, segment_length: int) -> bool:
        """Whether the key's second mention and the end of the answer lie in one segment, so that no memory is
        needed."""
        # The beginning-of-document token precedes the prompt, and the answer's last token is not fed.
        key, last = self.second_mention + 1, len(self) + len(self.answer) - 1
        return key // segment_length == last // segment_length

    def chunks(self, size: int, start: int = 0) -> Iterator[np.ndarray]:
        """The prompt from token `start` on, `size` tokens at a time; the last chunk may be shorter."""
        parts: list[np.ndarray] = []
        held = 0
        for span in self.spans:
            offset, start = min(start, len(span)), max(0, start - len(span))
            while offset < len(span):
                part = span.read(offset, size - held)
                parts.append(part)
                offset += len(part)
                held += len(part)
                if held == size:
                    yield np.concatenate(parts)
                    parts, held = [], 0
        if parts:
            yield np.concatenate(parts)


def input_ids(prompt: Prompt, bos_id: int) -> np.ndarray:
    """Input for a prompt and its answer: bos_id, the prompt, and the answer without its last token."""
    return np.concatenate([[bos_id], *prompt.chunks(1 << 16), prompt.answer[:-1]]).astype(np.int64)


def is_held_out(key: str) -> bool:
    """Whether no training prompt has this key."""
    return sum(map(int, key)) % _KEY_MODULUS == 0


def shared_prefix(prompts: Sequence[Prompt]) -> int:
    """Number of tokens with which all prompts begin: whole spans, and the shared beginning of the first that differ.

    It may be smaller than the longest shared beginning, because it ends where fillers of different length end.
    """
    total = 0
    for spans in zip(*(prompt.spans for prompt in prompts), strict=False):
        first, width = spans[0], min(map(len, spans))
        alike = [span.tokens is first.tokens or np.array_equal(span.tokens, first.tokens) for span in spans]
        if not all(alike) or any(span.start != first.start for span in spans):
            if any(len(span.tokens) != len(span) for span in spans):
                return total
            same = np.all([span.read(0, width) == first.read(0, width) for span in spans], axis=0)
            return total + int(width if same.all() else np.argmin(same))
        total += width
        if any(len(span) != width for span in spans):
            return total
    return total


class PasskeyTemplate:
    """The parts of the prompt as tokens, and examples made of them.

    encode: text -> token ids, without special tokens. A part's tokens are those that it adds to the text before it, so
    any tokenizer works whose tokens do not cross the boundaries of parts.

    digits: digits of a key. as_printed: the filler after the key with the paper's misprint. distractors: number of
    other keys ("The green key is ...") in the filler. book: token ids of a text that replaces the repeated block.
    fill: "blocks" (whole blocks only) or "exact" (the first block is trimmed to reach the length). longest_training: no
    training prompt is longer, so that longer prompts differ from all of them; None: unknown.
    """

    def __init__(
        self,
        encode: Callable[[str], np.ndarray],
        *,
        digits: int = 5,
        as_printed: bool = False,
        distractors: int = 0,
        fill: str = "blocks",
        book: np.ndarray | None = None,
        longest_training: int | None = None,
    ) -> None:
        if digits < 2 or fill not in ("blocks", "exact"):
            raise ValueError(f"digits={digits}, fill={fill!r}: at least 2 digits, fill blocks or exact")
        self.digits, self.distractors, self.fill = digits, distractors, fill
        self.longest_training = longest_training
        # The texts before the parts, and a key whose position is resampled, are encoded once.
        self._encode = lru_cache(maxsize=64)(encode)
        self.head = np.asarray(encode(HEAD))
        self.block = self._added(BLOCK) if book is None else np.asarray(book)
        second = self._added(BLOCK_AS_PRINTED if as_printed else BLOCK) if book is None else self.block
        self.second_block, self.book = second, book
        # Many blocks in one array, so that most reads are one copy.
        self._runs = (np.tile(self.block, 256), np.tile(second, 256)) if book is None else (self.block, second)
        self.question = self._added(QUESTION, BLOCK)

    def shortest(self, training: bool) -> int:
        """The smallest length that has room for every example of the training or the evaluation set."""
        # With up to four blocks, nine where those before and after the key differ in length, there may be no key
        # position that the evaluation set allows.
        blocks = 2 if training else 6 if len(self.block) == len(self.second_block) else 10
        sentences = (1 + self.distractors) * (len(self.key_tokens("0" * self.digits)) + 2 * self.digits)
        # A book has no blocks: 64 of its tokens count as one.
        block = len(self.block) if self.book is None else 64
        return len(self.head) + sentences + len(self.question) + self.digits + blocks * block

    def _added(self, text: str, after: str = BLOCK) -> np.ndarray:
        """The tokens that `text` adds after `after`."""
        before, whole = self._encode(HEAD + after), self._encode(HEAD + after + text)
        if len(whole) <= len(before) or not np.array_equal(whole[: len(before)], before):
            raise InputError(f"the tokenizer merges {after.strip()[-12:]!r} and {text.strip()[:12]!r} into one token")
        return np.asarray(whole[len(before) :])

    def key_tokens(self, key: str) -> np.ndarray:
        """The sentence with the key."""
        return self._added(KEY.format(key=key))

    def answer_tokens(self, key: str) -> np.ndarray:
        """The key as it follows the question."""
        return self._added(f" {key}", QUESTION)

    def filler(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` tokens of filler without a key, from a random offset."""
        start = int(rng.integers(len(self.block)))
        return Span(self.block, start, start + count).read(0, count).astype(np.int64)

    def draw_key(self, rng: np.random.Generator, training: bool, few_digits: bool = False) -> str:
        """A uniform key of the training or the evaluation set; few_digits: with at most two to four distinct digits."""
        while True:
            # Digits are resampled too: no training key consists of 0 and 5 alone.
            kinds = rng.permutation(10)[: rng.integers(2, 5)] if few_digits else np.arange(10)
            key = "".join(map(str, kinds[rng.integers(0, len(kinds), self.digits)]))
            if is_held_out(key) != training:
                return key

    def example(
        self,
        length: int,
        depth: float,
        rng: np.random.Generator,
        training: bool,
        few_digits: bool = False,
        trim_after_key: float = 0.0,
        key: str | None = None,
    ) -> Prompt:
        """A prompt that has, with its answer, at most `length` tokens and more than `length` minus one block.

        depth: 0 is the start, 1 the end. The key is at the nearest number of blocks that the training or the evaluation
        set allows; evaluation prompts longer than all training prompts may have any. few_digits: see draw_key.
        trim_after_key: with fill="exact", probability that the block after the key is trimmed instead of the first.
        key: None draws one. Raises InputError when there is no room for a key.
        """
        key = self.draw_key(rng, training, few_digits) if key is None else key
        given, answer = self.key_tokens(key), self.answer_tokens(key)
        first_half = KEY.format(key=key).partition(f" {key} is")[0]
        others = [self._distractor(rng, training, key, few_digits) for _ in range(self.distractors)]
        fixed = sum(map(len, (self.head, given, *others, self.question, answer)))
        if fixed > length:
            raise InputError(f"length={length}: too short for a passkey prompt, which needs at least {fixed} tokens")
        x, y, spare = self._blocks(length - fixed, depth, training, length)
        begin = 0 if self.book is None else int(rng.integers(len(self.book)))
        # (block number, kind, tokens) of the sentences between fillers; at the same block the key comes last.
        places = [*((int(rng.integers(x + y + 1)), 0, tokens) for tokens in others), (x, 1, given)]
        spans = [Span(self.head, 0, len(self.head))]
        trim_second = self.fill == "exact" and trim_after_key > 0 and bool(rng.random() < trim_after_key)
        if self.fill == "exact" and not trim_second:
            spans.append(Span(self.block, len(self.block) - spare, len(self.block)))
        at = position = 0
        for index, kind, tokens in [*sorted(places, key=lambda place: place[:2]), (x + y, 2, self.question)]:
            if self.book is not None:
                spans.append(Span(self.book, begin + at, begin + index))
            else:
                block, run = (self.block, self._runs[0]) if index <= x else (self.second_block, self._runs[1])
                spans.append(Span(run, 0, (index - at) * len(block)))
            if kind == 1:
                position = sum(map(len, spans))
            spans.append(Span(tokens, 0, len(tokens)))
            if kind == 1 and trim_second:
                spans.append(Span(self.second_block, len(self.second_block) - spare, len(self.second_block)))
            at = index
        second_mention = position + len(self._added(first_half))
        kept = tuple(span for span in spans if len(span))
        return Prompt(kept, answer, key, position, second_mention, position + len(given), (x, y))

    def _blocks(self, room: int, depth: float, training: bool, length: int) -> tuple[int, int, int]:
        """The allowed blocks before and after the key nearest to `depth`, and the remaining tokens."""
        first, second = (1, 1) if self.book is not None else (len(self.block), len(self.second_block))
        most = room // first
        wanted = round(depth * most)
        # The range includes all remainders, even if the two kinds of blocks differ in length.
        reach = 3 * _FILLER_MODULUS
        near = range(max(0, wanted - reach), min(most, wanted + reach) + 1)
        for x in sorted(near, key=lambda x: (abs(x - wanted), x)):
            y, spare = divmod(room - x * first, second)
            beyond = not training and self.longest_training is not None and length > self.longest_training
            if beyond or ((x + 3 * y) % _FILLER_MODULUS != 0) == training:
                return x, y, spare
        enough = self.shortest(training)
        raise InputError(
            f"length={length}: {room} tokens of filler are too few to tell training and evaluation prompts apart; "
            f"{enough} tokens are enough"
        )

    def _distractor(self, rng: np.random.Generator, training: bool, pass_key: str, few_digits: bool) -> np.ndarray:
        colour = COLOURS[int(rng.integers(len(COLOURS)))]
        # The distractor has as few distinct digits as the key; otherwise this would give the key away.
        while (key := self.draw_key(rng, training, few_digits)) == pass_key:
            pass
        return self._added(DISTRACTOR.format(colour=colour, key=key))


def stages(cfg: Config) -> list[tuple[int, int]]:
    """(segment length, tokens per sequence) of every stage of the training, the main training last."""
    N = cfg.dims.segment_length
    early = [(segment, tokens) for segment, tokens, *_ in cfg.recipe.curriculum or ()]
    return [*early, (N, N * cfg.recipe.segments_per_sequence)]


def make_template(cfg: Config, tokenizer: TextTokenizer, split: str) -> tuple[PasskeyTemplate, dict[str, Any]]:
    """The prompts of `cfg.task` in the tokens of `tokenizer`, and the description of their text for records.

    split: the split of books for filler, so that training, validation and evaluation share none. Prompts of a training
    and its validation always fill their length exactly: with whole blocks, questions would fall on few positions
    relative to segment boundaries.
    """
    task = cast(PasskeyConfig, cfg.task)
    book, data = None, {"name": cfg.task.name, "source": "generated", "revision": APPENDIX, "split": split}
    if task.filler == "book":
        if tokenizer.hash == word_tokenizer().hash:
            raise InputError(
                "task.filler='book': this tokenizer has only the words of the prompt; train with task.tokenizer=scale"
            )
        books = tokenise(documents_of(cfg, split), tokenizer, cache_folder(cfg))
        taken, total = [], 0
        for index in range(len(books)):
            taken.append(books.ids(index))
            total += len(taken[-1])
            if total >= BOOK_TOKENS:
                break
        book = np.concatenate(taken)[:BOOK_TOKENS]
        data |= {"source": books.source, "revision": books.revision}
    template = PasskeyTemplate(
        tokenizer.encode,
        digits=task.digits,
        as_printed=task.as_printed,
        distractors=task.distractors,
        fill=task.fill if split == "test" else "exact",
        book=book,
        # It is at least that of the paper, because an evaluation may change the segment length.
        longest_training=max(LONGEST_TRAINING, *(tokens for _, tokens in stages(cfg))),
    )
    return template, data | {"tokenizer": tokenizer.name}
