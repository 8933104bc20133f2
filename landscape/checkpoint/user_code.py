"""A user's model, data and loss: their allowed forms, and their import by MODULE:NAME on the command line.

Only modules that the user names are imported, never a module that a file names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from landscape import data as datasets
from landscape import models
from landscape.core import registry
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.options import choose, near, toml_value
from landscape.core.registry import Registry, others_code
from landscape.data.base import Dataset, fingerprint
from landscape.problem.batches import is_resident, named_tensors
from landscape.problem.data import batched
from landscape.problem.metrics import BY_NAME
from landscape.problem.problem import Loss


@dataclass(frozen=True)
class Spec:
    """A NAME, or MODULE:NAME, with options for its call; ``called``: whether the text has brackets."""

    name: str
    options: dict[str, Any]
    called: bool


def is_user_defined(name: str) -> bool:
    """Return whether the name of a model or data set is MODULE:NAME, and not a built-in one."""
    return ":" in name


def parse(where: str, text: str) -> Spec:
    """Return the name and options in a text such as "digits", "mlp(widths=[64, 10])" or "my:net(depth=2)".

    Raises InputError, with the option ``where``, for a text of another form.
    """
    match = re.fullmatch(r"([\w.-]+(?::[\w.]+)?)(?:\((.*)\))?", text.strip())
    if not match:
        form = "NAME, MODULE:NAME or either with (KEY=VALUE, …)"
        raise InputError(f"{where}: '{text}' is not allowed, it must be {form}")
    try:
        options = tomllib.loads(f"options = {{{match[2] or ''}}}")["options"]
        json.dumps(options)  # the form in a checkpoint, which cannot have the dates and times of TOML
    except (tomllib.TOMLDecodeError, TypeError) as error:
        why = f"it must be KEY=VALUE, … in TOML ({error})"
        raise InputError(f"{where}: '({match[2]})' is not allowed, {why}") from error
    return Spec(match[1], options, match[2] is not None)


def text_of(name: str, options: Mapping[str, Any]) -> str:
    """Return NAME, or NAME(KEY=VALUE, …), the text that :func:`parse` reads."""
    text = ", ".join(f"{key}={toml_value(value)}" for key, value in options.items())
    return f"{name}({text})" if text else name


def command_text(name: str, options: Mapping[str, Any]) -> str:
    """Return :func:`text_of`, quoted for a shell."""
    return shlex.quote(text_of(name, options)) if options else name


def known_spec(where: str, text: str, registry: Registry) -> Spec:
    """Return :func:`parse` of a text, with checked options and defaults for a built-in model or data set."""
    spec = parse(where, text)
    if is_user_defined(spec.name):
        return spec
    choose(where, spec.name, [*registry.names(), "MODULE:NAME"])
    return replace(spec, options=registry.options(spec.name, spec.options))


def find(where: str, name: str) -> Any:
    """Import the module of MODULE:NAME, and return the object; raise InputError in one line if that fails."""
    module_name, _, path = name.partition(":")
    with contextlib.suppress(FileNotFoundError):  # the current folder has been deleted
        if (folder := os.getcwd()) not in sys.path:
            sys.path.append(folder)  # as the last one, because it must not hide an installed module
    try:
        with others_code():
            value: Any = importlib.import_module(module_name)
    except Exception as error:  # any error of the user's module
        absent = (error.name or module_name) if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            raise InputError(f"{where}: there is no module '{absent}' in this folder or installed") from error
        raise _failed(where, f"importing {module_name}", error) from error
    for part in path.split("."):
        if not hasattr(value, part):
            at = getattr(sys.modules[module_name], "__file__", None) or "built in"
            raise InputError(f"{where}: {module_name} ({at}) has no '{part}'{near(part, dir(value))}")
        value = getattr(value, part)
    return value


def _make(where: str, spec: Spec) -> Any:
    """Return the result of a call of MODULE:NAME with its options, or the object itself if it is a module."""
    value = find(where, spec.name)
    if isinstance(value, nn.Module) or not callable(value):
        return value
    try:
        with others_code():
            return value(**spec.options)
    except LandscapeError:
        raise
    except Exception as error:  # any error of the user's function
        raise _failed(where, spec.name, error) from error


def _failed(where: str, what: str, error: Exception) -> OperationError:
    """Return an error of one line, with the line of the user's code that raised ``error``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    words = " ".join(str(error).split())[:200]
    return OperationError(f"{where}: {what} failed: {type(error).__name__}: {words}{at}")


def build_model(where: str, spec: Spec) -> nn.Module:
    """Return a built-in model, or the ``nn.Module`` that is, or is returned by, a user's MODULE:NAME.

    A wrapper for several GPUs is removed, because here the learners are distributed.
    """
    if not is_user_defined(spec.name):
        return models.build(spec.name, **spec.options)
    model = _make(where, spec)
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if not isinstance(model, nn.Module):
        raise InputError(f"{where}: {spec.name} gives a {type(model).__name__}, it must give an nn.Module")
    return model


