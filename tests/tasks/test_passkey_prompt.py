"""The passkey prompt: the paper's words, the lengths and places asked for, sets that do not meet, spans that stream."""

import re
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from infini.errors import InputError
from infini.tasks.passkey.prompt import PasskeyTemplate, shared_prefix, word_tokenizer
from infini.tasks.text.documents import bpe_tokenizer, synthetic_documents


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    bpe = bpe_tokenizer(synthetic_documents("train"), 300, tmp_path_factory.mktemp("cache"))
    return {"words": word_tokenizer(), "bpe": bpe}


@pytest.fixture(scope="module")
def small_bpe(tmp_path_factory):
    return bpe_tokenizer(synthetic_documents("train"), 290, tmp_path_factory.mktemp("cache"))


def whole(example):
    """Prompt and answer as one array."""
    return np.concatenate([*example.chunks(1000), example.answer])


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
@pytest.mark.parametrize("as_printed", [False, True])
def test_the_text_is_the_papers(encoders, tokenizer, as_printed):
    encode = encoders[tokenizer].encode
    template = PasskeyTemplate(encode, digits=4, as_printed=as_printed)
    example = template.example(2000, 0.4, np.random.default_rng(0), training=False)
    x, y = example.blocks
    assert x > 2 and y > 2
    block = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    last = block.replace("back", "ack") if as_printed else block
    expected = " ".join(
        [
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
            "you about the important information there.",
            *[block] * x,
            f"The pass key is {example.key}. Remember it. {example.key} is the pass key.",
            *[last] * y,
            f"What is the pass key? The pass key is {example.key}",
        ]
    )
    assert np.array_equal(whole(example), encode(expected))


def test_the_vocabulary_of_words_has_no_unknown_word_in_any_variant(encoders):
    tokenizer = encoders["words"]
    rng = np.random.default_rng(0)
    for as_printed in (False, True):
        example = PasskeyTemplate(tokenizer.encode, as_printed=as_printed, distractors=9).example(900, 0.5, rng, True)
        assert "<unk>" not in tokenizer.decode(whole(example))
    assert "<unk>" in tokenizer.decode(tokenizer.encode("Call me Ishmael"))
    assert tokenizer.vocab_size < 64


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fill", ["blocks", "exact"])
@pytest.mark.parametrize("distractors", [0, 3])
def test_lengths_and_depths(encoders, fill, training, distractors):
    encode = encoders["bpe"].encode
    template = PasskeyTemplate(encode, fill=fill, distractors=distractors)
    rng = np.random.default_rng(1)
    block = len(template.block)
    for length in (1000, 1001, 1013, 4096, 32768):
        for depth in (0.0, 0.25, 0.5, 1.0):
            example = template.example(length, depth, rng, training)
            total = len(example) + len(example.answer)
            assert length - block < total <= length and (total == length or fill == "blocks")
            assert len(whole(example)) == total
            assert abs(example.blocks[0] - depth * sum(example.blocks)) <= 7.5
            sentence = template.key_tokens(example.key)
            assert np.array_equal(whole(example)[example.key_position :][: len(sentence)], sentence)


@pytest.mark.parametrize("digits", [4, 5, 8])
def test_keys_are_uniform_fresh_and_never_shared_with_training(encoders, digits):
    template = PasskeyTemplate(encoders["words"].encode, digits=digits)
    rng = np.random.default_rng(2)
    drawn = {training: [template.draw_key(rng, training) for _ in range(4000)] for training in (True, False)}
    assert not set(drawn[True]) & set(drawn[False])
    for keys in drawn.values():
        assert {len(key) for key in keys} == {digits}
        for place in range(digits):
            counts = Counter(key[place] for key in keys)
            assert set(counts) == set("0123456789") and min(counts.values()) > 300
    assert digits == 4 or len(set(drawn[False])) > 3500


