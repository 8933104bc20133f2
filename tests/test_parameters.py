"""Options that are made from the parameters of functions."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.testing import CliRunner

from landscape.cli.options import command, described, group, options_of


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
    own = {"draws": {"flag": "--min-draws"}, "on": {"flag": "--on/--off"}}
    options = options_of(measure, "batch", "tol", "draws", "exact", **own)
    shown = click.Command("command", params=options, callback=lambda **values: print(sorted(values.items())))
    run = CliRunner().invoke
    assert "Missing option '--batch'" in run(shown, []).output
    given = run(shown, ["--batch", "3", "--min-draws", "-1", "--exact", "--off"])
    assert given.output == "[('batch', 3), ('draws', -1), ('exact', True), ('on', False), ('tol', 0.1)]\n"
    assert "[('batch', 1), ('draws', None), ('exact', False), ('on', True), ('tol', 2.0)]" in (
        run(shown, ["--batch", "1", "--tol", "2"]).output
    )
    assert run(shown, ["--batch", "x"]).exit_code == 2


@dataclass
class Place:
    """Where.

    Args:
        floor: A number. All of the text is the help.
    """

    floor: int = 0


@command(place=group(Place), names={"argument": True, "metavar": "NAME…"}, hidden=None)
def visit(names: tuple[str, ...], place: Place, times: tuple[float, ...], hidden: int = 1) -> None:
    """Visit places.

    Args:
        times: When.

    Example:
        landscape visit
        roof
    """
    print(names, place, times, hidden)


def test_the_parameters_of_a_function_are_the_options_of_its_command() -> None:
    run = CliRunner().invoke
    assert run(visit, ["a", "b", "--floor", "2", "--times", "1", "--times", "2"]).output == (
        "('a', 'b') Place(floor=2) (1.0, 2.0) 1\n"
    )
    text = run(visit, ["--help"]).output
    for words in ("Visit places.\n", "A number. All of the text is the help.  [default: 0]", "When.", "NAME"):
        assert words in text
    assert text.endswith("Example: landscape visit roof\n")
    assert "hidden" not in text
    assert "Args" not in text
