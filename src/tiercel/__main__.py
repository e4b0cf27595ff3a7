"""`python -m tiercel`: the command line, for when the script is not on PATH."""

import sys

from tiercel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
