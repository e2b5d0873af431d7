"""The search for learning rates: as many runs for every model, no best rate at the edge, files that name their runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import environment_of, installed_copy
from report_runs import make_train

from infini import records
from infini.cli.main import main
from infini.config.compose import compose, config_hash
from infini.errors import DivergedError, InputError
from infini.records import RunRecord
from infini.report.load import load_report
from infini.report.search import SearchReport, at_the_edge, best_rate, build_search, next_rate, tuned_yaml
from infini.report.text_report import Report
from infini.runs import search
from infini.runs import train as train_command


def run(loss: float | None, model: str = "rmt", metric: str = "validation_nll_per_token") -> RunRecord:
    made = make_train(model, 1, run_id=f"{model}-{loss}")
    made.results = {metric: {"value": loss, "n": 1}}
    return made


def diverged() -> RunRecord:
    made = make_train("rmt", 1, run_id="rmt-diverged")
    made.results, made.diverged = {}, {"step": 7, "reason": "the loss at step 7 is nan"}
    return made


def test_the_best_rate_is_known_when_every_rate_was_tried() -> None:
    assert best_rate({0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)}) == 0.2
    assert best_rate({0.1: run(4.0), 0.2: None}) is None
    # A training that went wrong is no candidate.
    assert best_rate({0.1: run(None), 0.2: run(3.0)}) == 0.2
    assert best_rate({0.1: run(None), 0.2: run(None)}) is None


def test_a_search_for_summaries_goes_by_the_loss_on_the_validation_books() -> None:
    report = load_report(compose(["report=summary_rates"]).report)
    assert isinstance(report, SearchReport) and report.task == "booksum"
    found = {rate: run(loss, "bart", "validation_summary_nll") for rate, loss in {0.1: 6.0, 0.2: 5.0, 0.4: 7.0}.items()}
    assert best_rate(found) == 0.2
    (table,) = build_search(report, "laptop", {"booksum": {"bart": found}}).tables
    assert table.cell("bart", "0.2").text == "5.0000*" and table.cell("bart", "Best").text == "0.2"


def test_the_grid_grows_beyond_its_better_edge() -> None:
    assert at_the_edge({0.1: run(4.0), 0.2: run(3.0)}) and not at_the_edge(
        {0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)}
    )
    assert next_rate({0.1: run(4.0), 0.2: run(3.0)}, 2.0) == 0.4
    assert next_rate({0.1: run(3.0), 0.2: run(4.0)}, 2.0) == 0.05
    assert next_rate({0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)}, 2.0) == 0.05
    assert next_rate({0.1: run(4.0), 0.2: run(3.0), 0.4: diverged()}, 3.0) == pytest.approx(0.1 / 3, rel=1e-5)
    assert next_rate({0.1: run(4.0), 0.2: None}, 2.0) is None


def test_a_file_of_the_best_rate_is_a_configuration_that_names_its_runs() -> None:
    text = tuned_yaml({0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)})
    assert text is not None and text.startswith("# @package _global_\n")
    assert yaml.safe_load(text) == {"optimizer": {"lr": 0.2}}
    assert "# 0.2: 3.0000 (rmt-3.0)" in text
    assert tuned_yaml({0.2: run(3.0), 0.4: run(5.0), 0.1: run(4.0)}) == text, (
        "by rate, in whichever order they were tried"
    )
    assert tuned_yaml({0.1: None}) is None
    assert tuned_yaml({0.1: run(2.0), 0.2: run(3.0), 0.4: run(5.0)}) is None, "the best may lie beyond the edge"


def test_the_table_marks_the_lowest_and_says_what_is_at_the_edge() -> None:
    report = load_report(compose(["report=lr_search"]).report)
    assert isinstance(report, SearchReport)
    found: dict[str, dict[str, dict[float, RunRecord | None]]] = {
        "pg19": {
            "rmt": {0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)},
            "local": {0.1: run(2.0, "local"), 0.2: run(3.0, "local"), 0.4: None},
            "full": {0.1: run(2.0, "full"), 0.2: run(3.0, "full"), 0.4: run(4.0, "full")},
        }
    }
    (table,) = build_search(report, "laptop", found).tables
    assert table.cell("rmt", "0.2").text == "3.0000*" and table.cell("rmt", "Best").text == "0.2"
    assert table.cell("local", "0.4").origin == "missing"
    assert table.cell("local", "Best").text == "0.1 (at the edge, so far)"
    assert table.cell("full", "Best").text == "0.1 (at the edge)"
    assert table.cell("rmt", "0.4").run_ids == ("rmt-5.0",)


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of published records of its own: the project's are of real searches."""
    folder = tmp_path_factory.mktemp("published")
    monkeypatch.setattr(records, "published_dir", lambda: folder)
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The trainings so far: (model, rate). RMT's loss falls up to a rate of 0.04, that of the others up to 0.01."""
    done: list[tuple[str, float]] = []

    def train(cfg: Any, overrides: list[str]) -> RunRecord:
        model, rate = cfg.model["name"], cfg.optimizer.lr
        done.append((model, rate))
        best = 0.04 if model == "rmt" else 0.01
        made = run(4.0 + abs(rate - best), model)
        made.run_id = f"{model}-{len(done)}"
        made.config = compose_config(overrides)
        made.config_hash = config_hash(cfg)
        records.write_record(made, cfg.results_dir)
        return made

    monkeypatch.setattr("infini.runs.train.train", train)
    # There are no texts, so earlier trainings count as trained on today's.
    monkeypatch.setattr(search, "newest_on_the_data", lambda cfg, runs, split: next(reversed(runs), None))
    return done


