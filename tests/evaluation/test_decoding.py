"""Decoding: prefill and steps against one full forward pass, drawing, saved states, `infini generate`."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_model, models_by, variant_id, variants
from tiny_runs import TINY, write_corpus

from infini.cli import main as cli
from infini.errors import InputError
from infini.evaluation.decoding import Reader, generate, load_reader, sample_token, save_reader
from infini.nn.state import leaves
from infini.runs.generate import _pieces
from infini.tasks.text.documents import TextTokenizer

BOS = 0
ABOUT = {"model": "m", "tokenizer": "t"}


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCABULARY, count)


@models_by(4, variants(), "prompt", [0, 1, 13, 40])
def test_prefill_and_steps_are_the_full_forward_pass(options: dict[str, Any], prompt: int) -> None:
    model = make_model(options)
    ids = tokens(prompt + 45)
    everything = torch.from_numpy(np.concatenate([[BOS], ids]))[None]
    with torch.no_grad():
        expected = model.head(model(everything).hidden_BTD)[0]
    reader = Reader.begin(model, BOS).read([ids[:prompt]], tokens_per_call=7)
    for position in range(prompt, len(ids) + 1):
        with torch.no_grad():
            out = model(torch.tensor([[reader.last]]), reader.state)
            logits = model.head(out.hidden_BTD)[0, -1]
        assert torch.allclose(logits, expected[position], rtol=0, atol=1e-10), position
        assert torch.equal(reader.next_logits()[0], logits.float())
        if position < len(ids):
            reader = Reader(model, out.state, int(ids[position]))


@pytest.mark.parametrize("options", variants()[:2], ids=variant_id)
def test_the_cut_of_a_prompt_decides_nothing(options: dict[str, Any]) -> None:
    model, ids = make_model(options), tokens(50)
    whole = Reader.begin(model, BOS).read([ids], tokens_per_call=1000)
    heard: list[int] = []
    cut = Reader.begin(model, BOS).read(np.split(ids, [1, 4, 33]), tokens_per_call=5, advance=heard.append)
    assert sum(heard) == 50 and max(heard) == 5
    assert cut.last == whole.last
    assert torch.allclose(cut.next_logits()[0], whole.next_logits()[0], rtol=0, atol=1e-6)


def test_logits_in_bfloat16_runs_are_float32() -> None:
    model = make_model(variants()[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        reader = Reader.begin(model, BOS).read([tokens(20)], 7)
        logits, _ = reader.next_logits()
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9, "rounded to 8 bits, tokens tie"


def test_a_fork_goes_its_own_way() -> None:
    model = make_model(variants()[0])
    book = Reader.begin(model, BOS).read([tokens(40)], 16)
    before = [leaf.clone() for _, leaf in leaves(book.state)]
    one, other = book.fork().read([tokens(9, seed=1)], 16), book.fork().read([tokens(9, seed=2)], 16)
    assert not torch.equal(one.next_logits()[0], other.next_logits()[0])
    for kept, (path, leaf) in zip(before, leaves(book.state), strict=True):
        assert torch.equal(kept, leaf), path
    again = book.read([tokens(9, seed=1)], 16)
    assert torch.equal(again.next_logits()[0], one.next_logits()[0])


@pytest.mark.parametrize("options", variants(), ids=variant_id)
def test_a_saved_state_goes_on_as_if_it_had_not_been(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_model(options)
    reader = Reader.begin(model, BOS).read([tokens(37)], 16)
    save_reader(reader, tmp_path / "state", ABOUT)
    loaded = load_reader(tmp_path / "state", model, ABOUT)
    assert loaded.last == reader.last
    for (path, mine), (_, theirs) in zip(leaves(reader.state), leaves(loaded.state), strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, path
    more = [tokens(20, seed=3)]
    assert torch.equal(loaded.read(more, 8).next_logits()[0], reader.read(more, 8).next_logits()[0])


def test_a_state_of_something_else_is_one_line(tmp_path: Path) -> None:
    model = make_model(variants()[0])
    path = tmp_path / "state"
    save_reader(Reader.begin(model, BOS), path, ABOUT)
    with pytest.raises(InputError, match=r"its model is 'm', this model's is 'other'"):
        load_reader(path, model, {**ABOUT, "model": "other"})
    with pytest.raises(InputError, match=r"its tokenizer is 't'"):
        load_reader(path, model, {**ABOUT, "tokenizer": "other"})
    with pytest.raises(InputError, match="not a state of this model"):
        load_reader(path, make_model(variants()[0], n_heads=1, d_model=8), ABOUT)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="checksum mismatch: the file is damaged"):
        load_reader(path, model, ABOUT)
    path.write_bytes(content[:-9])
    with pytest.raises(InputError, match="cannot be read as a saved state"):
        load_reader(path, model, ABOUT)
    with pytest.raises(InputError, match="cannot be read as a saved state"):
        load_reader(tmp_path / "nothing", model, ABOUT)


LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]))


def shares(temperature: float, top_p: float, count: int = 4000) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_token(LOGITS, temperature, top_p, generator) for _ in range(count)]
    return np.bincount(drawn, minlength=5) / count


def test_draws_follow_the_probabilities() -> None:
    assert np.allclose(shares(1.0, 1.0), [0.1, 0.5, 0.05, 0.3, 0.05], atol=0.03)
    squared = np.array([0.01, 0.25, 0.0025, 0.09, 0.0025])
    assert np.allclose(shares(0.5, 1.0), squared / squared.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_likeliest_that_reach_it(top_p: float, kept: list[int]) -> None:
    found = shares(1.0, top_p)
    assert np.flatnonzero(found).tolist() == kept
    expected = np.array([0.1, 0.5, 0.05, 0.3, 0.05])[kept]
    assert np.allclose(found[kept], expected / expected.sum(), atol=0.03)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert shares(0.0, 0.1, count=5).tolist() == [0, 1, 0, 0, 0]


def test_drawing_ends_at_the_end_and_at_the_limit() -> None:
    model = make_model(variants()[0])
    reader = Reader.begin(model, BOS).read([tokens(20)], 8)

    def drawn(end: int, limit: int = 30, seed: int = 5) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [token for token, _ in generate(reader, limit, 1.0, 1.0, generator, {end})]

    long = drawn(end=-1)
    assert len(long) == 30 and long == drawn(end=-1) != drawn(end=-1, seed=6)
    place = long.index(long[10])
    assert drawn(end=long[10]) == long[:place]
    assert drawn(end=-1, limit=0) == []


def test_a_streamed_text_is_the_whole_text(tmp_path: Path) -> None:
    from infini.tasks.text.documents import bpe_tokenizer, load_documents

    write_corpus(tmp_path / "data")
    documents = load_documents("pg19", "train", tmp_path / "data", "none")
    tokenizer = bpe_tokenizer(documents, 300, tmp_path / "cache")
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abc def \n\té€"), size=60_000))
    for size in (1, 4097, 10**6):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = (
            list(tokenizer.encode_stream(pieces)) if size > 1 else list(tokenizer.encode_stream(iter(text[:20_000])))
        )
        known = text if size > 1 else text[:20_000]
        assert "".join(part for _, part in parts) == known
        assert np.array_equal(np.concatenate([ids for ids, _ in parts]), tokenizer.encode(known))
    decode_token = tokenizer.stream_decoder()
    spoken = "".join(decode_token(int(token)) for token in tokenizer.encode(text[:500]))
    assert spoken == text[:500]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("generate")
    write_corpus(folder / "data")
    settings = [*TINY, f"results_dir={folder}/results", f"cache_dir={folder}/cache", f"task.data_dir={folder}/data"]
    assert cli.main(["train", *settings, "logger=none"]) == 0
    return folder, [f"results_dir={folder}/results", "parallel.precision=fp32", "decoding.max_new_tokens=12"]


def said(capfd: pytest.CaptureFixture[str], settings: list[str], *words: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    assert cli.main(["generate", *settings, *words]) == code
    return capfd.readouterr()


def test_generate_reads_text_files_and_standard_input_alike(
    trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = trained
    text = (folder / "data" / "test" / "test0.txt").read_text()[:400]
    (folder / "prompt.txt").write_text(text)
    from_file, err = said(capfd, settings, f"prompt=@{folder}/prompt.txt")
    assert "tokens read in" in err and "; 12 tokens generated, " in err
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert said(capfd, settings, "prompt=-")[0] == from_file
    assert said(capfd, settings, f"prompt='{text}'")[0] == from_file
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert said(capfd, settings, "prompt=-", "seed=2")[0] != from_file


def test_a_book_is_read_once_and_asked_twice(
    trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, settings = trained
    path = folder / "data" / "test" / "test0.txt"
    state = f"{folder}/book.state"
    said(capfd, settings, f"prompt=@{path}", f"save_state={state}", "decoding.max_new_tokens=0")
    tokenizer = TextTokenizer.load(next(folder.glob("results/checkpoints/*/tokenizer.json")))
    for question in (" one", " another"):
        asked, err = said(capfd, settings, f"load_state={state}", f"prompt='{question}'")
        assert f"{len(tokenizer.encode(question))} tokens read" in err
        (folder / "both.txt").write_text(path.read_text() + question)
        assert said(capfd, settings, f"prompt=@{folder}/both.txt")[0] == asked
    assert said(capfd, settings, f"load_state={state}")[0] == said(capfd, settings, f"prompt=@{path}")[0]


def test_a_saved_state_finds_its_own_model(
    trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model that was trained since changes nothing, unless the command line says which model it wants."""
    folder, (_, *settings) = trained
    shutil.copytree(folder / "results", tmp_path / "results")
    settings.append(f"results_dir={tmp_path}/results")
    state = f"{tmp_path}/asked.state"
    said(capfd, settings, "prompt=Once", f"save_state={state}", "decoding.max_new_tokens=0")
    expected = said(capfd, settings, f"load_state={state}")[0]
    (own,) = (path.name for path in (tmp_path / "results" / "checkpoints").iterdir())
    data = [f"cache_dir={folder}/cache", f"task.data_dir={folder}/data", "logger=none", "seed=2"]
    assert cli.main(["train", *TINY, *data, f"results_dir={tmp_path}/results"]) == 0
    assert said(capfd, settings, f"load_state={state}")[0] == expected
    err = said(capfd, settings, f"load_state={state}", "model=infini_linear", code=2)[1]
    assert f"its model is '{own}'" in err and f"it belongs to checkpoint={own}" in err
    assert said(capfd, settings, f"load_state={state}", f"checkpoint={own}")[0] == expected


