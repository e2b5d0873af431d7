"""Names of base models: what is taken for a folder, and what for a hub id."""

from __future__ import annotations

from pathlib import Path

import pytest

from infini.errors import InputError
from infini.pretrained.base_names import injected, local_path


@pytest.mark.parametrize(
    "name", ["./qwen-infin", "../models", "./a.b", ".hidden", "-x", "a/../b", "a/.b", "a/-b", "a/b/c", "qwen-infin/"]
)
def test_a_path_without_a_folder_is_no_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be looked for on the hub, and the error would be that it cannot be downloaded."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="^base=.*: no such folder; name a hub id, a folder, "):
        local_path(name, "base")
    assert injected(name) == {}


@pytest.mark.parametrize("name", ["~nosuchuser/x", "~nosuchuser"])
def test_a_home_that_is_not_known_is_one_line(name: str) -> None:
    """Wherever the name is asked for."""
    pytest.importorskip("transformers")
    from infini.pretrained.llm.bases import Base

    base, said = Base(name), f"^model.base={name!r}: the home folder ~nosuchuser is not known; write the whole path$"
    for ask in (lambda: injected(name), lambda: base.config, base.describe):
        with pytest.raises(InputError, match=said):
            ask()
    with pytest.raises(InputError, match=said.replace("model.base", "base")):
        local_path(name, "base")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "_me/a_b.c-d", "01-ai/Yi-6B", "a.b/c"])
def test_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path(name, "base") is None
