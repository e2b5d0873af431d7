"""`infini table`, `infini figure` and `infini publish` on folders of records."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_runs import make_eval, make_train, report_settings, synthetic

from infini import records
from infini.config.compose import compose
from infini.config.schema import LoggerConfig
from infini.errors import InputError
from infini.records import RunRecord
from infini.report.figures import draw_curves, smoothed, training_curves
from infini.report.selection import Selection
from infini.runs import figure, publish, table
from infini.runs.renew import renew_figures


def fill(folder: Path, *runs: RunRecord) -> list[RunRecord]:
    """Write runs and, for evaluations, the training runs behind them."""
    for run in runs:
        records.write_record(run, folder)
        if run.verb == "eval":
            environment = {"environment": run.environment}
            records.write_record(make_train(run.model, run.seed, **environment), folder)
    return records.load_records(folder)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "published"
    monkeypatch.setattr(records, "published_dir", lambda: folder)
    return folder


@pytest.fixture
def cfg(tmp_path: Path) -> Any:
    scale, task = SimpleNamespace(name="laptop"), SimpleNamespace(name="pg19")
    return SimpleNamespace(
        report=report_settings(),
        scale=scale,
        task=task,
        results_dir=str(tmp_path / "mine"),
        full=False,
        logger=LoggerConfig("csv", None),
    )


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_table_command_prints_the_paper_where_nothing_ran(
    cfg: Any, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.run(cfg, []) == 0
    assert "11.88" in capsys.readouterr().out
    assert files(Path(cfg.results_dir)) == [f"tables/table2_lm_laptop.{suffix}" for suffix in ("csv", "md", "tex")]


def test_rows_without_a_run_are_named_in_the_short_form(
    cfg: Any, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(Path(cfg.results_dir), make_eval("infini_linear", 1))
    assert table.run(cfg, []) == 0
    assert "rows without a run, not shown: " in " ".join(capsys.readouterr().out.split())


def test_the_published_tables_stay_as_published_in_their_own_folder(cfg: Any, published: Path) -> None:
    """`results_dir=results` in a checkout: its runs were taken for the reader's, too, and the tables written so."""
    fill(published, make_eval("infini_linear", 1))
    assert table.run(cfg, []) == 0
    cfg.results_dir = str(published)
    assert table.run(cfg, []) == 0
    mine, theirs = (
        (Path(folder) / "tables" / "table2_lm_laptop.csv").read_text(encoding="utf-8")
        for folder in (published.parent / "mine", published)
    )
    assert theirs == "".join(line for line in mine.splitlines(keepends=True) if " yours," not in line)
    assert ",published," in theirs and " yours," in mine
    assert "](../runs/" in (published / "tables" / "table2_lm_laptop.md").read_text(encoding="utf-8")


def test_figure_command_draws_or_says_how_to_get_runs(cfg: Any, published: Path) -> None:
    with pytest.raises(InputError, match="infini reproduce report=table2_lm scale=laptop"):
        figure.run(cfg, ["report=table2_lm"])
    with pytest.raises(InputError, match="infini reproduce scale=laptop"):
        figure.run(cfg, [])
    fill(Path(cfg.results_dir), make_eval("infini_linear", 1), make_eval("local", 1, series={}))
    kinds = ("gates", "perplexity_by_memory")
    drawn = [f"figures/table2_lm_laptop_{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")]
    for words in (["report=table2_lm"], []):
        assert figure.run(cfg, words) == 0
        assert [name for name in files(Path(cfg.results_dir)) if name.startswith("figures")] == drawn


