"""The work of the verbs: train, evaluate, generate, tabulate. It brings models, tasks and reports together."""

import os

from infini.errors import InputError

# Lightning reads these when it is imported, and fails for a rank that is no number.
for _name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
    try:
        int(os.environ.get(_name, "0"))
    except ValueError:
        raise InputError(
            f"{_name}={os.environ[_name]!r}: this environment variable must be a number, or unset"
        ) from None
