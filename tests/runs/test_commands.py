"""Commands from end to end: a few pages, tiny models, real files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from command_runner import Runner
from tiny_runs import DOCUMENTS

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.evaluation import perplexity
from infini.models import registered
from infini.records import RunRecord
from infini.report.tables import DASH, commit_of
from infini.runs import bench, evaluate, figure
from infini.tasks.text import document_data, document_evaluation
from infini.tasks.text import documents as text_module
from infini.tasks.text.documents import TextTokenizer, bpe_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")


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


def test_the_validation_of_a_training_reads_documents_in_batches(
    infini: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory must not grow with the number of documents: it would end a training after its last step."""
    rows: list[int] = []
    real = document_data.stream_documents

    def reading(model: Any, documents: Any, *args: Any, **options: Any) -> Any:
        rows.append(len(documents.n_tokens))
        return real(model, documents, *args, **options)

    monkeypatch.setattr(document_data, "stream_documents", reading)
    infini("train")
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 1)
    infini("train")
    assert rows == [DOCUMENTS["validation"]] + [1] * DOCUMENTS["validation"]
    together, alone = (run.metric("validation_nll_per_token") for run in infini.records())
    assert alone == pytest.approx(together, rel=1e-6)


def test_a_record_tells_what_was_typed_and_no_place_of_the_source(with_model: Runner, project_root: Path) -> None:
    (run,) = with_model.records()
    assert run.command.startswith("infini train dims.d_model=16 ")
    assert run.overrides[0] == "dims.d_model=16"
    assert run.config["dims"]["d_model"] == 16
    ran = {key: run.environment[key] for key in ("threads", "device", "bfloat16")}
    assert ran == {"threads": 1, "device": "cpu", "bfloat16": False}, "as parallel.precision=fp32 says"
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
    assert "perplexity" in out
    assert "reset_delta: how much the loss rises when the memory is emptied before every segment" in out
    assert "foreign_delta: how much the loss rises when every segment reads the memory of another document" in out
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
    for series in ("nll_by_position", "nll_by_place"):
        assert sum(sum(row) for row in run.series[series]["nll"]) == pytest.approx(total, abs=0.1)
    assert run.series["nll_by_place"]["edges"][-1] == run.config["dims"]["segment_length"]
    for knock in ("reset", "foreign"):
        cost = sum(entry[f"nll_{knock}"] - entry[f"nll_{knock}_base"] for entry in run.documents)
        tokens = sum(entry[f"{knock}_tokens"] for entry in run.documents)
        assert run.metric(f"{knock}_delta") == pytest.approx(cost / tokens, abs=1e-9)


def test_an_evaluation_of_books_that_was_stopped_reads_only_what_is_missing(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 2)
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
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 1)
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
    assert "is a checkpoint of infini_linear; add model=infini_linear" in message


def test_eval_of_a_checkpoint_that_is_not_there(with_model: Runner) -> None:
    (run,) = with_model.records()
    message = with_model.error("eval", f"checkpoint={run.run_id[:-1]}x")
    assert message.startswith("checkpoint=") and run.run_id in message
    assert "neither a folder nor a run id" in message
    assert with_model.error("eval", "checkpoint=''") == "checkpoint='': must be a run id or a folder, or null"
    (records.published_dir() / "runs").mkdir(parents=True)
    (records.published_dir() / "runs" / "shown.json").touch()
    message = with_model.error("eval", "checkpoint=shown")
    assert "checkpoint='shown': published runs have no weights; no checkpoint in " in message


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


def test_an_evaluation_reads_the_folder_of_the_training_unless_another_is_named(
    with_model: Runner, corpus: Path
) -> None:
    assert with_model.error("eval", "task.data_dir=null").startswith("no data for pg19")
    with_model.settings = [text for text in with_model.settings if not text.startswith("task.data_dir=")]
    with_model("eval")
    assert f"data: {corpus}, as the training; task.data_dir= names another" in with_model.err
    assert with_model.records()[-1].config["task"]["data_dir"] == str(corpus)


def test_a_task_that_asks_any_model_says_where_it_was_trained_on_another(with_model: Runner) -> None:
    (trained,) = with_model.records("train")
    said = "checkpoint: was trained on task=pg19, so its answers are zero-shot"
    words = ["task=passkey", f"checkpoint={trained.run_id}", "length=2K", "depth=start", "task.examples=1"]
    with_model("eval", *words)
    assert said in with_model.err.splitlines()
    with_model("eval")
    assert "zero-shot" not in with_model.err
    with_model.error("eval", "task=arxiv_math", f"checkpoint={trained.run_id}")
    assert "zero-shot" not in with_model.err


