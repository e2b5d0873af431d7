"""Checks of a command that run before its work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infini.cli.keys import is_read_by, refuse_unread_of_report
from infini.commands import Verb
from infini.config.words import key_of

if TYPE_CHECKING:
    from infini.config.schema import Config


def check(verb: Verb, cfg: Config, overrides: Sequence[str]) -> None:
    """Raise InputError for a command that cannot work."""
    name = verb.name
    if "report" in verb.groups:
        from infini.report.load import load_report

        report = load_report(cfg.report)
        if is_read_by(name, report):
            refuse_unread_of_report(name, report, overrides)
        elif name == "reproduce":
            return
        if cfg.scale.name not in (getattr(report, "settings", None) or [cfg.scale.name]):
            # A search that has no such scale reports that itself.
            return
    verb.check(cfg, overrides)
    if verb.computes and getattr(cfg.task, "reference", None) is None:
        from infini.system.devices import check_made_for

        for group in ("scale", "suite"):
            if group in verb.groups or group in verb.choices:
                check_made_for(group, cfg.scale.name if group == "scale" else cfg.suite.name, cfg.parallel.accelerator)


def note_replaced(words: Sequence[str]) -> None:
    """Print which settings are replaced by a later setting of the same key."""
    last = {key: word for word in words if (key := key_of(word))}
    for word in dict.fromkeys(words):
        if (key := key_of(word)) and last[key] != word and not word.startswith("~"):
            print(f"{word}: given again as {last[key]}, which holds", file=sys.stderr)
