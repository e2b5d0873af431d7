"""The training stream: each row reads whole documents in order, on the documents' own segment grid."""

from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from infini.config.compose import compose
from infini.config.schema import Config
from infini.errors import InputError
from infini.nn.ops.cross_entropy import IGNORE
from infini.tasks.text.document_data import DocumentDataModule
from infini.tasks.text.stream import DocumentStream
from infini.tasks.text.token_cache import TokenisedSplit

BOS = 0
SEGMENT = 4
LENGTHS = (1, 4, 5, 8, 13, 30, 3)

Batch = dict[str, torch.Tensor]


def make_split(lengths: tuple[int, ...] = LENGTHS, revision: str = "r") -> TokenisedSplit:
    # A token says which document it is of and where: 1000 * document + position.
    tokens = [np.arange(n, dtype=np.uint16) + 1000 * (index + 1) for index, n in enumerate(lengths)]
    counts = np.array(lengths, dtype=np.int64)
    names = [str(index) for index in range(len(lengths))]
    return TokenisedSplit("pg19", "train", "folder", revision, "bytes", names, tokens, counts, counts)


def make_stream(split: TokenisedSplit | None = None, batch_size: int = 3, seed: int = 1) -> DocumentStream:
    return DocumentStream(make_split() if split is None else split, batch_size, 3, SEGMENT, BOS, seed)


def take(stream: DocumentStream, count: int) -> Batch:
    batches = list(islice(stream, count))
    return {name: torch.cat([batch[name] for batch in batches], dim=1) for name in batches[0]}


def runs(joined: Batch, row: int) -> list[dict[str, np.ndarray]]:
    """A row's documents, each from its reset to the column before the next."""
    starts = joined["reset_BT"][row].nonzero()[:, 0].tolist()
    columns = zip(starts, [*starts[1:], joined["reset_BT"].shape[1]], strict=True)
    return [{name: value[row, start:end].numpy() for name, value in joined.items()} for start, end in columns]


def assert_equal(first: Batch, second: Batch) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_shapes_and_types() -> None:
    batch = next(make_stream())
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "ids_BT": (torch.int64, (3, 12)),
        "targets_BT": (torch.int64, (3, 12)),
        "mask_BT": (torch.bool, (3, 12)),
        "reset_BT": (torch.bool, (3, 12)),
    }


