"""The presets of the paper's LLM experiments: what they set, and their models on the meta device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infini.config.compose import compose
from infini.config.schema import groups
from infini.nn.ops.cross_entropy import summed_cross_entropy
from infini.nn.state import state_bytes
from infini.pretrained.llm import inject
from infini.pretrained.llm.language_model import PretrainedLM
from infini.report.load import load_report

PAPER = {
    # Configurations as their model cards have them.
    "llm_1b_passkey": (
        Olmo2ForCausalLM,
        Olmo2Config(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
            num_key_value_heads=16, vocab_size=100352, max_position_embeddings=4096, tie_word_embeddings=False,
        ),
    ),
    "llm_8b_booksum": (
        Qwen3ForCausalLM,
        Qwen3Config(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=PAPER)
def paper(request: pytest.FixtureRequest) -> tuple[Any, Any, PretrainedLM]:
    """A preset's configuration, that of its base, and the model on the meta device."""
    cfg = compose([f"experiment={request.param}"])
    made, base = PAPER[request.param]
    with torch.device("meta"):
        stock = made(base)
    N = cfg.dims.segment_length
    return cfg, base, PretrainedLM(inject(stock, N, gate_init=cfg.model["gate_init"]), N)


def test_the_presets_are_the_papers(paper: tuple[Any, Any, PretrainedLM]) -> None:
    cfg = paper[0]
    inputs = {"allenai/OLMo-2-0425-1B": 4096, "Qwen/Qwen3-8B": 8192}[cfg.model["base"]]
    recipe = cfg.recipe
    assert (recipe.steps, recipe.batch_size, cfg.optimizer.lr, cfg.dims.segment_length) == (30000, 64, 1e-4, 2048)
    assert recipe.segments_per_sequence * cfg.dims.segment_length == inputs
    assert (cfg.task.name, cfg.task.min_tokens, cfg.task.carry_state) == ("continual", 4096, False)
    assert cfg.task.sources == ["pg19", "arxiv_math", "c4"] and recipe.checkpoint_activations
    assert (cfg.model["train"], cfg.model["memory"]) == ("all", "infini")


def test_parameters_are_the_bases_and_a_gate_a_head(paper: tuple[Any, Any, PretrainedLM]) -> None:
    _, base, model = paper
    D, L, H, G = base.hidden_size, base.num_hidden_layers, base.num_attention_heads, base.num_key_value_heads
    K = getattr(base, "head_dim", None) or D // H
    # Norms of queries and keys: of all heads together (OLMo 2), or one weight for every head (Qwen 3).
    norms = 2 * D + (H + G) * K if isinstance(base, Olmo2Config) else 2 * D + 2 * K
    layer = D * K * (2 * H + 2 * G) + 3 * D * base.intermediate_size + norms
    expected = 2 * base.vocab_size * D + L * layer + D + L * H
    assert sum(p.numel() for p in model.parameters()) == expected
    assert round(expected / 1e9, 2) in (1.48, 8.19)


def test_the_state_has_the_size_of_its_formula(paper: tuple[Any, Any, PretrainedLM]) -> None:
    """Memories in float32, and the unfinished segment's keys and values; the same behind any text."""
    _, base, model = paper
    L, G, K = base.num_hidden_layers, base.num_key_value_heads, model._d_key
    memories = 4 * L * G * K * (K + 1)
    assert 4 * model.state_floats(1000) == memories
    held = state_bytes(model.init_state(1, "meta"))
    window = 2 * 4 * L * G * K * model.segment_length
    # The memory that is read, the one that is written meanwhile, and the window.
    assert 2 * memories + window <= held <= 1.01 * (2 * memories + window)


def test_checkpointed_activations_have_the_size_of_their_formula(paper: tuple[Any, Any, PretrainedLM]) -> None:
    """A training step of one input, forward and backward on meta tensors. Kept are the inputs of the layers."""
    cfg, base, model = paper
    model.train()
    model.checkpoint_activations = True
    T = cfg.recipe.segments_per_sequence * cfg.dims.segment_length
    ids = torch.zeros(1, T, dtype=torch.long, device="meta")
    kept: dict[int, int] = {}
    hold: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            hold.append(x)
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(ids)
    layers = 4 * base.num_hidden_layers * T * base.hidden_size
    # The rest is the embedded input, the last norm, ids and rotary angles.
    assert layers <= sum(kept.values()) <= 1.35 * layers
    targets = torch.zeros(1, T, dtype=torch.long)
    loss, _ = summed_cross_entropy(out.hidden_BTD, model.output_weight, targets, cfg.recipe.loss_chunk)
    loss.backward()
    gates = [p for name, p in model.named_parameters() if name.endswith("beta")]
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in gates)
    model.zero_grad()


