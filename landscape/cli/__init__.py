"""The command line. One file a command; each parses, calls the library and prints."""

from __future__ import annotations

import signal
import sys

import click

from landscape import streams
from landscape._version import __version__
from landscape.cli import system
from landscape.cli.contour import contour
from landscape.cli.demo import demo
from landscape.cli.figures import figures
from landscape.cli.hessian_grid import hessian_grid
from landscape.cli.import_state import import_state
from landscape.cli.info import info
from landscape.cli.line import line
from landscape.cli.minima import minima
from landscape.cli.noise import noise
from landscape.cli.plan import plan
from landscape.cli.plot import plot
from landscape.cli.recipes import recipes
from landscape.cli.saddles import saddles
from landscape.cli.smoothing import smoothing
from landscape.cli.spectrum import spectrum
from landscape.cli.stability import stability
from landscape.cli.sweep import sweep
from landscape.cli.train import train
from landscape.failures import explain
from landscape.train import launcher


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="landscape")
def group() -> None:
    """Train with distributed SGD, decompose every step, and map the loss landscape around the result.

    \b
    Example:
      landscape train digits-dpsgd -o runs/dp
      landscape contour runs/dp/last.h5 --plot contour.png
    """


for command in (
    train, sweep, plan, contour, line, hessian_grid, spectrum, noise, smoothing, stability,
    minima, saddles, figures, plot, import_state, info, recipes, demo,
):  # fmt: skip
    group.add_command(command)


def main() -> None:
    """Run the command line. Exit 0 done, 1 failed, 2 bad usage; a user's mistake is one line on stderr."""
    streams.prepare()
    try:
        with system.signals():
            code = group.main(standalone_mode=False)
    except click.UsageError as error:
        code = _fail(error.format_message(), 2)
    except click.ClickException as error:
        code = _fail(error.format_message(), 1)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        stopped = cause if isinstance(cause, system.Stopped) else system.Stopped(signal.SIGINT)
        code = _fail(str(stopped), stopped.exit_code)
    except BrokenPipeError:  # the reader of stdout went away, as with | head
        streams.flush()
        code = 1
    except Exception as error:
        streams.flush()
        known = explain(error)
        if known is None:
            raise
        code = _fail(str(known), known.exit_code)
    else:
        if lost := streams.flush():
            code = 1 if isinstance(lost, BrokenPipeError) else _fail(str(explain(lost)), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    """Say in a line why the command failed, here or in the process that started this one."""
    line = " ".join(message.split())
    if not launcher.report(line, code):
        click.echo(f"landscape: {line}", err=True)
    return code
