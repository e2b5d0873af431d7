"""Whatever is typed gets an answer: a result, or one line and exit code 2. Never a traceback.

The default is a few hundred cases; `make test-slow` runs ten thousand and a hundred real processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infini.cli import main as cli
from infini.commands import Verb, verbs
from infini.config.compose import compose
from infini.config.lengths import format_length, parse_depths, parse_length, parse_lengths
from infini.config.schema import Config, groups, task_schema
from infini.config.typed import build
from infini.errors import InputError

DEFAULT = dataclasses.asdict(compose([]))
GROUPS = {name: value for name, value in DEFAULT.items() if isinstance(value, dict)}
KEYS = [
    *DEFAULT,
    *(f"{group}.{key}" for group, values in GROUPS.items() for key in values),
    *(f"+{group}.new" for group in GROUPS),
    *(f"~{group}" for group in GROUPS),
    "hydra.run.dir",
    "hydra/launcher",
    "tuned",
    "experiment",
    "@",
    "",
]
ODD = ["", "0", "-1", "1X", "1e6", "1e400", "nan", "inf", "null", "true", "None", "[]", "[1,2]", "{a:1}", "${seed}"]
ODD += ["${x}", "${oc.env:HOME}", "'", '"', "\\", "a,b", "[", "}", "=", "a=b", "@none", "-", "1_000", "０", "²", "\x00"]
ODD += ["\n", "é", "🙂", "9" * 400, "../x", "/", "/dev/null", "/proc/1/x", "32K", "1M,2M", "range(1,3)", "choice(a)"]
ODD += ["glob(*)", "[1,[2,[3]]]"]
texts = st.one_of(st.sampled_from(ODD), st.text(max_size=12), st.integers().map(str), st.floats().map(str))
choices = st.sampled_from([choice for options in groups().values() for choice in options])
words = st.one_of(
    st.tuples(st.sampled_from(KEYS), st.one_of(texts, choices)).map("=".join),
    texts,
    st.sampled_from(["-m", "--multirun", "--help", "-h", "--version", "-x", "--"]),
)
lines = st.tuples(st.one_of(st.sampled_from([*verbs(), "help"]), texts), st.lists(words, max_size=4)).map(
    lambda parts: [parts[0], *parts[1]]
)
RELAXED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def answered(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """cli.main reads the line and composes it; the command itself is another test's."""
    # A sweep starts Hydra's launcher, with files of its own: composing is what is tried here.
    monkeypatch.setattr(Verb, "run", lambda *given, **options: 0)
    monkeypatch.setattr("infini.cli.sweep.sweep", cli._run)
    monkeypatch.setattr("infini.cli.sweep.share", cli._run)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    assert code in (0, 2), arguments
    said = err.getvalue().splitlines()
    if code == 2:
        assert len(said) == 1 and said[0].startswith("infini: error: "), (arguments, said)
        assert len(said[0]) < 5000
    assert "Traceback" not in err.getvalue()


@settings(max_examples=150, deadline=None, suppress_health_check=RELAXED)
@given(lines)
def test_every_line_is_answered(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    answered(arguments, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(lines)
def test_ten_thousand_lines_are_answered(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    answered(arguments, monkeypatch)


def in_a_process(arguments: list[str]) -> bool:
    """No zero byte, which a system takes in no argument, and not the table that needs neither data nor a model."""
    return "\x00" not in "".join(arguments) and not (arguments[0] == "reproduce" and "passkey" in " ".join(arguments))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(lines.filter(in_a_process))
def test_a_hundred_processes_answer(tmp_path: Path, project_root: Path, arguments: list[str]) -> None:
    # Without data and without a model nothing long can begin; what comes last counts.
    missing = ["task.data_dir=/none", "results_dir=out", "checkpoint=none"]
    short = {"train": ["recipe.steps=1", "recipe.warmup_steps=0"]}
    short["bench"] = ["suite.repeats=0", "suite.stream_tokens=0", "suite.decode_tokens=0", "suite.source_tokens=[]"]
    short["bench"] += ["suite.prompt_tokens=[]"]
    verb = arguments[0]
    line = arguments if verb not in verbs() else [verb, *missing, *arguments[1:], *short.get(verb, [])]
    done = subprocess.run(
        [sys.executable, str(project_root / "cli.py"), *line], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 2), (line, done.stderr)
    assert "Traceback" not in done.stderr, (line, done.stderr)


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), texts)


sized = st.tuples(st.integers(0, 10**7), st.sampled_from("KMkmGX ")).map(lambda pair: f"{pair[0]}{pair[1]}")


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(numbers, sized), max_size=3))
def test_parse_length_gives_a_length_or_one_line(given: list[Any]) -> None:
    for value in given:
        try:
            result = parse_length(value)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(result, int) and result >= 1
            assert parse_length(format_length(result)) == result
    for parse in (parse_lengths, parse_depths):
        try:
            assert parse(given)
        except InputError as error:
            assert "\n" not in str(error)


values = st.one_of(numbers, st.lists(numbers, max_size=3), st.dictionaries(st.text(max_size=3), numbers, max_size=2))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_schema_is_built_or_refused_in_one_line(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(sorted(set(GROUPS) - {"model", "report"})))
    hint = task_schema(data.draw(st.sampled_from(groups()["task"]))) if group == "task" else None
    cls = hint or {field.name: field.type for field in dataclasses.fields(Config)}[group]
    if isinstance(cls, str):
        import infini.config.schema

        cls = getattr(infini.config.schema, cls)
    given = dict(GROUPS[group])
    for key in data.draw(st.lists(st.sampled_from([*given, "unknown"]), max_size=3)):
        given[key] = data.draw(values)
    try:
        build(cls, given, group)
    except InputError as error:
        assert "\n" not in str(error)
