"""Training batches of the passkey task, and the stages of its curriculum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_model
from tiny_runs import write_corpus

from infini.config.compose import compose, config_hash
from infini.errors import InputError
from infini.nn.ops.cross_entropy import IGNORE
from infini.tasks.passkey import prompt as prompts
from infini.tasks.passkey.prompt import PasskeyTemplate, word_tokenizer
from infini.tasks.passkey.task import DataModule, PasskeyBatches
from infini.training.module import LanguageModelModule

TOKENIZER = word_tokenizer()
STAGES = [(64, 192), (128, 512)]


def batches(**options: Any) -> PasskeyBatches:
    template = PasskeyTemplate(TOKENIZER.encode, fill="exact")
    return PasskeyBatches(template, TOKENIZER.bos_id, STAGES, options.pop("batch_size", 6), 1, **options)


def test_a_batch_asks_for_the_key_it_shows() -> None:
    batch = batches().batch(0, 1)
    for ids, targets, mask in zip(batch["ids_BT"], batch["targets_BT"], batch["mask_BT"], strict=True):
        n_fed = int(mask.sum())
        assert mask[:n_fed].all() and ids[0] == TOKENIZER.bos_id
        text = TOKENIZER.decode(ids[1:n_fed].numpy())
        key = TOKENIZER.decode(targets[targets != IGNORE].numpy())
        assert len(key.split()) == 5
        assert f"The pass key is {key} . Remember it . {key} is the pass key ." in text
        # The last token that is fed is the key's last but one; the targets are what follows each.
        asked = torch.nonzero(targets != IGNORE).flatten()
        assert asked.tolist() == list(range(n_fed - 5, n_fed))
        assert torch.equal(ids[asked[1:]], targets[asked[:-1]])
        assert text.endswith("What is the pass key ? The pass key is " + " ".join(key.split()[:-1]))


def test_stages_have_as_many_tokens_and_prompts_fill_their_last_segment() -> None:
    made = batches()
    for stage, (segment, length) in enumerate(STAGES):
        batch = made.batch(3, stage)
        assert batch["ids_BT"].shape[1] == length and batch["segment_length"] == segment
        assert abs(batch["ids_BT"].numel() - 6 * 512) < length
        used = batch["mask_BT"].sum(1)
        assert used.max() <= length and used.min() > length - segment - 24


def test_targets_that_need_a_memory_are_those_whose_key_lies_in_an_earlier_segment() -> None:
    """The curve of a training would be high at once with the keys that local attention sees."""
    made, found = batches(), []
    for number in range(20):
        batch = made.batch(number, 1)
        for ids, targets, recalled in zip(batch["ids_BT"], batch["targets_BT"], batch["recalled_BT"], strict=True):
            asked = torch.nonzero(targets != IGNORE).flatten()
            key = targets[asked].tolist()
            places = [at for at in range(int(asked[0])) if ids[at : at + 5].tolist() == key]
            far = places[-1] // 128 != int(asked[-1]) // 128
            assert torch.nonzero(recalled).flatten().tolist() == (asked.tolist() if far else [])
            found.append(far)
    assert 10 < sum(found) < len(found) - 10


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_records_how_many_keys_in_earlier_segments_it_answers(accumulate: int) -> None:
    """The answers of the largest logits of the whole sequence, as an evaluation that feeds the true key gives them."""
    made = module()
    made.accumulate = accumulate
    model = made.model
    batch = batches(batch_size=3).batch(0, 1)
    batch["ids_BT"] %= len(model.output_weight)
    with torch.no_grad():
        best = (model(batch["ids_BT"]).hidden_BTD @ model.output_weight.T).argmax(-1)
    # Half of what the model answers is declared to be right.
    places = torch.nonzero(batch["recalled_BT"].flatten()).flatten()
    batch["targets_BT"] = batch["targets_BT"].clamp(max=len(model.output_weight) - 1)
    wrong = (best + 1) % len(model.output_weight)
    batch["targets_BT"].view(-1)[places] = torch.where(places % 2 == 0, best.flatten()[places], wrong.flatten()[places])
    del batch["segment_length"]
    made.training_step(batch, 0)
    made.read_losses()
    assert made.recall_curve == [[1, int((places % 2 == 0).sum()), len(places)]]
    batch["recalled_BT"][:] = False
    made.training_step(batch, 1)
    made.read_losses()
    assert len(made.recall_curve) == 1


@pytest.mark.parametrize(
    ("segments", "curriculum", "longest"),
    [(4, "null", 8192), (64, "null", 16384), (4, "[[256,16384]]", 16384)],
)
def test_what_is_longer_than_all_training_prompts_depends_on_the_recipe(
    segments: int, curriculum: str, longest: int
) -> None:
    words = ["dims.segment_length=256", f"recipe.segments_per_sequence={segments}", f"recipe.curriculum={curriculum}"]
    template, _ = prompts.make_template(compose(["task=passkey", *words]), TOKENIZER, "test")
    assert template.longest_training == longest


def test_questions_and_keys_fall_on_every_place_of_the_grid() -> None:
    made = batches(batch_size=64)
    ends = torch.cat([made.batch(index, 1)["mask_BT"].sum(1) for index in range(4)]) % 128
    assert len(set((ends // 16).tolist())) == 8


def test_batches_depend_on_seed_and_number_alone() -> None:
    one, other = batches(), batches()
    other.batch(7, 0)
    for key in ("ids_BT", "targets_BT"):
        assert torch.equal(one.batch(3, 1)[key], other.batch(3, 1)[key])
    assert not torch.equal(one.batch(3, 1)["ids_BT"], one.batch(4, 1)["ids_BT"])


def test_no_key_of_the_training_is_asked_in_evaluation() -> None:
    for index in range(5):
        batch = batches().batch(index, 1)
        for targets in batch["targets_BT"]:
            digits = TOKENIZER.decode(targets[targets != IGNORE].numpy()).split()
            assert sum(map(int, digits)) % 5 != 0


def test_the_language_modelling_loss_covers_every_other_token() -> None:
    batch = batches(lm_loss_weight=0.1).batch(0, 0)
    key, others = batch["targets_BT"] != IGNORE, batch["lm_targets_BT"] != IGNORE
    assert not (key & others).any()
    assert torch.equal(key | others, batch["mask_BT"])
    rows, columns = torch.nonzero(others[:, :-1], as_tuple=True)
    assert torch.equal(batch["lm_targets_BT"][rows, columns], batch["ids_BT"][rows, columns + 1])
    assert "lm_targets_BT" not in batches().batch(0, 0)


@pytest.mark.slow
def test_a_key_right_after_the_head_is_the_last_stages() -> None:
    def share(stage: int) -> float:
        made = batches(batch_size=64)
        head = np.concatenate([[made.bos_id], made.template.head])
        sentence = made.template.key_tokens("00000")
        rows = [row for number in range(120) for row in made.batch(number, stage)["ids_BT"].numpy()]
        assert all(np.array_equal(row[: len(head)], head) for row in rows)
        return float(np.mean([np.array_equal(row[len(head) :][:4], sentence[:4]) for row in rows]))

    # One key in fourteen is at the very start, half of these without a trimmed block before them; but for one in seven,
    # which has the evaluation's numbers of blocks. If that block is empty by chance, there is none, either.
    wanted = (1 / 28 + 1 / 28 / 24) * 6 / 7
    assert share(0) < 0.015 and abs(share(1) - wanted) < 4 * (wanted * (1 - wanted) / 7680) ** 0.5


def test_keys_of_few_digits_are_the_last_stages() -> None:
    def kinds(stage: int, **options: float) -> list[int]:
        batch = batches(batch_size=60, **options).batch(0, stage)
        return [len(set(targets[targets != IGNORE].tolist())) for targets in batch["targets_BT"]]

    assert all(count <= 4 for count in kinds(1, few_digit_share=1.0))
    # Three in ten uniform keys have five kinds of digits.
    assert 0.05 < sum(count == 5 for count in kinds(1, few_digit_share=0.5)) / 60 < 0.25
    assert kinds(0, few_digit_share=1.0) == kinds(0)


def test_keys_stand_at_the_very_ends_in_the_last_stage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in fourteen at the very start, three at the very end, where the question follows the key."""
    example, fed, asked, depths = PasskeyTemplate.example, prompts.input_ids, [0.0], []

    def note(self: PasskeyTemplate, length: int, depth: float, *arguments: Any, **options: Any) -> Any:
        asked[0] = depth
        return example(self, length, depth, *arguments, **options)

    def count(*arguments: Any) -> Any:
        # The last place that was drawn for a key is the one that counts.
        depths.append(asked[0])
        return fed(*arguments)

    monkeypatch.setattr(PasskeyTemplate, "example", note)
    monkeypatch.setattr(prompts, "input_ids", count)
    for stage, (start, end) in enumerate([(0.0, 0.0), (1 / 14, 3 / 14)]):
        depths.clear()
        batches(batch_size=400).batch(0, stage)
        n = len(depths)
        for place, share in ((0.0, start), (1.0, end)):
            # Four standard deviations.
            assert abs(depths.count(place) / n - share) <= 4 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_segment_ends_within_a_key_as_often_as_asked(share: float) -> None:
    """Chance alone puts the end of a segment of 128 into one sentence of 23 tokens in eight."""
    sentence = len(batches().template.key_tokens("00000"))
    start = TOKENIZER.encode("The pass key is")
    cut = []
    for row in batches(batch_size=400, cut_key_share=share).batch(0, 1)["ids_BT"].numpy():
        first = next(at for at in range(len(row)) if np.array_equal(row[at : at + len(start)], start))
        boundary = (first + sentence - 1) // 128 * 128
        cut.append(first < boundary)
    # None of the keys at the very start, one in fourteen.
    segment, length = STAGES[-1]
    by_chance = (length // segment - 1) * (sentence - 1) / (length - sentence)
    wanted = (share + (1 - share) * by_chance) * 13 / 14
    # Four standard deviations.
    assert abs(np.mean(cut) - wanted) <= 4 * (wanted * (1 - wanted) / 400) ** 0.5


@pytest.mark.parametrize(("asked", "share"), [("null", 0.4), ("0.0", 0.0), ("0.25", 0.25)])
def test_the_share_of_cut_keys_is_an_option(asked: str, share: float) -> None:
    """Null is what records without the key were trained with."""
    data = DataModule(compose(["task=passkey", f"task.cut_key_share={asked}"]))
    data.setup("fit")
    assert data.batches.cut_key_share == share


def test_a_share_of_cut_keys_is_none_or_a_fraction() -> None:
    with pytest.raises(InputError, match=r"^task\.cut_key_share=2\.0: must be between 0 and 1, or null$"):
        compose(["task=passkey", "task.cut_key_share=2"])


def test_no_answer_of_the_last_stage_is_cut_off_its_question() -> None:
    """One in sixteen is in the stage before, which has segments of 64."""
    for stage, (segment, _) in enumerate(STAGES):
        batch = batches(batch_size=200).batch(0, stage)
        places = [np.flatnonzero(targets != IGNORE) for targets in batch["targets_BT"].numpy()]
        cut = [place[0] // segment != place[-1] // segment for place in places]
        assert any(cut) if stage == 0 else not any(cut)


def test_a_stage_without_room_for_a_prompt_is_refused_before_training() -> None:
    cfg = compose(["task=passkey", "recipe.curriculum=[[16,64]]"])
    with pytest.raises(
        InputError, match="^recipe.curriculum.*: 64 tokens are too few for a passkey prompt, which needs"
    ):
        DataModule(cfg).setup("fit")
    with pytest.raises(InputError, match="^recipe.curriculum, recipe.short_sequences.*: 30 tokens are too few"):
        batches(short=(30, 0.5))


def test_validation_prompts_are_in_books_that_training_prompts_are_not_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in the training's own books, with other keys."""
    corpus = write_corpus(tmp_path / "books")
    words = [
        "task=passkey",
        "recipe.curriculum=null",
        "task.filler=book",
        "task.tokenizer=scale",
        f"task.data_dir={corpus}",
    ]
    module = DataModule(compose([*words, "scale.vocab_size=300", f"cache_dir={tmp_path / 'cache'}"]))
    module.setup("fit")
    asked: list[Any] = []

    def answers(model: Any, questions: Any, *args: Any, **options: Any) -> Any:
        asked.extend(questions)
        return []

    monkeypatch.setattr("infini.tasks.passkey.task.answer_questions", answers)
    with pytest.raises(ZeroDivisionError):
        module.validate(make_model({"name": "infini_linear"}), torch.device("cpu"))
    texts = {id(span.tokens) for each in asked for span in each.prompt.spans}
    assert id(module.held_out.book) in texts and id(module.template.book) not in texts
    words_of_it = module.tokenizer.decode(module.held_out.book)
    assert next((corpus / "validation").iterdir()).read_text(encoding="utf-8") in words_of_it


def test_a_book_as_filler_needs_a_tokenizer_of_books() -> None:
    cfg = compose(["task=passkey", "task.filler=book"])
    with pytest.raises(InputError, match="^task.filler='book': this tokenizer has only the words of the prompt"):
        DataModule(cfg).setup("fit")


def module(*overrides: str) -> LanguageModelModule:
    cfg = compose(["task=passkey", "recipe.advance_below=0.5", *overrides])
    made = LanguageModelModule(make_model({"name": "infini_linear"}), cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    return made


def test_the_curriculum_goes_on_when_the_smoothed_loss_is_low() -> None:
    made = module("recipe.curriculum=[[4,8],[8,16]]")
    for loss in (3.0, 0.1, 0.1):
        made._advance(torch.tensor(loss))
    assert made.stage == 0 and made.stage_loss == pytest.approx((3.0 * 0.98 + 0.002) * 0.98 + 0.002)
    for _ in range(200):
        made._advance(torch.tensor(0.3))
        if made.stage:
            break
    assert made.stage == 1 and made.stage_loss is None and not made.in_last_stage
    made._advance(torch.tensor(0.1))
    assert made.in_last_stage and made.stage_steps == [1, 1]
    # The training proper has no next stage.
    made._advance(torch.tensor(0.0))
    assert made.stage == 2


def test_the_length_extension_waits_for_the_training_proper(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def extended(model: Any, ids_BT: torch.Tensor, *rest: Any) -> Any:
        called.append(rest[-2])
        return model(ids_BT)

    monkeypatch.setattr("infini.training.additions.length_extension.extended_call", extended)
    made = module("recipe.curriculum=[[8,24]]", "recipe.length_extension=100", "recipe.length_extension_share=1")
    ids = torch.zeros(2, 32, dtype=torch.long)
    mask = torch.ones(2, 32, dtype=torch.bool)
    batch = {"ids_BT": ids, "targets_BT": ids, "mask_BT": mask, "reset_BT": ~mask, "segment_length": 8}
    made.training_step(batch, 0)
    assert not called
    made.stage = 1
    for _ in range(3):
        made.training_step(batch, 0)
    assert len(called) == 3 and all(cut in (8, 16, 24) for cut in called)
    assert made.tokens_seen == 4 * 64


@pytest.mark.parametrize("scale", [None, 1e9, 7.0])
def test_sparse_writes_are_asked_for_in_the_training_proper_only(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weight is constant, or in proportion to the loss of the step before and at most that of the recipe."""
    monkeypatch.setattr("infini.training.module.penalty", lambda model, keys, mask_BT: torch.tensor(-5.0))
    ids = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 16, dtype=torch.bool)
    batch = {"ids_BT": ids, "targets_BT": ids, "mask_BT": mask, "reset_BT": ~mask, "segment_length": 8}
    given = f"recipe.sparse_loss_scale={'null' if scale is None else scale}"
    asked = module("recipe.curriculum=[[8,24]]", "recipe.sparse_writes=0.1", given)
    plain = module("recipe.curriculum=[[8,24]]", "recipe.sparse_writes=null")
    plain.load_state_dict(asked.state_dict())
    for stage, before in ((0, None), (1, None), (1, 3.5), (1, 14.0)):
        for one in (asked, plain):
            one.stage = stage
            one.loss_curve = [] if before is None else [[1, before]]
        difference = plain.training_step(batch, 0) - asked.training_step(batch, 0)
        share = 1.0 if scale is None or before is None else min(1.0, before / scale)
        assert difference.item() == pytest.approx(0.5 * share * stage, rel=1e-5, abs=1e-6)
    # The curve holds the loss alone, and so does the line of progress.
    assert asked.last_loss == plain.last_loss
    asked.read_losses()
    plain.read_losses()
    assert asked.loss_curve == plain.loss_curve


def test_a_share_of_the_last_stages_batches_has_short_sequences() -> None:
    """They have as many tokens in more rows, and all parts of the last stage's prompts; other batches are the same."""
    mixed, plain = batches(short=(256, 0.25)), batches()
    widths = [mixed.batch(index, 1)["ids_BT"].shape for index in range(200)]
    assert set(widths) == {(12, 256), (6, 512)}
    assert widths.count((12, 256)) / 200 == pytest.approx(0.25, abs=0.08)
    assert all(torch.equal(mixed.batch(i, 0)["ids_BT"], plain.batch(i, 0)["ids_BT"]) for i in range(5))
    short = next(mixed.batch(index, 1) for index, width in enumerate(widths) if width == (12, 256))
    assert short["segment_length"] == 128 and 256 - 128 < int(short["mask_BT"].sum(1).min())
    again = next(index for index, width in enumerate(widths) if width == (12, 256))
    assert torch.equal(mixed.batch(again, 1)["ids_BT"], short["ids_BT"])


@pytest.mark.parametrize("given", ["[5]", "[0,0.5]", "[5,2]", "[2.5,0.5]"])
def test_short_sequences_are_some_segments_and_a_share(given: str) -> None:
    with pytest.raises(
        InputError, match="recipe.short_sequences=.*: must be .segments, share between 0 and 1., or null"
    ):
        compose(["task=passkey", "recipe.segments_per_sequence=40", f"recipe.short_sequences={given}"])


def test_short_sequences_are_shorter_than_the_others() -> None:
    same = ["task=passkey", "recipe.segments_per_sequence=5"]
    assert config_hash(compose([*same, "recipe.short_sequences=[5,0.5]"])) == config_hash(
        compose([*same, "recipe.short_sequences=null"])
    )
    made = DataModule(compose(["task=passkey", "recipe.segments_per_sequence=6", "recipe.short_sequences=[3,1]"]))
    made.setup("fit")
    assert made.batches.batch(0, 1)["ids_BT"].shape[1] == 3 * 128


def test_a_batch_of_another_segment_length_resizes_the_model() -> None:
    made = module()
    ids = torch.zeros(1, 12, dtype=torch.long)
    mask = torch.ones(1, 12, dtype=torch.bool)
    for segment in (4, 6):
        batch = {"ids_BT": ids, "targets_BT": ids, "mask_BT": mask, "reset_BT": ~mask, "segment_length": segment}
        made.training_step(batch, 0)
        assert made.model.segment_length == segment
        assert all(block.attention.segment_length == segment for block in made.model.blocks)


def test_a_resized_model_is_the_model_of_that_segment_length() -> None:
    resized, built = make_model({"name": "infini_delta"}), make_model({"name": "infini_delta"}, segment_length=5)
    resized.resize_segments(5)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 31, (2, 23)))
    assert torch.equal(resized(ids).hidden_BTD, built(ids).hidden_BTD)


def test_a_loss_on_few_tokens_is_the_loss_on_those_tokens() -> None:
    made = module()
    hidden = torch.randn(2, 9, 16, dtype=torch.float64)
    targets = torch.full((2, 9), IGNORE)
    targets[0, 3], targets[1, 8] = 5, 7
    logits = made.model.head(torch.stack([hidden[0, 3], hidden[1, 8]]))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([5, 7]))
    assert float(made._loss(hidden, targets).detach()) == pytest.approx(float(expected), rel=1e-9)


def test_the_second_loss_is_a_mean_over_its_own_targets() -> None:
    made, batch = module(), batches(lm_loss_weight=0.1).batch(0, 0)
    made.model.resize_segments(batch["segment_length"])
    for name in ("ids_BT", "targets_BT", "lm_targets_BT"):
        batch[name] = torch.where(batch[name] == IGNORE, IGNORE, batch[name] % len(made.model.output_weight))
    with torch.no_grad():
        objective, loss, *_ = made._read(batch, None, made._whole(batch))
        hidden = made.model(batch["ids_BT"], mask_BT=batch["mask_BT"]).hidden_BTD
        second = made._loss(hidden, batch["lm_targets_BT"])
    assert float(objective - loss) == pytest.approx(batch["lm_weight"] * float(second), rel=1e-6)


def test_keys_stand_on_every_place_of_the_grid_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks alone before the key put it on one place in 24, the evaluation's: chance and one in 28, no more."""
    fed, places = prompts.input_ids, []

    def note(prompt: Any, *arguments: Any) -> Any:
        places.append(prompt.key_position)
        return fed(prompt, *arguments)

    monkeypatch.setattr(prompts, "input_ids", note)
    batches(batch_size=1200).batch(0, 1)
    template = PasskeyTemplate(TOKENIZER.encode)
    start, later = (template.example(length, 1.0, np.random.default_rng(0), False) for length in (2000, 3000))
    block = (later.key_position - start.key_position) // (later.blocks[0] - start.blocks[0])
    whole = sum((place - start.key_position) % block == 0 for place in places) / len(places)
    assert block == 24
    # Four standard deviations above 1/24 + 1/28.
    assert 1 / 28 < whole < 1 / 24 + 1 / 28 + 4 * (0.077 * 0.923 / len(places)) ** 0.5