@pytest.mark.parametrize(
    "text", ["Hello, world", "It's late", 'He said "no" {x} ${y}', "42", "true", " two  spaces ", "a=b"]
)
def test_a_prompt_is_taken_as_it_is_typed(
    trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str], text: str
) -> None:
    folder, settings = trained
    (folder / "typed.txt").write_text(text)
    assert said(capfd, settings, f"prompt={text}")[0] == said(capfd, settings, f"prompt=@{folder}/typed.txt")[0]


def test_line_ends_are_read_as_they_are(trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    folder, settings = trained
    counts = []
    for name, ends in (("unix", "\n"), ("windows", "\r\n")):
        (folder / name).write_bytes(ends.join(["line"] * 50).encode())
        err = said(capfd, settings, f"prompt=@{folder}/{name}")[1]
        counts.append(int(err.partition(" tokens read")[0].split()[-1]))
    assert counts[1] > counts[0]


def test_generate_says_what_is_wrong(trained: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    folder, settings = trained
    for name, content in (("utf16", "text".encode("utf-16")), ("blank", b" \n"), ("zero", b"a\0")):
        (folder / f"{name}.txt").write_bytes(content)
    for words, expected in (
        ([], "prompt=null: give a text"),
        ([f"prompt=@{folder}/none"], "none': cannot be read (No such file"),
        ([f"prompt=@{folder}"], "cannot be read (Is a directory)"),
        ([f"prompt=@{folder}/utf16.txt"], "is not UTF-8 text (byte 0)"),
        ([f"prompt=@{folder}/blank.txt"], "blank.txt': is empty"),
        ([f"prompt=@{folder}/zero.txt"], "zero.txt': is not text (byte 1 is zero)"),
        (["prompt=x", "decoding.top_p=0"], "decoding.top_p=0.0: must be above 0"),
        (["prompt=x", "decoding.temperature=-1"], "decoding.temperature=-1.0: must be at least 0"),
        (["prompt=x", f"load_state={folder}/none"], "cannot be read as a saved state"),
        (["prompt=x", f"save_state={folder}"], "exists and is not a regular file; name another file"),
        (["prompt=x", f"save_state={folder}/utf16.txt/state"], "utf16.txt is not a folder; name another place"),
        (["prompt=\udce9"], "is not UTF-8 text"),
    ):
        out, err = said(capfd, settings, *words, code=2)
        assert expected in err and "Traceback" not in err and err.count("infini: error:") == 1
        assert out == ""


@pytest.mark.parametrize("read_as", ["its name", "a link to it", "standard input"])
def test_a_state_does_not_overwrite_the_book_that_is_read(
    trained: tuple[Path, list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    read_as: str,
) -> None:
    _, settings = trained
    book, link = tmp_path / "book.txt", tmp_path / "link.txt"
    book.write_text("A man goes.", encoding="utf-8")
    link.symlink_to(book)
    prompt = {"its name": f"prompt=@{book}", "a link to it": f"prompt=@{link}", "standard input": "prompt=-"}[read_as]
    with open(book, encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdin", file)
        _, err = said(capfd, settings, prompt, f"save_state={tmp_path}/none/../book.txt", code=2)
    assert "save_state=" in err and "is the file of the prompt, which would be overwritten; name another file" in err
    assert book.read_text(encoding="utf-8") == "A man goes."


def test_a_state_may_be_saved_where_it_was_loaded(
    trained: tuple[Path, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, settings = trained
    state = tmp_path / "one.state"
    said(capfd, settings, "prompt=Once", f"save_state={state}", "decoding.max_new_tokens=0")
    before = state.read_bytes()
    said(capfd, settings, "prompt=more", f"load_state={state}", f"save_state={state}", "decoding.max_new_tokens=0")
    assert state.read_bytes() != before


def read_from(content: bytes, monkeypatch: pytest.MonkeyPatch, size: int = 4) -> str:
    """The text of these bytes, read a few at a time."""
    monkeypatch.setattr("infini.runs.generate._BYTES", size)
    return "".join(_pieces(io.BytesIO(content), "book"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfWith a mark.", "With a mark."),
        ("née où \U0001f600\r\n".encode(), "née où \U0001f600\r\n"),
        ("a \ufeff b".encode(), "a \ufeff b"),
        (b"  \n\n x", "  \n\n x"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_bytes_become_text_however_they_come(
    content: bytes, text: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_from(content, monkeypatch, size) == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n\t \r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"0123456789\0", "is not text (byte 10 is zero)"),
        ("A book.".encode("utf-16-le"), "is not text (byte 1 is zero)"),
        (b"0123456789\xff", "is not UTF-8 text (byte 10)"),
        # A character that is cut short, across two pieces and at the end.
        (b"012\xc3x", "is not UTF-8 text (byte 3)"),
        (b"01234\xc3", "is not UTF-8 text (byte 5)"),
    ],
)
def test_bytes_that_are_no_text_are_named_with_their_place(
    content: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as error:
        read_from(content, monkeypatch)
    assert str(error.value) == f"book: {problem}"
