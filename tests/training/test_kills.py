"""Runs whose process is killed, at named moments and at random ones, end as if they had not been."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import killed
import pytest
from killed import server
from tiny_runs import STEPS, outcome, words

from infini import records
from infini.cli import main as cli
from infini.training.module import LanguageModelModule
from infini.training.resume import UnfinishedRun


def run(moment: str, when: float, arguments: list[str], verb: str = "train") -> tuple[int, str]:
    """Exit code and output of a process that kills itself at that moment, or ends because it never came to it."""
    given, taken = server().stdin, server().stdout
    assert given is not None and taken is not None
    with tempfile.NamedTemporaryFile() as output:
        asked = {"moment": moment, "when": when, "words": [verb, *arguments], "output": output.name}
        print(json.dumps({**asked, "environment": dict(os.environ), "folder": str(Path.cwd())}), file=given, flush=True)
        code = int(taken.readline())
        said = Path(output.name).read_text(encoding="utf-8")
    assert code in (0, -signal.SIGKILL), said
    return code, said


def kill(moment: str, occurrence: int, arguments: list[str]) -> int:
    """The exit code alone."""
    return run(moment, occurrence, arguments)[0]


def killed_and_finished(arguments: list[str], moments: list[tuple[str, int]]) -> Counter[str]:
    """Kill a training at these moments, one process after the other, then let it end; how often each was hit."""
    hit: Counter[str] = Counter()
    for moment, occurrence in moments:
        if kill(moment, occurrence, arguments) == 0:
            return hit
        hit[moment] += 1
    assert kill("in a step", 10**6, arguments) == 0
    return hit


@pytest.mark.slow
def test_killed_while_it_saves(corpus: Path, tmp_path: Path) -> None:
    # It also runs in a process of its own, because other threads change the last bits.
    assert kill("in a step", 10**6, words(corpus, tmp_path / "straight")) == 0
    moments = [("before a point's rename", 2), ("in the weights' write", 1), ("before the record", 1)]
    hit = killed_and_finished(words(corpus, tmp_path / "killed"), moments)
    assert sum(hit.values()) == len(moments)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


def test_ctrl_c_behind_the_last_step_says_where_it_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("infini.runs.train.save_model", stopped)
        assert cli.main(["train", *words(corpus, tmp_path)]) == cli.INTERRUPTED
    assert "stopped after the last step: the same command resumes from there" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", stopped)
        assert cli.main(["train", *words(corpus, tmp_path)]) == 0
    assert len(outcome(tmp_path)[0]) == STEPS


def answers(results: Path) -> list[dict[str, Any]]:
    """The entry of every example in the newest evaluation below `results`, without what differs from run to run."""
    newest = [found for found in records.load_records(results) if found.verb == "eval"][-1]
    beside = records.record_path(results, newest.run_id).with_suffix(".jsonl").read_text()
    told = ("name", "key", "answer", "right", "log_probability", "prompt_tokens")
    return [{key: entry[key] for key in told} for entry in map(json.loads, beside.splitlines())]


@pytest.mark.slow
def test_an_evaluation_that_is_killed_asks_the_remaining_prompts(corpus: Path, tmp_path: Path) -> None:
    asked = [*words(corpus, tmp_path / "results", "passkey"), "length=256", "depth=start,end", "task.examples=3"]
    asked.remove("logger=none")
    assert kill("in a step", 10**6, words(corpus, tmp_path / "results", "passkey")) == 0
    assert run("before the record", 10**6, asked, "eval")[0] == 0
    straight = answers(tmp_path / "results")
    assert len(straight) == 6
    (record,) = (tmp_path / "results" / "runs").glob("*-eval-*.json")
    for path in (record, record.with_suffix(".jsonl")):
        path.unlink()
    for moment, occurrence in zip(killed.OF_EVALUATIONS, (1, 3, 1, 1, 1), strict=True):
        code, errors = run(moment, occurrence, asked, "eval")
        assert code == -signal.SIGKILL, (moment, errors)
    code, errors = run("before the record", 10**6, asked, "eval")
    assert code == 0 and "(6 were answered before)" in errors
    assert answers(tmp_path / "results") == straight
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.mark.slow
def test_an_evaluation_of_books_that_is_killed_resumes(corpus: Path, tmp_path: Path) -> None:
    """Killed before the result of a pass is written, and in the middle of its line, in every pass but the last."""
    asked = [*words(corpus, tmp_path / "results"), "scale.eval_segments_per_call=16"]
    asked.remove("logger=none")
    assert kill("in a step", 10**6, words(corpus, tmp_path / "results")) == 0
    assert run("before the record", 10**6, asked, "eval")[0] == 0
    (straight,) = (found for found in records.load_records(tmp_path / "results") if found.verb == "eval")
    records.record_path(tmp_path / "results", straight.run_id).unlink()
    # Passes: read, foreign, reset, base. A process first repeats the pass in which the one before it was killed.
    for moment, occurrence in (
        ("before an answer is kept", 1),
        ("in an answer's line", 1),
        ("before an answer is kept", 2),
        ("in an answer's line", 2),
        ("before answers are dropped", 1),
    ):
        assert run(moment, occurrence, asked, "eval")[0] == -signal.SIGKILL, (moment, occurrence)
        records_left = [found for found in records.load_records(tmp_path / "results") if found.verb == "eval"]
        for record in records_left:
            records.record_path(tmp_path / "results", record.run_id).unlink()
    assert run("before the record", 10**6, asked, "eval")[0] == 0
    (resumed,) = (found for found in records.load_records(tmp_path / "results") if found.verb == "eval")
    assert resumed.cost["resumed"] and resumed.documents == straight.documents
    assert resumed.results == straight.results and resumed.series == straight.series
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


def said(errors: str, what: str) -> str:
    """The text of a process's line after `what`."""
    return errors.partition(f"\n{what}: ")[2].partition("\n")[0]


