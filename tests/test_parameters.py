"""Options that are made from the parameters of functions."""

from __future__ import annotations

import click
from click.testing import CliRunner

from landscape.cli.options import described, options_of


def measure(
    batch: int, tol: float = 0.1, draws: int | None = None, exact: bool = False, on: bool = True
) -> None:
    """Something.

    Args:
        batch: samples of a minibatch, as :func:`landscape.noise` takes them. A second sentence.
        tol, draws: the ``tol`` of Lau et al. 2023; default:
            a tenth.
        exact: λ is exact

    Returns:
        Nothing.
    """


def test_the_help_is_the_first_sentence_of_the_args() -> None:
    assert described(measure) == {
        "batch": "Samples of a minibatch, as landscape.noise takes them.",
        "tol": "The tol of Lau et al. 2023; default: a tenth.",
        "draws": "The tol of Lau et al. 2023; default: a tenth.",
        "exact": "λ is exact.",
    }


def test_options_have_the_defaults_and_types_of_the_signature() -> None:
    @click.command()
    def command(**values: object) -> None:
        click.echo(sorted(values.items()))

    for option in options_of(measure, "batch", "tol", "draws", "exact", on={"flag": "--on/--off"}):
        command = option(command)
    run = CliRunner().invoke
    assert "Missing option '--batch'" in run(command, []).output
    given = run(command, ["--batch", "3", "--min-draws", "-1", "--exact", "--off"])
    assert given.output == "[('batch', 3), ('draws', -1), ('exact', True), ('on', False), ('tol', 0.1)]\n"
    assert "[('batch', 1), ('draws', None), ('exact', False), ('on', True), ('tol', 2.0)]" in (
        run(command, ["--batch", "1", "--tol", "2"]).output
    )
    assert run(command, ["--batch", "x"]).exit_code == 2