CONTINUAL = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "continual.md"


@pytest.mark.parametrize(("task", "preset"), [("passkey", "llm_1b_passkey"), ("booksum", "llm_8b_booksum")])
def test_the_fine_tuning_of_a_preset_goes_on_as_its_pre_training(task: str, preset: str) -> None:
    """The recipes of tasks are for models from scratch: other gates, and for passkeys activations that are kept."""
    page = CONTINUAL.read_text("utf-8")
    (words,) = re.findall(rf"^infini train (experiment={preset}_finetune .*)$", page, re.MULTILINE)
    tuned, before = compose(words.split()), compose([f"experiment={preset}"])
    assert tuned.task.name == task and tuned.scale.name == "paper"
    assert dict(tuned.model) == dict(before.model) and tuned.dims.segment_length == before.dims.segment_length
    assert vars(tuned.optimizer) == vars(before.optimizer)
    assert tuned.recipe.checkpoint_activations and before.recipe.checkpoint_activations
    assert tuned.init_from == "RUN_ID"
    if task == "passkey":
        assert tuned.recipe.batch_size == before.recipe.batch_size and tuned.recipe.steps == 400
        # Keys of few digits are an addition of ours.
        assert tuned.task.few_digit_share == 0.0
        assert tuned.recipe.segments_per_sequence * tuned.dims.segment_length == 4096
    else:
        assert f"a batch of {tuned.recipe.batch_size} and {tuned.recipe.steps:,} steps" in page


@pytest.mark.parametrize("scale", ["laptop", "gpu", "paper"])
@pytest.mark.parametrize("words", ["task=continual", "task=pg19 optimizer=adamw", "task=passkey", "task=booksum"])
def test_a_pretrained_model_has_the_papers_rate_whatever_trains_it(scale: str, words: str) -> None:
    """The rates of models from scratch are 40 to 100 times as high."""
    of_llm = [*words.split(), "model=llm", f"scale={scale}"]
    assert compose(of_llm).optimizer.lr == 1e-4
    assert compose([*of_llm, "optimizer.lr=0.0005"]).optimizer.lr == 5e-4
    scratch = compose([*words.split(), "model=infini_linear", f"scale={scale}"])
    assert scratch.optimizer.lr >= 4e-3 or (scratch.task.name, scale) == ("booksum", "paper")


def shown_time(operations: float) -> str:
    """The time at 400 TFLOP/s."""
    days = operations / 4e14 / 86400
    if days < 1:
        return f"{days * 24 * 60:.0f} minutes"
    return f"{days:.1f} days" if days < 10 else f"{days:.0f} days"


@pytest.mark.parametrize("preset", PAPER)
def test_the_arithmetic_of_the_page_counts_recomputed_activations(preset: str) -> None:
    """Two of the eight operations a parameter and token are the second forward pass. It was counted as six."""
    page, cfg = CONTINUAL.read_text("utf-8"), compose([f"experiment={preset}"])
    column = list(PAPER).index(preset)
    recipe = cfg.recipe
    tokens = recipe.steps * recipe.batch_size * recipe.segments_per_sequence * cfg.dims.segment_length
    total = (8 if recipe.checkpoint_activations else 6) * (1.48e9, 8.19e9)[column] * tokens
    (row,) = (line.split("|") for line in page.splitlines() if line.startswith("| arithmetic of the training, 8 times"))
    assert f"{total:.0e}".replace("+", "") == row[2 + column].strip()
    assert f"| `experiment={preset}`, {tokens / 1e9:.1f} billion tokens | {shown_time(total)} |" in page
    tuned = compose([f"experiment={preset}_finetune"])
    tokens = tuned.recipe.steps * tuned.recipe.batch_size
    tokens *= tuned.recipe.segments_per_sequence * tuned.dims.segment_length
    total = 8 * (1.48e9, 8.19e9)[column] * tokens
    assert f"| `experiment={preset}_finetune`, {tokens / 1e9:.1f} billion tokens | {shown_time(total)} |" in page
    (row,) = (line.split("|") for line in page.splitlines() if line.startswith("| activations of an input"))
    kept = [float(cell.split()[0]) for cell in row[2:4]]
    assert f"come on top: {' and '.join(f'{64 * size:.0f}' for size in kept)} GB." in page


RESULTS = CONTINUAL.parents[2] / "results"


