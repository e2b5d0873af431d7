"""`python -m infini <verb> ...`, which launchers of several processes need, and the entry of the command `infini`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; see infini.cli.main.main."""
    try:
        # A checkout has this package only where it is installed.
        if importlib.util.find_spec("infini.conf") is None:
            print("infini: error: this checkout is not installed; run `make env`", file=sys.stderr)
            return 2
        # Imported here, because Ctrl-C may come while modules are imported.
        from infini.cli.main import main as command

        return command(argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