def test_where_nothing_is_yours_the_published_runs_are_drawn(
    cfg: Any, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(published, make_eval("infini_linear", 1))
    assert figure.run(cfg, ["report=table2_lm"]) == 0
    assert "drawn from the published ones" in capsys.readouterr().out
    assert len(files(Path(cfg.results_dir))) == 2 and not (published / "figures").exists()
    fill(Path(cfg.results_dir), make_eval("infini_linear", 2))
    assert figure.run(cfg, ["report=table2_lm"]) == 0
    assert f"table2_lm: drawn from the runs in {cfg.results_dir} alone" in capsys.readouterr().out


def test_training_curves_are_drawn_once_and_are_the_same_bytes_twice(tmp_path: Path) -> None:
    curve = [[step, 3.0 / step] for step in range(1, 301)]
    trained = make_train("infini_linear", 1, series={"loss_curve": curve, "stage_steps": [100]})
    runs = [make_eval("infini_linear", 1), make_eval("infini_linear", 1, run_id="again", parent=trained.run_id)]
    selection = Selection({"one": runs[:1], "two": runs[1:]}, {trained.run_id: trained})
    titles = {"one": "A long title", "two": "Two"}
    made = [draw_curves(selection, titles, "x", tmp_path / folder / "training") for folder in ("first", "second")]
    assert [path.suffix for path in made[0]] == [".png", ".svg"]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]
    svg = made[0][1].read_text()
    # The second row's training is the first's.
    assert "A long title" in svg and "Two" not in svg
    assert draw_curves(Selection({"one": runs[:1]}, {}), titles, "x", tmp_path / "none") == []
    step, loss = smoothed(curve)
    assert len(step) == 60 and step[0] == 3.0 and loss[0] == pytest.approx(sum(3 / n for n in range(1, 6)) / 5)


def test_a_curve_is_the_mean_of_its_trainings_and_the_title_names_the_lowest(tmp_path: Path) -> None:
    rows = {"one": (1.0, 3.0), "two": (1.5, 1.5)}
    trained = {
        row: [
            make_train(
                "local", seed, run_id=f"{row}{seed}", series={"loss_curve": [[step, loss] for step in range(60)]}
            )
            for seed, loss in enumerate(losses)
        ]
        for row, losses in rows.items()
    }
    svg = training_curves(trained, {"one": "One", "two": "Two"}, tmp_path / "training", "x")[1].read_text()
    assert "Lowest training loss at the end: Two, 1.500 nats a token (2 seeds)" in svg.replace("\n", " ")


def test_curves_of_other_recipes_are_not_ranked(tmp_path: Path) -> None:
    """A row that learned by another recipe may have a lower loss and be worse. One that learned another task than that
    of the evaluations has a loss of other tokens and is not drawn."""
    series = {"loss_curve": [[step, 2.0 + 1 / step] for step in range(1, 61)]}
    trained = {name: make_train("local", 1, run_id=name, series=series) for name in ("one", "two", "books")}
    trained["two"].config["recipe"] = {**trained["two"].config["recipe"], "name": "another"}
    trained["books"].task = "arxiv_math"
    evaluated = {name: [make_eval("local", 1, run_id=f"e-{name}", parent=name)] for name in trained}
    titles = {"one": "One", "two": "Two", "books": "Books"}
    selection = Selection(evaluated, trained)
    svg = draw_curves(selection, titles, "x", tmp_path / "training")[1].read_text()
    assert "Training loss of 2 rows, whose recipes differ" in " ".join(svg.split()) and "Books" not in svg
    alone = Selection({"books": evaluated["books"]}, trained)
    assert "Books" in draw_curves(alone, titles, "x", tmp_path / "alone")[1].read_text()


def test_only_declared_figures_are_published(cfg: Any, published: Path) -> None:
    cfg.report = {**cfg.report, "published_figures": ["gates"]}
    fill(Path(cfg.results_dir), make_eval("infini_linear", 1), make_eval("local", 1))
    assert publish.run(cfg, ["report=table2_lm"], []) == 0
    assert files(published / "figures") == ["table2_lm_laptop_gates.png"]
    cfg.report["published_figures"] = ["gate"]
    with pytest.raises(InputError, match=r"report.published_figures=\['gate'\]: null, or a list of gap_by_pos"):
        publish.run(cfg, ["report=table2_lm"], [])


