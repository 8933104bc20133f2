"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds.

The public names stand in ``__init__.pyi``. A name is imported when it is first used: ``import landscape``
alone takes milliseconds.
"""

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
#: Public name -> the module that defines it; "landscape" for packages of the public.
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = list(_MODULES)
#: Former public name -> today's, for one minor version: that after which they go.
_FORMER = {
    "Ends": "ExtremeEigenvalues",
    "FailedError": "OperationError",
    "NoiseEstimate": "Noise",
    "estimate_noise": "noise",
}
_FORMER_UNTIL = "0.19"


def __getattr__(name: str) -> Any:
    """The public name ``name``, imported (PEP 562)."""
    if name in _FORMER:
        line = f"landscape.{name} is landscape.{_FORMER[name]} now; the old name goes with {_FORMER_UNTIL}"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        return __getattr__(_FORMER[name])
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = _MODULES[name]
    if module == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    found = globals()[name] = getattr(importlib.import_module(module), name)  # the next use finds it at once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
