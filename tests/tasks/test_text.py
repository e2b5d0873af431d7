"""Documents, tokenizers and the token cache."""

import copy
import errno
import hashlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import open_split
from tokenizers import models, normalizers, pre_tokenizers

from infini.config.compose import compose
from infini.config.schema import Config
from infini.errors import InputError
from infini.tasks.text import documents as text_module
from infini.tasks.text import hub
from infini.tasks.text.documents import Documents, TextTokenizer, bpe_tokenizer, load_documents, synthetic_documents
from infini.tasks.text.hub import hub_tokenizer
from infini.tasks.text.token_cache import tokenise

HUB_ID = "somebody/books"
STORY = "The quick brown fox, it's said,\n  jumps over 12 lazy dogs.\r\n\r\n\tNaïve “fox”! <s> <pad>\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("validation", 1), ("test", 2)):
        folder = tmp_path / "data" / "pg19" / split
        folder.mkdir(parents=True)
        for book in range(count):
            (folder / f"{split}{book}.txt").write_bytes((f"Book {book}.\n" + STORY * (20 + book)).encode())
    return tmp_path / "data" / "pg19"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)


@pytest.fixture(scope="module")
def story_tokenizer() -> TextTokenizer:
    return text_module._train_bpe(iter([STORY * 10]), 400)


def folder_documents(corpus: Path, split: str = "train") -> Documents:
    return load_documents("pg19", split, corpus, HUB_ID, corpus.parent.parent / "cache")


