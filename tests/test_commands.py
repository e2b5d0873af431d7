"""Commands from end to end: a few pages, tiny models, real files."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import DOCUMENTS, TINY, write_corpus

import cli
from infini import records
from infini.commands import bench, reproduce
from infini.precision import has_fast_bfloat16
from infini.records import RunRecord
from tasks import document_evaluation
from tasks import text as text_module
from tasks.text import TextTokenizer, bpe_tokenizer

MODELS = ["transformer_xl", "memorizing", "rmt", "infini_linear", "infini_delta", "local", "full"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the checkout, whose published results are not these tests' business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "published_dir", lambda: tmp_path / "published")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second between runs: several of these end within one, which is how finely records tell their times."""
    minutes = itertools.count()
    monkeypatch.setattr(records, "utc_now", lambda: f"2100-01-01T00:{next(minutes):02d}:00Z")


class Runner:
    """Runs command lines on a corpus and a results folder; `error` is for those that must fail with one line."""

    def __init__(self, corpus: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.results, self.capfd = results, capfd
        self.settings = [*TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}"]
        self.out = self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        self.capfd.readouterr()
        returned = cli.main([words[0], *self.settings, *words[1:]])
        self.out, self.err = self.capfd.readouterr()
        assert returned == code, self.err
        return self.out

    def error(self, *words: str) -> str:
        self(*words, code=2)
        lines = [line for line in self.err.splitlines() if line.startswith("infini: error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err
        assert self.err.splitlines()[-1] == lines[0]
        return lines[0].removeprefix("infini: error: ")

    def records(self, verb: str | None = None) -> list[RunRecord]:
        return [run for run in records.load_records(self.results) if verb in (None, run.verb)]

    def checkpoint(self, run: RunRecord) -> Path:
        return self.results / "checkpoints" / run.run_id

    def weights(self, run: RunRecord) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(run) / "model.safetensors")


@pytest.fixture
def infini(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(corpus, tmp_path / "results", capfd)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one training, made once; tests work on a copy."""
    results = tmp_path_factory.mktemp("trained")
    assert cli.main(["train", *TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}"]) == 0
    return results


@pytest.fixture
def with_model(infini: Runner, trained: Path) -> Iterator[Runner]:
    shutil.copytree(trained, infini.results)
    yield infini


def test_train_writes_record_and_checkpoint(with_model: Runner, corpus: Path) -> None:
    (run,) = with_model.records()
    assert (run.verb, run.task, run.model, run.scale) == ("train", "pg19", "infini_linear", "laptop")
    assert (run.seed, run.parent) == (1, None)
    assert [step for step, _ in run.series["loss_curve"]] == [1, 2, 3]
    assert run.data["source"] == "folder" and run.data["split"] == "train"
    assert run.data["documents"] == DOCUMENTS["train"]
    assert run.data["bytes"] == sum(path.stat().st_size for path in (corpus / "train").iterdir())
    assert run.cost["tokens_seen"] == 3 * 2 * 2 * 16
    assert run.cost["parameters"] == sum(tensor.numel() for tensor in with_model.weights(run).values())
    assert run.cost["state_floats"] == 2 * 8 * 9
    assert run.metric("validation_nll_per_token") == pytest.approx(5.7, abs=0.4)
    names = sorted(path.name for path in with_model.checkpoint(run).iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not list(with_model.results.glob("unfinished/*/*"))


def test_a_record_tells_what_was_typed_and_no_place_of_the_source(with_model: Runner, project_root: Path) -> None:
    (run,) = with_model.records()
    assert run.command.startswith("infini train dims.d_model=16 ")
    assert run.overrides[0] == "dims.d_model=16"
    assert run.config["dims"]["d_model"] == 16
    ran = {key: run.environment[key] for key in ("threads", "device", "bfloat16")}
    assert ran == {"threads": 1, "device": "cpu", "bfloat16": has_fast_bfloat16(torch.device("cpu"))}
    assert str(project_root) not in json.dumps(run.environment)
    for part in (run.data, run.cost, run.results, run.series, run.documents):
        assert str(project_root) not in json.dumps(part)
        assert str(with_model.results.parent) not in json.dumps(part)


def test_gates_are_in_the_records(with_model: Runner) -> None:
    with_model("eval")
    train, evaluation = with_model.records("train")[0], with_model.records("eval")[0]
    beta = with_model.weights(train)["blocks.0.attention.beta"]
    for run in (train, evaluation):
        torch.testing.assert_close(torch.tensor(run.series["gates"][0]), torch.sigmoid(beta))


def test_eval_takes_the_newest_matching_run_and_says_which(with_model: Runner) -> None:
    with_model("train", "seed=2")
    with_model("train", "model=local", "seed=3")
    first, newest, local = with_model.records("train")
    out = with_model("eval")
    assert f"evaluating {newest.run_id} on {DOCUMENTS['test']} documents" in with_model.err
    assert "perplexity" in out and "reset_delta" in out and "foreign_delta" in out
    with_model("eval", "seed=1")
    with_model("eval", f"checkpoint={first.run_id}")
    with_model("eval", f"checkpoint={with_model.checkpoint(newest)}")
    with_model("eval", "model=local")
    assert [run.parent for run in with_model.records("eval")] == [
        newest.run_id,
        first.run_id,
        first.run_id,
        newest.run_id,
        local.run_id,
    ]


def test_an_evaluation_scores_the_test_split(with_model: Runner, corpus: Path) -> None:
    with_model("eval")
    (run,) = with_model.records("eval")
    assert run.data["split"] == "test"
    texts = {path.stem: path.read_text() for path in (corpus / "test").iterdir()}
    assert [entry["name"] for entry in run.documents] == sorted(texts)
    assert [entry["words"] for entry in run.documents] == [len(texts[name].split()) for name in sorted(texts)]
    assert [entry["bytes"] for entry in run.documents] == [len(texts[name]) for name in sorted(texts)]
    total = sum(entry["nll"] for entry in run.documents)
    assert run.metric("nll_per_token") == pytest.approx(total / sum(entry["tokens"] for entry in run.documents))
    assert sum(sum(row) for row in run.series["nll_by_position"]["nll"]) == pytest.approx(total, abs=0.1)
    for knock in ("reset", "foreign"):
        cost = sum(entry[f"nll_{knock}"] - entry[f"nll_{knock}_base"] for entry in run.documents)
        tokens = sum(entry[f"{knock}_tokens"] for entry in run.documents)
        assert run.metric(f"{knock}_delta") == pytest.approx(cost / tokens, abs=1e-9)


def test_an_evaluation_of_books_that_was_stopped_reads_only_what_is_missing(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_evaluation, "TOGETHER", 2)
    with_model("eval")
    (straight,) = with_model.records("eval")
    read: list[Any] = []
    real = document_evaluation.stream_documents
    stop_at = 4

    def reading(model: Any, documents: Any, *arguments: Any, **options: Any) -> Any:
        if len(read) == stop_at:
            raise KeyboardInterrupt
        read.append([documents.chosen, options["reset_every"]])
        return real(model, documents, *arguments, **options)

    monkeypatch.setattr(document_evaluation, "stream_documents", reading)
    with_model("eval", code=cli.INTERRUPTED)
    stop_at = 100
    with_model("eval")
    # Three documents, longest first, two at a time; each pass goes over both groups once, in whichever sitting.
    assert read == [[group, reset] for reset in (None, 16, None) for group in ([2, 1], [0])]
    resumed = with_model.records("eval")[-1]
    assert resumed.cost["resumed"] and not straight.cost["resumed"]
    assert resumed.results == straight.results and resumed.documents == straight.documents
    assert resumed.series == straight.series
    assert not list((with_model.results / "unfinished").glob("*"))


def test_books_read_in_groups_are_the_books_read_together(with_model: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model("eval")
    monkeypatch.setattr(document_evaluation, "TOGETHER", 1)
    with_model("eval")
    together, alone = with_model.records("eval")
    for name, result in together.results.items():
        assert alone.results[name]["value"] == pytest.approx(result["value"], rel=1e-5, abs=1e-6)
        assert alone.results[name]["n"] == result["n"]
    assert alone.series["nll_by_position"]["edges"] == together.series["nll_by_position"]["edges"]
    assert alone.series["nll_by_position"]["tokens"] == together.series["nll_by_position"]["tokens"]


def test_eval_max_tokens_shortens_every_document(with_model: Runner) -> None:
    with_model("eval", "scale.eval_max_tokens=40")
    (run,) = with_model.records("eval")
    assert [entry["tokens"] for entry in run.documents] == [40] * DOCUMENTS["test"]
    assert run.results["perplexity"]["n"] == 40 * DOCUMENTS["test"]


def test_eval_without_a_model(infini: Runner) -> None:
    assert "no trained model for task=pg19 model=infini_linear scale=laptop" in infini.error("eval")
    assert infini.records() == []


def test_eval_of_another_model(with_model: Runner) -> None:
    (run,) = with_model.records()
    message = with_model.error("eval", "model=local", f"checkpoint={run.run_id}")
    assert "holds infini_linear; add model=infini_linear" in message


def test_eval_of_a_checkpoint_that_is_not_there(with_model: Runner) -> None:
    (run,) = with_model.records()
    message = with_model.error("eval", f"checkpoint={run.run_id[:-1]}x")
    assert message.startswith("checkpoint=") and run.run_id in message
    assert "neither a folder nor a run id" in message


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_description(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def other_tokenizer(folder: Path) -> None:
    documents = text_module.Documents("x", "train", "folder", "r", ["x"], ["abc abcd abcde " * 50].__getitem__)
    bpe_tokenizer(documents, 262, folder / "cache").save(folder / "tokenizer.json")
    assert TextTokenizer.load(folder / "tokenizer.json").vocab_size == 262


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors"),
        (remove_description, "config.json"),
        (remove_tokenizer, "tokenizer"),
        (break_tokenizer, "tokenizer"),
        (other_tokenizer, "tokenizer"),
    ],
)
def test_eval_of_a_damaged_checkpoint(with_model: Runner, damage: Callable[[Path], None], named: str) -> None:
    (run,) = with_model.records()
    damage(with_model.checkpoint(run))
    assert named in with_model.error("eval")
    assert with_model.records("eval") == []


def test_an_evaluations_record_describes_the_model_that_was_evaluated(with_model: Runner) -> None:
    """Whatever the command line's defaults are: tables pair runs by seed, and a reader goes by the sizes."""
    with_model("train", "seed=2")
    sizes = [text for text in with_model.settings if text.startswith(("dims.", "recipe."))]
    message = with_model.error("eval", "dims.d_model=128")
    assert "dims.d_model=128" in message and "16" in message
    with_model.settings = [text for text in with_model.settings if text not in sizes]
    with_model("eval")
    trained, (run,) = with_model.records("train")[-1], with_model.records("eval")
    assert run.parent == trained.run_id
    assert (run.seed, run.config["seed"]) == (2, 2)
    assert run.config["dims"] == trained.config["dims"]


def test_missing_data_is_one_line(infini: Runner, tmp_path: Path) -> None:
    message = infini.error("train", f"task.data_dir={tmp_path / 'nowhere'}")
    assert str(tmp_path / "nowhere") in message and "{train,validation,test}/*.txt" in message
    assert "INFINI_DATA_DIR" in infini.error("train", "task.data_dir=null")


def test_a_sweep_makes_a_record_for_each_combination(infini: Runner) -> None:
    infini("train", "-m", "model=infini_linear,infini_delta", "seed=1,2")
    runs = infini.records()
    assert [(run.model, run.seed) for run in runs] == [
        ("infini_linear", 1),
        ("infini_linear", 2),
        ("infini_delta", 1),
        ("infini_delta", 2),
    ]
    assert len({run.config_hash for run in runs}) == 4
    assert all(infini.checkpoint(run).is_dir() for run in runs)
    for run in runs:
        assert {f"model={run.model}", f"seed={run.seed}"} <= set(run.overrides)


def test_a_sweep_with_a_wrong_value_trains_nothing(infini: Runner) -> None:
    assert "model='infini'" in infini.error("train", "-m", "model=infini_linear,infini")
    assert infini.records() == []


def test_reproduce_fills_the_table_once(infini: Runner) -> None:
    out = infini("reproduce")
    assert [run.model for run in infini.records("train")] == MODELS
    assert {run.parent for run in infini.records("eval")} == {run.run_id for run in infini.records("train")}
    for label in ("Infini-Transformer (Linear + Delta)", "Local attention only", "Full attention", "RMT"):
        assert label in out
    assert (infini.results / "tables").is_dir()
    assert infini("reproduce") == out
    assert len(infini.records()) == 2 * len(MODELS)
    infini("reproduce", "seed=1,2")
    assert sorted((run.model, run.seed) for run in infini.records("eval")) == sorted(
        (model, seed) for model in MODELS for seed in (1, 2)
    )


@pytest.mark.parametrize(
    ("words", "tasks"),
    [([], ["pg19", "arxiv_math"]), (["task=arxiv_math"], ["arxiv_math"]), (["task.data_dir=synthetic"], ["pg19"])],
)
def test_reproduce_runs_every_task_of_the_report_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, words: list[str], tasks: list[str]
) -> None:
    for task in ("pg19", "arxiv_math"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / task).symlink_to(corpus)
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path / "data"))
    cells = []
    monkeypatch.setattr(
        reproduce, "_fill", lambda cfg, *_: cells.append((cfg.seed, cfg.task.name, cfg.recipe.name, cfg.model["name"]))
    )
    monkeypatch.setattr(reproduce.table, "run", lambda *_: 0)
    assert cli.main(["reproduce", "report=table2_lm", "seed=1,2", *words]) == 0
    expected = [(seed, task, f"{task}_laptop", model) for seed in (1, 2) for task in tasks for model in MODELS]
    assert cells == expected


