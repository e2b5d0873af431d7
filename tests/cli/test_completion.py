"""Shell completion: the script is run by the shell it is for."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from infini.cli import main as cli
from infini.cli.completion import script
from infini.commands import verbs
from infini.config.schema import Config, groups
from infini.errors import InputError

BASH = shutil.which("bash")


def completions(line: str) -> list[str]:
    """Completions that bash offers for a command line up to the cursor; words are broken at = as bash breaks them."""
    words = line.replace("=", " = ").split()
    if line.endswith((" ", "=")) and not line.endswith("="):
        words.append("")
    listed = " ".join(repr(word) for word in words)
    asked = (
        f"{script('bash')}\nCOMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_WORDS=({listed})\n"
        f"COMP_CWORD={len(words) - 1}; _infini; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    assert BASH is not None
    done = subprocess.run([BASH, "--norc", "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.split()


needs_bash = pytest.mark.skipif(BASH is None, reason="no bash")


@needs_bash
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("infini ta", ["table"]),
        ("infini train mod", ["model=", *(f"model.{key}=" for key in ("delta_normaliser",))]),
        ("infini eval len", ["length="]),
        ("infini generate decoding.t", ["decoding.temperature=", "decoding.top_p="]),
        ("infini table len", []),
    ],
)
def test_verbs_and_keys_are_completed(line: str, expected: list[str]) -> None:
    found = completions(line)
    assert set(expected) <= set(found)
    assert all(word.startswith(line.rpartition(" ")[2]) for word in found)
    assert bool(found) == bool(expected)


@needs_bash
def test_the_verbs_come_first() -> None:
    assert completions("infini ") == [*verbs(), "completion", "help"]


@needs_bash
def test_choices_of_a_group_are_completed() -> None:
    assert completions("infini train model=") == list(groups()["model"])
    assert completions("infini train task=pass") == ["passkey"]
    assert completions("infini train seed=") == []


@needs_bash
def test_every_completed_key_is_a_key() -> None:
    from infini.cli.completion import keys_of_verb

    for verb in verbs().values():
        roots = {key.partition(".")[0] for key in keys_of_verb(verb)}
        assert roots <= {*Config.__dataclass_fields__, *verb.aliases}


def test_printed_for_a_shell_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["completion", "fish"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err == (
        "infini: error: completion 'fish': must be one of bash, zsh; did you mean 'zsh'?\n"
    )
    with pytest.raises(InputError, match="must be one of bash, zsh"):
        script("")
