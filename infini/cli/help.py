"""`infini <verb> --help`: the verb's groups and keys with their defaults and meanings.

Meanings come from the fields of the configuration. Those of a model's options come from the comments in its YAML: its
module imports torch, which takes seconds, and help must not wait for it.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from typing import Any

from infini.commands import Verb
from infini.config.schema import Config, given_keys, groups, key_of, schema_of

WIDTH = 118
_INDENT = 36
_DESCRIBED = ("task", "model", "scale", "report", "suite")
"""Groups whose choices are listed with their meanings. Names of the others say what they are."""


def verb_help(verb: Verb, overrides: Sequence[str]) -> str:
    """The help of a verb, with the defaults under `overrides`, as task=passkey.

    Raises InputError for overrides that do not compose.
    """
    from infini.config.compose import compose

    composed, given = compose(overrides), {key_of(text) for text in overrides}
    cfg = dataclasses.asdict(composed)
    pretrained = "base" in composed.model and "model" in verb.groups
    if pretrained:
        from infini.runs.common import segment_length

        cfg["dims"] = {"name": "of the base", "segment_length": segment_length(composed, given_keys(overrides))}
    lines = [f"infini {verb.name}: {verb.summary}", "", f"  {verb.example}"]
    lines += ["", "Keys (key=value; shown with their defaults):"]
    about = _meanings(Config)
    lines += [line for key in verb.keys if "." not in key for line in _entry(key, cfg[key], about.get(key, ""))]
    of_groups = {key: key for key in verb.keys if "." in key} | dict(verb.aliases)
    for short, whole in of_groups.items():
        group, _, key = whole.partition(".")
        if key in cfg[group]:
            lines += _entry(short, cfg[group][key], _explained(group, cfg[group]["name"]).get(key, ""))
    left_out = {*verb.excludes, *verb.aliases.values()}
    if pretrained:
        # The base's.
        left_out |= {"scale.tokenizer", "scale.vocab_size"}
    for group in (*verb.groups, *verb.choices):
        if group in verb.chosen and all(f"{group}.{key}" in left_out for key in cfg[group] if key != "name"):
            continue
        every = group in verb.default_all and not {group, "experiment"} & given
        chosen = "every one" if every else cfg[group].get("name")
        others = [choice for choice in groups()[group] if choice != chosen and not (pretrained and group == "dims")]
        what = about.get(group, "")
        lines += ["", f"{group}={chosen}: {what[:1].lower()}{what[1:]}"]
        if group in _DESCRIBED:
            lines += _choices(group)
        elif others:
            also = f"Also: {', '.join(others)}."
            lines += textwrap.wrap(also, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if group in verb.choices:
            continue
        if group == "report":
            lines += _report_entries(cfg[group])
            continue
        explained = _explained(group, str(getattr(composed, group).name if group == "dims" else chosen))
        for key, value in cfg[group].items():
            if key not in ("name", "kind") and f"{group}.{key}" not in left_out:
                lines += _entry(f"{group}.{key}", value, explained.get(key, ""))
    if verb.reads("experiment"):
        lines += ["", "experiment=null: a report, or a training, with the settings that it needs."]
        lines += _choices("experiment")
    if set(verb.groups) - verb.chosen:
        lines += ["", "Choices change defaults: add one, for example task=passkey, to see its defaults."]
    return "\n".join(lines)


def _choices(group: str) -> list[str]:
    """The choices of a group, each with the first sentence of the comment at the top of its YAML, or its title."""
    lines = []
    for choice in groups()[group]:
        text = resources.files("infini.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8")
        comment = re.match(r"(?:# @package \S+\n)?((?:#.*\n)+)", text)
        title = re.search(r"^title: (.+)$", text, re.MULTILINE)
        about = re.sub(r"\n?# ?", " ", comment[1]).strip() if comment else title[1] if title else ""
        # Commands that follow a colon are in the documentation.
        sentence = re.split(r"(?<!et al)\.(?:\s|$)|: `|; see ", about)[0]
        lines += _aligned(f"    {choice}", sentence)
    return lines


def _explained(group: str, chosen: str) -> dict[str, str]:
    """Key -> its meaning, of a choice of a group."""
    return _option_meanings(group, chosen) | _meanings(schema_of(group, chosen))


def _report_entries(report: dict[str, Any]) -> list[str]:
    """The keys of a report that can be set on the command line."""
    rows = report.get("rows") or report.get("systems") or {}
    meanings = {
        "run": f"Rows that `infini reproduce` makes: all, or names of {', '.join(rows)}.",
        "aggregate": "Of several runs for one cell: null refuses; newest, mean or largest (most examples) choose.",
    }
    found = [_entry(f"report.{key}", report[key], text) for key, text in meanings.items() if key in report]
    return [line for entry in found for line in entry]


def _entry(key: str, value: Any, meaning: str) -> list[str]:
    return _aligned(f"  {key}={_text(value)}", meaning)


def _aligned(shown: str, meaning: str) -> list[str]:
    """Lines with the meaning in a column of its own."""
    column = " " * _INDENT
    if len(shown) > _INDENT - 2:
        return [shown, *textwrap.wrap(meaning, WIDTH, initial_indent=column, subsequent_indent=column)]
    return textwrap.wrap(meaning, WIDTH, initial_indent=f"{shown:<{_INDENT}}", subsequent_indent=column) or [shown]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _meanings(schema: Any) -> dict[str, str]:
    """Key -> what it means."""
    fields = dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ()
    return {field.name: _plain(field.metadata.get("doc", "")) for field in fields}


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