def test_publish_copies_run_and_parent_and_renews_tables_and_figures(cfg: Any, published: Path) -> None:
    mine = Path(cfg.results_dir)
    fill(mine, make_eval("infini_linear", 1), make_eval("local", 1))
    assert publish.run(cfg, [], ["eval-infini_linear-1"]) == 0
    assert files(published / "runs") == ["eval-infini_linear-1.json", "train-infini_linear-1.json"]
    for name in files(published / "runs"):
        assert (published / "runs" / name).read_bytes() == (mine / "runs" / name).read_bytes()
    text = (published / "tables" / "table2_lm_laptop.md").read_text(encoding="utf-8")
    assert "[`eval-infini_linear-1`](../runs/eval-infini_linear-1.json)" in text
    assert "yours" not in text
    assert [path.suffix for path in (published / "figures").iterdir()] == [".png"]

    assert publish.run(cfg, ["report=table2_lm"], []) == 0
    assert len(files(published / "runs")) == 4
    # The gap, the gates, and perplexity by memory.
    assert len(files(published / "figures")) == 3
    before = {name: (published / name).read_bytes() for name in files(published)}
    assert publish.run(cfg, ["report=table2_lm"], []) == 0
    assert before == {name: (published / name).read_bytes() for name in files(published)}


def test_publishing_that_is_stopped_leaves_no_record_without_what_belongs_to_it(
    cfg: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Path(cfg.results_dir), make_eval("infini_linear", 1), make_eval("local", 1))
    left = records.record_path(published, "eval-local-1").with_name(".eval-local-1.json.1234abcd.tmp")
    records.write_atomically(left, b"half")
    write, order = records.write_atomically, list[str]()

    def noted(path: Path, content: bytes) -> None:
        order.append(path.name)
        write(path, content)

    monkeypatch.setattr(records, "write_atomically", noted)
    publish.run(cfg, ["report=table2_lm"], [])
    assert [name.partition("-")[0] for name in order[:4]] == ["train", "train", "eval", "eval"]
    assert not left.exists()


@pytest.mark.parametrize(
    ("dirty", "reason"), [(True, "uncommitted changes"), (None, "commit it was made from is not known")]
)
def test_publish_refuses_runs_of_unknown_code(cfg: Any, published: Path, dirty: bool | None, reason: str) -> None:
    run = make_eval("local", 1)
    run.environment["git_dirty"] = dirty
    fill(Path(cfg.results_dir), run, make_eval("full", 1))
    with pytest.raises(InputError, match=f"(eval|train)-local-1.*{reason}"):
        publish.run(cfg, [], ["eval-full-1", "eval-local-1"])
    assert not published.exists()


def test_publish_refuses_a_clean_evaluation_of_a_dirty_training(cfg: Any, published: Path) -> None:
    mine = Path(cfg.results_dir)
    fill(mine, make_eval("local", 1))
    records.write_record(make_train("local", 1, environment={"git_dirty": True}), mine)
    with pytest.raises(InputError, match="train-local-1"):
        publish.run(cfg, [], ["eval-local-1"])
    (mine / "runs" / "train-local-1.json").unlink()
    with pytest.raises(InputError, match="no run 'train-local-1'"):
        publish.run(cfg, [], ["eval-local-1"])
    assert not published.exists()


def test_publish_refuses_synthetic_unknown_and_unnamed_runs(cfg: Any, published: Path) -> None:
    fill(Path(cfg.results_dir), synthetic(make_eval("local", 1)))
    with pytest.raises(InputError, match="synthetic"):
        publish.run(cfg, [], ["eval-local-1"])
    with pytest.raises(InputError, match=r"no run 'eval-locl-1'.*did you mean 'eval-local-1'"):
        publish.run(cfg, [], ["eval-locl-1"])
    with pytest.raises(InputError, match="no run"):
        publish.run(cfg, [], ["../runs/eval-local-1"])
    with pytest.raises(InputError, match="no run and no report is named"):
        publish.run(cfg, ["scale=laptop"], [])
    assert not published.exists()


