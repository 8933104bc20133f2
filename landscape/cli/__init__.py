"""The command line, and the signals that end it. Each command parses, calls the library and prints."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem

from landscape.cli import commands, output
from landscape.core import progress, registry
from landscape.core.errors import DataWarning, OperationError, explain
from landscape.core.files import printable
from landscape.core.options import choose, near
from landscape.training.processes import children

_HELP = f"{__name__}.help"  # in click's context: the help of a command may be asked for


def as_command(entry: Any) -> click.Command:
    """Return the command of an entry of the registry: the entry itself, or one made from an analysis."""
    if isinstance(entry, click.Command):
        return entry
    from landscape.cli.common import command_of  # here, because it imports torch

    return command_of(entry)


class Commands(click.Group):
    """The group of all registered commands.

    A command is imported when it runs. Lists, help and completion import no command.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return registry.commands.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in registry.commands:
            return None
        if cmd_name in commands.WORDS and (ctx.resilient_parsing or ctx.meta.get(_HELP)):
            command = commands.without_callback(cmd_name)
        else:
            command = as_command(registry.commands[cmd_name])
        output.add_options(command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_HELP] = not set(ctx.help_option_names).isdisjoint(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in registry.commands:
            hint = near(args[0], self.list_commands(ctx)) or "; landscape --help lists the commands"
            ctx.fail(f"no such command '{args[0]}'{hint}")
        if args[0] in commands.WORDS and not ctx.resilient_parsing and not ctx.meta.get(_HELP):
            values = _checked_arguments(args, ctx)
            names_figures = bool(values.get("names") or values.get("every") or values.get("share"))
            if args[0] == "figures" and not names_figures and registry.figures.untouched:
                # No plugin has added a figure, so the built-in ones are listed without the command's imports.
                rows = commands.WORDS["figures"]["rows"]
                command = commands.without_callback("figures")
                command.callback = lambda **_: output.list_figures(rows)
                output.add_options(command)
                return args[0], command, args[1:]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=registry.commands.summary(name)) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        name_width = max(map(len, names))
        summary_width = formatter.width - 6 - name_width  # as in click
        built_in = [name for group in commands.GROUPS.values() for name in group]
        plugins = {"Plugins": [name for name in names if name not in built_in]}
        for title, group in {**commands.GROUPS, **plugins}.items():
            rows = []
            for name in group:
                summary = registry.commands.summary(name)
                if not summary and (command := self.get_command(ctx, name)):  # a plugin's
                    summary = (command.short_help or command.help or "").partition("\n\n")[0]
                short_summary = textwrap.shorten(summary, summary_width, placeholder="...")
                rows.append((name.ljust(name_width), short_summary))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _checked_arguments(args: list[str], ctx: click.Context) -> dict[str, Any]:
    """Parse the words ``args`` of a command line; refuse wrong options, files and names.

    The command is imported only afterwards, because an import takes seconds.

    Returns:
        The value of each parameter, by the parameter's name.
    """
    output.current().command = args[0]
    command = commands.without_callback(args[0])
    output.add_options(command)
    values = command.make_context(args[0], args[1:], ctx).params
    for parameter in commands.WORDS[args[0]]["params"]:  # entries of commands.json
        *flags, parameter_name = parameter["declarations"]
        if flags:  # an option: only arguments are checked for files and names
            continue
        completion = parameter.get("complete")  # "file", or the allowed names
        value = values[parameter_name]  # a text or several texts; None or "" if it is not given
        if not value:
            continue
        words = [value] if isinstance(value, str) else value
        for word in words:
            exists = os.path.lexists(word)
            if completion == "file" and not exists:
                raise OperationError(f"{word}: no such file; a file of weights, a run or a result is needed")
            if word.endswith(".toml") and not exists:
                raise OperationError(f"{word}: no such file; a recipe is needed")
            is_pattern = bool(set("*?[") & set(word))
            if args[0] in ("recipes", "train", "sweep") and not is_pattern:
                from landscape.training import recipes

                # A word that names no recipe of the paper's tables must name a file or a built-in recipe:
                # ``file_values`` raises an error for any other word.
                if not recipes.paper_recipe_values(word, changes={}):
                    recipes.file_values(word)
            # ``untouched``: no plugin has added a figure, so that ``completion`` has all names. ``choose``
            # raises an error for any other name. With plugins, the command itself checks the name.
            if args[0] == "figures" and registry.figures.untouched:
                choose("NAME", word, completion)
    return values


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the versions and the devices."""
    if value and not context.resilient_parsing:
        from landscape.cli import details  # here, because it imports torch

        versions = [f"{name} {version}" for name, version in details.packages().items()]
        click.echo("\n".join([*versions, *details.devices()]))
        context.exit()


@click.group(
    cls=Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of landscape, Python and torch, and the devices.",
)
@click.pass_context
def group(context: click.Context) -> None:
    """Train with distributed SGD, decompose every step, and map the loss landscape around the result.

    \b
    Example:
      landscape train digits-dpsgd -o runs/dp
      landscape contour runs/dp/last.h5 --plot contour.png
    """
    output.current().command = context.invoked_subcommand or ""
    # The modules of the command are imported by now. From here on a signal raises an exception. If a package
    # caught this exception during its import, the package would stay incomplete.
    context.with_resource(signals())
    if context.invoked_subcommand is None:  # then the help is printed, and no error message
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main() -> None:
    """Run the command line. Exit 0 done, 1 failed, 2 bad usage; a user's mistake is one line on stderr."""
    progress.prepare()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        code = _run()
    sys.exit(code)


