"""`python -m infini <verb> ...`, which launchers of several processes need."""

import sys

from infini.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