@pytest.fixture
def of_hub(infini: Runner, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """No data folder, and a hub whose data sets all have the texts of `corpus`, in rows named after the data set."""

    def load_dataset(hub_id: str, split: str, streaming: bool) -> Any:
        paths = sorted((corpus / split).iterdir())
        rows = [{"text": path.read_text("utf-8"), "url": f"{hub_id}-{path.stem}"} for path in paths]
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for module in ("infini.runs.common", "infini.tasks.text.hub"):
        monkeypatch.setattr(f"{module}.reachable", lambda: True)
    infini.settings = [text for text in infini.settings if not text.startswith("task.data_dir=")]
    return infini


def test_an_evaluation_reads_the_data_set_of_the_training_unless_another_is_named(of_hub: Runner, corpus: Path) -> None:
    of_hub("train", "task.hub_id=me/my_books")
    said = "data: me/my_books of the hub, as the training; task.hub_id= names another"
    for words, folder, read in (
        ([], None, "my_books-test0"),
        (["task.data_dir=null"], None, "my_books-test0"),
        (["task.hub_id=me/others"], None, "others-test0"),
        ([f"task.data_dir={corpus}"], str(corpus), "test0"),
    ):
        of_hub("eval", *words)
        (run,) = (run for run in of_hub.records("eval") if run.documents[0]["name"] == read)
        assert run.config["task"]["data_dir"] == folder
        assert (said in of_hub.err) == (read == "my_books-test0"), words
        (of_hub.results / "runs" / f"{run.run_id}.json").unlink()


def test_a_data_set_that_is_named_is_read_in_place_of_the_folder_of_the_training(of_hub: Runner, corpus: Path) -> None:
    of_hub("train", f"task.data_dir={corpus}")
    of_hub("eval", "task.hub_id=me/others")
    assert of_hub.records("eval")[0].documents[0]["name"] == "others-test0"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(46532968448.0, "46,532,968,448"), (9999.5, "9999.5000"), (-0.25, "-0.2500"), (None, DASH), (float("inf"), DASH)],
)
def test_large_numbers_are_printed_for_readers(value: float | None, shown: str) -> None:
    assert evaluate._shown(value) == shown


def test_a_training_that_has_ended_is_named_before_it_is_trained_once_more(with_model: Runner) -> None:
    (run,) = with_model.records()
    with_model("train")
    assert f"trained before: {run.run_id}; this trains the same model once more (infini eval" in with_model.err
    assert " parameters on cpu, 1 thread, matrix products in float32" in with_model.err
    with_model("train", "seed=2")
    assert "trained before" not in with_model.err


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


def remove_record(infini: Runner, run: RunRecord, data: Path) -> None:
    records.record_path(infini.results, run.run_id).unlink()


def remove_model(infini: Runner, run: RunRecord, data: Path) -> None:
    shutil.rmtree(infini.checkpoint(run))


def rewrite_texts(infini: Runner, run: RunRecord, data: Path) -> None:
    path = data / str(run.data["split"]) / f"{run.data['split']}0.txt"
    path.write_text(path.read_text("utf-8").upper() + " more", "utf-8")


def remove_texts(infini: Runner, run: RunRecord, data: Path) -> None:
    shutil.rmtree(data)


CHANGES = [("train", None), ("train", rewrite_texts), ("eval", remove_record)]
MORE_CHANGES = [
    *(("train", change) for change in (remove_record, remove_texts, remove_model)),
    *(("eval", change) for change in (None, rewrite_texts, remove_texts)),
]


