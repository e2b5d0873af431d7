"""docs/reference/llm_families.md: it is as its script writes it, and every test that it names exists."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import llm_table


def collected(session: pytest.Session, root: Path, file: str) -> list[pytest.Function]:
    """The tests of a file, as pytest would run them."""
    found = pytest.Module.from_parent(session, path=root / file).collect()
    return [item for item in found if isinstance(item, pytest.Function)]


def test_the_page_is_as_its_script_writes_it() -> None:
    assert llm_table.PAGE.read_text(encoding="utf-8") == llm_table.page(), "run python tests/support/llm_table.py"
    assert llm_table.MEANINGS.keys() == llm_table.PROPERTIES.keys()


def test_every_cell_is_a_test_that_runs_by_default(request: pytest.FixtureRequest, project_root: Path) -> None:
    tests = collected(request.session, project_root, llm_table.BY_FAMILY)
    by_default = {item.name for item in tests if item.get_closest_marker("slow") is None}
    assert llm_table.named_by_family() <= by_default


def test_every_fault_has_its_test_and_every_test_its_fault(request: pytest.FixtureRequest, project_root: Path) -> None:
    tests = collected(request.session, project_root, llm_table.OF_FAULTS)
    by_default = {item.originalname for item in tests if item.get_closest_marker("slow") is None}
    assert llm_table.named_by_fault() == by_default == {item.originalname for item in tests}
