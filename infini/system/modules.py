"""Packages whose modules are found by themselves."""

from __future__ import annotations

import importlib
import os
import pkgutil
import traceback
from collections.abc import Iterable
from types import ModuleType

from infini.errors import InputError


def import_all(package: str, folders: Iterable[str]) -> list[ModuleType]:
    """Import every module that lies in the folders of a package.

    Raises InputError, naming file and line, for a module that cannot be imported: none is left out silently.
    """
    modules = []
    for found in pkgutil.iter_modules(folders):
        try:
            modules.append(importlib.import_module(f"{package}.{found.name}"))
        except Exception as error:
            folder = getattr(found.module_finder, "path", package.replace(".", "/"))
            path = os.path.join(folder, f"{found.name}.py")
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            if isinstance(error, SyntaxError):
                lines = [error.lineno]
            place = f"{path}, line {lines[-1]}" if lines else path
            raise InputError(f"{place}: {type(error).__name__}: {error}") from error
    return modules
