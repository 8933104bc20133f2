"""Every parameter of every public function and command, with wrong values that its annotation chooses.

Each is refused before any work in one line, which says the parameter, its value and what is allowed.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

import landscape
import landscape.cli
from landscape import InputError, Problem, limits
from landscape.core import registry
from tests.conftest import Command
from tests.test_cli import one_line
from tests.test_first_argument import GIVEN, linear

#: Values of each kind. An object, a class and bytes are never right, but where anything is.
VALUES: list[Any] = [
    object(), Problem, b"x", True, 1.5, math.nan, math.inf, -1, 2**70, np.float32("nan"), np.int64(-1),
    torch.tensor(True), torch.ones(2, dtype=torch.bool), "no such", "", "1", "a\0b", [object()], [1.5, "x"], {1: 2},
]  # fmt: skip

#: Classes that are called as functions are, and functions outside of landscape.__all__.
CLASSES = ("Problem", "HessianOperator", "Recorder", "DecentralizedDataParallel", "ShardedProblem")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(landscape, name)
        for name in landscape.__all__
        if inspect.isfunction(getattr(landscape, name))
    },
    **{name: getattr(landscape, name) for name in CLASSES},
    **{f"limits.{name}": getattr(limits, name) for name in limits.__all__},
    "models.build": landscape.models.build,
    "data.load": landscape.data.load,
}

NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
#: Parameters that stand for anything, or of which the function itself says what is wrong, in other words.
EXAMINED = {"problem", "problems", "model", "loss", "data", "optimizer", "run"}


def may_be(value: Any, annotation: Any) -> bool:
    """Return whether a value may be right, by its type and the kind of bounds alone."""
    kind, args = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind is typing.Annotated:
        beyond = isinstance(value, (int, float, np.number)) and value == -1
        return (
            may_be(value, args[0])
            and not beyond
            and (args[0] is not str or value not in ("no such", "1", ""))
        )
    if kind in (typing.Union, types.UnionType):
        return any(may_be(value, part) for part in args)
    if kind is typing.Literal:
        return value in args
    if kind in (int, float):
        if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, (int, float, np.number)):
            return False
        return math.isfinite(value) if kind is float else abs(value) < 2**63 and value == int(value)
    if kind is Path:
        return isinstance(value, str) and value not in ("", "a\0b")
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    if kind in (list, tuple) or (
        isinstance(kind, type) and issubclass(kind, typing.Iterable) and kind is not str
    ):
        items = isinstance(value, (list, tuple, torch.Tensor)) and getattr(value, "ndim", 1) > 0
        if isinstance(value, kind) and not isinstance(value, (list, tuple, str, bytes, type)):
            return True
        return items and bool(args) and all(may_be(each, args[0]) for each in value)
    if kind is Callable:
        return callable(value)
    if kind is torch.Tensor:
        return isinstance(value, torch.Tensor)
    return kind is Any or (isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, type))


def cases() -> Iterator[tuple[str, str]]:
    """(function, parameter) of all that are checked."""
    for name, function in FUNCTIONS.items():
        for key, parameter in inspect.signature(function).parameters.items():
            if name == "ShardedProblem" and key in ("terms", "check", "name"):  # all ranks compare it before
                continue
            if key not in EXAMINED and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                yield name, key


class Counting(torch.nn.Linear):
    """A layer that counts its passes."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.passes += 1
        return super().forward(x)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments that functions cannot do without."""
    _, loss, data = linear()
    model = Counting(3, 2)
    problem = Problem(model, loss, data)
    path = tmp_path_factory.mktemp("weights") / "net.pt"
    torch.save(model.state_dict(), path)
    run = landscape.import_state(path, model)
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=3)
    return GIVEN | {
        "problem": problem, "problems": [problem, problem], "model": model, "loss": loss, "data": data,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "run": run, "surface": surface,
        "folder": "no folder", "path": "no.h5", "paths": "no.pt", "recipe": "digits-ssgd", "recipes": "digits-ssgd",
        "runs": "no.h5", "results": [surface], "t": np.ones(3), "function": landscape.trace, "name": "digits",
        "delays": [0], "momentum": 0.0, "into": model,
    }  # fmt: skip


def in_line(value: Any, line: str) -> bool:
    """Return whether a line says a value, or its type."""
    shown = [repr(value)[:60], str(value)[:60], type(value).__name__, "the class", " bits"]
    return any(text in line for text in filter(None, shown))


@pytest.mark.parametrize(("name", "key"), list(cases()))
def test_a_wrong_value_is_refused_before_any_work(
    name: str, key: str, arguments: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = FUNCTIONS[name]
    of = function.__init__ if inspect.isclass(function) else function
    annotation = typing.get_type_hints(of, include_extras=True).get(key, Any)
    if inspect.isclass(function) and annotation is Any:  # of a dataclass
        annotation = typing.get_type_hints(function, include_extras=True).get(key, Any)
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name: arguments[p.name] for p in parameters if p.default is p.empty and p.kind in NAMED}
    if name.startswith("limits."):
        needed |= {each: limits.Hyperparameters() for each in ("before", "after") if each in needed}
    default = inspect.signature(function).parameters[key].default
    unknown = isinstance(default, float) and math.isnan(default)  # NaN says that a number is not known
    before = Counting.passes
    for value in VALUES:
        if may_be(value, annotation) or (unknown and isinstance(value, float) and math.isnan(value)):
            continue
        with pytest.raises(InputError) as refusal:
            function(**needed | {key: value})
        line = str(refusal.value)
        assert line.startswith(key), line
        assert "\n" not in line
        assert in_line(value, line) or isinstance(value, (list, torch.Tensor)), line
        assert "must be" in line or "allowed" in line, line
    assert Counting.passes == before
    assert not any(tmp_path.iterdir())


def options() -> Iterator[tuple[str, str, bool]]:
    """(command, option, whether it is a number) of all options that are numbers or choices."""
    for name in registry.commands.names():
        for option in landscape.cli.as_command(registry.commands[name]).params:
            if not isinstance(option, click.Option) or option.is_flag:
                continue
            number = option.type.name in ("integer", "float")
            if number or isinstance(option.type, click.Choice):
                yield name, max(option.opts, key=len), number


@pytest.mark.parametrize(("name", "flag", "number"), list(options()))
def test_wrong_values_of_options_are_refused(name: str, flag: str, number: bool, command: Command) -> None:
    for value in ("x", "", "nan", "inf", "1e999", "9" * 400, "True", "1,x") if number else ("x", "", "nan"):
        one_line(command(name, flag, value, "no.h5"), 2, f"{flag}: ")


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)])
def test_numbers_of_other_packages_are_numbers(number: Any, arguments: Mapping[str, Any]) -> None:
    problem = arguments["problem"]
    assert landscape.top_eigenvalues(problem, number, seed=number).values.shape == (2,)
    plane = landscape.random_plane(problem)
    assert landscape.contour(problem, plane, grid=(number, 3), span=number).span == 2.0
    assert limits.max_stable_step(number) == limits.max_stable_step(2)


def test_a_path_may_be_any_path_like_object(arguments: Mapping[str, Any], tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path / "surface.h5")

    landscape.save([arguments["surface"]], Named())  # type: ignore[arg-type]
    assert isinstance(landscape.load(Named()), landscape.Surface)  # type: ignore[arg-type]
