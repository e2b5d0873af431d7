"""Tables that are filled by one command, gone on with, and published."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_runner import Runner
from rich.console import Console

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import DivergedError
from infini.records import RunRecord
from infini.runs import reproduce, reproduce_text
from infini.runs.common import find_training
from infini.runs.workers import Worker
from infini.tasks.text import documents as text_module

MODELS = ["transformer_xl", "compressive", "memorizing", "rmt", "autocompressor"]
MODELS += ["infini_linear", "infini_delta", "local", "full"]

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")


def test_reproduce_fills_the_table_once(infini: Runner) -> None:
    out = infini("reproduce")
    assert [run.model for run in infini.records("train")] == MODELS
    assert {run.parent for run in infini.records("eval")} == {run.run_id for run in infini.records("train")}
    for label in ("Infini-Transformer (Linear + Delta)", "Local attention only", "Full attention", "RMT"):
        assert label in out
    assert (infini.results / "tables").is_dir()
    assert infini("reproduce") == out
    assert len(infini.records()) == 2 * len(MODELS)
    two = ["rmt", "infini_delta"]
    infini("reproduce", f"model={','.join(two)}", "seed=1,2")
    assert sorted((run.model, run.seed) for run in infini.records("eval")) == sorted(
        [*((model, 1) for model in MODELS), *((model, 2) for model in two)]
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
        reproduce_text,
        "_fill",
        lambda cfg, *_: cells.append((cfg.seed, cfg.task.name, cfg.recipe.name, cfg.model["name"])),
    )
    monkeypatch.setattr(reproduce.table, "show", lambda *_: 0)
    assert cli.main(["reproduce", "report=table2_lm", "seed=1,2", *words]) == 0
    expected = [(seed, task, f"{task}_laptop", model) for seed in (1, 2) for task in tasks for model in MODELS]
    assert cells == expected


def test_a_cell_that_diverges_leaves_the_others_to_be_filled(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pg19").symlink_to(corpus)
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path))
    cells = []

    def fill(cfg: Any, *_: Any) -> None:
        cells.append(cfg.model["name"])
        if cfg.model["name"] == "rmt":
            raise DivergedError("optimizer.lr=0.02: the loss at step 7 is nan")

    monkeypatch.setattr(reproduce_text, "_fill", fill)
    monkeypatch.setattr(reproduce.table, "show", lambda *_: 0)
    assert cli.main(["reproduce", "report=table2_lm", "task=pg19"]) == 2
    assert cells == MODELS
    said = capfd.readouterr().err
    assert "optimizer.lr=0.02: the loss at step 7 is nan" in said
    assert "infini: error: optimizer.lr: too high for pg19, RMT, seed 1; the other cells are filled" in said


def test_a_corpus_that_is_not_there_is_gone_without_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pg19").symlink_to(corpus)
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path / "data"))
    cells = []
    monkeypatch.setattr(reproduce_text, "_fill", lambda cfg, *_: cells.append(cfg.task.name))
    monkeypatch.setattr(reproduce.table, "show", lambda *_: 0)
    assert cli.main(["reproduce", "report=table2_lm"]) == 0
    assert cells == ["pg19"] * len(MODELS)
    assert "arxiv_math: no such folder; continuing without" in capfd.readouterr().err
    assert cli.main(["reproduce", "report=table2_lm", "task=arxiv_math"]) == cli.USAGE_ERROR
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(
        f"infini: error: INFINI_DATA_DIR='{tmp_path}/data': {tmp_path}/data/arxiv_math/train does not"
    )
    assert set(cells) == {"pg19"}, "where it is named, its absence is an error"


@pytest.mark.slow
def test_an_experiment_fills_its_own_rows_and_no_other_tables(infini: Runner) -> None:
    # Length extension needs three segments.
    words = ["reproduce", "experiment=lm_history_scaling", "recipe.segments_per_sequence=3"]
    out = infini(*words)
    trained = infini.records("train")
    extended = [run.config["recipe"]["length_extension"] for run in trained]
    assert [run.model for run in trained] == ["infini_linear"] * 2 + ["infini_delta"] * 2 + ["local"]
    assert extended == [None, 100.0, None, 100.0, None]
    assert [run.config["variant"] for run in trained] == [made and "lm_history_scaling" for made in extended]
    usual, lengthened = (next(run for run in infini.records("eval") if run.parent == trained[i].run_id) for i in (0, 1))
    names = ("lm_history_scaling", "table2_whole", "table2_lm")
    for name in names[1:]:
        infini("table", f"report={name}")
    own, whole, table2 = (infini.results / "tables" / f"{name}_laptop.md" for name in names)
    assert {usual.run_id, lengthened.run_id} <= set(re.findall(r"[\w-]+-eval-[\w-]+", own.read_text()))
    assert usual.run_id in whole.read_text() and lengthened.run_id not in whole.read_text()
    assert usual.run_id not in table2.read_text(), "it was read to the end of the documents"
    assert "gap_by_position.png" in infini("figure", "experiment=lm_history_scaling")
    assert infini(*words) == out and len(infini.records()) == 10
    shutil.rmtree(infini.results / "checkpoints")
    assert infini(*words) == out and len(infini.records()) == 10


@pytest.mark.parametrize("dirty", [True, False, None])
def test_uncommitted_changes_are_reported_before_the_runs(
    monkeypatch: pytest.MonkeyPatch, infini: Runner, dirty: bool | None
) -> None:
    monkeypatch.setattr(records, "git_state", lambda root: ("0" * 40, dirty))
    monkeypatch.setattr(reproduce_text, "_fill", lambda cfg, overrides, console: None)
    monkeypatch.setattr(reproduce.table, "show", lambda *_: 0)
    infini("reproduce")
    assert ("cannot be published" in infini.err) == bool(dirty)


@pytest.mark.slow
def test_a_stopped_reproduction_goes_on(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = reproduce.evaluate

    def interrupted(cfg: Any, *arguments: Any) -> RunRecord:
        if cfg.model["name"] == "infini_delta":
            raise KeyboardInterrupt
        return evaluate(cfg, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "evaluate", interrupted)
        infini("reproduce", code=130)
    assert "finished runs are recorded" in infini.err
    done = [(run.verb, run.model) for run in infini.records()]
    begun = MODELS[: MODELS.index("infini_delta") + 1]
    assert done == [(verb, name) for name in begun for verb in ("train", "eval")][:-1]
    infini("reproduce")
    assert len(infini.records()) == 2 * len(MODELS)
    assert infini.err.count("trained before") == len(begun)


@pytest.mark.slow
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
    assert published == {run.run_id, str(run.parent)} and "fills no cell" not in infini.err
    said = infini.error("publish", run.run_id, "scale=gpu")
    assert said == "scale=gpu: runs that are named have a scale of their own; leave it out, or name no run"
    infini("publish", run.run_id, "report=rmt_sweep")
    assert infini.err == f"{run.run_id}: published, but it fills no cell of report=rmt_sweep\n"
    assert "Infini-Transformer (Linear)" in infini("table")


@pytest.mark.parametrize(("split", "again"), [("train", ["train", "eval"]), ("test", ["eval"])])
def test_what_was_made_of_other_texts_is_made_again(
    infini: Runner, corpus: Path, tmp_path: Path, split: str, again: list[str]
) -> None:
    own = tmp_path / "corpus"
    shutil.copytree(corpus, own)
    words = [*infini.settings, f"task.data_dir={own}", "model=local"]

    def fill() -> list[str]:
        reproduce_text._fill(compose(words), words, Worker(Console(quiet=True)))
        return [run.verb for run in infini.records()]

    assert fill() == fill() == ["train", "eval"]
    changed = own / split / f"{split}0.txt"
    changed.write_text(changed.read_text(encoding="utf-8") + " and an end", encoding="utf-8")
    assert fill() == fill() == ["train", "eval", *again]
    assert len({run.data["revision"] for run in infini.records(again[0])}) == 2


def test_what_was_trained_as_a_variant_is_not_taken_for_the_model_as_it_is(with_model: Runner) -> None:
    (run,) = with_model.records()
    cfg = compose(with_model.settings)
    found = find_training(cfg)
    assert found is not None and found.run_id == run.run_id
    run.config["variant"] = "table2_100k"
    records.write_record(run, with_model.results)
    assert find_training(cfg) is None
    assert find_training(replace(cfg, variant="lm_gates")) is None
    found = find_training(replace(cfg, variant="table2_100k"))
    assert found is not None and found.run_id == run.run_id


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+report.models.locl=Local"], "report.models: row 'locl' is no model, .*; did you mean 'local'"),
        (
            ["+report.models.mine=Mine", "+report.variants.mine={model:locl,settings:{laptop:['seed=1']}}"],
            "report.variants.mine.model='locl': must be one of .*; did you mean 'local'",
        ),
        (
            ["+report.models.mine=Mine", "+report.variants.mine={model:local,settings:{labtop:['seed=1']}}"],
            "report.variants.mine.settings='labtop': must be one of .*; did you mean 'laptop'",
        ),
    ],
    ids=["row", "model", "scale"],
)
@pytest.mark.parametrize("verb", [["reproduce", "plan=true"], ["table"]], ids=["reproduce", "table"])
def test_a_row_that_nothing_could_fill_is_one_line(
    infini: Runner, verb: list[str], words: list[str], said: str
) -> None:
    """It was left out, as a row that is only quoted from the paper is."""
    assert re.match(said, infini.error(*verb, "report=table2_lm", *words))


@pytest.mark.parametrize(("words", "hint"), [([], True), (["task=pg19"], False)])
def test_a_report_whose_yaml_chooses_no_task_says_what_to_add(infini: Runner, words: list[str], hint: bool) -> None:
    own = ["report=table2_lm", "report.task=arxiv_math", "~report.benchmarks.pg19"]
    line = infini.error("reproduce", *own, "plan=true", *words)
    assert line.startswith("task=pg19: report=table2_lm is about task=arxiv_math")
    assert line.endswith("; add task=arxiv_math, or choose it in the defaults of conf/report/table2_lm.yaml") == hint
