"""The verb of docs/how-to/extending.md works as printed, once its entry and module are there."""

from __future__ import annotations

import importlib.util
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
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    (entry,) = re.findall(r"```python\n(Verb\(.*?)```", page, re.DOTALL)
    (source,) = re.findall(r"`infini/runs/list_runs\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "list_runs.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("infini.runs.list_runs", tmp_path / "list_runs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "infini.runs.list_runs", module)
    monkeypatch.setattr(commands, "_VERBS", (*commands._VERBS, eval(entry, vars(commands))))
    commands.verbs.cache_clear()
    yield
    commands.verbs.cache_clear()


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
