"""The versions of this package and of what it computes with, and the devices."""

from __future__ import annotations

import os
import platform

import torch

from landscape._version import __version__
from landscape.core.memory import peak_memory
from landscape.core.progress import duration


def packages() -> dict[str, str]:
    """Versions by name."""
    return {"landscape": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def devices() -> list[str]:
    """The CPU with its threads, and the GPUs with their memory."""
    found = [f"cpu: {torch.get_num_threads()} threads of torch, {os.cpu_count()} cores"]
    for k in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(k).total_memory
        found.append(f"cuda:{k}: {torch.cuda.get_device_name(k)}, {memory / 2**30:.0f} GiB")
    return found


def line() -> str:
    """Versions and devices in one line."""
    return "; ".join([", ".join(f"{name} {version}" for name, version in packages().items()), *devices()])


def used(seconds: float) -> str:
    """Time and memory of the command so far."""
    peak = peak_memory()
    memory = f", at most {peak / 2**20:.0f} MiB of memory" if peak else ""
    return f"{duration(seconds) if seconds >= 1 else f'{seconds:.2f} s'}{memory}"
