"""The command line. One file a command; each parses, calls the library and prints."""

from __future__ import annotations

import signal
import sys
import textwrap
import warnings

import click

from landscape._version import __version__
from landscape.cli import system
from landscape.core import registry, streams
from landscape.core.failures import explain
from landscape.core.files import printable
from landscape.train.distributed import launcher


class Commands(click.Group):
    """The commands of the registry, each imported when it is used; the list of them imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return registry.commands.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in registry.commands:
            return None
        with system.importing():
            command: click.Command = registry.commands[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))  # as in click
        rows = []
        for name in names:
            summary = registry.commands.summary(name)
            if not summary and (command := self.get_command(ctx, name)):  # a plugin's
                summary = (command.short_help or command.help or "").partition("\n\n")[0]
            rows.append((name, textwrap.shorten(summary, limit, placeholder="...")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="landscape")
@click.pass_context
def group(context: click.Context) -> None:
    """Train with distributed SGD, decompose every step, and map the loss landscape around the result.

    \b
    Example:
      landscape train digits-dpsgd -o runs/dp
      landscape contour runs/dp/last.h5 --plot contour.png
    """
    if context.invoked_subcommand is None:  # its help, and not a one-line error
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main() -> None:
    """Run the command line. Exit 0 done, 1 failed, 2 bad usage; a user's mistake is one line on stderr."""
    streams.prepare()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        code = _run()
    sys.exit(code)


def _run() -> int:
    """The exit code of the command; errors are printed."""
    try:
        with system.signals():
            code = group.main(prog_name="landscape", standalone_mode=False)
    except click.UsageError as error:
        code = _fail(error.format_message(), 2)
    except click.ClickException as error:
        code = _fail(error.format_message(), 1)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        stopped = cause if isinstance(cause, system.Stopped) else system.Stopped(signal.SIGINT)
        code = _fail(str(stopped), stopped.exit_code)
    except BrokenPipeError:  # nothing reads stdout any more, as with | head
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
    return code if isinstance(code, int) else 0


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """A warning as one line without its place in the code, for a user of commands; none with -q."""
    context = click.get_current_context(silent=True)
    if not (context and context.params.get("quiet")):
        _say(" ".join(str(message).split()))


def _fail(message: str, code: int) -> int:
    """Print in one line why the command failed, here or in the process that started this one."""
    line = " ".join(message.split())
    if not launcher.report(line, code):
        _say(line)
    return code


def _say(line: str) -> None:
    """A line on stderr; control characters from names and files are escaped for the terminal."""
    click.echo(f"landscape: {printable(line)}", err=True)
