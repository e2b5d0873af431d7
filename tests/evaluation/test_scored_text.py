"""Divisors of perplexities: words and bytes of just the text that was scored, and texts without such a number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from command_runner import Runner
from tiny_runs import DOCUMENTS, TINY, open_split
from tokenizers import decoders, models, normalizers, pre_tokenizers

from infini.config.compose import compose
from infini.evaluation.perplexity import Binned, Streamed, metrics
from infini.tasks.text import documents as text_module
from infini.tasks.text.documents import TextTokenizer

AWKWARD = "Né où “fox”: 狐狸遇见了母鸡。  Ж и\r\n\r\n\tœuvre 👩\u200d🚀 ㎞ ½ e\u0301t " * 4


def byte_level() -> TextTokenizer:
    """A tokenizer as a training makes it; few of the letters of AWKWARD are one token."""
    return text_module._train_bpe(iter(["plain words où " * 10]), 280)


def with_byte_tokens() -> TextTokenizer:
    """Like Llama 2's on the hub: letters that the vocabulary lacks are tokens of a byte each."""
    vocabulary = {"<s>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    merges = [("▁", "o"), ("f", "o"), ("fo", "x")]
    for token in (*"▁abcdefghijklmnopqrstuvwxyz狐é\n", *(a + b for a, b in merges)):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TextTokenizer(tokenizer)


def of_pieces() -> TextTokenizer:
    """Like T5's on the hub: letters are normalised, white space is one space, and unknown letters are one token."""
    pieces = [("<pad>", 0.0), ("<unk>", -9.0), ("▁fox", -2.0), ("km", -2.0), *((c, -3.0) for c in "▁abcdefnortuvé狐")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return TextTokenizer(tokenizer)


def bytes_of(tokenizer: TextTokenizer, ids: np.ndarray) -> bytes:
    """The bytes of tokens, by the definition of the two vocabularies whose tokens are bytes of the text."""
    letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
    found = b""
    for index in ids:
        token = tokenizer._tokenizer.id_to_token(int(index))
        if token.startswith("<0x"):
            found += bytes([int(token[3:5], 16)])
        elif tokenizer._tokenizer.token_to_id("▁") is None:
            found += bytes(letters[letter] for letter in token)
        else:
            found += token.replace("▁", " ").encode()
    return found


def _byte_letters() -> list[str]:
    """The letter of every byte in a byte-level vocabulary: itself where it is printed, else one from U+0100 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


@pytest.mark.parametrize("make", [byte_level, with_byte_tokens])
@pytest.mark.parametrize("pieces", [1 << 14, 7])
def test_words_and_bytes_are_those_of_the_tokens(
    make: Callable[[], TextTokenizer], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "_ENCODE_CHARACTERS", pieces)
    tokenizer = make()
    ids = tokenizer.encode(AWKWARD)
    assert bytes_of(tokenizer, ids) == AWKWARD.encode()
    for count in range(len(ids) + 2):
        scored = bytes_of(tokenizer, ids[:count])
        # A letter that is there only in part counts as a word, too.
        assert tokenizer.extent(AWKWARD, count) == (len(scored.decode(errors="replace").split()), len(scored))


def test_where_letters_are_changed_those_of_the_text_count() -> None:
    tokenizer = of_pieces()
    encoding = tokenizer._tokenizer.encode(AWKWARD)
    found = [tokenizer.extent(AWKWARD, count) for count in range(len(encoding.ids) + 1)]
    assert found[0] == (0, 0) and found[-1] == (len(AWKWARD.split()), len(AWKWARD.encode()))
    assert found == sorted(found)
    shared = 0
    for count, (words, size) in enumerate(found[1:-1], 1):
        end = encoding.offsets[count - 1][1]
        if encoding.offsets[count][0] >= end:
            assert (words, size) == (len(AWKWARD[:end].split()), len(AWKWARD[:end].encode()))
        else:
            shared += 1
    assert shared, "a letter of two tokens"


@pytest.fixture(scope="module")
def foreign_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose letters have many bytes at their ends alone: no share of them is that of their beginnings."""
    folder = tmp_path_factory.mktemp("foreign")
    for split, count in DOCUMENTS.items():
        (folder / split).mkdir()
        for number in range(count):
            text = f"plain words {number} " * 10 + AWKWARD * (number + 1) + "x" * 50
            (folder / split / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("limit", [83, 200])
def test_an_evaluation_counts_what_it_scored(infini: Runner, foreign_corpus: Path, limit: int) -> None:
    data = f"task.data_dir={foreign_corpus}"
    infini("train", data)
    infini("eval", data, f"scale.eval_max_tokens={limit}")
    (run,) = infini.records("eval")
    split, tokenizer = open_split(compose([*TINY, data]), "test")
    for index, entry in enumerate(run.documents):
        scored = bytes_of(tokenizer, split.ids(index)[:limit])
        words = len(scored.decode(errors="replace").split())
        assert (entry["tokens"], entry["bytes"], entry["words"]) == (limit, len(scored), words)
    assert run.results["bits_per_byte"]["n"] == sum(entry["bytes"] for entry in run.documents)
    assert run.results["word_perplexity"]["n"] == sum(entry["words"] for entry in run.documents)


def streamed_of(nll: float, tokens: int) -> Streamed:
    binned = Binned([0, 64], np.array([[nll]]), np.array([[tokens]]))
    return Streamed(binned, binned)


ALL_MEASURES = ("nll_per_token", "perplexity", "word_perplexity", "bits_per_byte")


@pytest.mark.parametrize(
    ("nll", "tokens", "words", "size", "missing"),
    [
        (30.0, 10, 3, 40, {}),
        (30.0, 10, 1, 101, {"word_perplexity": "white space separates no words here: 1 in 101 bytes"}),
        (30.0, 10, 1, 100, {}),
        (30.0, 10, 0, 40, {"word_perplexity": "white space separates no words here: 0 in 40 bytes"}),
        (2000.0, 10, 2, 200, {"word_perplexity": "too large for a floating-point number"}),
        (2000.0, 2, 20, 100, dict.fromkeys(["perplexity"], "too large for a floating-point number")),
        (3.0, 1, 0, 0, {"word_perplexity": "white space", "bits_per_byte": "what was scored has no bytes"}),
        (math.nan, 10, 3, 40, dict.fromkeys(ALL_MEASURES, "the loss of a token is not a finite number")),
        (math.inf, 10, 3, 40, dict.fromkeys(ALL_MEASURES, "the loss of a token is not a finite number")),
        (0.0, 0, 3, 40, dict.fromkeys(["nll_per_token", "perplexity"], "no token was scored")),
    ],
)
def test_a_measure_that_does_not_exist_is_none_with_a_note(
    nll: float, tokens: int, words: int, size: int, missing: dict[str, str]
) -> None:
    found = metrics(streamed_of(nll, tokens), np.array([words]), np.array([size]))
    for name, entry in found.items():
        assert (entry["value"] is None) == (name in missing), name
        assert entry.get("note", "").startswith(missing.get(name, "")) and bool(entry.get("note")) == (name in missing)
    if not missing:
        assert found["word_perplexity"]["value"] == pytest.approx(math.exp(nll / words))


@pytest.mark.usefixtures("elsewhere")
def test_a_text_without_white_space_has_no_word_perplexity(infini: Runner, tmp_path: Path) -> None:
    for split, count in DOCUMENTS.items():
        (tmp_path / "zh" / split).mkdir(parents=True)
        for number in range(count):
            text = "狐狸遇见了母鸡。他们谈论玉米。" * (60 + number)
            (tmp_path / "zh" / split / f"{number}.txt").write_text(text, encoding="utf-8")
    data = f"task.data_dir={tmp_path / 'zh'}"
    infini("train", data)
    for limit in ("256", "null"):
        out = infini("eval", data, f"scale.eval_max_tokens={limit}", "scale.knockout_max_tokens=64")
        line, note = (line for line in out.splitlines() if line.startswith("word_perplexity"))
        assert line.split()[1] == "—" and note.startswith("word_perplexity: white space separates no words here: 3 in")
        results = infini.records("eval")[-1].results
        assert results["word_perplexity"]["value"] is None and results["perplexity"]["value"] > 1
        assert results["bits_per_byte"]["value"] > 0
    reported = ("report=table2_lm", "report.aggregate=newest")
    assert "—" in infini("table", *reported)
    infini("figure", *reported)


def test_an_evaluation_of_one_token_is_one(with_model: Runner) -> None:
    with_model("eval", "scale.eval_max_tokens=1", "scale.knockout_max_tokens=1")
    (run,) = with_model.records("eval")
    assert [entry["tokens"] for entry in run.documents] == [1, 1, 1]
    assert [entry["words"] for entry in run.documents] == [1, 1, 1] == [bool(entry["bytes"]) for entry in run.documents]
