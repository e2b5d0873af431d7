"""`python cli.py <verb> ...` from a checkout; the installed command is `infini`."""

import sys

from infini.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
