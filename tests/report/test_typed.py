"""A value of another type than a report declares is refused in one line, before anything uses it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, get_type_hints

import pytest
from helpers import one_in

from infini.config.compose import compose
from infini.config.schema import groups
from infini.config.typed import build
from infini.errors import InputError
from infini.report.load import load_report

VALUES: tuple[Any, ...] = (5, True, "x", None, [5], [[1]], {"a": 5}, {3: "x"}, float("nan"))
"""No field takes all of them."""
ROWS = ("rows", "systems", "claims")
"""Keys whose entries are dataclasses themselves."""


def refused(config: dict[str, Any], key: str) -> bool:
    """Whether a report is refused, in one line that names the key."""
    try:
        load_report(config)
    except InputError as error:
        said = str(error)
        assert said.startswith(key) and "\n" not in said and "argument" not in said
        return True
    return False


@pytest.mark.parametrize("name", one_in(3, groups()["report"]))
def test_a_value_of_another_type_is_refused_with_its_key(name: str) -> None:
    config = dict(compose([f"report={name}"]).report)
    report = load_report(config)
    for key, hint in get_type_hints(type(report)).items():
        if key not in {field.name for field in dataclasses.fields(report)}:
            continue
        wrong = [repr(value) for value in VALUES if refused({**config, key: value}, f"report.{key}")]
        assert wrong, key
        assert "5" in wrong or hint in (int, float, int | None), key


@pytest.mark.parametrize("name", groups()["report"])
def test_so_is_one_in_a_row(name: str) -> None:
    config = dict(compose([f"report={name}"]).report)
    for of_rows in (key for key in ROWS if key in config):
        rows = config[of_rows]
        place, where = (0, f"report.claims.{rows[0]['name']}") if of_rows == "claims" else (next(iter(rows)), "")
        where = where or f"report.{of_rows}.{place}"
        row = load_report(config).__dict__[of_rows][place]
        for field in dataclasses.fields(row):
            changed = copy.deepcopy(rows)
            found = []
            for value in VALUES:
                changed[place] = {**rows[place], field.name: value}
                at = "report.claims." if field.name == "name" else f"{where}.{field.name}"
                found.append(refused({**config, of_rows: changed}, at))
            assert any(found), field.name


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("long_context", "lengths", "32768"),
        ("table4_booksum", "input_lengths", "65536"),
        ("table3_passkey", "lengths", "32K"),
        ("table3_passkey", "depths", "0.5"),
    ],
)
def test_a_single_length_is_answered_with_the_list(name: str, key: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"^report\.{key}=.*: must be a list, as \[{value}\]$"):
        load_report(compose([f"report={name}", f"report.{key}={value}"]).report)


@dataclasses.dataclass
class Row:
    share: float
    names: tuple[str, ...] = ()
    paper: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    limit: int | None = None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": "x"}, "rows.a.share='x': must be a finite number"),
        ({"share": True}, "rows.a.share=True: must be a finite number"),
        ({"names": "x"}, "rows.a.names='x': must be a list"),
        ({"names": ["x", 5]}, "rows.a.names=5: must be a string"),
        ({"paper": {"a": {"b": "x"}}}, "rows.a.paper.a.b='x': must be a finite number"),
        ({"paper": {3: {}}}, "rows.a.paper={3: {}}: must be names with what belongs to each, {a: ..., b: ...}, with "),
        ({"limit": 1.5}, "rows.a.limit=1.5: must be an integer or null"),
    ],
)
def test_the_message_says_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        build(Row, {"share": 1.0, **values}, "rows.a")
    assert str(error.value).startswith(message)


def test_what_is_of_its_type_is_accepted() -> None:
    values = {"share": 1, "names": ["x"], "paper": {"a": {"b": 2}}, "limit": None}
    assert build(Row, values, "rows.a") == Row(1.0, ("x",), {"a": {"b": 2.0}}, None)
    assert build(Row, {"share": 0.5}) == Row(0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1, "unknown": 3}, "rows.a.unknown=3: no such key of rows.a; allowed: limit, names, paper, share"),
        (
            {"share": 1, "limits": 3},
            "rows.a.limits=3: no such key of rows.a; allowed: .*; did you mean 'rows.a.limit'?",
        ),
        ({"share": 1, "foo": 3}, "rows.a.foo=3: no such key of rows.a; allowed: limit, names, paper, share$"),
        ({"limit": 3}, "rows.a.share: missing; give it a value"),
    ],
)
def test_keys_are_those_of_the_dataclass(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        build(Row, values, "rows.a")
