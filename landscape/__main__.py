"""The start of a command: ``python -m landscape`` and the console script."""

import os
import signal
import sys


def main() -> None:
    """Run the command line; see :func:`landscape.cli.main`."""
    # Until the command handles signals, Ctrl-C ends the process: the exception that Python raises for it is
    # lost where it meets a callback within an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.getcwd()
    except FileNotFoundError:  # without one, MKL cannot be loaded
        sys.exit("landscape: the current folder has been deleted; change to one that exists (cd)")
    # OpenMP's threads otherwise wait in a loop of milliseconds for their next work: beside other programs on
    # the same cores, 150 steps of a small network took up to ten times as long. After this number of turns
    # they sleep. A quiet machine is then as fast as before, which is not so with the policy PASSIVE. OpenMP
    # reads the variable when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from landscape.cli import main as run

    run()


if __name__ == "__main__":
    main()