def load_loss(where: str, text: str) -> Loss | None:
    """Return the loss that ``text`` names; None for "output", the loss in the model's output.

    MODULE:NAME is the loss itself, loss(outputs, targets) -> mean, if it is a function or a module; a class,
    or a name with brackets, is called, and returns the loss.
    """
    if text == "output":
        return None
    spec = parse(where, text)
    if not is_user_defined(spec.name):
        raise InputError(f"{where}: '{text}' is not allowed, it must be MODULE:NAME or output")
    value = find(where, spec.name)
    loss = _make(where, spec) if spec.called or inspect.isclass(value) else value
    if not callable(loss):
        kind = type(loss).__name__
        raise InputError(f"{where}: {spec.name} gives a {kind}, it must be loss(outputs, targets)")
    return loss


def load_metrics(where: str, texts: Sequence[str]) -> dict[str, Any] | None:
    """Return the metrics of ``texts``, each a name or NAME=MODULE:FUNCTION; None if there are none."""
    metrics: dict[str, Any] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if path:
            spec = parse(where, path)
            value = find(where, spec.name)
            metrics[name] = _make(where, spec) if spec.called or inspect.isclass(value) else value
        else:
            metrics[name] = choose(where, name, BY_NAME)
    return metrics or None


@dataclass(frozen=True)
class UserData:
    """A user's data.

    Attributes:
        splits: the data of each split, as for :class:`landscape.Problem`, by its name.
        loss: the loss; None for the loss in the model's output.
        columns: as for :class:`landscape.data.Dataset`.
    """

    splits: dict[str, Any]
    loss: Loss | None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> Any:
        """Return the split called ``name``; raise InputError if there is none."""
        return self.splits[choose("split", name, self.splits)]

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all tensors; "" if a split is an iterable of batches, whose order may change."""
        if not all(is_resident(split) for split in self.splits.values()):
            return ""
        every = (t for name in sorted(self.splits) for _, t in named_tensors(self.splits[name]))
        parts = (part for t in every for part in (torch.tensor(t.shape), t.detach().cpu()))
        return fingerprint(part.flatten().view(torch.uint8).numpy() for part in parts)


def as_data(data: Any) -> UserData | Dataset:
    """Return a user's data from any of the allowed forms.

    - a :class:`landscape.data.Dataset`, or any object with ``train`` and ``test`` (and perhaps ``loss`` and
      ``columns``);
    - a dict of splits, with "train" or "test" among its keys, and perhaps "loss" and "columns";
    - any other object is one split, used as both.

    A split is data as for :class:`landscape.Problem`. The default loss is cross-entropy or, if the batches
    are single dicts, the loss in the model's output.
    """
    if isinstance(data, (Dataset, UserData)):
        return data
    parts: Mapping[str, Any] = {"train": data, "test": data}
    if isinstance(data, Mapping) and {"train", "test"} & set(data):
        parts = data
    elif hasattr(data, "train") and hasattr(data, "test"):
        names = ("train", "test", "loss", "columns")
        parts = {name: getattr(data, name) for name in names if hasattr(data, name)}
    splits = {str(name): split for name, split in parts.items() if name not in ("loss", "columns")}
    loss = parts["loss"] if "loss" in parts else _usual_loss(next(iter(splits.values())))
    columns = parts.get("columns")
    return UserData(splits, loss, columns if isinstance(columns, Mapping) else {})


def _usual_loss(split: Any) -> Loss | None:
    if is_resident(split) or isinstance(split, Iterator):
        first = split
    else:
        batches = batched(split)  # a data set gives its samples one at a time
        first = next(iter(batches), None) if hasattr(batches, "__iter__") else None
    return None if isinstance(first, Mapping) else nn.functional.cross_entropy


def load_data(where: str, spec: Spec, data_dir: str | Path | None) -> UserData | Dataset:
    """Return a built-in data set, or the data of a user's MODULE:NAME; see :func:`as_data`."""
    if not is_user_defined(spec.name):
        return datasets.load(spec.name, data_dir=data_dir, **spec.options)
    return as_data(_make(where, spec))


def resolved(source: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of :meth:`landscape.Checkpoint.problem` with objects in place of their names."""
    source_options = dict(source)
    if isinstance(name := source.get("model"), str):
        source_options["model"] = partial(build_model, "model", known_spec("model", name, registry.models))
    if isinstance(name := source.get("data"), str):
        spec = known_spec("data", name, registry.data_sets)
        source_options["data"] = load_data("data", spec, source.get("data_dir"))
    if isinstance(name := source.get("loss"), str) and name != "data":
        source_options["loss"] = load_loss("loss", name)
    return source_options
