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


@pytest.fixture
def with_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's module lies in one more folder of the package, and no other file names it."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"`infini/commands/runs\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
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