def assert_one_line(error: pytest.ExceptionInfo[InputError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_text_that_changes_while_it_is_read_is_not_cached(
    corpus: Path, story_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """Its tokens would be those of the text that was there before, for every later run."""
    documents, path = folder_documents(corpus), corpus / "train" / "train1.txt"
    path.write_text("a draft that was saved meanwhile", encoding="utf-8")
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: was changed while it was read; start again$"):
        tokenise(documents, story_tokenizer, tmp_path / "cache", False)


def test_folder_documents_come_sorted_and_unchanged(corpus: Path) -> None:
    documents = folder_documents(corpus)
    assert [document.name for document in documents] == ["train0", "train1", "train2"]
    assert documents[1].text == "Book 1.\n" + STORY * 21
    assert documents.source == "folder"
    assert documents.total_bytes == sum(path.stat().st_size for path in (corpus / "train").iterdir())


def test_the_environment_names_the_folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINI_DATA_DIR", str(corpus.parent))
    assert load_documents("pg19", "train", None, HUB_ID).revision == folder_documents(corpus).revision


def test_revision_follows_names_and_contents(corpus: Path) -> None:
    before = folder_documents(corpus).revision
    assert folder_documents(corpus).revision == before
    book = corpus / "train" / "train0.txt"
    original = book.read_bytes()
    book.write_bytes(b"x" + original[1:])
    os.utime(book, ns=(1, 1))
    changed = folder_documents(corpus).revision
    book.write_bytes(original)
    book.rename(corpus / "train" / "renamed.txt")
    assert len({before, changed, folder_documents(corpus).revision}) == 3


@pytest.mark.parametrize("hashed_before", [False, True])
def test_a_byte_order_mark_is_no_text(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, hashed_before: bool
) -> None:
    """This includes a folder whose files an older version hashed with their marks."""
    cache, paths = tmp_path / "cache", sorted((corpus / "train").iterdir())
    marked = paths[1].read_bytes()
    plain = tokenise(load_documents("pg19", "train", corpus, HUB_ID), story_tokenizer, tmp_path / "plain", False)
    paths[1].write_bytes(b"\xef\xbb\xbf" + marked)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    if hashed_before:
        entries = {path.name: [path.stat().st_size, path.stat().st_mtime_ns, hashes[path.name]] for path in paths}
        key = hashlib.sha256(os.fsencode((corpus / "train").resolve())).hexdigest()[:16]
        (cache / "hashes").mkdir(parents=True)
        (cache / "hashes" / f"{key}.json").write_text(json.dumps(entries))
    documents = folder_documents(corpus)
    split = tokenise(documents, story_tokenizer, cache, progress=False)
    assert documents[1].text == marked.decode() and split.totals() == plain.totals()
    assert all(np.array_equal(split.ids(index), plain.ids(index)) for index in range(len(paths)))
    # Tokens and vocabularies that an older version cached of the marks have another name.
    with_marks = hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in hashes.items()).encode())
    assert documents.revision == plain.revision != with_marks.hexdigest()


def test_a_text_without_a_byte_order_mark_keeps_its_revision(corpus: Path) -> None:
    """Caches and records know it by this name."""
    paths = sorted((corpus / "train").iterdir())
    found = "".join(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths)
    assert folder_documents(corpus).revision == hashlib.sha256(found.encode()).hexdigest()


def test_unchanged_files_are_hashed_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = folder_documents(corpus).revision

    def refuse(path: Path) -> bytes:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert folder_documents(corpus).revision == revision


@pytest.mark.parametrize("way", ["in place", "by another file"])
def test_a_text_that_changes_under_its_old_time_is_hashed_again(corpus: Path, way: str) -> None:
    """Archives and copies that keep times leave such files."""
    book, other = corpus / "train" / "train0.txt", corpus / "other"
    before = folder_documents(corpus).revision
    stat, changed = book.stat(), book.read_bytes()[::-1]
    (book if way == "in place" else other).write_bytes(changed)
    if way != "in place":
        other.replace(book)
    os.utime(book, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert folder_documents(corpus).revision != before


@pytest.mark.parametrize("damage", ["{", "[3]", '{"train1.txt": 3, "train0.txt": [1]}', "[" * 200_000])
def test_a_damaged_hash_memo_is_made_anew(corpus: Path, damage: str) -> None:
    revision = folder_documents(corpus).revision
    (memo,) = (corpus.parent.parent / "cache" / "hashes").iterdir()
    memo.write_text(damage)
    assert folder_documents(corpus).revision == revision


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_read_only_cache_is_read(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The folder may have been copied since: times differ, texts do not."""
    before = tokenise(folder_documents(corpus), story_tokenizer, tmp_path / "cache", progress=False)
    os.utime(corpus / "train" / "train0.txt", ns=(1, 1))

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    after = tokenise(folder_documents(corpus), story_tokenizer, tmp_path / "cache", progress=False)
    assert after.revision == before.revision and after.totals() == before.totals()


def test_missing_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as error:
        load_documents("pg19", "train", tmp_path / "nowhere", HUB_ID)
    assert_one_line(error, str(tmp_path / "nowhere" / "train"), "{train,validation,test}/*.txt or *.tex")
    assert str(error.value).startswith(f"task.data_dir={str(tmp_path / 'nowhere')!r}: ")
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path))
    with pytest.raises(InputError) as error:
        load_documents("pg19", "test", None, HUB_ID)
    assert_one_line(error, str(tmp_path / "pg19" / "test"), "does not exist")
    assert str(error.value).startswith(f"INFINI_DATA_DIR={str(tmp_path)!r}: ")
    (tmp_path / "pg19" / "test").mkdir(parents=True)
    with pytest.raises(InputError) as error:
        load_documents("pg19", "test", None, HUB_ID)
    assert_one_line(error, "holds no .txt or .tex file")


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        ("a".encode("utf-16-be"), "not text"),
    ],
)
def test_a_bad_book_is_named(corpus: Path, contents: bytes, problem: str) -> None:
    (corpus / "train" / "train1.txt").write_bytes(contents)
    with pytest.raises(InputError) as error:
        list(folder_documents(corpus))
    assert_one_line(error, "train1", problem)


def test_unknown_split_is_refused(corpus: Path) -> None:
    with pytest.raises(InputError, match="split='valid'"):
        folder_documents(corpus, "valid")


def test_synthetic_documents_are_deterministic_and_have_their_own_cast() -> None:
    documents = load_documents("pg19", "validation", "synthetic", HUB_ID)
    assert documents.source == "synthetic"
    assert documents.revision == synthetic_documents("validation").revision
    assert documents.revision != synthetic_documents("validation", seed=1).revision
    assert documents.revision != synthetic_documents("test").revision
    casts = [
        {name for name, count in Counter(re.findall(r"[A-Z]\w+(?= of the )", document.text)).items() if count > 30}
        for document in documents
    ]
    assert all(casts)
    assert not set.intersection(*casts)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_encoding_is_lossless(story_tokenizer: TextTokenizer, text: str) -> None:
    assert story_tokenizer.decode(story_tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab'st1,<>é \t\n\r\x1c\x85\u00a0\u2028", max_size=200))
def test_pieces_have_the_tokens_of_the_whole(story_tokenizer: TextTokenizer, text: str) -> None:
    whole = story_tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_ENCODE_CHARACTERS", 5)
        assert story_tokenizer.encode(text).tolist() == whole


def test_marks_never_come_from_text(story_tokenizer: TextTokenizer) -> None:
    ids = story_tokenizer.encode("<s>and<pad>")
    assert ids.dtype == np.uint16
    assert story_tokenizer.bos_id not in ids
    assert ids.max() < story_tokenizer.vocab_size


def test_tokenizer_is_deterministic_and_cached(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = folder_documents(corpus)
    first = bpe_tokenizer(documents, 300, tmp_path / "one")
    second = bpe_tokenizer(documents, 300, tmp_path / "two")
    assert first.hash == second.hash
    assert first.name == f"bpe-{first.vocab_size}-{first.hash[:8]}"
    assert first.vocab_size == 300
    assert bpe_tokenizer(documents, 290, tmp_path / "one").hash != first.hash
    monkeypatch.setattr(text_module, "_train_bpe", lambda *_: pytest.fail("trained again"))
    assert bpe_tokenizer(documents, 300, tmp_path / "one").hash == first.hash


@pytest.mark.parametrize("kind", ["Prepend", "Metaspace"])
@pytest.mark.parametrize("text", ["word word.\n\tword " * 60, "word\n" * 30 + "a  b " * 60, " word" * 99])
def test_pieces_of_a_tokenizer_that_begins_with_a_space_add_none(
    monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    """Llama 2's puts a space before a text, and before each piece of it as if that were one."""
    alphabet = sorted(set(text) - {" "} | {"\N{LOWER ONE EIGHTH BLOCK}"})
    backend = tokenizers.Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    if kind == "Prepend":
        replaced = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}"), replaced])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<s>"])
    monkeypatch.setattr(text_module, "_ENCODE_CHARACTERS", 7)
    tokenizer, whole = TextTokenizer(backend), backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == whole
    parts = list(tokenizer.encode_stream([text[:50], text[50:]]))
    assert [index for ids, _ in parts for index in ids] == whole and "".join(part for _, part in parts) == text
    assert len(parts) > 9
    lengths = range(0, len(whole) + 1, 7)
    in_pieces = [tokenizer.extent(text, n_tokens) for n_tokens in lengths]
    monkeypatch.setattr(text_module, "_ENCODE_CHARACTERS", 10**6)
    of_the_whole = [tokenizer.extent(text, n_tokens) for n_tokens in lengths]
    # The token of the space at which a piece begins counts as the character behind it.
    assert np.abs(np.subtract(in_pieces, of_the_whole)).max() <= 1
    assert tokenizer.extent(text, len(whole)) == (len(text.split()), len(text))