@pytest.mark.parametrize("init_from", ["made-up", "checkpoints/made-up", "somewhere/best"])
@pytest.mark.parametrize("published_alone", ["train-local-1", "eval-local-1"])
def test_publish_refuses_what_began_from_a_model_of_made_up_text(
    cfg: Any, published: Path, init_from: str, published_alone: str
) -> None:
    """An evaluation, and its training by itself."""
    fill(Path(cfg.results_dir), make_eval("local", 1))
    training = make_train("local", 1)
    training.config["init_from"] = init_from
    if init_from == "somewhere/best":
        training.environment = {**training.environment, "started_from": "made-up"}
    for record in (training, synthetic(make_train("local", 1, run_id="made-up"))):
        records.write_record(record, Path(cfg.results_dir))
    with pytest.raises(InputError, match="run made-up cannot be published: its data is synthetic"):
        publish.run(cfg, [], [published_alone])
    assert not published.exists()


@pytest.mark.parametrize("name", ["layer", "lr_search"])
def test_a_report_that_chooses_its_runs_itself_takes_none_by_name(cfg: Any, name: str) -> None:
    cfg.report = compose([f"report={name}"]).report
    with pytest.raises(InputError, match=f"^some-run: report={name} publishes its newest runs; leave the run out$"):
        publish.run(cfg, [f"report={name}"], ["some-run"])
    with pytest.raises(InputError, match="^report.title=Mine: the published table is as the project declares it"):
        publish.run(cfg, [f"report={name}", "report.title=Mine"], [])


def test_publish_refuses_runs_that_another_report_is_about(cfg: Any, published: Path) -> None:
    fill(Path(cfg.results_dir), make_eval("local", 1, task="passkey"))
    with pytest.raises(
        InputError, match="report=table2_lm is about task=pg19 or arxiv_math, not passkey; add report=.*table3_passkey"
    ):
        publish.run(cfg, [], ["eval-local-1"])
    assert not published.exists()


def test_a_corpus_that_was_made_up_keeps_no_real_one_from_being_published(cfg: Any, published: Path) -> None:
    made_up = synthetic(make_eval("local", 1, run_id="made-up", task="arxiv_math"))
    fill(Path(cfg.results_dir), make_eval("local", 1), made_up)
    publish.run(cfg, ["report=table2_lm"], [])
    assert sorted(path.stem for path in (published / "runs").iterdir()) == ["eval-local-1", "train-local-1"]


