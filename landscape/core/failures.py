"""What a user's machine can refuse, in a line: memory, files, the terminal."""

from __future__ import annotations

import re
import sys

from landscape.core.errors import FailedError, InputError

# As torch's allocators, C++ and numpy say it.
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "cannot allocate memory",
    "not enough memory",
)
REMEDY = (
    "to train, lower learners, batch or the model, or raise accumulate; to analyse, lower --max-memory, "
    "--grid, --jobs or --nproc"
)


def explain(error: BaseException) -> InputError | None:
    """``error`` as a line for the user, if this machine caused it; None for a defect of the code."""
    if isinstance(error, InputError):
        return error
    words = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # where it was not imported, the error is not its own
    memory = isinstance(error, (MemoryError, *([torch.OutOfMemoryError] if torch else [])))
    if memory or (isinstance(error, RuntimeError) and any(part in words.lower() for part in _NO_MEMORY)):
        wanted = re.search(r"(?:tried to allocate|allocate) (\d[\d.]* ?\w+)", words)
        size = f", {wanted[1]} more were needed" if wanted else ""
        return FailedError(f"there is not enough memory{size}; {REMEDY}")
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return FailedError(f"{name}{error.strerror}")
    return None