@pytest.mark.parametrize(("pieces", "expected"), [(1, ["middle0"]), (2, ["middle0", "middle1"]), (100, ["all"])])
def test_the_sample_is_spread_over_documents(monkeypatch: pytest.MonkeyPatch, pieces: int, expected: list[str]) -> None:
    monkeypatch.setattr(text_module, "_PIECE_CHARACTERS", 10)
    texts = [f"{index}" * 100 for index in range(2)]
    documents = Documents("pg19", "train", "folder", "r", ["a", "b"], texts.__getitem__)
    sample = list(text_module._sample(documents, pieces * 10))
    if expected == ["all"]:
        assert sample == texts
    else:
        assert sample == [texts[int(name[-1])][:10] for name in expected]


def test_tokenizer_round_trips_through_its_file(story_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    story_tokenizer.save(tmp_path / "tokenizer.json")
    loaded = TextTokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.hash, loaded.bos_id) == (
        story_tokenizer.name,
        story_tokenizer.hash,
        story_tokenizer.bos_id,
    )
    assert loaded.encode(STORY).tolist() == story_tokenizer.encode(STORY).tolist()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as error:
        TextTokenizer.load(tmp_path / "tokenizer.json")
    assert_one_line(error, "tokenizer.json")


def test_a_tokenizer_that_cuts_and_fills_texts_is_one_that_does_not(story_tokenizer: TextTokenizer) -> None:
    """The tokenizer.json of models with short inputs does so."""
    cutting = copy.deepcopy(story_tokenizer._tokenizer)
    cutting.enable_truncation(3)
    cutting.enable_padding(length=500)
    found = TextTokenizer(cutting)
    assert found.encode("dog").tolist() == story_tokenizer.encode("dog").tolist()
    assert found.encode(STORY).tolist() == story_tokenizer.encode(STORY).tolist()
    assert found.extent(STORY, 20) == story_tokenizer.extent(STORY, 20) and found.hash == story_tokenizer.hash


