"""Foundations of packages of one's own: base classes, registries, checks of options, parts of pictures.

A package adds names to the registries in the module that its entry point of the group "landscape.plugins"
names. The names of this module stand in ``__init__.pyi``; each is imported when it is used, so that an entry
point that declares names takes no time.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from landscape.core import registry as registry

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
#: Name -> the module that defines it.
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """The name ``name`` of ``__init__.pyi``, imported (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
