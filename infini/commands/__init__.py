"""The verbs of the command line: one file a verb, found by its `VERB`. The work is done in `infini.runs`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from infini.config.keys import reads


@dataclass(frozen=True)
class Arguments:
    """The words behind a verb, taken apart."""

    overrides: list[str]
    """Settings in Hydra's grammar."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Arguments of the verb's function beside the configuration and the overrides."""
    first: list[str] = field(default_factory=list)
    """Settings to compose with where a key was given several values: the first of each."""


@dataclass(frozen=True)
class Verb:
    """One command: what it does, which keys it reads, and the function that does it."""

    name: str
    summary: str
    example: str
    """One command line that runs as it stands."""
    module: str
    """Module whose `run(cfg, overrides, **extra)` does the work; it returns an exit code, or None for success."""
    groups: tuple[str, ...] = ()
    """Groups that it reads with all of their keys."""
    keys: tuple[str, ...] = ()
    """Root keys that it reads."""
    choices: tuple[str, ...] = ()
    """Groups of which it reads the choice alone."""
    all_of: tuple[str, ...] = ()
    """Groups of which it takes every choice where none is named."""
    also: tuple[str, ...] = ()
    """What else it reads, not shown in its help: keys, groups by name (the choice alone) or `group.*` (all keys)."""
    never: tuple[str, ...] = ()
    """Keys of `groups` that it does not read."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Keys that it also takes without their group -> the whole key."""
    order: int = 100
    """Place in the list of verbs."""
    read: Callable[[Sequence[str]], Arguments] | None = None
    """Takes the words of the command line apart, and raises InputError for words that cannot be; None: every word is a
    setting."""
    takes_words: bool = False
    """Whether words without `=` mean something to it."""
    fixed: tuple[str, ...] = ()
    """Settings that it always has."""
    sweeps: bool = False
    """Whether `-m` runs one job for each combination of values."""
    shares: bool = False
    """Whether `-m` runs the command in several processes, which share its runs."""
    if_stopped: str = "the same command starts from the beginning"
    """What is true when the command was interrupted before it could say so itself."""
    needs_reader: bool = False
    """Whether it only prints: it stops when nobody reads its output."""
    computes: bool = False
    """Whether a scale that is made for a GPU needs one here."""
    begins_with: str = ""
    """`module:function` of the configuration, called before the slow imports of `module`; empty: nothing."""
    check: Callable[[Any, Sequence[str]], None] | None = None
    """Raises InputError for what is wrong with a configuration and its overrides, before any work; None: nothing."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What it reads; see infini.config.keys."""
        return (*(f"{group}.*" for group in self.groups), *self.choices, *self.keys, *self.also)

    @property
    def chosen(self) -> set[str]:
        """Groups whose choice is always the same."""
        return {word.partition("=")[0] for word in self.fixed}.intersection(self.groups)

    def run(self, cfg: Any, overrides: Sequence[str], **extra: Any) -> int | None:
        """Do the work: an exit code, or None for success."""
        if self.begins_with:
            module, _, function = self.begins_with.partition(":")
            getattr(importlib.import_module(module), function)(cfg)
        waiting: AbstractContextManager[object] = nullcontext()
        if self.computes and sys.stderr.isatty():
            # It takes some seconds.
            from rich.console import Console

            waiting = Console(stderr=True).status("loading torch and lightning")
        with waiting:
            work = importlib.import_module(self.module)
        code: int | None = work.run(cfg, overrides, **extra)
        return code

    def reads(self, key: str) -> bool:
        """Whether it reads a key, at least with some kind of report."""
        return reads(self.patterns, key) and key not in self.never


@cache
def verbs() -> dict[str, Verb]:
    """Name -> verb, from the files of this package."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = sorted((module.VERB for module in modules), key=lambda verb: (verb.order, verb.name))
    return {verb.name: verb for verb in found}