@pytest.fixture(scope="module")
def byte_fallback() -> TextTokenizer:
    """A tokenizer like those of Llama 2, Gemma and Phi-3: characters outside the vocabulary are written in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnop."]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = tokenizers.models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    spaces = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    made.normalizer = tokenizers.normalizers.Sequence(spaces)
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(words[:3])
    return TextTokenizer(made)


@given(text=st.text(alphabet="ab .\n\té€😀", max_size=40))
@settings(max_examples=50, deadline=None)
def test_a_streamed_text_is_the_decoded_one(
    story_tokenizer: TextTokenizer, byte_fallback: TextTokenizer, text: str
) -> None:
    for tokenizer in (story_tokenizer, byte_fallback):
        ids, decode_token = tokenizer.encode(text).tolist(), tokenizer.stream_decoder()
        assert "".join(map(decode_token, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_text_stop_no_stream(story_tokenizer: TextTokenizer, byte_fallback: TextTokenizer) -> None:
    id_of, decode_token = byte_fallback._tokenizer.token_to_id, byte_fallback.stream_decoder()
    tokens = ["<0xC3>", "<0xA9>", "<0xFF>", "▁", "a", "▁", "b", "<0xE2>", "<0x82>", "<0xAC>"]
    assert [decode_token(id_of(token)) for token in tokens] == ["", "é", "", "\ufffd ", "a", " ", "b", "", "", "€"]
    rng = np.random.default_rng(0)
    for tokenizer in (story_tokenizer, byte_fallback):
        for _ in range(20):
            decode_token = tokenizer.stream_decoder()
            assert "".join(map(decode_token, rng.integers(0, tokenizer.vocab_size, 100).tolist()))


def test_vocabulary_below_the_bytes_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scale\.vocab_size=257"):
        bpe_tokenizer(folder_documents(corpus), 257, tmp_path)


def test_hub_tokenizer_begins_with_pad_when_it_has_no_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0), ("<unk>", -9.0)]
    t5 = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=4))
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=lambda hub_id: t5))
    tokenizer = hub_tokenizer("somebody/t5")
    assert tokenizer.bos_id == 0
    assert tokenizer.name.startswith("unigram-5-")
    assert tokenizer.encode("ab").tolist() == [2, 3]


def test_hub_tokenizer_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(hub_id: str) -> None:
        raise Exception("offline\nfor good")

    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_pretrained=offline))
    with pytest.raises(InputError) as error:
        hub_tokenizer("somebody/t5")
    assert_one_line(error, "scale.tokenizer='somebody/t5'")
    with pytest.raises(InputError, match="model.weights='somebody/t5': .*or use model.weights=null") as error:
        hub_tokenizer("somebody/t5", "model.weights", "model.weights=null")
    assert_one_line(error, "model.weights")


def test_a_vocabulary_and_its_merges_make_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LED's first repositories have such files, and no tokenizer.json."""
    pytest.importorskip("transformers")
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*marks, *letters, "do", "dog"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nd o\ndo g\n", "utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "led"}), "utf-8")

    def missing(hub_id: str) -> None:
        raise Exception("404: tokenizer.json")

    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", missing)
    tokenizer = hub_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.end_id) == (0, 2)
    assert tokenizer.encode("dog").tolist() == [vocabulary["dog"]] and tokenizer.decode([vocabulary["dog"]]) == "dog"


