"""What the environment says to other packages and must not decide here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def drawing_without_a_screen() -> Iterator[None]:
    """matplotlib draws with Agg in here, whatever MPLBACKEND says.

    A shell that a notebook starts has the notebook's MPLBACKEND, which matplotlib refuses when it is imported where the
    notebook's packages are not installed. torchmetrics, and with it Lightning, imports matplotlib, so a training would
    not even start.
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
