"""What verbs do: train, evaluate, generate, tabulate. Here models, tasks and reports meet."""

import os

from infini.errors import InputError


def _check_ranks() -> None:
    """Raise InputError for a rank that is no number: Lightning reads these when it is imported, and fails."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        try:
            int(os.environ.get(name, "0"))
        except ValueError:
            raise InputError(
                f"{name}={os.environ[name]!r}: this environment variable must be a number, or unset"
            ) from None


_check_ranks()
