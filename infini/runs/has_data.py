"""`python -m infini.runs.has_data TASK...`: whether the texts of these tasks are here, or can be downloaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from infini.config.compose import compose
from infini.errors import InputError
from infini.runs.common import check_data

SPLITS = ("train", "validation", "test")


def main(tasks: Sequence[str]) -> int:
    """0 where all are; otherwise 2, after a line about each that is not."""
    missing = 0
    for task in tasks:
        try:
            check_data(compose([f"task={task}"]), SPLITS)
        except InputError as error:
            missing += 1
            print(f"{task}: {error}", file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