def compose_config(overrides: list[str]) -> dict[str, Any]:
    return asdict(compose(overrides))


WORDS = ["report=lr_search", "task=pg19", "report.models=[rmt,local]"]


def test_every_model_gets_as_many_runs_and_a_second_search_none(
    trained: list[tuple[str, float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"results_dir={tmp_path}"]
    assert main(["reproduce", *words]) == 0
    # Five until RMT's best is inside its grid, and as many for the other, beyond its better edge.
    rates = {"rmt": [0.005, 0.01, 0.02, 0.04, 0.08], "local": [0.00125, 0.0025, 0.005, 0.01, 0.02]}
    assert sorted(trained) == sorted((model, rate) for model in rates for rate in rates[model])
    assert "4.0000*" in capfd.readouterr().out
    assert yaml.safe_load((tmp_path / "tuned" / "pg19_laptop_rmt_muon.yaml").read_text()) == {"optimizer": {"lr": 0.04}}
    assert yaml.safe_load((tmp_path / "tuned" / "pg19_laptop_local_muon.yaml").read_text()) == {
        "optimizer": {"lr": 0.01}
    }
    assert main(["reproduce", *words]) == 0
    assert len(trained) == 10
    assert "0.08" in capfd.readouterr().out


def test_a_training_of_the_search_is_one_of_the_table_unless_it_is_told_otherwise(
    trained: list[tuple[str, float]], tmp_path: Path
) -> None:
    """So the best of them is the table's own, and is not trained again."""
    table = compose(["task=pg19", "model=rmt", "optimizer.lr=0.01", "tuned=null"])
    for words, steps in (([], table.recipe.steps), (["recipe.steps=300"], 300)):
        results = tmp_path / str(steps)
        assert main(["reproduce", *WORDS, *words, "report.most=3", f"results_dir={results}"]) == 0
        found = records.load_records(results)
        assert {run.config["recipe"]["steps"] for run in found} == {steps}
        assert (config_hash(table) in {config_hash(run.config) for run in found}) == (not words)


@pytest.mark.slow
def test_a_search_may_be_about_other_sizes_and_leaves_the_usual_rates_alone(
    trained: list[tuple[str, float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["report=segment_rates", "task=pg19", "report.models=[local]", "report.most=3", f"results_dir={tmp_path}"]
    assert main(["reproduce", *words]) == 0
    assert trained == [("local", 0.0025), ("local", 0.005), ("local", 0.01)]
    configs = [run.config for run in records.load_records(tmp_path)]
    assert {(found["dims"]["segment_length"], found["variant"]) for found in configs} == {(256, "segment_lengths")}
    assert "at the edge" in capfd.readouterr().err and not (tmp_path / "tuned").exists()
    assert main(["reproduce", *words[:3], "report.most=4", f"results_dir={tmp_path}"]) == 0
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == ["pg19_laptop_local_muon_segment_rates.yaml"]
    assert "the rate of rows with these settings" in capfd.readouterr().err
    own = [*words[:2], "report.models=[infini_linear]", "report.most=3", f"results_dir={tmp_path}"]
    assert main(["reproduce", *own]) == 0
    gates = [run.config["model"]["gate_init"] for run in records.load_records(tmp_path) if run.model == "infini_linear"]
    assert gates == ["local"] * 3
    # A training of the search is that of the row which has its rate.
    segments = load_report(compose(["report=segment_lengths"]).report)
    assert isinstance(segments, Report)
    settings = segments.settings_of("local_256", "laptop")
    assert settings is not None
    row = compose(["task=pg19", "model=local", *settings, "optimizer.lr=0.01"])
    assert config_hash(row) in {run.config_hash for run in records.load_records(tmp_path)}
    assert main(["reproduce", *words, "scale=gpu"]) == 2
    assert "scale=gpu: report=segment_rates is of scale=laptop" in capfd.readouterr().err


def test_a_grid_that_may_not_grow_says_so(
    trained: list[tuple[str, float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *WORDS, "report.most=3", f"results_dir={tmp_path}"]) == 0
    assert len(trained) == 6
    assert "pg19, rmt: the best of 3 rates is still at the edge: no file for conf/tuned" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == ["pg19_laptop_local_muon.yaml"]
    # An earlier search's file no longer has the best of this one.
    stale = tmp_path / "tuned" / "pg19_laptop_rmt_muon.yaml"
    stale.write_text("optimizer:\n  lr: 0.01\n")
    assert main(["reproduce", *WORDS, "report.most=3", f"results_dir={tmp_path}"]) == 0
    assert not stale.exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("report.rates=[0.1]", r"report.rates=\[0.1\]: must be two rates above 0, or more"),
        ("report.rates=[0.1,0.3,0.2]", "must ascend"),
        ("report.rates=0.01", "report.rates=0.01: must be two rates above 0, or more"),
        ("report.factor=1", "report.factor=1.*: must be above 1"),
        ("report.factor=abc", "report.factor='abc': must be above 1"),
        ("report.most=1", "report.most=1: must be at least the 2 rates"),
        ("+report.settings=[a]", r"report.settings=\['a'\]: must be {scale: "),
        ("+report.model_settings={rmt: a}", r"report.model_settings={'rmt': 'a'}: must be {model: "),
        ("+report.settings={laptop: [a]}", r"report.settings={'laptop': \['a'\]}: must be {scale: "),
    ],
)
def test_what_is_wrong_is_one_line(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_report(compose(["report=lr_search", override]).report)


def test_a_rate_that_diverges_is_no_candidate_and_stops_nothing(
    trained: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    below = train_command.train

    def diverging(cfg: Any, overrides: list[str]) -> RunRecord:
        made = below(cfg, overrides)
        if cfg.model["name"] == "rmt" and cfg.optimizer.lr > 0.03:
            made.results, made.diverged = {}, {"step": 7, "reason": "the loss is not finite"}
            records.write_record(made, cfg.results_dir)
            raise DivergedError("it went wrong", 7, made)
        return made

    monkeypatch.setattr("infini.runs.train.train", diverging)
    assert main(["reproduce", *WORDS, f"results_dir={tmp_path}"]) == 0
    text = (tmp_path / "tuned" / "pg19_laptop_rmt_muon.yaml").read_text()
    assert yaml.safe_load(text) == {"optimizer": {"lr": 0.02}} and "# 0.04: the loss is not finite (" in text
    # The table knows the failure, and so does a search that is started again.
    assert main(["table", *WORDS, f"results_dir={tmp_path}"]) == 0
    assert "failed" in capfd.readouterr().out
    done = len(trained)
    monkeypatch.setattr("infini.runs.train.train", below)
    assert main(["reproduce", *WORDS, f"results_dir={tmp_path}"]) == 0
    (failed,) = (made for made in records.load_records(tmp_path) if made.diverged)
    path = records.record_path(tmp_path, failed.run_id)
    said = " ".join(capfd.readouterr().err.split())
    assert len(trained) == done and "optimizer.lr=0.04: the loss is not finite; try a lower optimizer.lr. " in said
    assert f"To rerun with this rate, remove {path}" in said
    # If its record is removed, it is tried again.
    path.unlink()
    assert main(["reproduce", *WORDS, f"results_dir={tmp_path}"]) == 0
    assert ("rmt", 0.04) in trained[done:]


def test_publishing_one_tasks_search_leaves_the_others_in_the_table(
    trained: list[tuple[str, float]], tmp_path: Path, published: Path
) -> None:
    for task in ("arxiv_math", "pg19"):
        words = ["report=lr_search", f"task={task}", "report.models=[local]", f"results_dir={tmp_path / task}"]
        assert main(["reproduce", *words]) == 0 and main(["publish", *words]) == 0
    table = (published / "tables" / "lr_search_laptop.md").read_text(encoding="utf-8")
    assert "PG19: validation loss" in table and "Arxiv-math: validation loss" in table
    assert len(set(re.findall(r"runs/(\S+?)\.json", table))) == len(trained)


@pytest.mark.slow
def test_a_search_is_published_with_its_table_and_shown_where_nothing_was_run(
    trained: list[tuple[str, float]], tmp_path: Path, published: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"results_dir={tmp_path}"]
    assert main(["publish", *words]) == 2
    assert f"{tmp_path}: no runs of lr_search at scale laptop to publish" in capfd.readouterr().err
    assert main(["reproduce", *words]) == 0
    assert main(["publish", *words]) == 0
    runs = sorted(path.stem for path in (published / "runs").glob("*.json"))
    assert len(runs) == len(trained) == 10
    table = (published / "tables" / "lr_search_laptop.md").read_text(encoding="utf-8")
    assert r"4.0000\*" in table and all(f"(../runs/{name}.json)" in table for name in runs) and "yours" not in table
    capfd.readouterr()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["table", *WORDS, f"results_dir={empty}"]) == 0
    assert "4.0000*" in capfd.readouterr().out
    changed = records.load_records(tmp_path)[0]
    changed.results["validation_nll_per_token"]["value"] = 1.0
    records.write_record(changed, tmp_path)
    before = (published / "runs" / f"{changed.run_id}.json").read_bytes()
    assert main(["publish", *words]) == 2
    assert f"run {changed.run_id} is already published with different content" in capfd.readouterr().err
    assert (published / "runs" / f"{changed.run_id}.json").read_bytes() == before
    # Published is not made: a reproduction on another machine trains its own.
    assert main(["reproduce", *WORDS, f"results_dir={empty}"]) == 0
    assert len(trained) == 20


def test_other_mistakes_stop_a_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(cfg: Any, overrides: list[str]) -> RunRecord:
        raise InputError("no data for pg19")

    monkeypatch.setattr("infini.runs.train.train", failing)
    assert main(["reproduce", *WORDS, f"results_dir={tmp_path}"]) == 2


def test_the_seed_that_is_named_is_the_one_that_is_trained(
    trained: list[tuple[str, float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "report.most=3", f"results_dir={tmp_path}"]
    assert main(["reproduce", *words, "seed=7"]) == 0
    assert {run.config["seed"] for run in records.load_records(tmp_path)} == {7}
    assert main(["reproduce", *words, "seed=7,8"]) == 2
    assert "seed=7,8: a search uses one seed" in capfd.readouterr().err


def test_a_tuned_rate_is_of_one_optimizer(project_root: Path, tmp_path: Path) -> None:
    copied = installed_copy(project_root, tmp_path, ignore=("tuned",)) / "infini" / "conf"
    (copied / "tuned").mkdir()
    text = tuned_yaml({0.1: run(4.0), 0.2: run(3.0), 0.4: run(5.0)})
    assert text is not None
    (copied / "tuned" / "pg19_laptop_rmt_muon.yaml").write_text(text)
    code = "import sys; from infini.config.compose import compose\n"
    code += "for w in sys.argv[1:]: print(compose(w.split()).optimizer.lr)"
    words = ["model=rmt", "model=local", "model=rmt optimizer=adamw", "model=rmt optimizer.lr=0.5"]
    call = [sys.executable, "-c", code, *words]
    # It starts there, because the working folder comes before all others.
    environment = environment_of(tmp_path)
    found = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0.2", "0.01", "0.004", "0.5"]


def test_another_task_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "report=lr_search", "task=passkey", f"results_dir={tmp_path}"]) == 2
    assert "task=passkey: report=lr_search is about task=pg19 or arxiv_math" in capfd.readouterr().err


def test_at_paper_scale_it_is_the_papers_search_and_no_rate_is_refused(
    trained: list[tuple[str, float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.01 is interior where 0.03 was trained too: torch's Adafactor, which caps the rate, could not be."""
    words = ["report=lr_search", "task=pg19", "scale=paper", "report.models=[local]", f"results_dir={tmp_path}"]
    words.append("parallel.accelerator=cpu")
    assert main(["reproduce", *words]) == 0
    assert trained == [("local", rate) for rate in (0.003, 0.005, 0.01, 0.03)]
    tuned = tmp_path / "tuned" / "pg19_paper_local_adafactor.yaml"
    assert yaml.safe_load(tuned.read_text()) == {"optimizer": {"lr": 0.01}}
    report = load_report(compose(["report=lr_search", "report.rates=[0.1,0.2,0.3]", "scale=paper"]).report)
    assert isinstance(report, SearchReport) and report.rates == [0.1, 0.2, 0.3], "the command line has the last word"


def test_losses_on_other_texts_are_not_of_this_search(
    trained: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["report=lr_search", "task=pg19", "report.models=[local]", f"results_dir={tmp_path}"]
    assert main(["reproduce", *words]) == 0 and len(trained) == 3
    monkeypatch.setattr(search, "newest_on_the_data", lambda cfg, runs, split: None)
    assert main(["reproduce", *words]) == 0 and len(trained) == 6, "of texts that are others now"
    newest = next(run for run in records.load_records(tmp_path) if run.config["optimizer"]["lr"] == 0.005)
    newest.run_id, newest.data["revision"], newest.started = "newest", "other", "2100-01-01T00:00:00Z"
    records.write_record(newest, tmp_path)
    capfd.readouterr()
    assert main(["table", *words]) == 0
    out = capfd.readouterr().out
    assert all(text in out for text in ("4.0000", "4.0050", "4.0100"))
    assert "1 training on other texts left out" in out


def test_the_runs_that_tuned_rates_rest_on_are_published() -> None:
    root = Path(__file__).parents[2]
    named = [
        run_id
        for path in (root / "conf" / "tuned").glob("*.yaml")
        for run_id in re.findall(r"\((\d{8}T\d{6}Z-train-[\w-]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert named
    assert [run_id for run_id in named if not (root / "results" / "runs" / f"{run_id}.json").is_file()] == []
