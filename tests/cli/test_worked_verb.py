"""The verb of docs/how-to/extending.md works as printed, once its module is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import make_eval

from infini import commands
from infini.cli import main as cli
from infini.cli.completion import script
from infini.records import write_record

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"`infini/commands/runs\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def with_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The page's module, or the text that a test gives, lies in one more folder of the package, and no other file names
    it."""
    source = getattr(request, "param", SOURCE)
    folder = tmp_path / "commands"
    folder.mkdir()
    (folder / "runs.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(folder)])
    commands.verbs.cache_clear()
    yield
    commands.verbs.cache_clear()
    sys.modules.pop("infini.commands.runs", None)


@pytest.mark.usefixtures("with_verb")
def test_the_pages_verb_is_known_to_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_eval("infini_linear", 3)
    write_record(run, tmp_path)
    assert cli.main(["runs", f"results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.split() == ["eval", "infini_linear", "seed", "3", run.run_id]
    assert cli.main(["runs", "--help"]) == 0
    assert "list the runs of a folder" in (told := capsys.readouterr().out) and "results_dir" in told
    assert cli.main(["--help"]) == 0
    assert "infini runs results_dir=outputs/results" in capsys.readouterr().out
    assert cli.main(["runs", "seed=2"]) == 2
    assert "seed" in capsys.readouterr().err
    assert " runs" in script("bash")


@pytest.mark.parametrize("with_verb", [SOURCE.replace('keys=("', 'keys=("scale.vocab_size", "')], indirect=True)
@pytest.mark.usefixtures("with_verb")
def test_a_verb_may_read_one_key_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help had a traceback."""
    assert cli.main(["runs", "--help"]) == 0
    assert re.search(r"^  scale\.vocab_size=2048 +Entries of the vocabulary", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["runs", f"results_dir={tmp_path}", "scale.vocab_size=300"]) == 0
    assert cli.main(["runs", "scale.eval_segments_per_call=3"]) == 2
    assert "does not read scale.eval_segments_per_call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("with_verb", "said"),
    [
        (SOURCE.replace("VERB = Verb(", "VERB = Verb(("), r", line \d+: SyntaxError: "),
        (SOURCE.replace('"runs",', '"train",'), ": VERB.name='train': is the name of another verb"),
        (
            SOURCE.replace("needs_reader", 'groups=("dimms",), needs_reader'),
            r": VERB\.groups='dimms': must be one of .*; did you mean 'dims'",
        ),
        (
            SOURCE.replace("needs_reader", 'choices=("scales",), needs_reader'),
            r": VERB\.groups='scales': must be one of .*; did you mean 'scale'",
        ),
        (
            SOURCE.replace('keys=("results_dir"', 'keys=("results"'),
            r": VERB\.keys='results': .*did you mean 'results_dir'",
        ),
        (SOURCE.replace('keys=("results_dir"', 'keys=("scal.name"'), r": VERB\.keys='scal': .*did you mean 'scale'"),
    ],
    ids=["syntax", "name", "group", "choice", "key", "key of a group"],
    indirect=["with_verb"],
)
@pytest.mark.usefixtures("with_verb")
def test_a_module_that_declares_no_verb_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    """A traceback, a verb that replaced another one, or keys that nothing reads."""
    assert cli.main(["demo", "--help"]) == 2
    message = capsys.readouterr().err
    assert re.match(f"infini: error: {re.escape(str(tmp_path / 'commands' / 'runs.py'))}{said}", message)
    assert message.count("\n") == 1