def test_a_corpus_that_is_not_there_is_gone_without_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pg19").symlink_to(corpus)
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path / "data"))
    cells = []
    monkeypatch.setattr(reproduce, "_fill", lambda cfg, *_: cells.append(cfg.task.name))
    monkeypatch.setattr(reproduce.table, "run", lambda *_: 0)
    assert cli.main(["reproduce", "report=table2_lm"]) == 0
    assert cells == ["pg19"] * len(MODELS)
    assert "arxiv_math: no such folder; going on without" in capfd.readouterr().err.replace("\n", "")
    assert cli.main(["reproduce", "report=table2_lm", "task=arxiv_math"]) == 0
    assert set(cells) == {"pg19", "arxiv_math"}, "where it is named, its absence is the training's to say"


def test_a_stopped_reproduction_goes_on(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = reproduce.evaluate

    def interrupted(cfg: Any, *arguments: Any) -> RunRecord:
        if cfg.model["name"] == "infini_delta":
            raise KeyboardInterrupt
        return evaluate(cfg, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "evaluate", interrupted)
        infini("reproduce", code=130)
    assert "runs that had finished kept their records" in infini.err
    done = [(run.verb, run.model) for run in infini.records()]
    begun = MODELS[: MODELS.index("infini_delta") + 1]
    assert done == [(verb, name) for name in begun for verb in ("train", "eval")][:-1]
    infini("reproduce")
    assert len(infini.records()) == 2 * len(MODELS)
    assert infini.err.count("trained before") == len(begun)


def test_reproduce_trains_again_what_has_lost_its_model(with_model: Runner) -> None:
    (run,) = with_model.records()
    shutil.rmtree(with_model.checkpoint(run))
    with_model("reproduce")
    assert [run.model for run in with_model.records("train")] == ["infini_linear", *MODELS]


def test_without_data_reproduce_goes_on_with_a_labelled_synthetic_corpus(
    infini: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(split: str) -> text_module.Documents:
        texts = [f"The {word} of the {split} corpus. " * 40 for word in ("first", "second", "third")]
        return text_module.Documents("synthetic", split, "synthetic", split, list("abc"), texts.__getitem__)

    monkeypatch.setattr(text_module, "synthetic_documents", small)
    monkeypatch.setattr(records, "git_state", lambda root: ("0" * 40, False))
    # Set while the command runs, to be undone after it.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = infini("reproduce", "task.data_dir=null")
    assert "SYNTHETIC" in infini.err and "INFINI_DATA_DIR" in infini.err
    assert "synthetic" in out.lower()
    assert len(infini.records()) == 2 * len(MODELS)
    assert all(run.synthetic for run in infini.records())
    infini("reproduce", "task.data_dir=null")
    assert len(infini.records()) == 2 * len(MODELS)
    assert len({run.config_hash for run in infini.records()}) == len(MODELS)
    for run in infini.records("eval"):
        assert "its data is synthetic" in infini.error("publish", run.run_id)


@pytest.mark.parametrize(
    ("state", "reason"),
    [((None, None), "the commit it was made from is not known"), (("0" * 40, True), "uncommitted changes")],
    ids=["none", "dirty"],
)
def test_publish_refuses_what_cannot_be_repeated(
    infini: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: tuple[Any, Any], reason: str
) -> None:
    monkeypatch.setattr(records, "git_state", lambda root: state)
    infini("train")
    infini("eval")
    (run,) = infini.records("eval")
    assert reason in infini.error("publish", run.run_id)
    assert not (tmp_path / "published").exists()


def test_publish_copies_what_can_be_repeated(infini: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "git_state", lambda root: ("0" * 40, False))
    infini("train")
    infini("eval")
    (run,) = infini.records("eval")
    infini("publish", run.run_id)
    published = {path.stem for path in (tmp_path / "published" / "runs").iterdir()}
    assert published == {run.run_id, str(run.parent)}
    assert "Infini-Transformer (Linear)" in infini("table")


def test_init_from_starts_with_those_weights(with_model: Runner) -> None:
    (run,) = with_model.records()
    # A rate so small that nothing moves.
    still = ["optimizer.lr=1e-30", "optimizer.gate_lr=1e-30", "optimizer.weight_decay=0", "seed=5"]
    with_model("train", f"init_from={run.run_id}", *still)
    with_model("train", f"init_from={with_model.checkpoint(run)}", *still)
    _, by_id, by_folder = with_model.records()
    before = with_model.weights(run)
    for other in (by_id, by_folder):
        after = with_model.weights(other)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert other.config_hash != run.config_hash
    assert "model.safetensors" in with_model.error("train", f"init_from={run.run_id}", "dims.d_ff=48")
    assert "nowhere" in with_model.error("train", "init_from=nowhere")


def test_bench_writes_a_record(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    trained = ["local", "infini_linear", "memorizing", "rmt"]
    decode = ["suite.decode_tokens=5", "suite.decode_short_tokens=20", "suite.decode_long_tokens=100"]
    asked = [f"suite.models=[{','.join(trained)}]", "suite.agreement_tokens=20"]
    out = infini("bench", *asked, "suite.repeats=2", "suite.stream_short_tokens=64", "suite.stream_tokens=256", *decode)
    (run,) = infini.records()
    assert run.verb == "bench"
    steps = run.series["train"]["models"]
    assert set(steps) == set(trained)
    assert steps["local"]["ratio_to_local"][1] == 1.0
    # 2 layers of 2 heads: 8 x 9 for a memory; vectors of 16; see tiny_runs.
    floats = {name: entry["state_floats"] for name, entry in steps.items()}
    assert floats["local"] == 0 and floats["infini_linear"] == 2 * 8 * 9
    assert all(entry["parameters"] > 0 for entry in steps.values())
    # On the processor itself, in its own format.
    assert set(run.series["agreement"]) == set(trained)
    assert all(error < 0.05 for error in run.series["agreement"].values())
    streams = run.series["stream"]["models"]
    for entry in streams.values():
        assert entry["state_bytes"]["64"] == entry["state_bytes"]["256"] > 0
        for per_part in (entry["tokens_per_second"], entry["peak_growth_bytes"]):
            assert {length: len(values) for length, values in per_part.items()} == {"64": 4, "256": 4}
        assert entry["ratio"] == sorted(entry["ratio"]) and entry["ratio"][0] > 0
    decoded = run.series["decode"]["models"]
    assert set(decoded) == set(bench.DECODED)
    for name, entry in decoded.items():
        # Both texts end where a segment does; the window of `full` is two segments.
        assert entry["tokens_before"] == ([32, 128] if name == "full" else [32, 112])
        assert entry["ratio"] == sorted(entry["ratio"]) and entry["ratio"][0] > 0
        assert all(len(quartiles) == 3 and quartiles[0] > 0 for quartiles in entry["milliseconds"])
    for name in (*bench.DECODED, *trained, "parameters", "state bytes", "ms a token"):
        assert name in out
    infini("bench", "suite.repeats=0", "suite.stream_tokens=0", "suite.decode_tokens=0")
    assert set(infini.records()[-1].series) == {"matrix_product_flops", "matrix_product_format"}
