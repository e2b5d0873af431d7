"""What `infini <verb> --help` prints: the verb's groups, their keys with defaults, and what each means.

Meanings are the strings under the fields of `infini.config.schema`, and for a model's options the comments of its YAML:
the help cannot say anything else than the code.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from infini.config import schema, schema_running
from infini.config.schema import Config, groups

WIDTH = 118
_INDENT = 36
_TRAINING = ("task", "model", "dims", "scale", "optimizer", "recipe", "parallel", "logger")
_PLACES = ("results_dir", "cache_dir")
USES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (_TRAINING, ("seed", "init_from", *_PLACES)),
    "eval": (("task", "model", "scale", "parallel"), ("checkpoint", "length", "depth", "seed", *_PLACES)),
    "generate": (
        ("decoding", "task", "model", "scale", "parallel"),
        ("prompt", "checkpoint", "save_state", "load_state", "seed", "results_dir"),
    ),
    "summarize": (
        ("decoding", "model", "scale", "parallel"),
        ("checkpoint", "output", "seed", "results_dir"),
    ),
    "table": (("report", "scale"), ("results_dir",)),
    "figure": (("report", "scale"), ("results_dir",)),
    "reproduce": (("report", *_TRAINING), ("seed", "length", "depth", *_PLACES)),
    "publish": (("report", "scale"), ("results_dir",)),
    "bench": (("suite", "dims", "recipe", "parallel"), ("seed", "results_dir")),
}
"""Verb -> the groups and the root keys that bear on it."""


def verb_help(name: str, description: str, example: str, overrides: Sequence[str]) -> str:
    """The help of a verb; defaults are those that `overrides`, as task=passkey, lead to.

    Raises InputError for overrides that do not compose.
    """
    from infini.config.compose import compose

    cfg = dataclasses.asdict(compose(overrides))
    used_groups, used_keys = USES[name]
    lines = [f"infini {name}: {description}", "", f"  {example}", "", "Keys (key=value; shown with their defaults):"]
    about = _meanings("Config")
    lines += [line for key in used_keys for line in _entry(key, cfg[key], about.get(key, ""))]
    for group in used_groups:
        chosen = cfg[group].get("name")
        others = [choice for choice in groups()[group] if choice != chosen]
        lines += ["", f"{group}={chosen}: {_lower(about.get(group, ''))}"]
        if others:
            also = f"Also: {', '.join(others)}."
            lines += textwrap.wrap(also, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if group == "report":
            lines += _report_entries(cfg[group])
            continue
        explained = _option_meanings(group, str(chosen)) | _meanings(_schema_of(group, str(chosen)))
        for key, value in cfg[group].items():
            if key not in ("name", "kind"):
                lines += _entry(f"{group}.{key}", value, explained.get(key, ""))
    if "report" in used_groups:
        experiments = ", ".join(groups()["experiment"])
        lines += ["", f"experiment=null: a report together with settings that it needs; one of {experiments}."]
    lines += ["", "Choices change defaults: add them, as task=passkey, to see theirs."]
    return "\n".join(lines)


def _report_entries(report: dict[str, Any]) -> list[str]:
    """The keys of a report that a command line sets."""
    rows = report.get("rows") or report.get("systems") or {}
    meanings = {
        "run": f"Rows that `infini reproduce` makes: all, or names of {', '.join(rows)}.",
        "aggregate": "Of several runs for one cell: null refuses; newest, mean or largest (most examples) choose.",
    }
    found = [_entry(f"report.{key}", report[key], text) for key, text in meanings.items() if key in report]
    return [line for entry in found for line in entry]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _entry(key: str, value: Any, meaning: str) -> list[str]:
    shown = f"  {key}={_text(value)}"
    if len(shown) > _INDENT - 2:
        wrapped = textwrap.wrap(meaning, WIDTH - _INDENT)
        return [shown, *(" " * _INDENT + line for line in wrapped)]
    wrapped = textwrap.wrap(meaning, WIDTH - _INDENT) or [""]
    return [f"{shown:<{_INDENT}}{wrapped[0]}".rstrip(), *(" " * _INDENT + line for line in wrapped[1:])]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _schema_of(group: str, chosen: str) -> str:
    """Name of the dataclass of a group; empty where a group is a mapping."""
    hint = get_type_hints(Config)[group]
    if group == "task":
        hint = schema.TASK_CONFIGS.get(chosen, schema.TaskConfig)
    return str(hint.__name__) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else ""


@cache
def _strings() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Class -> its bases and what stands under each of its fields."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    sources = (Path(module.__file__ or "").read_text(encoding="utf-8") for module in (schema, schema_running))
    for node in (node for source in sources for node in ast.parse(source).body):
        if not isinstance(node, ast.ClassDef):
            continue
        texts: dict[str, str] = {}
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = below.value if isinstance(below, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[field.target.id] = _plain(value.value)
        found[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)], texts
    return found


def _meanings(name: str) -> dict[str, str]:
    bases, texts = _strings().get(name, ([], {}))
    return {key: text for base in bases for key, text in _meanings(base).items()} | texts


def _option_meanings(group: str, chosen: str) -> dict[str, str]:
    """Key -> the comment above it in the YAML of a choice."""
    path = resources.files("infini.conf").joinpath(group, f"{chosen}.yaml")
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
            continue
        if match := re.match(r"([a-z_]+):", line):
            found[match[1]] = _plain(" ".join(comment))
        comment = []
    return found


def _plain(text: str) -> str:
    return re.sub(r"\bNone\b", "null", " ".join(text.split()).replace("`", ""))
