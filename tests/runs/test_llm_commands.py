"""model=llm from the command line on a tiny Llama with a tokenizer of its own: no training, training, controls,
folders that were injected before, and `infini inject`."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from books import write_books
from command_runner import Runner
from helpers import assert_close
from safetensors.torch import load_file, save_file
from tiny_llms import prompt, write_tiny_base
from tiny_runs import SUMMARIES, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

from infini.cli import main as cli
from infini.config.compose import compose
from infini.evaluation import perplexity
from infini.models.llm import base_model
from infini.pretrained.llm import bases, inject, model_card
from infini.pretrained.llm.language_model import PretrainedLM
from infini.report.load import load_report
from infini.runs.common import with_base
from infini.system.paths import SCRATCH_PREFIX
from infini.training.checkpoint import load_model
from infini.training.module import LanguageModelModule

N = 16
SHORT = ["scale.eval_max_tokens=64", "scale.knockouts=false"]
KNOCKED_OUT = ["scale.eval_max_tokens=64", "scale.knockout_max_tokens=48"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a byte-level tokenizer that merges nothing."""
    return write_tiny_base(tmp_path_factory.mktemp("base"))


class Llm:
    """A Runner whose command lines are about the tiny base."""

    def __init__(self, infini: Runner, base: Path) -> None:
        own = [text for text in infini.settings if not text.startswith(("dims.", "scale.vocab_size"))]
        infini.settings, self.infini, self.base = own, infini, base
        self.settings = ["model=llm", f"dims.segment_length={N}"]

    def __call__(self, verb: str, *words: str) -> str:
        return self.infini(verb, *self._words(words))

    def error(self, verb: str, *words: str) -> str:
        return self.infini.error(verb, *self._words(words))

    def _words(self, words: tuple[str, ...]) -> list[str]:
        return [*self.settings, f"model.base={self.base}", *words]


@pytest.fixture
def tiny_smollm2(llm: Llm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Llm]:
    """The tiny base under the name smollm2, and two corpora of a few pages."""
    corpora = tmp_path / "corpora"
    for task in ("pg19", "arxiv_math"):
        for split in ("train", "validation"):
            (corpora / task / split).mkdir(parents=True)
            for number in range(3):
                text = f"{task} has number {number}, and {split} as well. " * 120
                (corpora / task / split / f"{number}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("INFINI_DATA_DIR", str(corpora))
    # All code looks the base up here, so that the package with the real one need not be installed.
    monkeypatch.setattr("infini.pretrained.base_names._smollm2", lambda where: Path(llm.base))
    monkeypatch.setattr(bases.Base, "describe", lambda self: {"name": "tiny", "family": "llama"})
    base_model.cache_clear()
    llm.infini.settings = []
    yield llm
    base_model.cache_clear()


@pytest.fixture
def llm(infini: Runner, base: Path, elsewhere: None, clock: None) -> Llm:
    return Llm(infini, base)


def perplexities(llm: Llm) -> list[float]:
    return [run.results["perplexity"]["value"] for run in llm.infini.records("eval")]


# Tests that need no training.


def test_the_base_is_evaluated_without_a_training(llm: Llm, base: Path) -> None:
    """The record says so, and its loss is that of the injected model of transformers on the same tokens."""
    llm("eval", *KNOCKED_OUT)
    (run,) = llm.infini.records()
    assert run.parent is None and run.environment["base"]["memory"] == "untrained"
    assert run.environment["base"]["name"] == base.name
    assert run.config["dims"] | {"name": "base"} == run.config["dims"]
    assert [run.config["dims"][key] for key in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_key", "d_ff")] == [
        16, 2, 2, 1, 8, 24,
    ]  # fmt: skip
    assert len(run.series["gates"]) == 2 and "foreign_delta" in run.results
    model = inject(LlamaForCausalLM.from_pretrained(base), N).eval()
    text = next(Path(llm.infini.settings[-2].partition("=")[2], "test").glob("test0.txt")).read_text()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False).input_ids[:64]]])
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
    assert next(entry for entry in run.documents if entry["name"] == "test0")["nll"] == pytest.approx(
        expected, rel=1e-5
    )


