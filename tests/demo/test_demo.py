"""`infini demo` finds what is hidden, with the model of the package, and says what it took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from infini import records
from infini.cli import main as cli
from infini.commands import verbs
from infini.commands.demo import DEMO_DIGITS, DEMO_SHORTEST
from infini.demo import FOLDER
from infini.tasks.passkey.answers import answer_questions, make_questions
from infini.tasks.passkey.prompt import LONGEST_TRAINING, PasskeyTemplate, word_tokenizer
from infini.training.checkpoint import DESCRIPTION, TOKENIZER, WEIGHTS, load_model

RUN = json.loads((FOLDER / DESCRIPTION).read_text(encoding="utf-8"))["run_id"]


def rows(out: str) -> dict[str, str]:
    return {line[:8].strip(): line[8:] for line in out.splitlines()}


def demo(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, str], str]:
    capfd.readouterr()
    assert cli.main(["demo", *words]) == 0
    out, err = capfd.readouterr()
    return rows(out), err


def test_the_key_is_found_wherever_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    for place, least, most in (
        ("start", 0, 100),
        ("0.1", 3_000, 3_500),
        ("middle", 16_000, 17_000),
        ("1", 32_000, 32_768),
    ):
        said, err = demo(capfd, "key=01235", f"place={place}", "length=32K")
        assert list(said) == ["key", "answer", "time", "memory", "peak"]
        position = int(re.search(r"after ([\d,]+) of 32,768 tokens", said["key"])[1].replace(",", ""))  # type: ignore[index]
        assert said["key"].startswith("01235, ") and least <= position <= most
        assert said["answer"] == "01235, right"
        assert re.match(r"hiding 01235 in 32,768 tokens; a model of [\d,]+ weights reads them in about \d+ s", err)


def test_what_is_said_of_time_and_memory(capfd: pytest.CaptureFixture[str]) -> None:
    said, _ = demo(capfd, "length=64K", "parallel.accelerator=cpu")
    seconds, speed = re.fullmatch(r"([\d.]+) s, ([\d,]+) tokens/s on one processor thread", said["time"]).groups()  # type: ignore[union-attr]
    assert float(speed.replace(",", "")) == pytest.approx(65_536 / float(seconds), rel=0.6)
    size = r"([\d,]+) bytes \+ ([\d,]+) for the current segment"
    # Constant, and what the model declares to carry, in float32.
    shown = re.fullmatch(rf"{size} \(the same after 16,384 tokens\)", said["memory"])
    assert shown is not None
    memory, segment = (int(text.replace(",", "")) for text in shown.groups())
    assert segment > 0 and memory == 4 * load_model(FOLDER, torch.device("cpu"))[0].state_floats(512)
    # The key is random, and of those that no training prompt had.
    assert "no prompt of its training had this key" in said["key"]
    assert "prompts of its training may have had it" in demo(capfd, "key=12346", "length=1K")[0]["key"]


def test_nothing_is_written_and_no_network_is_used(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket", None)
    assert demo(capfd, "length=1K")[0]["answer"].endswith("right")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_random_keys_at_all_places_are_right() -> None:
    """The demo's questions on 40 keys; a slow test asks the question of a whole million."""
    model, description = load_model(FOLDER, torch.device("cpu"))
    tokenizer = word_tokenizer()
    assert tokenizer.hash == description["tokenizer_hash"]
    template = PasskeyTemplate(tokenizer.encode, digits=DEMO_DIGITS, fill="exact", longest_training=8192)
    depths = {f"{depth:.2f}": float(depth) for depth in np.linspace(0, 1, 20)}
    asked = make_questions(template, [16 * 1024], depths, 2, seed=5)
    answers = list(answer_questions(model, list(asked), tokenizer.bos_id, tokens_per_call=2048))
    assert len(answers) == 40 and [answer.question.name for answer in answers if not answer.exact] == []


@pytest.mark.slow
def test_a_million_tokens_take_less_than_a_minute(tmp_path: Path) -> None:
    """The command is started as a user starts it, so its time includes all imports."""
    done = subprocess.run(
        [sys.executable, "-m", "infini", "demo", "key=12345", "place=0.1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = rows(done.stdout)
    assert done.returncode == 0, done.stderr
    assert said["answer"] == "12345, right" and float(said["time"].partition(" ")[0]) < 60


def test_bad_settings_are_named_before_anything_is_loaded(project_root: Path) -> None:
    code = (
        "import sys\nfrom infini.cli import main\n"
        "for word in sys.argv[1:]:\n    assert main.main(['demo', word]) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    words = ["key=1234", "place=1.5", "length=1X", "length=1K,2K", "length=1025M", "length=1000000000000"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "infini: error: key='1234': must have 5 digits, for example 12345, or null for a random key",
        "infini: error: place='1.5': must be start, middle, end, or a number from 0 to 1, for example 0.1",
        "infini: error: length='1X': must be a positive integer, or one followed by K (1,024) or M (1,048,576), "
        "for example 131072, 32K or 1M; did you mean 1K?",
        "infini: error: length=['1K', '2K']: must be one length, for example 4M: infini demo reads one text",
        "infini: error: length='1025M': infini demo reads at most 1024M tokens",
        "infini: error: length=1000000000000: infini demo reads at most 1024M tokens",
    ]


def test_the_model_is_that_of_a_published_training() -> None:
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {
        "__init__.py",
        WEIGHTS,
        DESCRIPTION,
        TOKENIZER,
    }
    (run,) = (run for run in records.load_records(records.published_dir()) if run.run_id == RUN)
    description = json.loads((FOLDER / DESCRIPTION).read_text(encoding="utf-8"))
    assert run.verb == "train" and run.config == description["config"]
    assert run.config["recipe"]["name"] == "passkey_laptop_extended" and not run.environment["git_dirty"]
    assert "/" not in run.config["results_dir"].replace("outputs/results", "")


def test_the_shortest_text_is_that_of_the_prompts() -> None:
    template = PasskeyTemplate(
        word_tokenizer().encode, digits=DEMO_DIGITS, fill="exact", longest_training=LONGEST_TRAINING
    )
    assert template.shortest(training=False) == DEMO_SHORTEST


def test_help_and_completion_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {key}=" in shown for key in verbs()["demo"].keys) and "length=[1M]" in shown
    assert cli.main(["completion", "bash"]) == 0
    assert 'demo) keys="key length place"' in capsys.readouterr().out