def test_keys_of_few_digits_have_at_most_four_kinds_and_are_the_trainings(encoders):
    template = PasskeyTemplate(encoders["words"].encode)
    rng = np.random.default_rng(5)
    keys = [template.draw_key(rng, training=True, few_digits=True) for _ in range(500)]
    assert {len(set(key)) for key in keys} == {2, 3, 4} and len(set(keys)) > 300
    assert {digit for key in keys for digit in key} == set("0123456789")
    assert not set(keys) & {template.draw_key(rng, training=False) for _ in range(4000)}
    assert len(set(template.example(400, 0.5, rng, training=True, few_digits=True).key)) <= 4


def test_training_shows_the_key_right_after_the_head_and_before_a_whole_block(encoders):
    """Evaluation has such keys. If the first block of every prompt were trimmed, training would hardly have any."""
    template = PasskeyTemplate(encoders["words"].encode, fill="exact")
    rng = np.random.default_rng(7)
    seen: Counter[bool] = Counter()
    for length in range(300, 400):
        example = template.example(length, 0.0, rng, training=True, trim_after_key=0.5)
        assert len(example) + len(example.answer) == length
        seen[example.key_position == len(template.head)] += 1
        sentence = template.key_tokens(example.key)
        tokens = whole(example)
        assert np.array_equal(tokens[example.key_position :][: len(sentence)], sentence)
    assert min(seen[True], seen[False]) > 20
    # The rule of fill=exact: the first block, and nothing else.
    for length in range(3000, 3030):
        example = template.example(length, 0.5, rng, training=False)
        x = example.blocks[0]
        trimmed = example.key_position - len(template.head) - x * len(template.block)
        assert 0 <= trimmed < len(template.block)


def test_filler_counts_are_never_shared_with_training(encoders):
    template = PasskeyTemplate(encoders["words"].encode)
    rng = np.random.default_rng(3)
    seen: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for training, counts in seen.items():
        for length in range(400, 1200, 7):
            for depth in np.linspace(0, 1, 9):
                counts.add(template.example(length, depth, rng, training).blocks)
    assert not seen[True] & seen[False] and min(map(len, seen.values())) > 50


def test_evaluation_prompts_longer_than_all_training_prompts_have_any_filler_counts(encoders):
    template = PasskeyTemplate(encoders["words"].encode, longest_training=600)
    rng = np.random.default_rng(3)

    def held_out(length):
        found = [template.example(length, depth, rng, training=False).blocks for depth in np.linspace(0, 1, 30)]
        return {(x + 3 * y) % 7 == 0 for x, y in found}

    assert held_out(600) == {True} and held_out(601) == {True, False}


def test_a_seed_gives_the_same_example(encoders):
    template = PasskeyTemplate(encoders["bpe"].encode, distractors=2)
    a, b, c = (whole(template.example(3000, 0.5, np.random.default_rng(seed), False)) for seed in (7, 7, 8))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("start", [0, 1, 50, 333])
def test_chunks_are_the_prompt_however_cut(encoders, size, start):
    example = PasskeyTemplate(encoders["words"].encode, fill="exact", distractors=1).example(
        700, 0.3, np.random.default_rng(4), False
    )
    expected = whole(example)[: len(example)]
    chunks = list(example.chunks(size, start))
    assert np.array_equal(np.concatenate(chunks), expected[start:])
    assert all(len(chunk) == size for chunk in chunks[:-1])