def seeds_of_rows(name: str) -> dict[str, set[str]]:
    """Row -> the seeds of its runs behind the published table."""
    report = load_report(compose([f"report={name}"]).report)
    table = (RESULTS / "tables" / f"{name}_laptop.md").read_text("utf-8")
    named = {
        row: re.findall(rf"^- {re.escape(title)}, .*$", table, re.MULTILINE) for row, title in report.titles.items()
    }
    return {row: set(re.findall(r"-(s\d+)-\w+\.json", "".join(lines))) for row, lines in named.items()}


@pytest.mark.parametrize("name", ["llm_continual", "llm_booksum", "llm_passkey", "long_context"])
def test_the_rows_without_a_run_on_the_page_are_those_of_the_table(name: str) -> None:
    """The page once said of a published row that it had no run."""
    page, seeds = CONTINUAL.read_text("utf-8"), seeds_of_rows(name)
    (line,) = re.findall(rf"^\| `infini reproduce report={name}` \|.*$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", line.split("|")[-2]) == [row for row, found in seeds.items() if not found]


@pytest.mark.parametrize("name", ["llm_continual", "llm_booksum", "llm_passkey"])
def test_the_command_of_the_page_makes_every_published_row(name: str) -> None:
    """That of the summaries left out a row that was published; the page names report.run=all where one is left out."""
    run = compose([f"report={name}"]).report["run"]
    (line,) = re.findall(rf"^\| `infini reproduce report={name}` \|.*$", CONTINUAL.read_text("utf-8"), re.MULTILINE)
    published = {row for row, seeds in seeds_of_rows(name).items() if seeds}
    assert run == "all" or published <= set(run) or "report.run=all" in line


def test_the_rows_with_three_seeds_on_the_page_are_those_of_the_table() -> None:
    page, seeds = CONTINUAL.read_text("utf-8"), seeds_of_rows("llm_continual")
    said = re.search(r"Rows with three seeds: (.*?) \(", page)
    assert said is not None
    assert re.findall(r"`(\w+)`", said[1]) == [row for row, found in seeds.items() if len(found) == 3]
    assert {len(found) for found in seeds.values()} <= {0, 1, 3}


@pytest.mark.slow
def test_the_kernels_of_the_page_are_those_that_are_started() -> None:
    """docs/how-to/continual.md estimates the time on a GPU from them. Views start none."""
    page = CONTINUAL.read_text("utf-8")
    said = re.search(r"starts ([\d,]+)\s+kernels for a training step.*? and ([\d,]+) to read one segment", page, re.S)
    assert said is not None
    smollm2 = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152,
    )  # fmt: skip
    with torch.device("meta"):
        model = PretrainedLM(inject(LlamaForCausalLM(smollm2), 512), 512)
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    with torch.no_grad(), Kernels() as reading:
        model(ids[:, :512])
    with Kernels() as training:
        loss, _ = summed_cross_entropy(model(ids).hidden_BTD, model.output_weight, torch.zeros(1, 2048).long(), 1024)
        loss.backward()
    counted = [training.count, reading.count]
    assert counted == pytest.approx([int(number.replace(",", "")) for number in said.groups()], rel=0.02)


class Kernels(TorchDispatchMode):
    """Counts the operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten._unsafe_view.default)
        return func(*args, **(kwargs or {}))


def test_the_laptops_presets_differ_in_what_they_are_named_for() -> None:
    laptop, paper, lessons = (
        compose([f"experiment={name}"]) for name in ("llm_laptop", "llm_as_in_paper", "llm_hugging_face_lessons")
    )
    assert {cfg.model["base"] for cfg in (laptop, paper, lessons)} == {"smollm2"}
    assert {cfg.dims.segment_length for cfg in (laptop, paper, lessons)} == {512}
    assert laptop.model["train"] == "lora" and {cfg.model["train"] for cfg in (paper, lessons)} == {"all"}
    assert paper.optimizer.gate_lr == paper.optimizer.lr and not paper.task.carry_state
    assert (lessons.optimizer.gate_lr, lessons.optimizer.lr) == (0.01, 3e-4)
    assert lessons.recipe.segments_per_sequence == 16
    tokens = {cfg.recipe.batch_size * cfg.recipe.segments_per_sequence for cfg in (laptop, paper, lessons)}
    assert tokens == {16}
    assert {name for name in groups()["experiment"] if name.startswith("llm_")} == {
        *PAPER, *(f"{name}_finetune" for name in PAPER), "llm_laptop", "llm_find_keys", "llm_as_in_paper",
        "llm_hugging_face_lessons",
    }  # fmt: skip