def test_claims_are_judged_before_anything_is_written(
    cfg: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> str:
        raise InputError("two runs for a cell")

    fill(Path(cfg.results_dir), make_eval("local", 1))
    with monkeypatch.context() as patch:
        patch.setattr(publish, "claims_text", failing)
        with pytest.raises(InputError, match="two runs"):
            publish.run(cfg, ["report=table2_lm"], [])
    assert not published.exists()
    publish.run(cfg, ["report=table2_lm"], [])
    assert "| Claim |" in (published / "CLAIMS.md").read_text(encoding="utf-8")


def test_a_table_of_a_folder_that_is_not_there_makes_none(cfg: Any, published: Path) -> None:
    cfg.results_dir = str(Path(cfg.results_dir) / "typo")
    with pytest.raises(InputError, match="results_dir=.*typo'?: no such folder"):
        table.run(cfg, [f"results_dir={cfg.results_dir}"])
    assert not Path(cfg.results_dir).exists()


def test_publish_refuses_a_second_run_for_a_published_cell_before_copying(cfg: Any, published: Path) -> None:
    mine = Path(cfg.results_dir)
    fill(mine, make_eval("local", 1))
    publish.run(cfg, [], ["eval-local-1"])
    before = files(published)
    fill(mine, make_eval("local", 1, 4.5, run_id="again"))
    with pytest.raises(InputError, match="(eval-local-1 and again|again and eval-local-1)"):
        publish.run(cfg, [], ["again"])
    assert files(published) == before


def test_rivals_of_one_report_stop_no_figure_of_another(
    cfg: Any, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code and a line say that one is missing; the choice that the line names draws it."""
    mine = Path(cfg.results_dir)
    rival = make_eval("memorizing", 1, 4.5, run_id="again", started="2025-01-01T00:00:00+00:00")
    fill(mine, make_eval("memorizing", 1), rival, make_eval("infini_linear", 2))
    zeros = make_train("infini_linear", 2)
    zeros.config["variant"], zeros.config["model"]["gate_init"] = "lm_gates", "zeros"
    records.write_record(zeros, mine)
    assert figure.run(cfg, []) == 2
    printed = capsys.readouterr()
    assert "lm_gates_laptop" in printed.out and "/table2_lm_laptop" not in printed.out
    why = "not drawn: table2_lm at scale laptop, memorizing: two runs for seed 1: eval-memorizing-1 and again"
    assert f"{why}; choose with report.aggregate=newest or" in printed.err
    assert figure.run(cfg, ["report.aggregate=newest"]) == 0
    printed = capsys.readouterr()
    assert "table2_lm_laptop_gates" in printed.out and not printed.err
    # For a named report it is an error, as in its table.
    with pytest.raises(InputError, match="two runs for seed 1"):
        figure.run(cfg, ["report=table2_lm"])


def test_a_choice_is_that_of_the_reports_which_have_it() -> None:
    by_choice = {
        choice: {report.name: report.aggregate for report in figure.every_report([f"report.aggregate={choice}"])}
        for choice in ("newest", "mean")
    }
    declared = {report.name: report.aggregate for report in figure.every_report([])}
    assert declared["table3_passkey"] == "largest" and declared["table2_lm"] is None
    assert by_choice["newest"] == {name: value or "newest" for name, value in declared.items()}
    assert by_choice["mean"]["table2_lm"] == "mean" and by_choice["mean"]["table4_booksum"] is None


@pytest.mark.parametrize("text", ["report.baseline=null", "report.published_figures=[gates]", "+report.lengths=[1K]"])
def test_other_keys_of_a_report_are_those_of_one(cfg: Any, published: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"report\..*: every report is drawn, .*add report=<name>"):
        figure.run(cfg, [text])


@pytest.mark.parametrize("choice", ["newest", "mean"])
def test_a_choice_on_the_command_line_publishes_no_rival_of_a_published_run(
    cfg: Any, published: Path, choice: str
) -> None:
    """Everybody makes the published table again without the choice."""
    mine = Path(cfg.results_dir)
    fill(mine, make_eval("local", 1))
    publish.run(cfg, [], ["eval-local-1"])
    before = files(published)
    fill(mine, make_eval("local", 1, 4.5, run_id="again", started="2025-01-01T00:00:00+00:00"))
    cfg.report["aggregate"] = choice
    for words, ids in (([], ["again"]), (["report=table2_lm"], [])):
        with pytest.raises(InputError, match="table2_lm: its published table is made with .*=null.*again"):
            publish.run(cfg, words, ids)
    assert files(published) == before


def test_figures_of_every_scale_are_renewed(cfg: Any, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(make_eval("local", 2), scale="gpu")
    fill(published, make_eval("local", 1), gpu)

    def draw(cfg: Any, published_dir: Path) -> None:
        records.write_atomically(Path(cfg.results_dir) / "figures" / f"new_{cfg.scale.name}.png", b"")

    monkeypatch.setattr("infini.runs.figure.draw_published", draw)
    for name in ("new_gpu.png", "stale_laptop.png"):
        records.write_atomically(published / "figures" / name, b"old")
    assert [path.name for path in renew_figures(published, published / "figures")] == ["new_gpu.png", "new_laptop.png"]
    assert files(published / "figures") == ["new_gpu.png", "new_laptop.png"]


def test_damaged_record_stops_the_table_with_its_name(cfg: Any, published: Path) -> None:
    records.write_atomically(Path(cfg.results_dir) / "runs" / "half.json", b'{"schema": 1,')
    with pytest.raises(InputError, match=r"half\.json"):
        table.run(cfg, [])


def test_publish_renews_the_published_tables_of_other_reports_that_show_the_run(cfg: Any, published: Path) -> None:
    fill(Path(cfg.results_dir), make_eval("infini_linear", 1), make_eval("local", 1))
    table2, cfg.report = cfg.report, compose(["report=lm_gates"]).report
    publish.run(cfg, [], ["eval-local-1"])
    gates, others = published / "tables" / "lm_gates_laptop.md", published / "tables" / "rmt_sweep_laptop.md"
    assert "eval-local-1" in gates.read_text() and "eval-infini_linear-1" not in gates.read_text()
    others.write_text("of runs that are not these\n")
    cfg.report = table2
    publish.run(cfg, [], ["eval-infini_linear-1"])
    assert "eval-infini_linear-1" in gates.read_text()
    # Unpublished runs give no table, and tables that show none of these runs stay.
    made = {path.stem for path in (published / "tables").glob("*.md")}
    assert made == {"lm_gates_laptop", "table2_lm_laptop", "rmt_sweep_laptop"}
    assert others.read_text() == "of runs that are not these\n"


def test_examples_that_a_record_does_not_name_are_not_published(cfg: Any, published: Path) -> None:
    """Nothing says what they should hold. Older records do not name theirs, which were published with them."""
    mine, made_up = Path(cfg.results_dir), b"made up\n"
    fill(mine, make_eval("local", 1), make_eval("full", 1))
    for record in ("eval-local-1", "train-local-1"):
        beside = mine / "runs" / f"{record}.jsonl"
        beside.write_bytes(made_up)
        with pytest.raises(InputError, match=rf"{record}\.jsonl: not named in the record of run {record}"):
            publish.run(cfg, [], ["eval-local-1"])
        beside.unlink()
    assert not published.exists()
    publish.run(cfg, [], ["eval-full-1"])
    old = published / "runs" / "eval-full-1.jsonl"
    old.write_bytes(b"an example\n")
    (mine / "runs" / old.name).write_bytes(made_up)
    publish.run(cfg, ["report=table2_lm"], [])
    assert old.read_bytes() == b"an example\n" and old.with_suffix(".json").is_file()


def test_examples_are_published_as_they_were_written_or_by_their_hash(
    cfg: Any, published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, content = Path(cfg.results_dir), b"an example\n"
    run = make_eval("local", 1)
    run.data["beside"] = {".jsonl": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    fill(mine, run)
    beside = mine / "runs" / "eval-local-1.jsonl"
    for wrong in (None, b"another\n"):
        if wrong is not None:
            beside.write_bytes(wrong)
        with pytest.raises(InputError, match=r"eval-local-1\.jsonl: not what run eval-local-1 wrote, by the SHA-256"):
            publish.run(cfg, [], ["eval-local-1"])
    assert not published.exists()
    beside.write_bytes(content)
    monkeypatch.setattr(publish, "MAX_BYTES", len(content) - 1)
    publish.run(cfg, [], ["eval-local-1"])
    copied = published / "runs" / "eval-local-1.jsonl"
    assert not copied.exists() and "eval-local-1.jsonl: not copied, because it is too large" in capsys.readouterr().err
    assert copied.with_suffix(".json").is_file()
    monkeypatch.setattr(publish, "MAX_BYTES", len(content))
    publish.run(cfg, [], ["eval-local-1"])
    assert copied.read_bytes() == content
