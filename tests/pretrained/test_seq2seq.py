"""Encoder-decoders: what the trainer calls, what a decoder is asked token by token, and the commands around them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from books import write_books
from command_runner import Runner
from tiny_runs import SUMMARIES

from infini.bench import sources as bench_sources
from infini.config.compose import compose
from infini.errors import InputError
from infini.models import build_model, kind_of, registered
from infini.nn.ops.cross_entropy import IGNORE
from infini.pretrained.seq2seq import Seq2Seq, SourceReader
from infini.pretrained.unlimiformer import encode, windows
from infini.runs import bench, figure
from infini.tasks.booksum.data import SourceBatches
from infini.tasks.text.documents import TextTokenizer
from infini.training.module import LanguageModelModule
from infini.training.optimizers import configured_groups

transformers = pytest.importorskip("transformers")
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402 - only where the library is

MODELS = sorted(registered("seq2seq"))
WINDOW, VOCABULARY, MARK = 16, 60, 0


def make(
    name: str,
    unlimiformer: str = "none",
    k: int = 8,
    weights: str | None = None,
    window: int = WINDOW,
    vocabulary: int = VOCABULARY,
    search: str = "exact",
) -> Seq2Seq:
    """A small model with weights that matter, or those of a folder, in float64."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "segment_length": 8}
    options = {
        "name": name,
        "weights": weights,
        "window": window,
        "unlimiformer": unlimiformer,
        "k": k,
        "search": search,
    }
    model: Seq2Seq = build_model(options, SimpleNamespace(**sizes), vocabulary)
    if weights is not None:
        return model.double().eval()
    with torch.no_grad():
        # Sorted by name: the order of parameters depends on what replaced them.
        for _, parameter in sorted(model.named_parameters()):
            parameter.normal_(std=0.3)
    return model.double().eval()


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_kinds() -> None:
    assert MODELS == ["bart", "primera"] and kind_of("bart") == "seq2seq" and kind_of("local") == "language_model"
    assert kind_of("none") is None and set(registered()) == {*MODELS, *registered("language_model")}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unlimiformer", ["none", "alternating"])
def test_the_call_of_the_trainer_is_the_models_own(name: str, unlimiformer: str) -> None:
    # If k is as large as the source, Unlimiformer is the model itself.
    model, ids, source = make(name, unlimiformer, k=WINDOW), tokens(2, 7), tokens(2, WINDOW, 2)
    mask = torch.ones_like(source).bool()
    mask[1, 9:] = False
    ours = model.head(model(ids, source_BS=source, source_mask_BS=mask).hidden_BTD)
    extra = {}
    if model.global_first:
        extra["global_attention_mask"] = torch.zeros_like(source)
        extra["global_attention_mask"][:, 0] = 1
    plain = make(name).inner(input_ids=source, attention_mask=mask.long(), decoder_input_ids=ids, **extra).logits
    assert (ours - plain).abs().max() < 1e-10
    changed = source.clone()
    changed[1, 9:] = 5
    again = model.head(model(ids, source_BS=changed, source_mask_BS=mask).hidden_BTD)
    assert (again - ours).abs().max() < 1e-10, "what the mask hides changes nothing"


@pytest.mark.parametrize("name", MODELS)
def test_a_long_source_is_read_in_windows_and_all_of_it_counts(name: str) -> None:
    model, ids, source = make(name, "test", k=1000), tokens(1, 5), tokens(1, 50, 2)
    mask = torch.ones_like(source)
    states = encode(model.inner.get_encoder(), source, WINDOW, model.global_first, attention_mask=mask)
    plain = make(name).inner(encoder_outputs=BaseModelOutput(last_hidden_state=states), decoder_input_ids=ids).logits
    out = model(ids, source_BS=source, source_mask_BS=mask)
    assert states.shape[1] == 50 and (model.head(out.hidden_BTD) - plain).abs().max() < 1e-10
    assert (model.source_tokens(50), make(name).source_tokens(50)) == (50, WINDOW)
    assert make(name).state_floats(100) == WINDOW * 16 and model.state_floats(100) == 800 * 16


@pytest.mark.parametrize("name", MODELS)
def test_states_at_random_are_as_many_as_asked_and_no_padding(name: str) -> None:
    model, ids = make(name, "alternating", k=6), tokens(2, 5)
    source, mask = tokens(2, 40, 2), torch.ones(2, 40).bool()
    mask[1, 6:] = False
    seen: list[torch.Tensor] = []
    decoder = model.inner.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True
    )
    torch.manual_seed(3)
    calls = [model(ids, source_BS=source, source_mask_BS=mask, at_random=True).hidden_BTD for _ in range(2)]
    whole = model.encode(source, mask.long())
    assert all(states.shape == (2, 6, 16) for states in seen)
    assert not torch.equal(seen[0][0], seen[1][0]), "other states each time"
    # The second row has six states that are not padding: these, in some order.
    assert torch.equal(seen[0][1].sum(-1).sort().values, whole[1, :6].sum(-1).sort().values)
    assert torch.allclose(calls[0][1], calls[1][1], atol=1e-12)
    # The best states count in every other batch.
    model(ids, source_BS=source, source_mask_BS=mask, at_random=False)
    assert seen[-1].shape == (2, 40, 16)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unlimiformer", ["none", "test"])
