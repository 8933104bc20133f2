"""The device that a user asks for."""

from __future__ import annotations

import torch

from landscape.core.errors import InputError
from landscape.core.options import choose

#: Names of devices; "auto" is CUDA where there is a GPU.
DEVICES = ("auto", "cpu", "cuda")


def pick_device(name: str) -> torch.device:
    """The device called "auto", "cpu" or "cuda". Raises InputError for CUDA where there is none."""
    choose("--device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: 'cuda' is not allowed, PyTorch finds no GPU here; use cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
