"""``python -m landscape``: the same commands as the console script."""

import os
import sys

# Python puts the current folder first for -m; what lies there is not to be taken for an installed package.
if not sys.flags.safe_path and os.path.isdir(".") and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from landscape.cli import main

main()