def test_token_by_token_is_the_whole_target_at_once(name: str, unlimiformer: str) -> None:
    model, target, source = make(name, unlimiformer, k=5), tokens(1, 6), tokens(1, 40, 2)
    read = source[:, : model.source_tokens(40)]
    ids = torch.cat([torch.tensor([[MARK]]), target], 1)
    whole = model.head(model(ids, source_BS=read, source_mask_BS=torch.ones_like(read)).hidden_BTD)[0]
    told: list[int] = []
    reader = SourceReader.begin(model, source[0].numpy(), MARK, told.append)
    for position, token in enumerate([*target[0].tolist(), None]):
        logits, state = reader.next_logits()
        assert (logits - whole[position].float()).abs().max() < 1e-5, position
        reader = SourceReader(model, state, token or 0)
    assert told == [window.keep_stop - window.keep_start for window in windows(read.shape[1], WINDOW)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unlimiformer", ["none", "test"])
def test_trained_weights_are_given_what_they_were_trained_on(tmp_path: Path, name: str, unlimiformer: str) -> None:
    plain = make(name)
    # The weights are saved in float32, as they will be read.
    plain.float().inner.save_pretrained(tmp_path)
    plain.double()
    model = make(name, unlimiformer, k=WINDOW, weights=str(tmp_path))
    for key, value in plain.inner.state_dict().items():
        assert torch.equal(model.inner.state_dict()[key], value), key
    config, target = plain.inner.config, tokens(1, 6)
    ids = torch.cat([torch.tensor([[MARK]]), target], 1)
    # One more than is read where the window is all that is read.
    source = tokens(1, WINDOW if unlimiformer == "none" else WINDOW - 2, 2)
    marks = torch.tensor([[config.bos_token_id], [config.eos_token_id]])
    begun = torch.cat([marks[:1], source[:, : WINDOW - 2], marks[1:]], 1)
    extra = {"global_attention_mask": (torch.arange(WINDOW) == 0).long()[None]} if model.global_first else {}
    started = torch.cat([torch.tensor([[config.decoder_start_token_id]]), ids], 1)
    theirs = plain.inner(input_ids=begun, decoder_input_ids=started, **extra).logits[:, 1:]
    ours = model.head(model(ids, source_BS=source, source_mask_BS=torch.ones_like(source)).hidden_BTD)
    assert (ours - theirs).abs().max() < 1e-10
    reader = SourceReader.begin(model, source[0].numpy(), MARK)
    for position, token in enumerate([*target[0].tolist(), 0]):
        logits, state = reader.next_logits()
        assert (logits - theirs[0, position].float()).abs().max() < 1e-5, position
        reader = SourceReader(model, state, token)
    with pytest.raises(InputError, match=r"task\.summary_tokens=2047: must be at most 2046"):
        model(tokens(1, 2048), source_BS=source, source_mask_BS=torch.ones_like(source))


def test_trained_weights_are_refused_a_window_they_have_no_positions_for(tmp_path: Path) -> None:
    make("primera").inner.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"model.window=32: must be at most {WINDOW}, which the encoder has"):
        make("primera", weights=str(tmp_path), window=32)
    with pytest.raises(InputError, match="model.weights='.*nobody': cannot be downloaded from the Hugging Face hub"):
        make("bart", weights=str(tmp_path / "nobody"))


