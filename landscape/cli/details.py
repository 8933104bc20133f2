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

# Arrays with more numbers are shown by shape and range: they are in the result's file (our choice).
MOST = 64
_PROPERTY_TYPES = ("float", "int", "bool", "str", "Array")


def text(value: Any) -> str:
    """Return ``value`` as JSON in ASCII, which every terminal and every program can read.

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
    """Convert ``value`` to types of JSON.

    NaN and infinite numbers become None. An array of more than ``MOST`` numbers becomes its shape and range.

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
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return str(value)


def _summary(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the shape of a large array and, for numbers, the range of its finite values."""
    summary: dict[str, Any] = {"shape": list(array.shape)}
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    if array.dtype.kind in "fiu" and finite.size:
        summary |= {"min": finite.min(), "max": finite.max()}
    return plain(summary)


def of_result(result: Result) -> dict[str, Any]:
    """Return the fields, the properties, the summary and the description of a result, in types of JSON."""
    entries: dict[str, Any] = {"schema": result.schema}
    entries |= {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    for base in reversed(type(result).__mro__):
        for name, member in vars(base).items():
            if name.startswith("_") or not (isinstance(member, property) and member.fget):
                continue
            if member.fget.__annotations__.get("return") in _PROPERTY_TYPES:
                entries[name] = getattr(result, name)
    if isinstance(result, Noise):
        entries["summary"] = result.means()
    entries["describe"] = result.describe()
    return {name: plain(value) for name, value in entries.items()}


def packages() -> dict[str, str]:
    """Return the versions of landscape, Python and torch by name."""
    return {"landscape": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def devices() -> list[str]:
    """Return a line for the CPU with its threads, and one for each accelerator with its name and memory."""
    lines = [f"cpu: {torch.get_num_threads()} threads of torch, {os.cpu_count()} cores"]
    if device := accelerator():
        properties_of = getattr(torch.get_device_module(device), "get_device_properties", lambda index: None)
        precision = "" if has_float64(device) else ", no float64"
        for index in range(torch.accelerator.device_count()):
            gpu = properties_of(index)
            text = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" if gpu else "memory of the CPU"
            lines.append(f"{device.type}:{index}: {text}{precision}")
    return lines


def line() -> str:
    """Return versions and devices in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in packages().items())
    return "; ".join([versions, *devices()])


def used(seconds: float) -> str:
    """Return the time and the peak memory of the command so far, as text."""
    peak = peak_memory()
    time = duration(seconds) if seconds >= 1 else f"{seconds:.2f} s"
    return f"{time}, at most {peak / 2**20:.0f} MiB of memory" if peak else time
