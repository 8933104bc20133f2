"""Tools of all other packages: errors, checks of input, files, HDF5, locks, memory, progress, registry."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """The module of each public name of a package, and its ``__getattr__`` (PEP 562) and ``__dir__``.

    A line of the stub beside its ``file``, ``from MODULE import NAME as NAME``, says which module defines a
    name.
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    modules = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", stub, re.MULTILINE)}

    def find(name: str) -> Any:
        """The public name ``name``, imported."""
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if modules[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    return modules, find, lambda: sorted({*vars(sys.modules[package]), *modules})
