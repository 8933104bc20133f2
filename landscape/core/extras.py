"""Packages that the toolkit uses where they are installed, and needs for nothing else."""

from __future__ import annotations

import importlib
from typing import Any

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
