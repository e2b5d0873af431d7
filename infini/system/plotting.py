"""Keeps MPLBACKEND from breaking commands that do not draw on a screen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def drawing_without_a_screen() -> Iterator[None]:
    """A context in which matplotlib draws with Agg, regardless of MPLBACKEND.

    A shell started by a notebook inherits the notebook's MPLBACKEND. Importing matplotlib then fails where the
    notebook's packages are not installed. torchmetrics, and so Lightning, imports matplotlib: training would not start.
    """
    before = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MPLBACKEND"]
        else:
            os.environ["MPLBACKEND"] = before
