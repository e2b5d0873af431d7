"""`python -m infini <verb> ...`, which launchers of several processes need, and the entry of the command `infini`."""

import sys


def run() -> int:
    """Run the command line of this process. Returns its exit code."""
    try:
        # Imported here, because Ctrl-C may come while modules are imported.
        from infini.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