def test_controls(llm: Llm) -> None:
    """none is segment-local attention, full sees everything; with one segment for all, the three are one."""
    for memory in ("infini", "none", "full"):
        llm("eval", *SHORT, f"model.memory={memory}")
    assert len(set(perplexities(llm))) == 3
    for memory in ("infini", "none", "full"):
        llm("eval", *SHORT, f"model.memory={memory}", "dims.segment_length=64")
    one, *others = perplexities(llm)[3:]
    assert others == pytest.approx([one] * 2, rel=1e-5)


def test_shut_gates_are_the_control(llm: Llm) -> None:
    for more in (["model.memory=none"], ["model.gate_init=-10000"]):
        llm("eval", *SHORT, *more, "model.window=previous", "model.sinks=1")
    none, shut = perplexities(llm)
    assert none == pytest.approx(shut, rel=1e-6)


def test_pass_keys(llm: Llm) -> None:
    """The tokenizer is the base's. Prompts share their common tokens; the answers are those of each prompt alone."""
    asked = ["task=passkey", "task.examples=2", "length=[1K,2K]", "depth=[start,0.5]", "dims.segment_length=64"]
    llm("eval", *asked)
    (run,) = llm.infini.records()
    assert run.results["exact_match"]["n"] == 8 and run.data["tokenizer"].startswith("bpe-258")
    assert run.results["half_dilution"]["value"] > 0 and len(run.series["half_dilution"]) == 2


def test_generate(llm: Llm, tmp_path: Path) -> None:
    drawn = ["decoding.max_new_tokens=6", "decoding.temperature=0"]
    whole = llm("generate", "prompt=a long story about nothing at all", *drawn)
    assert "without" not in llm.infini.err and "continues" in llm.infini.err
    state = tmp_path / "state"
    llm("generate", "prompt=a long story about", f"save_state={state}", "decoding.max_new_tokens=0")
    assert llm("generate", "prompt= nothing at all", f"load_state={state}", *drawn) == whole
    said = llm.error("generate", "prompt=x", f"load_state={state}", "model.update_rule=linear")
    assert said.startswith(f"load_state='{state}': its model is ")


@pytest.mark.parametrize(
    ("read", "options"),
    [(N - 1, ""), (N, ""), (2 * N, ""), (N, "model.memory=full"), (N + 1, "model.layers=[1]")],
    ids=["within_a_segment", "one_segment", "two_segments", "its_own_cache", "one_layer"],
)
def test_a_saved_state_continues_wherever_its_text_ends(llm: Llm, tmp_path: Path, read: int, options: str) -> None:
    """At a segment's end two leaves of the state are one tensor, and keys and values of all tokens have no fixed size:
    either ended in a traceback or was refused."""
    more = [options] * bool(options)
    drawn = [*more, "decoding.max_new_tokens=6", "decoding.temperature=0"]
    whole = llm("generate", f"prompt={'a' * read} story", *drawn)
    state = tmp_path / "state"
    llm("generate", f"prompt={'a' * read}", f"save_state={state}", "decoding.max_new_tokens=0", *more)
    assert llm("generate", "prompt= story", f"load_state={state}", *drawn) == whole


