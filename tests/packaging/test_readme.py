"""What the README promises works as written."""

import re
from pathlib import Path

import pytest

from infini.cli import main as cli
from infini.commands import verbs
from infini.config.compose import compose, expand_sweep
from infini.config.keys import bracketed

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SHOWN = set(re.findall(r"`infini ([^`]+)`", README))
COMMANDS = sorted(SHOWN | set(re.findall(r"`infini ([^`]+)`", RESULTS)))


def test_the_readme_shows_every_verb() -> None:
    assert {command.split()[0] for command in SHOWN} >= set(verbs())


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--help" not in command])
def test_commands_of_the_readme_are_understood(command: str) -> None:
    verb, *words = command.split()
    assert verb in verbs()
    settings = [bracketed(word) if "-m" not in words else word for word in words if "=" in word]
    # reproduce takes several seeds without -m.
    for job in expand_sweep(settings) if "-m" in words or verb == "reproduce" else [settings]:
        compose(job)


def test_the_published_table_is_the_one_that_the_records_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["table", "report=table3_passkey", f"results_dir={tmp_path}"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    shown = next(block for block in re.findall(r"```\n(.*?)\n```", README, re.DOTALL) if block.startswith("Passkey"))
    assert shown in printed


def test_targets_of_the_readme_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make (\w+)\b", "\n".join(re.findall(r"`{1,3}\s*(make \w+)", README)))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_layers_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "InfiniAttention" in block)
    names: dict[str, object] = {}
    exec(compile(code.replace("10_000", "2_500"), "README.md", "exec"), names)
    assert names["y"].shape == (1, 500, 512)  # type: ignore[attr-defined]