def test_rows_reproduce_documents_exactly_and_in_order() -> None:
    split = make_split()
    joined = take(make_stream(split), 40)
    for row in range(3):
        assert joined["reset_BT"][row, 0]
        documents = runs(joined, row)
        assert len(documents) > 5
        for place, run in enumerate(documents[:-1]):
            real = run["mask_BT"]
            targets = run["targets_BT"][real]
            tokens = split.ids(int(targets[0]) // 1000 - 1)
            start = int(targets[0]) % 1000
            assert start == 0 or (place == 0 and start % SEGMENT == 0)
            assert np.array_equal(targets, tokens[start:])
            assert np.array_equal(run["ids_BT"][real], [BOS, *tokens[start:-1]])


def test_padding_is_only_at_the_end_of_a_document_and_has_no_loss() -> None:
    joined = take(make_stream(), 40)
    assert torch.equal(joined["targets_BT"] == IGNORE, ~joined["mask_BT"])
    for row in range(3):
        for run in runs(joined, row)[:-1]:
            real = run["mask_BT"]
            n_real = int(real.sum())
            assert real[:n_real].all()
            assert len(real) - n_real < SEGMENT


def test_resets_lie_on_segment_boundaries() -> None:
    columns = take(make_stream(), 40)["reset_BT"].nonzero()[:, 1]
    assert (columns % SEGMENT == 0).all()


def test_first_documents_start_at_random_segments() -> None:
    starts = {int(next(make_stream(make_split((400,)), 1, seed))["targets_BT"][0, 0]) % 1000 for seed in range(20)}
    assert len(starts) > 10
    assert all(start % SEGMENT == 0 for start in starts)


@pytest.mark.parametrize("batch_size", [3, len(LENGTHS)])
def test_no_two_rows_read_the_same_document_at_the_same_time(batch_size: int) -> None:
    targets = take(make_stream(batch_size=batch_size), 60)["targets_BT"][:, ::SEGMENT]
    for column in (targets // 1000).T.tolist():
        assert len(set(column)) == batch_size


def test_fewer_documents_than_rows_still_fill_every_row() -> None:
    joined = take(make_stream(make_split((5, 9)), batch_size=4), 20)
    assert joined["mask_BT"][:, ::SEGMENT].all()


def test_every_document_is_read_once_an_epoch() -> None:
    joined = take(make_stream(make_split((8,) * 12), batch_size=1), 40)
    order = [int(run["targets_BT"][0]) // 1000 for run in runs(joined, 0)]
    epochs = [order[start : start + 12] for start in range(0, 36, 12)]
    assert all(sorted(epoch) == list(range(1, 13)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_document_far_longer_than_the_others_does_not_pile_up() -> None:
    stream = make_stream(make_split((900, 4, 4)), batch_size=2)
    take(stream, 60)
    assert len(stream._queues[0]) <= 3


def mixed(shares: tuple[float, float], seed: int = 1) -> DocumentStream:
    """Two sources: documents 1 to 3 are the first, 4 to 7 the second."""
    parts = list(zip((range(3), range(3, 7)), shares, strict=True))
    return DocumentStream(make_split(), 2, 3, SEGMENT, BOS, seed, parts=parts)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0), (0.2, 0.05)])
def test_each_source_has_its_share_of_the_tokens(shares: tuple[float, float]) -> None:
    targets = take(mixed(shares), 400)["targets_BT"]
    first, second = ((targets // 1000 <= 3) & (targets >= 0)).sum(), (targets // 1000 > 3).sum()
    assert float(first / (first + second)) == pytest.approx(shares[0] / sum(shares), abs=0.02)


def test_a_source_is_read_in_epochs_of_its_own() -> None:
    stream = mixed((1.0, 1.0))
    joined = take(stream, 300)
    order = [int(run["targets_BT"][0]) // 1000 for row in range(2) for run in runs(joined, row)]
    assert set(order) == set(range(1, 8))
    # Ten tokens an epoch in the first source, 54 in the second.
    assert stream._epochs[0] > 3 * stream._epochs[1]


def test_one_source_is_as_no_mixture() -> None:
    one = DocumentStream(make_split(), 3, 3, SEGMENT, BOS, 1, parts=[(range(len(LENGTHS)), 0.3)])
    assert_equal(take(one, 20), take(make_stream(), 20))


def test_a_mixture_resumes_at_any_batch() -> None:
    whole, resumed = mixed((1.0, 2.0)), mixed((1.0, 2.0))
    take(whole, 17)
    resumed.seek(17)
    assert_equal(take(whole, 9), take(resumed, 9))


def test_batches_depend_on_the_seed_alone() -> None:
    assert_equal(take(make_stream(), 10), take(make_stream(), 10))
    assert not torch.equal(take(make_stream(), 10)["ids_BT"], take(make_stream(seed=2), 10)["ids_BT"])


@pytest.mark.parametrize("batches", [0, 1, 7])
def test_seek_continues_with_exactly_the_next_batches(batches: int) -> None:
    stream, sought = make_stream(), make_stream()
    for _ in range(batches):
        next(stream)
    # Seeking works from any position.
    next(sought)
    sought.seek(batches)
    following = take(stream, 10)
    assert_equal(following, take(sought, 10))
    assert stream.batches == sought.batches == batches + 10


def test_sizes_and_empty_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_stream(batch_size=0)
    with pytest.raises(InputError, match="no documents"):
        make_stream(make_split(()))


def test_the_data_set_gives_whole_batches_and_goes_on() -> None:
    loader = DataLoader(make_stream(), batch_size=None)
    expected = make_stream()
    for _ in range(2):
        assert_equal(next(iter(loader)), next(expected))


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path))
    for split in ("train", "validation"):
        folder = tmp_path / "pg19" / split
        folder.mkdir(parents=True)
        for book in range(3):
            (folder / f"{book}.txt").write_text(f"Chapter {book} of {split}.\n" * 200)
    return compose(
        [
            f"cache_dir={tmp_path / 'cache'}",
            "scale.vocab_size=300",
            "recipe.batch_size=2",
            "recipe.segments_per_sequence=2",
            "dims.segment_length=16",
        ]
    )


def test_a_training_setup_prepares_train_and_validation_only(cfg: Config) -> None:
    module = DocumentDataModule(cfg)
    module.setup("fit")
    assert module.data_record("train")["documents"] == 3
    assert module.data_record("validation")["tokenizer"] == module.tokenizer.name
    batch = next(iter(module.train_dataloader()))
    assert batch["ids_BT"].shape == (2, 32)
    assert (batch["ids_BT"][batch["reset_BT"]] == module.tokenizer.bos_id).all()
    with pytest.raises(InputError, match="does not exist"):
        module.setup("test")


class Recorder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["ids_BT"].clone())
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(cfg: Config, steps: int, checkpoint: Path | None = None) -> tuple[lightning.Trainer, Recorder]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, enable_checkpointing=False, **quiet)
    model = Recorder()
    trainer.fit(model, datamodule=DocumentDataModule(cfg), ckpt_path=checkpoint, weights_only=True)
    return trainer, model


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_training_goes_on_with_the_next_batch(cfg: Config, tmp_path: Path) -> None:
    _, straight = fit(cfg, 6)
    trainer, first = fit(cfg, 4)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, second = fit(cfg, 6, tmp_path / "half.ckpt")
    assert len(second.seen) == 2
    assert torch.equal(torch.stack(straight.seen), torch.stack(first.seen + second.seen))


def test_excerpts_cover_every_document_in_parts_of_one_length() -> None:
    split = make_split((10, 4, 9))
    stream = DocumentStream(split, 2, 2, 2, 0, 1, excerpt_tokens=4)
    parts = [text.tolist() for text in stream._texts]
    assert [len(part) for part in parts] == [4, 4, 4, 4, 4, 4, 4]
    whole = split.ids(0).tolist()
    assert parts[:3] == [whole[:4], whole[4:8], whole[6:]]
    assert parts[3] == split.ids(1).tolist()
    resets = torch.cat([next(stream)["reset_BT"] for _ in range(4)], 1)
    assert resets[:, ::4].all() and resets.sum() == 8
