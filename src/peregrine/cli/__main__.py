"""`python -m peregrine.cli` is the `peregrine` command."""

import sys

from peregrine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
