"""landscape completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from landscape.cli import output
from landscape.cli.choices import Choice

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_LANDSCAPE_COMPLETE"  # as click derives it from the name of the program


@click.command(epilog='Example: eval "$(landscape completion bash)"')
@click.argument("shell", metavar="SHELL", type=Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and values.

    SHELL is bash, zsh or fish. To have it in every shell:

    \b
      echo 'eval "$(landscape completion bash)"' >> ~/.bashrc
      echo 'eval "$(landscape completion zsh)"' >> ~/.zshrc
      landscape completion fish > ~/.config/fish/completions/landscape.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    context = click.get_current_context().find_root()
    script = kind(context.command, {}, "landscape", _VARIABLE).source()
    output.values(script, script=script)