def test_tokenised_split_holds_the_documents(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    documents = folder_documents(corpus, "test")
    split = tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    assert capfd.readouterr() == ("", "")
    assert list(split.names) == ["test0", "test1"]
    for index, document in enumerate(documents):
        assert story_tokenizer.decode(split.ids(index)) == document.text
        assert split.n_tokens[index] == len(split.ids(index))
        assert split.n_words[index] == len(document.text.split())
        assert split.n_bytes[index] == len(document.text.encode())
    assert split.ids(0).dtype == np.uint16
    assert not split.ids(0).flags.owndata
    assert split.totals()["documents"] == 2
    assert split.totals()["bytes"] == documents.total_bytes
    assert (split.source, split.revision, split.split) == ("folder", documents.revision, "test")
    assert split.tokenizer_name == story_tokenizer.name


def test_progress_is_shown_on_standard_error(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenise(folder_documents(corpus), story_tokenizer, tmp_path / "cache")
    out, err = capfd.readouterr()
    assert out == ""
    assert "tokenizing pg19/train" in err


@pytest.mark.slow
def test_a_book_of_one_long_line_is_read(corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer) -> None:
    line = "once upon a time there was a line without an end " * (100_000_000 // 49)
    (corpus / "train" / "train1.txt").write_text(line, encoding="utf-8")
    split = tokenise(folder_documents(corpus), story_tokenizer, tmp_path / "cache", progress=False)
    assert int(split.n_bytes[1]) == len(line) == 49 * (100_000_000 // 49)
    assert story_tokenizer.decode(split.ids(1)[:200]) == line[: len(story_tokenizer.decode(split.ids(1)[:200]))]


def test_a_document_without_tokens_is_named(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Characters that the tokenizer drops are text."""
    (corpus / "test" / "test1.txt").write_text("\u200b\u200b", "utf-8")
    dropping = tokenizers.Tokenizer.from_str(story_tokenizer._tokenizer.to_str())
    dropping.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    with pytest.raises(InputError) as error:
        tokenise(folder_documents(corpus, "test"), TextTokenizer(dropping), tmp_path / "cache")
    assert str(error.value) == "test document test1 of pg19 has no token in this vocabulary: remove it"
    assert not list(tmp_path.glob("cache/tokens/*"))
    tokenise(folder_documents(corpus, "test"), story_tokenizer, tmp_path / "cache")


def test_token_cache_is_used_again(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = folder_documents(corpus)
    first = tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
    second = tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    assert all(np.array_equal(first.ids(index), second.ids(index)) for index in range(len(first)))
    assert first.totals() == second.totals()


def test_an_interrupted_cache_is_not_picked_up(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = folder_documents(corpus)
    encode = TextTokenizer.encode
    calls = []

    def interrupted(self: TextTokenizer, text: str) -> np.ndarray:
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(TextTokenizer, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    assert len(tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)) == 3


def cut_points(path: Path) -> list[int]:
    """Sizes at which a file of Arrow still opens, with fewer rows."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        points = [file.tell()]
        for _ in stream:
            points.append(file.tell())
    return points


@pytest.mark.parametrize("damage", ["empty", "cut inside", "cut between documents", "zeros", "fewer documents"])
def test_a_damaged_token_cache_is_made_anew(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = folder_documents(corpus)
    first = tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    (path,) = (tmp_path / "cache" / "tokens").iterdir()
    whole = path.read_bytes()
    *_, third, _ = cut_points(path)
    left = {
        "empty": b"",
        "cut inside": whole[: third + 100],
        "cut between documents": whole[:third],
        "zeros": bytes(len(whole)),
        "fewer documents": whole[:third] + whole[-8:],
    }
    path.unlink()
    path.write_bytes(left[damage])
    again = tokenise(documents, story_tokenizer, tmp_path / "cache", progress=False)
    assert again.names == first.names == documents.names and path.read_bytes() == whole
    said = f"{path}: is damaged and is rebuilt\n"
    assert capsys.readouterr().err == ("" if damage == "fewer documents" else said)


@pytest.mark.parametrize("kept", ["tokens", "texts"])
def test_a_cache_is_on_disk_before_it_has_its_name(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Otherwise a power failure leaves a part of it under its name."""
    synced: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    if kept == "tokens":
        tokenise(folder_documents(corpus), story_tokenizer, tmp_path / "new", progress=False)
        (path,) = (tmp_path / "new" / "tokens").iterdir()
    else:
        monkeypatch.setattr(hub, "_rows", lambda *_: iter([("a", "A book.")]))
        hub.hub_documents("pg19", "test", HUB_ID, None, tmp_path / "new")
        (path,) = (tmp_path / "new" / "hub").iterdir()
    assert path.stat().st_ino in synced


def test_a_changed_book_or_tokenizer_makes_another_cache(
    corpus: Path, tmp_path: Path, story_tokenizer: TextTokenizer
) -> None:
    cache = tmp_path / "cache"
    tokenise(folder_documents(corpus), story_tokenizer, cache, progress=False)
    (corpus / "train" / "train0.txt").write_text("Another book.")
    changed = tokenise(folder_documents(corpus), story_tokenizer, cache, progress=False)
    assert story_tokenizer.decode(changed.ids(0)) == "Another book."
    tokenise(folder_documents(corpus), bpe_tokenizer(folder_documents(corpus), 270, cache), cache, progress=False)
    assert len(list((cache / "tokens").iterdir())) == 3


def test_open_split_trains_the_tokenizer_on_the_train_split(corpus: Path, tmp_path: Path) -> None:
    cfg: Config = compose([f"task.data_dir={corpus}", f"cache_dir={tmp_path / 'cache'}", "scale.vocab_size=300"])
    split, tokenizer = open_split(cfg, "test")
    assert tokenizer.hash == bpe_tokenizer(folder_documents(corpus), 300, tmp_path / "elsewhere").hash
    assert split.data_record() == {
        "name": "pg19",
        "source": "folder",
        "revision": split.revision,
        "split": "test",
        **split.totals(),
        "tokenizer": tokenizer.name,
    }
    given_one, _ = open_split(cfg, "test", bpe_tokenizer(folder_documents(corpus), 280, tmp_path))
    assert given_one.tokenizer_name.startswith("bpe-280-")


def test_a_text_in_two_splits_is_said_once(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "validation", "test", "train"):
        folder_documents(corpus, split)
    said = capsys.readouterr().err.splitlines()
    of_test = [line for line in said if "/test/" in line and "/train/" in line]
    names = f"{corpus}/test/test0.txt is the same text as {corpus}/train/train0.txt"
    others = f"{corpus}/test/test1.txt is the same text as {corpus}/train/train1.txt"
    assert len(said) == 3 and of_test[0].startswith((f"{names} (and 1 more); ", f"{others} (and 1 more); "))
    for split in ("train", "validation"):
        (corpus / split / f"{split}0.txt").write_text(f"Another book, {split}.")
    (corpus / "test" / "test1.txt").unlink()
    for split in ("train", "validation", "test"):
        folder_documents(corpus, split)
    assert capsys.readouterr().err == ""


def test_a_suffix_may_be_in_capitals(corpus: Path) -> None:
    (corpus / "train" / "train1.txt").rename(corpus / "train" / "BOOK.TXT")
    (corpus / "train" / "notes.md").write_text("No book.")
    assert list(folder_documents(corpus).names) == ["BOOK", "train0", "train2"]


def test_documents_of_one_stem_keep_their_suffixes(tmp_path: Path) -> None:
    """Runs are paired by the names of documents, so that no two may share one."""
    (tmp_path / "test").mkdir()
    for name in ("a.txt", "a.tex", "b.tex"):
        (tmp_path / "test" / name).write_text(f"What {name} says.")
    found = load_documents("arxiv_math", "test", tmp_path, "nowhere")
    assert {document.name: document.text for document in found} == {
        name: f"What {name} says." for name in ("a.tex", "a.txt", "b.tex")
    }
    (tmp_path / "test" / "a.txt").unlink()
    assert list(load_documents("arxiv_math", "test", tmp_path, "nowhere").names) == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are not UTF-8")
def test_a_name_that_is_not_utf8_and_what_stands_for_it_are_two(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for name in (b"caf\xe9.txt", b"caf\\xe9.txt"):
        (tmp_path / "test" / os.fsdecode(name)).write_bytes(b"What " + name.hex().encode() + b" says.")
    found = load_documents("pg19", "test", tmp_path, "nowhere")
    assert list(found.names) == ["caf\\xe9.txt", "caf\\xe9.txt-1"]
    assert len({document.text for document in found}) == 2
    (tmp_path / "test" / os.fsdecode(b"caf\xe9.txt")).unlink()
    assert list(load_documents("pg19", "test", tmp_path, "nowhere").names) == ["caf\\xe9"]


SPECIAL_TOKENS = {
    "this project": (["<s>", "<pad>", "</s>"], [], "<s>", "</s>", ["<s>", "</s>"]),
    "Llama 3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        [],
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    ),
    # Its vocabulary also has tags of HTML, which are not special.
    "Gemma": (
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["<s>", "</s>"],
        "<bos>",
        "<end_of_turn>",
        ["<eos>", "<bos>", "<end_of_turn>"],
    ),
    "Phi-3": (["<s>", "<|endoftext|>", "<|end|>"], ["</s>"], "<s>", "<|end|>", ["<s>", "<|endoftext|>", "<|end|>"]),
    "SmolLM2 and Qwen": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [],
        "<|endoftext|>",
        "<|im_end|>",
        ["<|endoftext|>", "<|im_end|>"],
    ),
    "Mistral": (["<unk>", "<s>", "</s>"], [], "<s>", "</s>", ["<s>", "</s>"]),
    "T5": (["<pad>", "</s>", "<unk>"], [], "<pad>", "</s>", ["<pad>", "</s>"]),
    "one without special tokens": ([], ["<s>", "<pad>"], "<s>", "<s>", ["<s>"]),
}
"""Family -> its special tokens, other tokens that look like them, and where a text begins, ends and is over."""


@pytest.mark.parametrize("family", SPECIAL_TOKENS)
def test_texts_begin_and_end_as_each_family_has_it(family: str) -> None:
    special, plain, begin, end, stops = SPECIAL_TOKENS[family]
    vocabulary = {token: index for index, token in enumerate([*plain, *special, "word"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word"))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=False) for token in plain])
    found = TextTokenizer(tokenizer)
    assert (found.bos_id, found.end_id) == (vocabulary[begin], vocabulary[end])
    assert found.stop_ids == {vocabulary[token] for token in stops}


def test_a_damaged_vocabulary_is_made_again(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = folder_documents(corpus)
    first = bpe_tokenizer(documents, 300, tmp_path)
    (path,) = (tmp_path / "tokenizers").glob("*.json")
    path.write_bytes(path.read_bytes()[:1000])
    assert bpe_tokenizer(documents, 300, tmp_path).hash == first.hash
    assert "it is made again" in capsys.readouterr().err
