"""``python -m landscape``: the same commands as the console script."""

from landscape.cli import main

main()
