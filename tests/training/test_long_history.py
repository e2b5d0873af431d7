"""Long histories: what they stand for, which rows begin after one, and when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import SEGMENT, assert_close, make_model, random_ids, relative_error

from infini.config.compose import compose
from infini.config.lengths import HISTORY_SEGMENTS
from infini.errors import InputError
from infini.nn.state import leaves, scale_memory, select_rows
from infini.tasks.passkey.prompt import BLOCK, PasskeyTemplate, word_tokenizer
from infini.tasks.passkey.task import PasskeyBatches
from infini.training.additions import long_history
from infini.training.additions.long_history import WEIGHT_GROWTH, read_histories, sample_initial_states
from infini.training.module import LanguageModelModule

TOKENIZER = word_tokenizer()
PIECE = HISTORY_SEGMENTS * SEGMENT


@pytest.mark.parametrize("first_segment", ["local", "zero"])
def test_linear_a_history_is_its_pieces_read_again_and_again(first_segment: str) -> None:
    """If there is one layer, writes depend on the segment alone, so pieces count as read 1, 3, 12 times."""
    model = make_model({"name": "infini_linear", "first_segment": first_segment}, n_layers=1)
    pieces = random_ids(3, PIECE)
    histories = read_histories(model, pieces)
    text: list[torch.Tensor] = []
    for p, piece in enumerate(pieces):
        # The local part of a segment sees no other, so that whole pieces can be repeated.
        text += [piece] * (1 if p == 0 else 3 * 4 ** (p - 1))
        read = model(torch.cat(text)[None]).state
        assert sum(map(len, text)) == PIECE * WEIGHT_GROWTH**p
        for (path, leaf), (_, expected) in zip(leaves(histories.layers), leaves(read.layers), strict=True):
            assert_close(leaf[p : p + 1], expected, 1e-10, f"{path} after piece {p}")


def test_delta_what_a_history_says_is_nearer_to_what_reading_as_much_says_than_a_factor_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eq. 5 moves values as it reads on; a memory made to weigh as much by a factor stands where it stood. Measured:
    half of the way at the growth that is used, three quarters with pieces half as coarse. (Random weights, which write
    everywhere; of a trained model's way 15 sixteenths, results/LOG.md 97.)"""
    model = make_model({"name": "infini_delta", "first_segment": "zero"})
    piece, probe, times = random_ids(1, PIECE), random_ids(1, 2 * SEGMENT, seed=5), 256

    def says(state: Any) -> torch.Tensor:
        return model(probe, state).hidden_BTD[:, :SEGMENT]

    read = says(model(piece.repeat(1, times)).state)
    by_factor = relative_error(says(scale_memory(model(piece).state, torch.tensor([float(times)]))), read)
    assert by_factor > 0.05
    for growth, share in ((2, 0.3), (4, 0.55)):
        monkeypatch.setattr(long_history, "WEIGHT_GROWTH", growth)
        n_pieces = round(np.log(times) / np.log(growth)) + 1
        histories = read_histories(model, piece.expand(n_pieces, -1))
        assert relative_error(says(select_rows(histories, torch.tensor([n_pieces - 1]))), read) < share * by_factor


def test_rows_begin_empty_or_after_one_of_the_histories() -> None:
    model = make_model({"name": "infini_delta"})
    histories = read_histories(model, random_ids(4, PIECE))
    fresh = model.init_state(400)
    made = sample_initial_states(fresh, histories, np.random.default_rng(0))
    kinds = []
    for row in range(400):
        one = [leaf[row] for _, leaf in leaves(made)]
        same = [
            all(torch.equal(a, leaf[kind].to(a.dtype)) for a, (_, leaf) in zip(one, leaves(other), strict=True))
            for kind, other in [(0, fresh), *((p, histories) for p in range(4))]
        ]
        assert sum(same) == 1
        kinds.append(same.index(True))
    counts = np.bincount(kinds, minlength=5)
    assert abs(counts[0] - 200) < 40 and counts[1:].min() > 25