def _run() -> int:
    """Run the command of the command line, print its error if there is one, and return its exit code."""
    out = output.Output()
    try:
        with output.collected(out):
            code = group.main(prog_name="landscape", standalone_mode=False)
    except click.UsageError as error:
        code = _fail(error.format_message(), 2)
    except click.ClickException as error:
        code = _fail(error.format_message(), 1)
    except (click.Abort, KeyboardInterrupt) as error:
        # Stopped is a KeyboardInterrupt. click catches a KeyboardInterrupt, and raises Abort instead.
        interrupt = error.__context__ if isinstance(error, click.Abort) else error
        stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
        code = _fail(str(stopped), stopped.exit_code)
    except BrokenPipeError:  # the reader of stdout has ended, such as head in "landscape … | head"
        progress.flush()  # empties the buffer of stdout
        code = 1
    except Exception as error:
        progress.flush()
        failure = explain(error)
        if failure is None:  # a defect of the program, which needs its traceback
            raise
        if out.verbose:
            traceback.print_exception(error)
        # failure.line() writes options in place of the parameters that the failure names.
        code = _fail(failure.line(flags_of(out.command)), failure.exit_code)
    else:
        write_error = progress.flush()  # None if all of stdout is written
        if isinstance(write_error, BrokenPipeError):
            code = 1
        elif write_error:
            code = _fail(str(explain(write_error)), 1)
    return code if isinstance(code, int) else 0  # a command that ends without an exit code returns None


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    """Print a warning as one line: with -v its location in the code, too; with -q only if data is lost."""
    out = output.current()
    where = f"{filename}:{lineno}: {category.__name__}: " if out.verbose else ""
    if not out.silent or (issubclass(category, DataWarning) and not out.muted):
        _say(where + " ".join(str(message).split()))


def flags_of(name: str) -> dict[str, str]:
    """Return the option of each parameter of the command ``name``; an argument's name is in capitals.

    Keys are names of parameters and, in lower case with underscores, of options.
    """
    flags: dict[str, str] = {}
    command = group.get_command(click.Context(group, resilient_parsing=True), name)  # without torch
    for parameter in command.params if command else ():
        flag = max(parameter.opts, key=len)
        if isinstance(parameter, click.Argument):
            flag = str(parameter.metavar or parameter.name).strip("[]….").upper()
        flags |= {str(parameter.name): flag, flag.lstrip("-").replace("-", "_").lower(): flag}
    return flags


def _fail(message: str, code: int) -> int:
    """Print why the command failed, in one line, and return ``code``.

    If a launcher started this process, the launcher prints the line.
    """
    line = " ".join(message.split())
    if not children.report(line, code):
        _say(line)
    return code


def _say(line: str) -> None:
    """Print a line on stderr; control characters from names and files are escaped for the terminal."""
    click.echo(f"landscape: {printable(line)}", err=True)


# ---- Signals

# Windows has no SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Stopped(KeyboardInterrupt):
    """A signal that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.exit_code = number, 128 + number  # as in shells

    def __str__(self) -> str:
        name = "" if self.number == signal.SIGINT else f" by {signal.Signals(self.number).name}"
        return f"interrupted{name}; the same command resumes contours and sweeps, --resume a training"


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Handle the signals SIGINT, SIGTERM and SIGHUP while the command runs.

    The first signal raises :class:`Stopped` in the command; the second one ends the process at once. Ignored
    signals, such as SIGHUP under nohup, stay ignored. Nothing changes in a process that --nproc started,
    because its launcher handles the signals, nor in a thread that is not the main one.
    """
    started_by_nproc = children.launcher_store() is not None
    if threading.current_thread() is not threading.main_thread() or started_by_nproc:
        yield
        return
    default_handlers = (signal.SIG_DFL, signal.default_int_handler)
    all_handlers = {number: signal.getsignal(number) for number in STOPPING}
    handlers = {number: handler for number, handler in all_handlers.items() if handler in default_handlers}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # as set_wakeup_fd below requires

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    def exit_at_second_signal() -> None:
        count = 0
        with receiver:
            while byte := receiver.recv(1):  # no byte: ``sender`` is closed
                number = byte[0]
                if number in handlers:
                    count += 1
                if count > 1:
                    sys.stderr.write(f"landscape: {Stopped(number)}\n")
                    sys.stderr.flush()
                    os._exit(Stopped(number).exit_code)

    # Python calls ``stop`` only between its own instructions, and so compiled code, such as an exchange
    # between processes, may delay the call for long. The thread is not delayed.
    threading.Thread(target=exit_at_second_signal, daemon=True).start()
    # From here on, Python writes the number of each signal to ``sender`` as one byte.
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        for number in handlers:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        sender.close()