def has_ended(results: Path) -> bool:
    """Whether the training below `results` has its record, and another sitting would begin another training."""
    begun = [json.loads(path.read_text()) for path in results.glob("unfinished/*/run.json")]
    return any((results / "runs").glob("*.json")) and all(found.get("ended") for found in begun)


def test_a_training_killed_while_it_clears_up_has_ended(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run after any of the removals resumes to the same record, or is a whole training of its own."""

    class Killed(BaseException):
        pass

    straight = tmp_path / "straight"
    assert cli.main(["train", *words(corpus, straight)]) == 0
    unlink, ended = Path.unlink, []
    for survived in (-1, 0, 2, 3):
        results = tmp_path / f"killed{survived}"
        removed: list[Path] = []

        def dies(path: Path, missing_ok: bool = False, removed: list[Path] = removed, most: int = survived) -> None:
            if any((tmp_path / f"killed{most}").glob("runs/*.json")):
                removed.append(path)
                if len(removed) > max(most, 0):
                    raise Killed
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Path, "unlink", dies)
            if survived < 0:
                patch.setattr(UnfinishedRun, "clear", lambda self: dies(self.folder))
            assert cli.main(["train", *words(corpus, results)]) == 0
        ended.append(has_ended(results))
        if not ended[-1]:
            assert cli.main(["train", *words(corpus, results)]) == 0
        assert outcome(results) == outcome(straight)
        assert cli.main(["train", *words(corpus, results)]) == 0
        first, second = (run for run in records.load_records(results) if run.verb == "train")
        assert first.series["loss_curve"] == second.series["loss_curve"] and not second.cost["resumed"]
        assert not any(results.glob("unfinished/*"))
    assert ended == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_by_the_clock(corpus: Path, tmp_path: Path) -> None:
    """Kills come at random times since a sitting's first step, whatever the training does then."""
    code, errors = run("after seconds", 1e6, words(corpus, tmp_path / "straight"))
    assert code == 0
    lasts = float(said(errors, "seconds"))
    rng, hit, trainings = random.Random(0), Counter[str](), 0
    while sum(hit.values()) < 20:
        results = tmp_path / f"killed{trainings}"
        code = -1
        # A process can also be killed when its training has ended.
        while code != 0 and not has_ended(results):
            code, errors = run("after seconds", rng.uniform(0, lasts), words(corpus, results))
            if code != 0:
                hit[said(errors, "killed")] += 1
        assert outcome(results) == outcome(tmp_path / "straight")
        trainings += 1
    print(f"{trainings} trainings of {lasts:.2f} s after the first step: {dict(hit)}")
    # The moments have names, and a process that lost its clock would be killed never.
    assert "" not in hit


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pg19", "passkey"])
def test_ten_kills_at_random_moments(corpus: Path, tmp_path: Path, task: str) -> None:
    expected = words(corpus, tmp_path / "straight", task)
    assert kill("in a step", 10**6, expected) == 0
    # Every moment once, in an order that lets the training come to it.
    rng = random.Random(task)
    early = list(killed.MOMENTS[:5])
    rng.shuffle(early)
    moments = [(moment, 1) for moment in early] + [(moment, 1) for moment in killed.MOMENTS[5:]]
    hit = killed_and_finished(words(corpus, tmp_path / "killed", task), moments)
    print(f"{task}: {dict(hit)}")
    assert sum(hit.values()) == len(moments) == 10
    curve, weights = outcome(tmp_path / "killed")
    assert curve == outcome(tmp_path / "straight")[0]
    assert weights == outcome(tmp_path / "straight")[1]
    assert len(curve) == STEPS
