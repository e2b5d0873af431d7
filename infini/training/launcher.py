"""The environment variables of torchrun, which also rank 0 sets for the processes that it starts."""

from __future__ import annotations

import os

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that say which process this is."""
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Variable that says that torchrun, or rank 0, started this process."""


def launched() -> bool:
    """Whether torchrun, or rank 0 of a training, started this process."""
    return LAUNCHED in os.environ