@pytest.mark.parametrize(
    ("verb", "change"), [*CHANGES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_CHANGES)]
)
def test_a_sweep_passes_over_jobs_whose_results_and_data_are_there(
    with_model: Runner,
    corpus: Path,
    tmp_path: Path,
    verb: str,
    change: Callable[[Runner, RunRecord, Path], None] | None,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    with_model.settings = [text for text in with_model.settings if not text.startswith("task.data_dir=")]
    # The second job fails, so that the sweep is not at its end.
    if verb == "train":
        line = ["train", "-m", f"task.data_dir={data}", "recipe.batch_size=2,3", "parallel.accumulate=2"]
    else:
        # Its data is what the training names.
        with_model("train", f"task.data_dir={data}")
        line = ["eval", "-m", f"checkpoint={with_model.records('train')[-1].run_id},none"]
    with_model.error(*line)
    run = with_model.records(verb)[-1]
    if change is not None:
        change(with_model, run, data)
    with_model.error(*line)
    again = [other.run_id for other in with_model.records(verb) if other.started > run.started]
    assert len(again) == (change not in (None, remove_texts))
    assert ("done before" in with_model.out) == (change is None)


def test_a_sweep_evaluates_the_model_that_is_the_newest_now(with_model: Runner) -> None:
    """A job that finished with the model before it is not done."""
    line = ["eval", "-m", "seed=1,2"]
    with_model.error(*line)
    with_model("train", "optimizer.lr=0.01")
    # The second job fails, so that the sweep is not at its end.
    for again in (False, True):
        with_model.error(*line)
        assert ("done before" in with_model.out) is again
        parents = [run.parent for run in with_model.records("eval")]
        assert parents == [run.run_id for run in with_model.records("train")]


def test_a_sweep_with_a_wrong_value_trains_nothing(infini: Runner) -> None:
    assert "model='infini'" in infini.error("train", "-m", "model=infini_linear,infini")
    assert infini.records() == []


def test_init_from_goes_on_with_the_model_that_was_trained(with_model: Runner) -> None:
    """Weights also fit a model with another activation, scale of its scores or number of heads."""
    (run,) = with_model.records("train")
    start, still = f"init_from={run.run_id}", ["optimizer.lr=1e-9", "recipe.warmup_steps=0"]
    usual = run.config["model"]["attention_scale"]
    other = next(each for each in ("d_key", "d_model") if each != usual)
    with_model("train", start, *still, f"model.attention_scale={other}")
    changed = with_model.records("train")[-1].run_id
    said = with_model.error("train", f"init_from={changed}", *still)
    assert said == (
        f"init_from={changed!r}: was trained with model.attention_scale={other}, this training has {usual}; add "
        f"model.attention_scale={other}, or model.attention_scale={usual} to change it"
    )


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


def test_a_record_names_the_run_that_a_training_started_from(with_model: Runner, tmp_path: Path) -> None:
    """The checkpoint itself names it; its folder may have any name."""
    (run,) = with_model.records()
    shutil.copytree(with_model.checkpoint(run), tmp_path / "best")
    for start in (run.run_id, str(with_model.checkpoint(run)), str(tmp_path / "best")):
        with_model("train", f"init_from={start}", "seed=5")
    for other in with_model.records()[1:]:
        assert other.started_from == run.run_id
    assert run.started_from is None
    # A record of an older version knows the name of the folder.
    del other.environment["started_from"]
    assert other.started_from == "best"


def test_every_language_model_is_measured() -> None:
    """Decoding is timed for all of them, and so is a training step."""
    # A pretrained model has sizes of its own.
    every = set(registered("language_model")) - {"llm"}
    for suite in ("models", "decode", "paper_models"):
        assert set(compose([f"suite={suite}"]).suite.models) == every


def test_bench_writes_a_record(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    trained = ["infini_linear", "local"]
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
    # The products run on the processor, in its own format.
    assert set(run.series["agreement"]) == set(trained)
    assert all(error < 0.05 for error in run.series["agreement"].values())
    # Four matrices of 16 x 16 and two of 16 x 32; with the output's (4,096 tokens) thrice in a training step.
    layers, output = 4 * 16 * 16 + 2 * 16 * 32, 4096 * 16
    rate = steps["local"]["tokens_per_second"]
    assert steps["local"]["share_of_peak"] == pytest.approx(3 * 2 * (layers + output) * rate / 1e12)
    streams = run.series["stream"]["models"]
    rate = float(np.median(streams["local"]["tokens_per_second"]["256"]))
    assert streams["local"]["share_of_peak"]["256"] == pytest.approx(2 * layers * rate / 1e12)
    assert set(streams) == set(trained) and streams["local"]["rate_to_local"] == 1.0
    for entry in streams.values():
        assert entry["state_bytes"]["64"] == entry["state_bytes"]["256"] > 0
        for per_part in (entry["tokens_per_second"], entry["peak_growth_bytes"]):
            assert {length: len(values) for length, values in per_part.items()} == {"64": 4, "256": 4}
        assert entry["ratio"] == sorted(entry["ratio"]) and entry["ratio"][0] > 0
    decoded = run.series["decode"]["models"]
    assert set(decoded) == set(trained) and decoded["local"]["milliseconds_to_local"] == 1.0
    spent = decoded["local"]["milliseconds"][1][1] / 1000
    assert decoded["local"]["share_of_peak"][1] == pytest.approx(2 * layers / spent / 1e12)
    for entry in decoded.values():
        # Both texts end where a segment does.
        assert entry["tokens_before"] == [32, 112]
        assert entry["ratio"] == sorted(entry["ratio"]) and entry["ratio"][0] > 0
        assert all(len(quartiles) == 3 and quartiles[0] > 0 for quartiles in entry["milliseconds"])
    for name in (*trained, "parameters", "state bytes", "ms a token"):
        assert name in out
    message = infini.error("bench", "suite.repeats=0", "suite.stream_tokens=0", "suite.decode_tokens=0")
    assert message == "suite.repeats=0: must be above 0: nothing else is measured" and len(infini.records()) == 1


@pytest.mark.slow
def test_longer_training_sequences_are_measured_and_drawn(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    models = ["local", "infini_delta"]
    out = infini(
        "bench",
        "suite=lengths",
        "suite.training_segments=[8,4]",
        "suite.training_group=2",
        f"suite.models=[{','.join(models)}]",
    )
    assert "of 2 segments" in out
    (run,) = infini.records()
    measured = run.series["training_lengths"]
    assert (measured["group"], measured["batch_size"]) == (2, run.config["recipe"]["batch_size"])
    assert set(measured["models"]) == set(models)
    for ways in measured["models"].values():
        for way in ("all", "grouped"):
            assert set(ways[way]) == {"4", "8"}
            assert all(one["seconds"] > 0 and one["peak_bytes"] >= 0 for one in ways[way].values())
    # Not by the verb, which would draw all reports.
    cfg = compose([f"results_dir={infini.results}"])
    sources = [infini.results]
    _, *paths = figure._draw_bench("lengths", cfg, sources)
    png, svg = map(Path, paths)
    assert (png.name, svg.name) == ("training_memory_laptop.png", "training_memory_laptop.svg")
    text = svg.read_text(encoding="utf-8")
    assert "Linear + Delta, all kept" in text and "Local attention, 2 segments" in text and models[1] not in text
    before = png.read_bytes(), svg.read_bytes()
    figure._draw_bench("lengths", cfg, sources)
    assert (png.read_bytes(), svg.read_bytes()) == before
    for wrong in ("[0]", "[true]", "[x]"):
        message = infini.error("bench", "suite=lengths", f"suite.training_segments={wrong}")
        assert "suite.training_segments" in message


def test_an_evaluation_has_the_tokenizer_of_its_checkpoint(infini: Runner) -> None:
    """The evaluation also says so, whatever the scale's own vocabulary is."""
    infini("train", "scale.vocab_size=290")
    infini.settings = [word for word in infini.settings if not word.startswith("scale.vocab_size")]
    infini("eval")
    (run,) = infini.records("eval")
    assert run.config["scale"]["vocab_size"] == 290 and "bpe-290" in run.data["tokenizer"]
    assert infini.error("eval", "scale.vocab_size=280") == ("scale.vocab_size=280: the checkpoint was trained with 290")


def test_an_evaluation_that_went_on_at_another_commit_says_so(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 2)
    real = document_evaluation.stream_documents
    state = ("a" * 40, False)
    monkeypatch.setattr(records, "git_state", lambda root: state)

    def reading(model: Any, documents: Any, *arguments: Any, **options: Any) -> Any:
        if state[0] == "a" * 40 and documents.chosen == [0]:
            raise KeyboardInterrupt
        return real(model, documents, *arguments, **options)

    monkeypatch.setattr(document_evaluation, "stream_documents", reading)
    with_model("eval", code=cli.INTERRUPTED)
    state = ("b" * 40, False)
    with_model("eval")
    mixed = with_model.records("eval")[-1]
    assert mixed.environment["git_revisions"] == ["a" * 40, "b" * 40] and mixed.environment["git_dirty"]
    assert f"{mixed.run_id} was started at another commit" in with_model.err
    assert commit_of(mixed) == f"{'a' * 12} and {'b' * 12}, started at one and ended at another"
    with_model("eval")
    straight = with_model.records("eval")[-1]
    assert "git_revisions" not in straight.environment and not straight.environment["git_dirty"]
    assert "another commit" not in with_model.err
    said = f"run {mixed.run_id} cannot be published: it was made at more than one commit"
    assert with_model.error("publish", mixed.run_id) == said


def test_what_is_made_from_made_up_text_says_so(infini: Runner, tmp_path: Path) -> None:
    made_up = "task.data_dir=synthetic"
    infini("train", made_up)
    assert "(made-up text)" in infini.err
    assert "measured on made-up text: it shows that this runs, and nothing else" in infini(
        "eval", made_up, "scale.eval_max_tokens=64"
    )
    infini("generate", made_up, "prompt=once", "decoding.max_new_tokens=2")
    assert "(trained on made-up text: it shows that this runs, and nothing else) continues" in infini.err
