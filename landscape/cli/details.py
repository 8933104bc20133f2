"""Details for --json and -v: values in types of JSON; versions, devices, time and memory."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from landscape._version import __version__
from landscape.core.devices import accelerator, has_float64
from landscape.core.memory import peak_memory
from landscape.core.progress import duration
from landscape.results.base import Result
from landscape.results.noise import Noise

# Arrays with more numbers are shown by shape and range: they are in the result's file (ours).
MOST = 64
_SHOWN = ("float", "int", "bool", "str", "Array")


def text(value: Any) -> str:
    """``value`` as JSON in ASCII, which every terminal and every program can read.

    Example:
        >>> print(text({"λ": [1.5, math.nan, -math.inf]}))
        {
          "\\u03bb": [
            1.5,
            null,
            null
          ]
        }
    """
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` in types of JSON; None for NaN and infinite numbers.

    Example:
        >>> plain({"x": np.array([1.0, np.nan]), "done": np.bool_(True), "texts": ("a", "b")})
        {'x': [1.0, None], 'done': True, 'texts': ['a', 'b']}
        >>> plain(np.arange(100.0))
        {'shape': [100], 'min': 0.0, 'max': 99.0}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return plain(value.tolist()) if value.size <= MOST else _summary(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    return str(value)


def _summary(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Shape and range of a large array."""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    ends = {"min": finite.min(), "max": finite.max()} if array.dtype.kind in "fiu" and finite.size else {}
    return plain({"shape": list(array.shape), **ends})


def of_result(result: Result) -> dict[str, Any]:
    """The numbers of a result: its fields, its properties, its summary and its description."""
    shown: dict[str, Any] = {"schema": result.schema}
    shown |= {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    for kind in reversed(type(result).__mro__):
        for name, member in vars(kind).items():
            made = member.fget.__annotations__ if isinstance(member, property) and member.fget else {}
            if made.get("return") in _SHOWN and not name.startswith("_"):
                shown[name] = getattr(result, name)
    if isinstance(result, Noise):
        shown["summary"] = result.means()
    shown["describe"] = result.describe()
    return {name: plain(value) for name, value in shown.items()}


def packages() -> dict[str, str]:
    """Versions by name."""
    return {"landscape": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def devices() -> list[str]:
    """The CPU with its threads, and the accelerators with what PyTorch says of them."""
    found = [f"cpu: {torch.get_num_threads()} threads of torch, {os.cpu_count()} cores"]
    if own := accelerator():
        told = getattr(torch.get_device_module(own), "get_device_properties", lambda k: None)
        for k in range(torch.accelerator.device_count()):
            known = told(k)
            text = f"{known.name}, {known.total_memory / 2**30:.0f} GiB" if known else "memory of the CPU"
            found.append(f"{own.type}:{k}: {text}{'' if has_float64(own) else ', no float64'}")
    return found


def line() -> str:
    """Versions and devices in one line."""
    return "; ".join([", ".join(f"{name} {version}" for name, version in packages().items()), *devices()])


def used(seconds: float) -> str:
    """Time and memory of the command so far."""
    peak = peak_memory()
    memory = f", at most {peak / 2**20:.0f} MiB of memory" if peak else ""
    return f"{duration(seconds) if seconds >= 1 else f'{seconds:.2f} s'}{memory}"
