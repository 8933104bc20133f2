"""Packages that the toolkit uses where they are installed, and where the modules of a user are found."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

from landscape.core.errors import FailedError


def optional(module: str, purpose: str, install: str) -> Any:
    """Import ``module``, which only ``purpose`` needs.

    Args:
        module: the module to import, such as "torch.utils.tensorboard".
        purpose: what asks for it: a method, an option with its value.
        install: what pip installs for it: a package, or an extra of this one.

    Raises:
        FailedError: the module cannot be imported; the line names ``purpose`` and ``install``.

    Example:
        >>> optional("json", "an example", "json").dumps([1])
        '[1]'
        >>> optional("no_such_module", "an example", "it")
        Traceback (most recent call last):
        landscape.core.errors.FailedError: an example: no_such_module is not installed; pip install it
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name not in (None, module, package):  # installed, but what it needs itself is missing
            raise FailedError(f"{purpose}: {module} cannot be imported ({error})") from error
        raise FailedError(f"{purpose}: {package} is not installed; pip install {install}") from error


class _Apart(importlib.abc.MetaPathFinder):
    """Finds modules in ``folders`` after all other places. Processes that are started do not inherit it."""

    folders: ClassVar[list[str]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        return None if path is not None else importlib.machinery.PathFinder.find_spec(name, self.folders)


_apart = _Apart()
_appended: list[str] = []  # what look_in put on the module path


def look_in(folder: str) -> None:
    """Have modules found in ``folder``, too: last, as it must not hide an installed module."""
    if _apart in sys.meta_path:
        _apart.folders.append(folder)
    elif folder not in sys.path:
        sys.path.append(folder)
        _appended.append(folder)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Imports inside find nothing in the folders of :func:`look_in`; nor do processes that are started later.

    Dask and PyTorch import packages such as zstandard and opt_einsum if they are there, and a file of that
    name in the current folder, which nobody named, would be run.
    """
    for folder in _appended:
        with contextlib.suppress(ValueError):  # somebody else has removed it
            sys.path.remove(folder)
    _apart.folders.extend(_appended)
    _appended.clear()
    if _apart in sys.meta_path:
        sys.meta_path.remove(_apart)
    yield
    sys.meta_path.append(_apart)