def test_ten_million_tokens_are_never_held(encoders):
    template = PasskeyTemplate(encoders["words"].encode)
    tracemalloc.start()
    example = template.example(10_000_000, 0.5, np.random.default_rng(5), False)
    total = sum(len(chunk) for chunk in example.chunks(1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == len(example) > 9_999_900
    assert peak < 4 << 20


def test_other_keys_stand_in_the_filler_and_are_not_the_answer(encoders):
    tokenizer = encoders["words"]
    # Two digits, so that chance alone would repeat the key in some of these 120 draws.
    template = PasskeyTemplate(tokenizer.encode, digits=2, distractors=4)
    for seed in range(30):
        example = template.example(900, 0.5, np.random.default_rng(seed), False)
        others = re.findall(r"The (green|blue|yellow) key is((?: \d)+)", tokenizer.decode(whole(example)))
        assert len(others) == 4
        assert all(number.replace(" ", "") != example.key for _, number in others)


@pytest.mark.parametrize("options", [{"digits": 1}, {"fill": "exat"}])
def test_options_that_make_no_prompt_are_refused(encoders, options):
    with pytest.raises(ValueError, match="at least 2 digits, fill blocks or exact"):
        PasskeyTemplate(encoders["words"].encode, **options)


def test_book_text_takes_the_place_of_the_block(encoders):
    tokenizer = encoders["bpe"]
    book = np.arange(100, 290)
    template = PasskeyTemplate(tokenizer.encode, book=book)
    example = template.example(5000, 0.5, np.random.default_rng(8), False)
    tokens = whole(example)
    assert len(tokens) == 5000
    x, y = example.blocks
    head = len(template.head)
    text = np.concatenate([tokens[head : head + x], tokens[head + x + len(template.key_tokens(example.key)) :][:y]])
    assert np.array_equal(text, (text[0] - 100 + np.arange(x + y)) % len(book) + 100)


def test_shared_prefix_is_shared_and_ends_where_the_keys_part(encoders):
    template = PasskeyTemplate(encoders["words"].encode)
    rng = np.random.default_rng(9)
    examples = [template.example(2000, 0.5, rng, False) for _ in range(5)]
    shared = shared_prefix(examples)
    prompts = [whole(example) for example in examples]
    assert all(np.array_equal(prompts[0][:shared], other[:shared]) for other in prompts)
    assert len({int(other[shared]) for other in prompts}) > 1
    assert shared >= examples[0].key_position
    assert shared_prefix([examples[0]]) == len(examples[0])
    far = template.example(2000, 0.9, rng, False)
    assert 0 < shared_prefix([examples[0], far]) <= examples[0].key_position


def test_too_short_a_length_is_one_line(encoders):
    template = PasskeyTemplate(encoders["words"].encode)
    with pytest.raises(InputError, match=r"length=40: too short for a passkey prompt, which needs at least \d+ tokens"):
        template.example(40, 0.5, np.random.default_rng(0), False)


def in_bytes(text: str) -> list[int]:
    """A tokenizer of whose tokens a block of filler has 90, as those of languages that a vocabulary hardly knows."""
    return list(text.encode())


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_the_length_that_is_called_enough_is_enough(encoders, tokenizer, depth):
    template = PasskeyTemplate(encoders["words"].encode if tokenizer == "words" else in_bytes)
    named = set()
    first = 100 if tokenizer == "words" else 400
    for length in range(first, first + 200):
        try:
            template.example(length, depth, np.random.default_rng(0), False)
        except InputError as error:
            named |= {int(number) for number in re.findall(r"(\d+) tokens are enough", str(error))}
    (enough,) = named
    for length in range(enough, enough + 200):
        template.example(length, depth, np.random.default_rng(0), False)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("difference", [-1, 1])
def test_enough_is_enough_where_the_misprint_is_shorter_or_longer(small_bpe, difference, depth):
    """A small vocabulary gives "ack" one token less than "back", or one more."""

    def encode(text: str) -> np.ndarray:
        return small_bpe.encode(text if difference < 0 else text.replace("back", "bk"))

    template = PasskeyTemplate(encode, as_printed=True)
    assert len(template.second_block) - len(template.block) == difference
    enough = template.shortest(False)
    for length in [*range(enough, enough + 1000), *range(8000, 8200)]:
        template.example(length, depth, np.random.default_rng(0), False)


def test_a_tokenizer_that_joins_the_parts_is_refused():
    def encode(text: str) -> np.ndarray:
        return np.array([len(text)])

    with pytest.raises(InputError, match="the tokenizer merges"):
        PasskeyTemplate(encode)