def test_an_evaluation_reads_a_few_segments_at_once(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 segments of 2,048 tokens of 16 documents took the memory of any machine."""
    assert [perplexity.tokens_of_a_call(64, n, True) for n in (512, 2048, 4096)] == [2048, 2048, 4096]
    assert perplexity.tokens_of_a_call(64, 2048, False) == 64 * 2048
    read: list[int] = []
    read_rows = PretrainedLM._read_rows

    def watched(self: Any, ids_BW: torch.Tensor, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            read.append(ids_BW.shape[1])
        return read_rows(self, ids_BW, *args)

    monkeypatch.setattr(PretrainedLM, "_read_rows", watched)
    llm("eval", *SHORT)
    whole = max(read)
    monkeypatch.setattr(perplexity, "TOKENS_OF_A_BASE", 2 * N)
    read.clear()
    llm("eval", *SHORT)
    llm("train", "optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0")
    assert whole == 64 and max(read) == 2 * N
    first, second = perplexities(llm)
    assert second == pytest.approx(first, rel=1e-6)


def test_summarize(llm: Llm, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    llm("summarize", str(book), "decoding.max_new_tokens=3")
    assert "tokens read by" in llm.infini.err


def test_a_fine_tuned_model_sums_up_a_book_without_being_named(llm: Llm, tmp_path: Path) -> None:
    """The newest training of the task is used, pretrained or not."""
    books = f"task.data_dir={write_books(tmp_path / 'data')}"
    words = [text for text in SUMMARIES if not text.startswith(("dims.", "scale.vocab_size"))]
    llm("train", "task=booksum", *words, books, "model.train=lora", "optimizer=adamw")
    (trained,) = llm.infini.records("train")
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    llm.infini("summarize", str(book), "decoding.max_new_tokens=3")
    assert f"tokens read by {trained.run_id}" in llm.infini.err


# Training.


@pytest.mark.parametrize("train", ["all", "gates"])
def test_training_and_its_evaluation(llm: Llm, train: str) -> None:
    """Then the trained model is the one that is evaluated; of another base or option there is no training."""
    words = ["optimizer=adamw", "optimizer.lr=0.001", f"model.train={train}"]
    llm("train", *words)
    (trained,) = llm.infini.records("train")
    weights = llm.infini.weights(trained)
    model = inject(LlamaForCausalLM.from_pretrained(llm.base), N)
    before = {f"llm.{name}": weight for name, weight in model.state_dict().items()}
    moved = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    gates = {name for name in weights if name.endswith("infini_gate.beta")}
    assert gates <= moved and (moved == gates) == (train == "gates")
    llm("eval", *SHORT, f"model.train={train}")
    (first,) = llm.infini.records("eval")
    assert first.parent == trained.run_id and first.environment["base"]["memory"] == "trained"
    if train == "all":
        # The same comparison distinguishes both ways from others.
        return
    llm("eval", *SHORT, f"model.train={train}", "model.update_rule=linear")
    assert llm.infini.records("eval")[1].parent is None
    llm("generate", f"model.train={train}", "prompt=x", "decoding.max_new_tokens=1")
    assert trained.run_id in llm.infini.err


@pytest.mark.parametrize("mixture", [False, True], ids=["all", "adapters_on_a_mixture"])
def test_a_training_resumes_exactly(llm: Llm, mixture: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also what experiment=llm_laptop does: adapters beside weights in bfloat16, on two corpora."""
    words = ["optimizer=adamw", "recipe.steps=4", "recipe.save_every=2"]
    if mixture:
        for name in ("pg19", "arxiv_math"):
            write_corpus(tmp_path / "corpora" / name)
        words += ["task=continual", f"task.data_dir={tmp_path / 'corpora'}", "task.min_tokens=16"]
        words += ["model.train=lora", "model.dtype=bfloat16", "parallel.precision=bf16"]
    llm("train", *words)
    (whole,) = llm.infini.records("train")
    weights = llm.infini.weights(whole)
    shutil.rmtree(llm.infini.results)
    step = LanguageModelModule.training_step

    def stop_at_third(self: Any, *args: Any) -> Any:
        if self.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(LanguageModelModule, "training_step", stop_at_third)
    llm.infini("train", *llm._words((*words,)), code=130)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    llm("train", *words)
    (resumed,) = llm.infini.records("train")
    assert resumed.cost["resumed"] and resumed.series["loss_curve"] == whole.series["loss_curve"]
    assert all(torch.equal(weight, weights[name]) for name, weight in llm.infini.weights(resumed).items())


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed_again"])
def test_a_training_computes_activations_again_if_asked(llm: Llm, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads a base in evaluation mode, in which it never does."""
    calls: list[bool] = []
    forward = LlamaMLP.forward

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls.append(self.training)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    words = ["optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0"]
    llm("train", *words, f"recipe.checkpoint_activations={str(again).lower()}")
    assert all(calls) and len(calls) == 2 * (1 + again)


@pytest.mark.parametrize("options", ["model.memory=full", "model.layers=[1]"])
def test_a_step_in_parts_has_documents_that_end_at_other_places(llm: Llm, tmp_path: Path, options: str) -> None:
    """Keys and values of all tokens have the columns of the longest row of their part."""
    for name, n in (("short", 8), ("longer", 50), ("longest", 90)):
        for split in ("train", "validation"):
            (tmp_path / "corpus" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "corpus" / split / f"{name}.txt").write_text("a word " * n, encoding="utf-8")
    words = [options, "optimizer=adamw", "recipe.steps=8", "recipe.batch_size=2", "recipe.segments_per_sequence=2"]
    for parts in (1, 2):
        llm("train", *words, f"parallel.accumulate={parts}", f"task.data_dir={tmp_path / 'corpus'}")
    curves = [run.series["loss_curve"] for run in llm.infini.records("train")]
    assert [loss for _, loss in curves[1]] == pytest.approx([loss for _, loss in curves[0]], rel=1e-5)


def test_a_training_goes_on_with_the_memory_that_was_trained(llm: Llm) -> None:
    """Where the command names no options of the memory, those of a preset took the place of the trained ones."""
    words = ["optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0"]
    llm("train", *words, "model.update_rule=linear", "model.window=previous")
    (first,) = llm.infini.records("train")
    start = f"init_from={first.run_id}"
    said = llm.error("train", *words, start, "model.window=previous")
    assert said == (
        f"init_from='{first.run_id}': was trained with model.update_rule=linear, this training has delta; add "
        "model.update_rule=linear, or model.update_rule=delta to change it"
    )
    assert "model.window=previous, this training has segment" in llm.error("train", *words, start)
    llm("train", *words, start, "model.window=previous", "model.update_rule=delta")
    llm("train", *words, start, "model.window=previous", "model.update_rule=linear")
    rules = [run.config["model"]["update_rule"] for run in llm.infini.records("train")]
    assert rules == ["linear", "delta", "linear"]


def with_other_weights(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    save_file({name: weight + 0.1 * (weight.dim() > 1) for name, weight in weights.items()}, base / "model.safetensors")


def test_answers_of_other_weights_of_a_name_are_not_resumed(llm: Llm, tmp_path: Path) -> None:
    """Half of an evaluation, then other weights under the same name: the record had answers of both."""
    llm.base = shutil.copytree(llm.base, tmp_path / "base")
    words = [*SHORT, "task.data_dir=" + str(write_corpus(tmp_path / "corpus"))]
    llm("eval", *words, "part=1/2")
    with_other_weights(llm.base)
    llm("eval", *words)
    (run,) = llm.infini.records("eval")
    assert not run.cost["resumed"]


def test_a_training_does_not_resume_with_other_weights_of_a_name(
    llm: Llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.base = shutil.copytree(llm.base, tmp_path / "base")
    words = ["optimizer=adamw", "recipe.steps=4", "recipe.save_every=2"]
    step = LanguageModelModule.training_step

    def stop_at_third(self: Any, *args: Any) -> Any:
        if self.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(LanguageModelModule, "training_step", stop_at_third)
        llm.infini("train", *llm._words((*words,)), code=130)
    with_other_weights(llm.base)
    llm("train", *words)
    (trained,) = llm.infini.records("train")
    assert not trained.cost["resumed"]


# Folders that were injected before.


def injected_base(llm: Llm, folder: Path, **options: Any) -> Path:
    """The tiny base with a memory, in a folder with its tokenizer."""
    model = inject(LlamaForCausalLM.from_pretrained(llm.base), gate_init=-1.0, **options)
    model.save_pretrained(folder)
    for file in llm.base.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


OWN: dict[str, Any] = {
    "update_rule": "linear",
    "window": "previous",
    "sinks": 2,
    "layers": [1],
    "memory_decay": 4.0,
    "input_gate": "sigmoid",
}


def test_an_injected_folder_is_a_base(llm: Llm, tmp_path: Path) -> None:
    """The base keeps the settings that it was injected with."""
    model = inject(LlamaForCausalLM.from_pretrained(llm.base), N, "linear", gate_init=-1.0)
    for file in llm.base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / file.name)
    model.save_pretrained(tmp_path)
    llm("eval", *SHORT, "model.update_rule=linear", "model.gate_init=-1")
    llm.base = tmp_path
    llm("eval", *SHORT, "model.update_rule=linear")
    first, second = perplexities(llm)
    assert first == second
    assert "was injected with 'linear'; set that" in llm.error("eval", *SHORT, "model.update_rule=delta")
    said = llm.error("eval", *SHORT, "model.update_rule=linear", "model.gate_init=3")
    assert "model.gate_init=3: " in said and said.endswith("has gates of its own; leave it out")


def test_an_injected_folder_keeps_its_segments_and_options(llm: Llm, tmp_path: Path) -> None:
    """A command that names no segments and no options reads with those of the folder, and the record has them."""
    spelled = [f"model.{name}={str(value).replace(' ', '')}" for name, value in OWN.items()]
    llm.base = injected_base(llm, tmp_path / "own", segment_length=16, **OWN)
    llm.settings = ["model=llm"]
    llm("eval", *SHORT)
    llm("eval", *SHORT, "dims.segment_length=16", *spelled)
    llm("eval", *SHORT, "dims.segment_length=64")
    usual, asked, other = llm.infini.records("eval")
    assert usual.results["perplexity"] == asked.results["perplexity"] != other.results["perplexity"]
    assert usual.config == asked.config
    assert usual.config["model"] | OWN == usual.config["model"]
    assert [run.config["dims"]["segment_length"] for run in (usual, asked, other)] == [16, 16, 64]
    llm("eval", *SHORT, "model.memory=none")
    llm("train", "optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0")
    (trained,) = llm.infini.records("train")
    assert trained.config["dims"]["segment_length"] == 16 and trained.config["model"] | OWN == trained.config["model"]


def test_a_trained_folder_counts_as_trained(llm: Llm, tmp_path: Path) -> None:
    folder = injected_base(llm, tmp_path / "own", segment_length=16)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["infini"]["training"] = "run A of infini"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    llm.base = folder
    llm("eval", *SHORT)
    (run,) = llm.infini.records()
    assert run.parent is None and run.environment["base"]["memory"] == "trained"


def test_the_sizes_of_a_base_are_taken_once(llm: Llm) -> None:
    """An experiment's segment stays, however often the base is asked."""
    words = ["experiment=llm_laptop", f"model.base={llm.base}"]
    once = with_base(compose(words), words)
    assert once.dims.segment_length == 512 and with_base(once, words) == once


def test_a_state_belongs_to_weights_and_not_to_a_name(llm: Llm, tmp_path: Path) -> None:
    first = injected_base(llm, tmp_path / "a" / "own", segment_length=16)
    second = shutil.copytree(first, tmp_path / "b" / "own")
    state = tmp_path / "state.safetensors"
    llm.base = first
    llm("generate", "prompt=a long story about", f"save_state={state}", "decoding.max_new_tokens=0")
    llm.base = second
    llm("generate", "prompt=it", f"load_state={state}", "decoding.max_new_tokens=1")
    weights = load_file(second / "model.safetensors")
    save_file({name: weight + (weight.dim() > 1) for name, weight in weights.items()}, second / "model.safetensors")
    said = llm.error("generate", "prompt=it", f"load_state={state}", "decoding.max_new_tokens=1")
    assert said == f"load_state={str(state)!r}: was saved by a model with other weights; read the prompt again"


# Mathematics.


def test_mathematics_from_the_base_to_a_trained_model(llm: Llm, tmp_path: Path) -> None:
    """task=arxiv_math: the base as it is, its own cache, a training, and the trained model on the same papers."""
    formula = "Let $x_{%d}$ be in $\\mathbb{R}$. Then $\\sum_i x_i^2 \\ge %d$, and so on \\dots\n"
    for split, papers in (("train", 3), ("validation", 1), ("test", 2)):
        (tmp_path / "papers" / split).mkdir(parents=True)
        for paper in range(papers):
            text = "".join(formula % (n, paper) for n in range(6 + paper))
            (tmp_path / "papers" / split / f"{split}{paper}.tex").write_text(text)
    words = ["task=arxiv_math", f"task.data_dir={tmp_path / 'papers'}"]
    llm("eval", *words, *SHORT)
    llm("eval", *words, *SHORT, "model.memory=full")
    llm("train", *words, "optimizer=adamw", "optimizer.lr=0.01")
    llm("eval", *words, *SHORT)
    (trained,) = llm.infini.records("train")
    untrained, own, after = llm.infini.records("eval")
    assert [run.parent for run in (untrained, own, after)] == [None, None, trained.run_id]
    assert {run.task for run in (trained, untrained, own, after)} == {"arxiv_math"}
    for run in (untrained, own, after):
        assert (run.data["name"], run.data["source"]) == ("arxiv_math", "folder")
        assert [entry["name"] for entry in run.documents] == ["test0", "test1"]
    assert len(set(perplexities(llm))) == 3


def test_a_checkpoint_without_its_base_is_one_line(llm: Llm, tmp_path: Path) -> None:
    """Configuration and tokenizer come from there."""
    llm.base = shutil.copytree(llm.base, tmp_path / "another")
    llm("train", "optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0")
    (run,) = llm.infini.records()
    base_model.cache_clear()
    shutil.rmtree(llm.base)
    for verb, words in (("eval", SHORT), ("generate", ["prompt=x"])):
        said = llm.infini.error(verb, f"checkpoint={run.run_id}", *words)
        assert f"model.base={str(llm.base)!r}: no such folder; name a hub id" in said


# Continual pre-training.


@pytest.mark.parametrize(
    ("train", "changed"),
    [("lora", ("beta", "lora_")), ("gates", ("beta",)), ("gates_and_norms", ("beta", "norm"))],
)
def test_what_a_training_changes(llm: Llm, train: str, changed: tuple[str, ...]) -> None:
    """Exactly the weights that model.train names; adapters have no effect before the first step."""
    llm("train", f"model.train={train}", "optimizer=adamw", "recipe.steps=1", "recipe.warmup_steps=0", "seed=3")
    llm("train", f"model.train={train}", "optimizer=adamw", "recipe.steps=4", "recipe.warmup_steps=0", "seed=3")
    first, last = (llm.infini.weights(run) for run in llm.infini.records("train"))
    moved = {name for name, weight in last.items() if not torch.equal(weight, first[name])}
    assert moved and moved == {name for name in last if any(part in name for part in changed)}
    assert all(torch.equal(last[name], weight) for name, weight in first.items() if name not in moved)


def test_an_adapted_model_is_measured_and_continued(llm: Llm) -> None:
    llm("train", "model.train=lora", "model.lora_rank=2", "optimizer=adamw")
    llm("eval", *SHORT, "model.train=lora", "model.lora_rank=2")
    (trained,), (measured,) = llm.infini.records("train"), llm.infini.records("eval")
    assert measured.parent == trained.run_id
    assert llm.infini.weights(trained)["llm.model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape[0] == 2


@pytest.mark.slow
def test_one_training_on_the_mixture_fills_a_column_of_each_task(
    tiny_smollm2: Llm,
) -> None:
    """report=llm_continual: untrained rows and trained rows. A second run makes none again."""
    llm, results = tiny_smollm2, f"results_dir={tiny_smollm2.infini.results}"
    for _ in range(2):
        rows = "report.run=[local,as_in_paper,delta,full_trained,local_2k_trained]"
        printed = llm.infini("reproduce", "report=llm_continual", rows, results)
        trainings, measured = llm.infini.records("train"), llm.infini.records("eval")
        assert [run.task for run in trainings] == ["continual"] * 4
        assert sorted((run.task, run.parent or "") for run in measured) == sorted(
            (task, parent) for task in ("pg19", "arxiv_math") for parent in ("", *(run.run_id for run in trainings))
        )
        assert "†" not in printed
        with open(llm.infini.results / "tables" / "llm_continual_laptop.csv", newline="", encoding="utf-8") as file:
            cells = [cell for cell in csv.DictReader(file) if cell["table"] == "1" and cell["source"] == "yours"]
        assert {cell["model"] for cell in cells} == {
            "local", "as_in_paper", "delta", "full_trained", "local_2k_trained",
        } and len(cells) == 10  # fmt: skip
        assert all(float(cell["value"]) > 1 for cell in cells)


@pytest.mark.slow
def test_prompts_are_asked_of_the_base_and_after_continual_pre_training(tiny_smollm2: Llm) -> None:
    """report=llm_passkey: the base as it is, the model of the mixture, and one that learned prompts after it."""
    llm, results = tiny_smollm2, f"results_dir={tiny_smollm2.infini.results}"
    rows = ["base", "linear_zero_shot", "linear_finetuned"]
    short = [f"report.rows.{row}.lengths=[1K]" for row in rows]
    tuned = "report.rows.linear_finetuned.overrides"
    own = load_report(compose(["report=llm_passkey"]).report).rows["linear_finetuned"].overrides  # type: ignore[attr-defined]
    stages = "recipe.curriculum=[[128,512,1]]"
    quoted = (f'"{text}"' for text in [*own, "recipe.steps=2", "recipe.warmup_steps=1", stages])
    short.append(f"{tuned}=[{','.join(quoted)}]")
    for _ in range(2):
        printed = llm.infini(
            *("reproduce", "report=llm_passkey", f"report.run=[{','.join(rows)}]", "report.lengths=[1K]"),
            *(*short, "task.examples=2", "depth=[start,end]", "report.depths=[start,end]", results),
        )
        first, second = llm.infini.records("train")
        assert (first.task, second.task, second.config["init_from"]) == ("continual", "passkey", first.run_id)
        measured = llm.infini.records("eval")
        assert [run.parent for run in measured] == [None, first.run_id, second.run_id]
        assert [run.config["dims"]["segment_length"] for run in measured] == [512] * 3
        table = printed.partition("Token accuracy")[2].partition("Details")[0]
        assert table.count("yours") == 3


# Mistakes of a user.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dims.d_model=64"], "dims.d_model=64: model=llm has the sizes of its base; leave it out"),
        (["scale.vocab_size=300"], "scale.vocab_size=300: model=llm has the tokenizer of its base; leave it out"),
        (["model.memory=full", "model.sinks=1"], "model.sinks=1: has no effect with model.memory=full"),
        (["model.base=no/such/folder"], "model.base='no/such/folder': no such folder; name a hub id"),
        (["model.base=none.gguf"], "model.base='none.gguf': no such file"),
        (["model.sinks=99"], "sinks=99: must be from 0 to segment_length=16"),
        (["model.memory_decay=0"], "model.memory_decay=0"),
        (
            ["model.memory=none", "model.memory_decay=4"],
            "model.memory_decay=4: has no effect with model.memory=none; leave it out",
        ),
        (["model.input_gate=exp"], "model.input_gate='exp': must be one of sigmoid, null"),
        (
            ["model.memory=none", "model.input_gate=sigmoid"],
            "model.input_gate='sigmoid': has no effect with model.memory=none; leave it out",
        ),
        (["model.layers=[5]"], "layers=[5]: name at least one of 0 to 1"),
        (["model.memory=full", "model.update_rule=linear"], "model.update_rule='linear': has no effect with"),
        (["model.memory=full", "model.gate_init=3"], "model.gate_init=3: has no effect with model.memory=full"),
        (["model.lora_rank=64"], "model.lora_rank=64: has no effect with model.train=all; leave it out"),
        (["model.memory=some"], "model.memory='some': must be one of infini, none, full"),
    ],
)
def test_one_line_for_a_mistake(llm: Llm, words: list[str], said: str) -> None:
    assert said in llm.error("eval", *words)
    assert not llm.infini.records()


@pytest.mark.parametrize("train", ["all", "gates_and_norms"])
def test_weights_whose_steps_would_be_rounded_away_are_not_trained(llm: Llm, train: str) -> None:
    """At a rate of 1e-4, bfloat16 would leave 7 in 10 entries of a matrix and all norms unchanged."""
    said = llm.error("train", f"model.train={train}", "model.dtype=bfloat16")
    assert said.startswith(f"model.dtype='bfloat16': its rounding removes most steps of model.train={train}; set ")
    assert not llm.infini.records()


def test_gates_that_are_not_there_cannot_be_trained(llm: Llm) -> None:
    said = llm.error("train", "model.train=gates", "model.memory=full")
    assert "model.train='gates': model.memory=full has no gates to train" in said


def test_long_histories_are_not_read_by_a_pretrained_model(llm: Llm) -> None:
    """Its calls take no write weights, with which histories are read."""
    words = ["recipe.length_extension=10", "recipe.long_history=[2,9]", "recipe.segments_per_sequence=3"]
    said = llm.error("train", "task=passkey", *words)
    assert "recipe.long_history=[2, 9]: must be null with model=llm" in said


# infini inject.


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_trained_model_becomes_a_folder_of_transformers(llm: Llm, train: str, tmp_path: Path) -> None:
    """Adapters are in its weights, and it says what the trained model says."""
    llm("train", f"model.train={train}", "optimizer.lr=0.1", "recipe.steps=2")
    (run,) = llm.infini.records("train")
    out = tmp_path / "out"
    said = llm.infini("inject", f"checkpoint={run.run_id}", f"out={out}")
    assert said.startswith(f"{out}: InfiniLlamaForCausalLM with a memory in 2 of 2 layers")
    assert said.endswith(f"; trained by {run.run_id}\n")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"| training | run {run.run_id} of infini, model.train={train} |" in card
    ids = prompt(1, 3 * N)
    trained, _ = load_model(llm.infini.results / "checkpoints" / run.run_id, torch.device("cpu"))
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert_close(loaded(ids).logits, trained.head(trained(ids).hidden_BTD), 1e-5, "logits")
    assert not any("lora_" in name for name in loaded.state_dict())
    assert AutoTokenizer.from_pretrained(out).vocab_size == base_model(str(llm.base)).tokenizer.vocab_size
    error = llm.infini.error
    again = f"out={tmp_path / 'again'}"
    assert error("inject", f"checkpoint={run.run_id}", again, "sinks=1").startswith("model.sinks: checkpoint=")
    assert error("inject", f"checkpoint={run.run_id}", again, "base=x").startswith("base: checkpoint=")


@pytest.mark.parametrize("there", [False, True])
def test_an_inject_that_is_stopped_leaves_nothing(
    llm: Llm, tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command starts from the beginning. An empty folder may be there before."""
    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
    words = ["inject", f"base={llm.base}", f"out={out}"]
    last = type(base_model(str(llm.base)).tokenizer)
    for stop, code in ((KeyboardInterrupt(), cli.INTERRUPTED), (OSError(28, "No space left on device"), 2)):
        with monkeypatch.context() as patch:

            def stopped(self: Any, folder: Any, stop: BaseException = stop) -> None:
                """Right before the last files, where all others are on disk."""
                assert (Path(folder) / "config.json").is_file()
                raise stop

            patch.setattr(last, "save_pretrained", stopped)
            assert cli.main(words) == code
        assert out.exists() is there and [path for path in out.parent.rglob("*") if path != out] == []
    # Files that a killed process left do not count either.
    (out if there else out.parent).joinpath(f"{SCRATCH_PREFIX}killed").mkdir()
    assert cli.main(words) == 0
    assert AutoTokenizer.from_pretrained(out) and AutoModelForCausalLM.from_pretrained(out)
    modes = {path.stat().st_mode & 0o777 for path in (out, out.parent)}
    assert len(modes) == 1


def test_inject_refuses_a_tokenizer_that_training_would_refuse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder was written, and then no training took it."""
    folder = write_tiny_base(tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{number}" for number in range(9)])
    tokenizer.save_pretrained(folder)
    assert cli.main(["inject", f"base={folder}", f"out={tmp_path / 'out'}"]) == cli.USAGE_ERROR
    assert f"infini: error: base='{folder}': its tokenizer has 267 tokens, its embedding 260" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inject_writes_a_folder(llm: Llm, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Stock classes of transformers load it, with its tokenizer; it is a base of its own."""
    out = tmp_path / "a folder"
    words = ["inject", f"base={llm.base}", f"out={out}"]
    options = ["segment_length=16", "update_rule=linear", "gate_init=-1", "window=previous", "sinks=2", "layers=[1]"]
    assert cli.main([*words, *options, "memory_decay=4", "input_gate=sigmoid"]) == 0
    said = capfd.readouterr().out
    assert "InfiniLlamaForCausalLM with a memory in 1 of 2 layers (linear, segments of 16 tokens)" in said
    assert {"README.md", "config.json", "model.safetensors", "modeling_infini.py", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
    assert "| training | none since the memory was put in |\n" in (out / "README.md").read_text(encoding="utf-8")
    found = AutoModelForCausalLM.from_pretrained(out).eval()
    # A later training would not undo the merge, so the config omits it.
    assert "| training | not recorded |\n" in model_card(found)
    made = inject(
        LlamaForCausalLM.from_pretrained(llm.base),
        16,
        "linear",
        [1],
        gate_init=-1.0,
        window="previous",
        sinks=2,
        memory_decay=4,
        input_gate="sigmoid",
    ).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(out)("it was a dark and stormy night, and so on").input_ids])
    assert torch.equal(found(ids).logits, made(ids).logits)
    llm.base = out
    llm("eval", *SHORT, "model.update_rule=linear", "model.window=previous", "model.sinks=2")
    assert llm.infini.records()[0].environment["base"]["name"] == "a folder"
    for more, problem in (
        ([], "the folder is not empty; name another one"),
        ([f"out={out}/config.json"], "exists and is not a folder; name another one"),
        (["out=null"], "out=null: name the folder to write"),
        (["base=null"], "base=null: name a hub id, a folder"),
        (["base=no/such/folder", "out=x"], "base='no/such/folder': no such folder"),
        (["sinks=99", "segment_length=16", "out=x"], "sinks=99: must be from 0 to segment_length=16"),
        (["model.memory=none"], "infini inject does not read model.memory"),
    ):
        assert cli.main([*words, *more]) == 2
        assert problem in capfd.readouterr().err