def module(*overrides: str) -> LanguageModelModule:
    cfg = compose(["task=passkey", "recipe.length_extension=100", "recipe.long_history=[3,100]", *overrides])
    made = LanguageModelModule(make_model({"name": "infini_delta"}), cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    return made


def batch(**more: Any) -> dict[str, Any]:
    ids = random_ids(6, 4 * SEGMENT, seed=3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask, **more}


def test_histories_wait_for_the_training_proper_and_are_read_again_as_weights_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    step = 0
    real = long_history.read_histories

    def reading(model: Any, pieces: torch.Tensor) -> Any:
        read.append(step)
        return real(model, pieces)

    monkeypatch.setattr(long_history, "read_histories", reading)
    monkeypatch.setattr(LanguageModelModule, "global_step", property(lambda _: step))
    made = module("recipe.curriculum=[[8,24]]")
    with_pieces = batch(history_PT=random_ids(3, PIECE))
    made.training_step(with_pieces, 0)
    assert made.histories is None
    made.stage = 1
    for step in range(7, 45):  # noqa: B007 - read by the two functions above
        made.training_step(with_pieces, 0)
    assert read == [7, 20, 40]
    # Not asked for: as it always was.
    assert made._after_history(batch()) is None


def test_a_step_after_a_history_is_the_step_of_a_model_that_has_read_it() -> None:
    """The same loss as when each row is read after its history, and gradients that end where the history does."""
    made = module("recipe.length_extension_share=0", "recipe.curriculum=null", "recipe.sparse_writes=null")
    asked = batch(history_PT=random_ids(3, PIECE))
    state = made._after_history(asked)
    assert state is not None and made.histories is not None
    loss = made.training_step(asked, 0)
    hidden = made.model(asked["ids_BT"], state).hidden_BTD
    expected = torch.nn.functional.cross_entropy(
        (hidden @ made.model.output_weight.T).flatten(0, 1), asked["targets_BT"].flatten()
    )
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    assert not any(leaf.requires_grad for _, leaf in leaves(made.histories))
    plain = module("recipe.length_extension_share=0", "recipe.curriculum=null", "recipe.sparse_writes=null")
    plain.load_state_dict(made.state_dict())
    assert abs(plain.training_step(batch(), 0).item() - loss.item()) > 1e-4


def test_the_pieces_are_filler_alone_of_the_last_stage() -> None:
    template = PasskeyTemplate(TOKENIZER.encode, fill="exact")
    stages = [(64, 192), (128, 512)]
    plain = PasskeyBatches(template, TOKENIZER.bos_id, stages, 4, 1)
    made = PasskeyBatches(template, TOKENIZER.bos_id, stages, 4, 1, history=(5, 4))
    for other in (made.batch(7, 0), made.batch(3, 1), plain.batch(7, 1)):
        assert "history_PT" not in other
    starts = set()
    for index in range(4, 24):
        with_pieces = made.batch(index, 1)
        assert torch.equal(with_pieces["ids_BT"], plain.batch(index, 1)["ids_BT"])
        pieces = with_pieces["history_PT"]
        assert pieces.shape == (5, 3 * 128)
        block = TOKENIZER.encode(BLOCK)
        text = pieces.flatten().numpy()
        (start,) = [s for s in range(len(block)) if np.array_equal(text[: len(block)], np.roll(block, -s))]
        assert np.array_equal(text, np.resize(np.roll(block, -start), len(text)))
        starts.add(start)
    assert len(starts) > 8


def test_a_history_of_books_comes_from_anywhere_in_them() -> None:
    book = np.arange(1000)
    template = PasskeyTemplate(TOKENIZER.encode, fill="exact", book=book)
    for seed in range(20):
        text = template.filler(np.random.default_rng(seed), 1500)
        assert np.array_equal(text, (text[0] + np.arange(1500)) % 1000)


def test_histories_are_the_passkeys_and_belong_to_length_extension() -> None:
    for words, said in (
        (["task=passkey", "recipe.long_history=[4]", "recipe.length_extension=10"], r"must be \[pieces, steps\]"),
        (["task=passkey", "recipe.long_history=[0,9]", "recipe.length_extension=10"], r"must be \[pieces, steps\]"),
        (["task=passkey", "recipe.long_history=[4,9]"], r"recipe.long_history=\[4, 9\]: needs recipe.length_extension"),
        (["task=pg19", "recipe.long_history=[4,9]", "recipe.length_extension=10"], "must be null for task=pg19"),
    ):
        with pytest.raises(InputError, match=said):
            compose(words)
