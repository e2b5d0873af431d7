"""The passkey evaluator: shared prefixes change no answer, decoding is greedy, a stopped evaluation resumes."""

import itertools
import json
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import one_in, tiny_dims, tiny_llm_folder, variant_id, variants, with_exact_norms
from report_runs import make_train

from infini.errors import InputError
from infini.evaluation import saved_reading
from infini.evaluation.result_cache import ResultCache
from infini.evaluation.saved_reading import SavedReadings
from infini.models import build_model
from infini.report.intervals import proportion_interval
from infini.tasks.passkey.answers import Answer, _Reader, answer_questions, make_questions, tokens_to_read
from infini.tasks.passkey.evaluation import _FIELDS, _cell, _entry
from infini.tasks.passkey.prompt import PasskeyTemplate, input_ids, word_tokenizer
from infini.tasks.text.documents import _train_bpe

TOKENIZER = word_tokenizer()
DEPTHS = {"start": 0.0, "middle": 0.5, "0.8": 0.8, "end": 1.0}
LENGTHS = [200, 333]


def passkey_model(options, segment=16):
    if options["name"] == "llm":
        options = {**options, "base": tiny_llm_folder(TOKENIZER.vocab_size)}
    torch.manual_seed(0)
    model = with_exact_norms(build_model(options, tiny_dims(segment_length=segment), TOKENIZER.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.double().eval()


def questions_of(examples=2, lengths=LENGTHS, depths=DEPTHS, **options):
    template = PasskeyTemplate(TOKENIZER.encode, digits=4, **options)
    return list(make_questions(template, lengths, depths, examples, seed=1))


def by_name(answers):
    return {(a.question.length, a.question.depth, a.question.index): a for a in answers}


def answer_alone(model, question, tokens_per_call):
    """The plain way: one prompt from its first token to its last, nothing shared."""
    reader = _Reader(model, TOKENIZER.bos_id, tokens_per_call, lambda tokens: None, knock_out=False)
    with torch.no_grad():
        return reader.decode(reader.read(reader.begin(), [question]), [question])[0]


def shared_cases():
    """Every second model in one variant, with one kind of prompts; the others are slow."""
    seen = set()
    for options in variants():
        is_new = options["name"] not in seen
        seen.add(options["name"])
        for number, (calls, prompts) in enumerate(
            ((16, {}), (48, {"distractors": 3}), (48, {"longest_training": 100}))
        ):
            quick = is_new and len(seen) % 2 and number == len(seen) % 3
            name = f"{calls}-{prompts}-{variant_id(options)}"
            yield pytest.param(options, calls, prompts, marks=() if quick else pytest.mark.slow, id=name)


@pytest.mark.parametrize(("options", "calls", "prompts"), shared_cases())
def test_what_is_shared_changes_no_answer(options, calls, prompts):
    """A prefix computed once and forked gives what the plain run gives."""
    model = passkey_model(options)
    questions = questions_of(examples=3, **prompts)
    answers = by_name(answer_questions(model, questions, TOKENIZER.bos_id, tokens_per_call=calls, rows_per_call=2))
    assert len(answers) == len(questions)
    for question in questions:
        alone = answer_alone(model, question, calls)
        shared = answers[question.length, question.depth, question.index]
        assert np.array_equal(alone.given, shared.given)
        assert alone.log_probability == pytest.approx(shared.log_probability, abs=1e-9)
        # Everything before the last digit was read, whoever computed it.
        assert alone.tokens_read == shared.tokens_read == len(question.prompt) + len(question.prompt.answer)


def models_alone():
    """One variant of each model, with either kind of prompts; one pair in four by default."""
    first = {options["name"]: options for options in reversed(list(variants()))}
    pairs = itertools.product(first.values(), ({}, {"longest_training": 100}))
    return one_in(4, pairs, lambda options, prompts: f"{options['name']}-{'one-place' if prompts else 'plain'}")


@pytest.mark.parametrize(("options", "prompts"), models_alone())
def test_the_remaining_prompts_get_the_answers_they_would_have_got(options, prompts):
    """Stopped before every answer in turn, and again at the next: no answer differs, and each is given once."""
    model = passkey_model(options)
    questions = questions_of(examples=2, **prompts)
    read = partial(answer_questions, model, bos_id=TOKENIZER.bos_id, tokens_per_call=48, rows_per_call=2)
    straight = by_name(read(questions))
    answers: dict[str, Answer] = {}
    while missing := [question for question in questions if question.name not in answers]:
        answer = next(read(missing))
        assert answer.question.name not in answers
        answers[answer.question.name] = answer
    for answer in answers.values():
        expected = straight[answer.question.length, answer.question.depth, answer.question.index]
        assert np.array_equal(answer.given, expected.given)
        assert answer.log_probability == pytest.approx(expected.log_probability, abs=1e-9)
        assert answer.tokens_read == expected.tokens_read


@pytest.mark.parametrize(("options", "prompts"), models_alone())
def test_a_reading_that_was_stopped_is_read_on_after_its_last_state(options, prompts, tmp_path, monkeypatch):
    """Stopped after every few calls: the same bits, and only the call that was stopped is read again."""
    monkeypatch.setattr(saved_reading, "SAVE_SECONDS", 0.0)
    model = passkey_model(options)
    questions = questions_of(examples=2, **prompts)
    call = partial(answer_questions, model, bos_id=TOKENIZER.bos_id, tokens_per_call=48, rows_per_call=2)
    straight = by_name(call(questions))
    answers: dict[str, Answer] = {}
    read: list[int] = []
    cache = ResultCache(tmp_path / "a.jsonl", _FIELDS)

    def advance(tokens):
        read.append(tokens)
        if len(read) % 4 == 0:
            raise KeyboardInterrupt

    while missing := [question for question in questions if question.name not in answers]:
        skipped: list[int] = []
        before = len(read)
        store = SavedReadings(cache)
        try:
            for answer in call(missing, advance=advance, skip=skipped.append, saved=store):
                answers[answer.question.name] = answer
            assert sum(read[before:]) + sum(skipped) == tokens_to_read(missing, 2)
        except KeyboardInterrupt:
            assert skipped or before == 0 or len(answers)
    for answer in answers.values():
        expected = straight[answer.question.length, answer.question.depth, answer.question.index]
        assert np.array_equal(answer.given, expected.given) and answer.tokens_read == expected.tokens_read
        assert answer.log_probability == expected.log_probability
    # A stop comes after every fourth call, and the next process reads that call again.
    stops = len(read) // 4
    assert sum(read) <= tokens_to_read(questions, 2) + stops * 2 * 48 * 2


def stopped_cache(tmp_path, questions):
    """That of an evaluation at commit "a" that was stopped in its seventh call; states were saved after all others."""
    cache = ResultCache(tmp_path / "a.jsonl", _FIELDS)
    for name in ("trunk", "rows"):
        cache.state_path(name).unlink(missing_ok=True)
    cache.commit = ["a", False]
    calls = itertools.count(1)

    def advance(tokens):
        if next(calls) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(reading(questions, cache, advance))
    return cache


def reading(questions, cache, advance=lambda tokens: None, skip=lambda tokens: None):
    model = passkey_model({"name": "infini_linear"})
    options = {"tokens_per_call": 48, "advance": advance, "skip": skip, "saved": SavedReadings(cache)}
    return answer_questions(model, questions, TOKENIZER.bos_id, **options)


def test_states_of_other_texts_or_another_commit_are_not_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_reading, "SAVE_SECONDS", 0.0)
    first, second = questions_of(examples=2, depths={"start": 0.0}, lengths=[333])
    questions, others = [first], [replace(first, prompt=second.prompt)]
    for asked, commit, expected in ((others, "a", [173]), (questions, "b", []), (questions, "a", [173, 66])):
        cache = stopped_cache(tmp_path, questions)
        cache.commit = [commit, False]
        skipped: list[int] = []
        list(reading(asked, cache, skip=skipped.append))
        # The two prompts begin alike; the key comes after 173 tokens.
        assert skipped == expected


def test_a_damaged_state_is_named_and_read_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(saved_reading, "SAVE_SECONDS", 0.0)
    questions = questions_of(examples=1, depths={"start": 0.0}, lengths=[333])
    cache = stopped_cache(tmp_path, questions)
    path = cache.state_path("rows")
    whole = path.read_bytes()
    skipped: list[int] = []
    for content in (whole[: len(whole) // 2], b"", b"no state", pickle.dumps({"tokens": 3}, protocol=2)):
        path.write_bytes(content)
        assert len(list(reading(questions, cache, skip=skipped.append))) == 1
        assert f"{path}: damaged; what it had read is read again" in capfd.readouterr().err
    # The shared beginning has a state of its own.
    assert skipped == [173] * 4


def test_a_state_of_a_gigabyte_is_not_saved(tmp_path, monkeypatch):
    """It would be a cache that grows with the text."""
    monkeypatch.setattr(saved_reading, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(saved_reading, "LARGEST_STATE", 1000)
    cache = stopped_cache(tmp_path, questions_of(examples=1))
    assert not list(tmp_path.glob("*.state"))
    monkeypatch.setattr(saved_reading, "LARGEST_STATE", 2**30)
    stopped_cache(tmp_path, questions_of(examples=1))
    assert cache.state_path("trunk").exists()


def test_the_progress_bar_ends_at_the_announced_number_of_tokens():
    model = passkey_model({"name": "infini_linear"})
    questions = questions_of(examples=3)
    for missing in (questions, questions[5:]):
        seen: list[int] = []
        list(
            answer_questions(model, missing, TOKENIZER.bos_id, tokens_per_call=48, rows_per_call=2, advance=seen.append)
        )
        assert sum(seen) == tokens_to_read(missing, 2)


def test_the_prompts_of_these_tests_matter_to_the_models():
    answers = answer_questions(
        passkey_model({"name": "infini_linear"}), questions_of(examples=4), TOKENIZER.bos_id, tokens_per_call=32
    )
    assert len({round(answer.log_probability, 6) for answer in answers}) > 20


def test_an_answer_is_what_one_call_over_the_whole_prompt_gives():
    model = passkey_model({"name": "infini_delta"})
    for answer in answer_questions(model, questions_of(), TOKENIZER.bos_id, tokens_per_call=32):
        ids = [TOKENIZER.bos_id, *np.concatenate(list(answer.question.prompt.chunks(10_000))).tolist()]
        total = 0.0
        for token in answer.given:
            with torch.no_grad():
                logits = model.head(model(torch.tensor([ids])).hidden_BTD[0, -1])
            assert int(logits.argmax()) == token
            total += float(logits.log_softmax(-1).max())
            ids.append(int(token))
        assert answer.log_probability == pytest.approx(total, abs=1e-9)


def test_decoding_is_greedy_and_feeds_back_its_own_tokens():
    """Never teacher forcing: a model that repeats its last token plus one continues from its own first digit."""
    question = questions_of()[0]
    digits = [int(TOKENIZER.encode(str(digit))[0]) for digit in range(10)]
    fed = []

    class Counter(torch.nn.Module):
        segment_length = 16

        def __init__(self):
            super().__init__()
            self.output_weight = torch.nn.Parameter(torch.eye(TOKENIZER.vocab_size))

        def init_state(self, rows, device):
            return torch.zeros(rows, 1)

        def prefill(self, ids_BT, state, reset_BT=None):
            fed.extend(ids_BT[0].tolist())
            return state

        def forward(self, ids_BT, state, reset_BT=None):
            fed.extend(ids_BT[0].tolist())
            last = ids_BT[:, -1].tolist()
            following = [digits[(digits.index(t) + 1) % 10] if t in digits else digits[7] for t in last]
            hidden = torch.eye(TOKENIZER.vocab_size)[following][:, None]
            return SimpleNamespace(hidden_BTD=hidden, state=state)

    answer = answer_alone(Counter(), question, 32)
    assert answer.given.tolist() == [digits[7], digits[8], digits[9], digits[0]]
    assert fed[-3:] == [digits[7], digits[8], digits[9]]
    assert fed[0] == TOKENIZER.bos_id and len(fed) == 1 + len(question.prompt) + 3


def test_progress_counts_shared_tokens_once_and_ends_at_its_estimate():
    questions = questions_of()
    told: list[int] = []
    list(
        answer_questions(
            passkey_model({"name": "infini_linear"}),
            questions,
            TOKENIZER.bos_id,
            tokens_per_call=32,
            advance=told.append,
        )
    )
    assert sum(told) == tokens_to_read(questions)
    assert sum(told) < sum(len(question.prompt) for question in questions)


def test_the_lengths_of_an_example_at_the_start_share_their_filler():
    shared = questions_of(examples=1, depths={"start": 0.0}, longest_training=100)
    assert {question.prompt.blocks[0] for question in shared} == {0}
    assert tokens_to_read(shared) < max(len(question.prompt) for question in shared) + 3 * 40


def test_a_knocked_out_memory_knows_nothing_before_the_segment():
    """If the memory is reset at every segment, the answers do not depend on the text before the last one."""
    model = passkey_model({"name": "infini_linear"})
    one, other = (questions_of(examples=20, lengths=[300], depths={"start": 0.0})[index] for index in (3, 11))
    assert one.prompt.key != other.prompt.key

    def ask(**options):
        answers = answer_questions(model, [one, other], TOKENIZER.bos_id, tokens_per_call=32, **options)
        return [answer.log_probability for answer in answers]

    knocked = ask(knock_out=True)
    assert knocked[0] == pytest.approx(knocked[1], abs=1e-9)
    kept = ask()
    assert abs(kept[0] - kept[1]) > 1e-6


def test_keys_are_fresh_for_every_depth_and_example_and_never_the_trainings():
    questions = questions_of(examples=20)
    keys = {(question.depth, question.index): question.prompt.key for question in questions}
    assert all(keys[question.depth, question.index] == question.prompt.key for question in questions)
    assert len(set(keys.values())) >= len(keys) - 3
    assert all(sum(map(int, key)) % 5 == 0 for key in keys.values())


def test_the_seed_decides_the_keys():
    template = PasskeyTemplate(TOKENIZER.encode)

    def keys(seed):
        return [question.prompt.key for question in make_questions(template, [300], {"end": 1.0}, 5, seed)]

    assert keys(1) == keys(1) != keys(2)


def kept_answers(path):
    return ResultCache(path, _FIELDS)


def test_kept_answers_survive_a_line_cut_short(tmp_path):
    path = tmp_path / "answers.jsonl"
    with kept_answers(path) as kept:
        kept.add("a", whole_entry())
        kept.add("b", whole_entry())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"name": "c", "len')
    again = kept_answers(path)
    assert list(again.entries) == ["a", "b"]
    with again:
        assert path.read_bytes() == whole
        again.add("c", {**whole_entry(), "length": 2})
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    assert [again.entries[name]["length"] for name in "abc"] == [1, 1, 2]


def test_a_cell_says_how_sure_it_is_of_what_prompts_it_asked():
    """Half of the digits of every second prompt right: prompts are counted, not tokens."""
    entry = {"length": 1, "depth": "start", "same_segment": False, "seconds": 1.0, "generator_seconds": 0.0}
    entry |= {"tokens": 4, "tokens_read": 5, "peak_memory_bytes": 0, "key": "1234", "answer": "1234"}
    cell = _cell(1, "start", [entry | {"right": 4}] * 40 + [entry | {"right": 2}] * 10)
    assert (cell["token_accuracy"], cell["exact_match"]) == (0.9, 0.8)
    assert (cell["low"], cell["high"]) == pytest.approx(proportion_interval(45, 50))
    assert (cell["exact_low"], cell["exact_high"]) == pytest.approx(proportion_interval(40, 50))
    # A key of more tokens counts for more.
    assert _cell(1, "start", [entry | {"right": 1, "tokens": 2}, entry | {"right": 4}])["token_accuracy"] == 5 / 6
    right = _cell(1, "start", [entry | {"right": 4}] * 50)
    assert right["low"] == right["exact_low"] == pytest.approx(0.92888, abs=1e-4)
    assert right["high"] == 1.0


def test_a_separator_is_a_token_and_no_digit():
    """An answer of one digit repeated has the separator before the key right, and a digit here and there."""
    entry = {"length": 1, "depth": "start", "same_segment": False, "seconds": 1.0, "generator_seconds": 0.0}
    entry |= {"tokens": 6, "tokens_read": 5, "peak_memory_bytes": 0, "answer": "99999"}
    cell = _cell(1, "start", [entry | {"key": "41447", "right": 1}, entry | {"key": "19092", "right": 3}])
    assert cell["token_accuracy"] == 4 / 12 and cell["digit_accuracy"] == 2 / 10
    # Answers may be too short, too long or no numbers at all.
    for answer, right in (("19", 2), ("1909234", 5), ("1 9 0 9 2", 5), ("1 9 9 9 2", 4), ("the", 0), ("", 0)):
        assert (
            _cell(1, "start", [entry | {"key": "19092", "right": 1, "answer": answer}])["digit_accuracy"] == right / 5
        )


BYTES = _train_bpe(iter(["a"]), 258)
"""A separator, then a token for each digit, as many language models have."""
PAIRS = _train_bpe(iter([" 03 19 7 10 31 97"] * 9), 290)
"""Digits are joined."""


@pytest.mark.parametrize(
    ("tokenizer", "given", "right"),
    [
        (TOKENIZER, "0 3 1 9 7", 5),
        (TOKENIZER, "pass 3 3 3 3", 1),
        (TOKENIZER, "key is 1 9 7", 3),
        (TOKENIZER, "0 3 . 9 the", 3),
        (TOKENIZER, "the key is the key", 0),
        (BYTES, " 03197", 5),
        (BYTES, " x3197", 4),
        # The letter takes the place of the separator, or there is none.
        (BYTES, "x03197", 5),
        (BYTES, "031975", 5),
        (BYTES, " 0x?97", 3),
        # Two tokens, one letter.
        (BYTES, " é197", 3),
        (PAIRS, " 03197", 5),
        (PAIRS, " 031 97", 5),
        (PAIRS, " 13197", 4),
    ],
)
def test_a_wrong_token_leaves_the_digits_behind_it_in_their_places(tokenizer, given, right):
    template = PasskeyTemplate(tokenizer.encode, digits=5)
    (question,) = make_questions(template, [3000], {"end": 1.0}, 1, seed=1)
    prompt = replace(question.prompt, key="03197", answer=template.answer_tokens("03197"))
    answer = Answer(replace(question, prompt=prompt), tokenizer.encode(given), 0.0, 1.0, 0.0, 3000, 0, 0)
    assert len(answer.given) == answer.n_tokens
    entry = _entry(answer, tokenizer, 16, 0)
    if tokenizer is TOKENIZER:
        assert entry["right"] == right
    assert _cell(3000, "end", [entry])["digit_accuracy"] == right / 5


@pytest.mark.parametrize(("segment", "same"), [(512, True), (32, False), (16, False)])
def test_the_end_needs_no_memory_where_key_and_question_share_a_segment(segment, same):
    (question,) = questions_of(examples=1, lengths=[400], depths={"end": 1.0}, longest_training=100)
    prompt = question.prompt
    assert prompt.blocks[1] == 0
    answer = Answer(question, prompt.answer, 0.0, 1.0, 0.0, 404, 0, 0)
    assert _entry(answer, TOKENIZER, segment, 0)["same_segment"] is same


def test_a_segment_is_shared_from_the_keys_last_mention_to_the_last_token_that_is_read():
    (question,) = questions_of(examples=1, lengths=[400], depths={"end": 1.0}, longest_training=100)
    prompt = question.prompt
    ids, key = input_ids(prompt, TOKENIZER.bos_id).tolist(), prompt.answer.tolist()
    mention = max(at for at in range(len(ids)) if ids[at : at + len(key)] == key)
    last = len(ids) - 1
    answer = Answer(question, prompt.answer, 0.0, 1.0, 0.0, 404, 0, 0)
    for segment, same in ((last + 1, True), (last, False), (mention, True), (mention + 1, False)):
        assert _entry(answer, TOKENIZER, segment, 0)["same_segment"] is same


def test_two_lengths_with_one_prompt_are_answered():
    model = passkey_model({"name": "infini_linear"})
    questions = questions_of(lengths=[400, 401], depths={"start": 0.0}, longest_training=100)
    assert len(questions[0].prompt) == len(questions[1].prompt)
    answers = list(answer_questions(model, questions, TOKENIZER.bos_id, tokens_per_call=32))
    assert len(answers) == len(questions)
    assert answers[0].log_probability == pytest.approx(answers[-2].log_probability, abs=1e-9)


def test_what_the_model_is_fed_is_the_prompts_own_tokens(monkeypatch):
    """No closed form for the repetition: the ids of every call, put together, are the prompt, whoever shares them."""
    model = passkey_model({"name": "infini_linear"})
    questions = questions_of(examples=1, lengths=[333], depths={"start": 0.0, "middle": 0.5})
    fed = []
    real_forward, real_prefill = type(model).forward, type(model).prefill

    def forward(self, ids_BT, *rest, **more):
        fed.append(ids_BT.clone())
        return real_forward(self, ids_BT, *rest, **more)

    def prefill(self, ids_BT, *rest, **more):
        fed.append(ids_BT.clone())
        return real_prefill(self, ids_BT, *rest, **more)

    monkeypatch.setattr(type(model), "forward", forward)
    monkeypatch.setattr(type(model), "prefill", prefill)
    by_question = {}
    for answer in answer_questions(model, questions, TOKENIZER.bos_id, tokens_per_call=32):
        by_question[answer.question.depth] = torch.cat([ids[0] for ids in fed])
    start, middle = (question.prompt for question in questions)
    whole = [TOKENIZER.bos_id, *np.concatenate(list(start.chunks(1000))).tolist()]
    # The mark and the head, then `start` to its end and its answer but the last digit.
    assert by_question["start"].tolist()[: len(whole)] == whole
    rest = np.concatenate(list(middle.chunks(1000))).tolist()
    seen = by_question["middle"].tolist()[len(by_question["start"]) :]
    assert seen[: len(seen) - 3] == rest[len(rest) - (len(seen) - 3) :]
    assert len(seen) - 3 + start.key_position >= len(rest)


def test_a_second_evaluation_at_the_same_time_is_refused(tmp_path):
    with kept_answers(tmp_path / "answers.jsonl"), pytest.raises(InputError, match="another evaluation"):
        with kept_answers(tmp_path / "answers.jsonl"):
            pass


def test_a_refused_evaluation_leaves_the_line_that_is_being_written(tmp_path):
    path = tmp_path / "answers.jsonl"
    with kept_answers(path) as kept:
        kept.add("a", whole_entry())
        half = path.read_bytes() + b'{"name": "b", '
        path.write_bytes(half)
        with pytest.raises(InputError, match="another evaluation"), kept_answers(path):
            pass
        assert path.read_bytes() == half
    # Nobody is writing any more: a kill cut that line short.
    with kept_answers(path) as kept:
        assert list(kept.entries) == ["a"]
    assert path.read_bytes() == half[: half.rindex(b"\n") + 1]


def test_answers_of_a_larger_evaluation_stay(tmp_path):
    with kept_answers(tmp_path / "answers.jsonl") as kept:
        kept.add("a", whole_entry())
        kept.add("b", whole_entry())
        kept.drop(["a"])
    assert list(kept_answers(tmp_path / "answers.jsonl").entries) == ["b"]


@pytest.mark.parametrize("line", ["[]", '{"name": "a"}', "no json", "7"])
def test_a_damaged_file_of_answers_is_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="answers.jsonl: damaged"):
        kept_answers(path)


def whole_entry():
    names = ("length", "right", "tokens", "same_segment", "seconds", "generator_seconds", "tokens_read")
    return {**dict.fromkeys(names, 1), "depth": "end", "key": "1", "answer": "1"}


def test_entries_of_two_commits_are_told_apart(tmp_path, capfd):
    def at(revision, dirty=False):
        return make_train("local", 1, environment={"git_revision": revision, "git_dirty": dirty})

    path = tmp_path / "answers.jsonl"
    with ResultCache(path, _FIELDS, at("first")) as kept:
        kept.add("a", whole_entry())
    second = at("second")
    with ResultCache(path, _FIELDS, second) as kept:
        kept.add("b", whole_entry())
    kept.record_commits(second, ["b"])
    assert second.environment == {"git_revision": "second", "git_dirty": False} and capfd.readouterr().err == ""
    kept.record_commits(second, ["b", "a"])
    assert second.environment["git_revisions"] == ["second", "first"] and second.environment["git_dirty"]
    assert "was started at another commit: no single commit reproduces it" in capfd.readouterr().err
    # The commit has changes, or the entries are older than the field for the commit.
    third = at("first", dirty=True)
    kept = ResultCache(path, _FIELDS, third)
    kept.record_commits(third, ["a"])
    assert third.environment["git_revisions"] == ["first"]
    del kept.entries["a"]["commit"]
    kept.record_commits(third, ["a"])
    assert third.environment["git_revisions"] == [None, "first"]