def test_a_training_starts_from_the_hubs_weights_and_tokenizer(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_books(tmp_path / "data")
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    marks = ["<s>", "<pad>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=marks,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(["A dog runs. " * 50], trainer)
    tokenizer = TextTokenizer(vocabulary)
    assert (tokenizer.bos_id, tokenizer.end_id) == (0, 2)
    monkeypatch.setattr("infini.tasks.booksum.task.hub_tokenizer", lambda name, *settings: tokenizer)
    make("bart", vocabulary=tokenizer.vocab_size).float().inner.save_pretrained(tmp_path / "bart")
    words = [
        "task=booksum",
        *SUMMARIES,
        "model=bart",
        f"model.window={WINDOW}",
        f"model.weights={tmp_path / 'bart'}",
        f"task.data_dir={folder}",
    ]
    infini("train", *words)
    infini("eval", *words, "length=64")
    (run,) = infini.records("eval")
    assert [book["tokens_read"] for book in run.series["cells"][0]["books"]] == [WINDOW - 2] * 2
    assert run.data["tokenizer"] == tokenizer.name


def test_a_target_longer_than_the_decoders_positions_is_one_line() -> None:
    model = make("bart")
    with pytest.raises(InputError, match="task.summary_tokens=2048: must be at most 2047"):
        model(tokens(1, 2049), source_BS=tokens(1, 4), source_mask_BS=torch.ones(1, 4))


@pytest.mark.parametrize(("key", "value"), [("window", 15), ("window", 0), ("k", 0), ("unlimiformer", "all")])
def test_an_option_that_is_wrong_is_one_line(key: str, value: Any) -> None:
    options = {"name": "bart", "weights": None, "window": 16, "unlimiformer": "none", "k": 8, "search": "exact"}
    with pytest.raises(InputError, match=f"model.{key}={value}" if key != "unlimiformer" else "model.unlimiformer="):
        build_model({**options, key: value}, SimpleNamespace(), 10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unlimiformer", ["none", "alternating"])
def test_activations_computed_again_give_the_same_gradients(name: str, unlimiformer: str) -> None:
    found = []
    for again in (False, True):
        model = make(name, unlimiformer).train()
        model.checkpoint_activations = again
        assert model.checkpoint_activations == again
        source = tokens(2, WINDOW, 2)
        hidden = model(tokens(2, 7), source_BS=source, source_mask_BS=torch.ones_like(source)).hidden_BTD
        model.head(hidden).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-10, atol=1e-12) for name in found[0])


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_no_matrices_to_the_optimizer(name: str) -> None:
    config: Any = SimpleNamespace(name="muon", lr=0.1, gate_lr=0.1, weight_decay=0.1)
    model = make(name)
    (matrices,) = [group["params"] for group in configured_groups(model, config) if group["name"] == "matrices"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert not [names[id(parameter)] for parameter in matrices if VOCABULARY in parameter.shape]
    assert not [names[id(parameter)] for parameter in matrices if "embed" in names[id(parameter)]]


def test_a_batch_has_the_book_as_source_and_the_summary_between_marks() -> None:
    books = [np.arange(100, 120), np.arange(200, 203)]
    summaries = [[np.arange(10, 13)], [np.arange(20, 26)]]
    made = SourceBatches(books, summaries, (MARK, 3), 8, 4, 2, 1)
    batch = next(made.all_once())
    assert batch["source_BS"].tolist() == [[*range(100, 108)], [200, 201, 202, 0, 0, 0, 0, 0]]
    assert batch["source_mask_BS"].sum(1).tolist() == [8, 3]
    # The second is cut, and does not end there.
    assert batch["ids_BT"].tolist() == [[0, 10, 11, 12], [0, 20, 21, 22]]
    assert batch["targets_BT"].tolist() == [[10, 11, 12, 3], [20, 21, 22, 23]] and batch["mask_BT"].all()
    whole = next(SourceBatches(books, summaries, (MARK, 3), 8, 6, 2, 1).all_once())
    assert whole["ids_BT"].tolist() == [[0, 10, 11, 12, 0, 0, 0], [0, *range(20, 26)]]
    assert whole["targets_BT"].tolist() == [[10, 11, 12, 3, *[IGNORE] * 3], [*range(20, 26), 3]]
    assert whole["mask_BT"].tolist() == [[True] * 4 + [False] * 3, [True] * 7]
    assert [made.batch(index)["at_random"] for index in range(3)] == [False, True, False]


SMALL = ("model.window=32", "model.k=16")


@pytest.mark.parametrize("name", MODELS)
def test_train_and_summarise(infini: Runner, tmp_path: Path, name: str) -> None:
    words = ["task=booksum", *SUMMARIES, *SMALL, f"model={name}", f"task.data_dir={write_books(tmp_path / 'data')}"]
    infini("train", *words)
    (training,) = infini.records("train")
    assert training.results["validation_summary_nll"]["n"] > 6
    infini("eval", *words, "length=64,1K")
    run = infini.records("eval")[-1]
    assert [book["tokens_read"] for cell in run.series["cells"] for book in cell["books"]] == [32] * 4
    # The same weights, and the whole source.
    infini("eval", *words, "length=64,64K", "model.unlimiformer=test")
    run = infini.records("eval")[-1]
    assert [book["tokens_read"] for book in run.series["cells"][0]["books"]] == [64, 64]
    # The states of the longest book, which is shorter than the length.
    longest = max(book["tokens_read"] for book in run.series["cells"][1]["books"])
    assert run.cost["state_floats"] == longest // 16 * 16 * 16
    assert run.config["model"]["unlimiformer"] == "test" and run.parent == training.run_id
    book = tmp_path / "book.txt"
    book.write_text("A dog runs. " * 50, "utf-8")
    infini("summarize", str(book), "decoding.max_new_tokens=4", f"model={name}")
    assert "32 of 201 tokens read by" in infini.err
    # The same weights, and the whole book; what was trained stays as it was.
    whole = ["model.unlimiformer=test", "model.k=2"]
    infini("summarize", str(book), "decoding.max_new_tokens=4", f"model={name}", *whole)
    assert "\n201 tokens read by" in f"\n{infini.err}"
    message = infini.error("summarize", str(book), f"model={name}", "model.window=64")
    assert message == "model.window=64: the checkpoint was trained with 32"
    assert "an encoder-decoder does not continue text" in infini.error(
        "generate", "prompt=x", f"model={name}", "task=booksum"
    )


def test_unlimiformer_trains_on_long_sources_in_turn(infini: Runner, tmp_path: Path) -> None:
    words = ["task=booksum", *SUMMARIES, *SMALL, "model=bart", f"task.data_dir={write_books(tmp_path / 'data')}"]
    infini("train", *words, "model.unlimiformer=alternating", "recipe.segments_per_sequence=8")
    infini("eval", *words, "model.unlimiformer=alternating", "recipe.segments_per_sequence=8", "length=64")
    (run,) = infini.records("eval")
    assert [book["tokens_read"] for book in run.series["cells"][0]["books"]] == [64, 64]
    message = infini.error("eval", *words, "recipe.segments_per_sequence=8", "model.window=16")
    assert message.startswith("model.window=16: the checkpoint was trained with 32")


def test_the_trainer_asks_for_states_at_random_in_turn_and_counts_what_is_read(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    read: list[int] = []
    forward, step = Seq2Seq.forward, LanguageModelModule.training_step

    def told(self: Seq2Seq, *given: Any, **options: Any) -> Any:
        if self.training:
            asked.append(options["at_random"])
        return forward(self, *given, **options)

    def counted(self: LanguageModelModule, batch: dict[str, Any], index: int) -> Any:
        # Books are longer than an example.
        assert batch["source_BS"].shape == (2, 8 * 16)
        read.append(int(batch["mask_BT"].sum() + batch["source_mask_BS"].sum()))
        return step(self, batch, index)

    monkeypatch.setattr(Seq2Seq, "forward", told)
    monkeypatch.setattr(LanguageModelModule, "training_step", counted)
    words = ["task=booksum", *SUMMARIES, *SMALL, "model=bart", f"task.data_dir={write_books(tmp_path / 'data')}"]
    infini("train", *words, "model.unlimiformer=alternating", "recipe.segments_per_sequence=8")
    (training,) = infini.records()
    assert asked == [False, True, False]
    assert training.cost["tokens_seen"] == sum(read) > 3 * 2 * 8 * 16


def test_a_task_that_takes_no_encoder_decoder_says_so(infini: Runner) -> None:
    for task in ("pg19", "passkey"):
        message = infini.error("train", f"task={task}", "model=bart")
        needs = f"task={task} needs a language model, for example model=infini_linear"
        assert message == f"model=bart: is an encoder-decoder; {needs}"


@pytest.mark.slow
def test_the_cost_of_a_long_source_is_measured_and_drawn(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    monkeypatch.setattr(bench_sources, "NEW_TOKENS", 3)
    ways = [way for way in bench_sources.WAYS if bench_sources._available(way)]
    out = infini("bench", "suite=sources", "suite.source_tokens=[40,80]", "model.window=32", "model.k=8", "model=bart")
    (run,) = infini.records()
    sources = run.series["sources"]
    assert set(sources["lengths"]) == {"40", "80"} and sources["k"] == 8
    for entry in sources["lengths"].values():
        assert set(entry["ways"]) == set(ways) and entry["encode_seconds"] > 0
        for found in entry["ways"].values():
            assert found["first_seconds"] > 0 and found["milliseconds"] == sorted(found["milliseconds"])
    assert all(way in out for way in ways)
    # Not by the verb, which would draw all reports.
    cfg = compose([f"results_dir={infini.results}"])
    found = [Path(cfg.results_dir)]
    said, *paths = figure._draw_bench("sources", cfg, found)
    png, svg = map(Path, paths)
    assert said.startswith("bench suite=sources: drawn from the runs in ")
    assert (png.name, svg.name) == ("source_costs_laptop.png", "source_costs_laptop.svg")
    before = png.read_bytes(), svg.read_bytes()
    figure._draw_bench("sources", cfg, found)
    assert (png.read_bytes(), svg.read_bytes()) == before
