"""Every case of bad input that docs/reference/bad_input.md lists."""

from __future__ import annotations

import re
from pathlib import Path

import bad_input
import pytest
from helpers import one_in

ROWS = [line for line in bad_input.TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]

NAMING = ("no space left", "a limit on the size of files")
"""Cases in which every answer begins with the file that could not be written."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bad_input.prepare(tmp_path_factory.mktemp("catalogue") / "prepared")


def test_the_table_has_every_case() -> None:
    assert [row.split(" | ")[0].removeprefix("| ") for row in ROWS] == [case.name for case in bad_input.CASES]


@pytest.mark.parametrize("case", one_in(2, bad_input.CASES, lambda case: case.name))
def test_bad_input_is_answered_in_one_line(case: bad_input.Case, prepared: Path, tmp_path: Path) -> None:
    answers = bad_input.try_out(case, prepared, tmp_path / "tries")
    (row,) = (row for row in ROWS if row.startswith(f"| {case.name} | {len(answers)} |"))
    # The words in brackets are other packages' and change with them; lists grow with the project.
    assert case.name not in NAMING or all(re.match("(DIR)?/.+: ", answer) for answer in answers), answers
    assert re.split(r"\(|must be one of|allowed:", answers[0])[0] in row
