"""A second device, "sim", for machines without one; ``python -m tests.device.simulated ARGUMENTS…`` is ``landscape`` there.

It is registered with torch for as long as the process lives, so that the tests use it in a process of its own.
Without arguments the process prints what tests/device/calls.py finds there, as JSON, with float64 and without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import filelock
import torch
from torch.torch_version import TorchVersion
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("simulated.cpp")
COMPILER = os.environ.get("CXX") or "g++"


def missing() -> str:
    """The reason why the device cannot be built here; "" if it can."""
    if sys.platform != "linux":
        return f"the simulated device is built on Linux, not on {sys.platform}"
    if TorchVersion(torch.__version__) < "2.7":  # whose devices register generators in another way
        return f"the simulated device needs torch 2.7, this is {torch.__version__}"
    return (
        ""
        if shutil.which(COMPILER)
        else f"the simulated device needs a C++ compiler, {COMPILER} is not there"
    )


def library() -> Path:
    """The compiled device, which is stored in the folder of temporary files for this source and version of torch."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [COMPILER, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", abi]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch"]
    text = "\n".join([SOURCE.read_text(), torch.__version__, *command])
    folder = Path(tempfile.gettempdir()) / f"landscape-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    with filelock.FileLock(folder / "lock"):
        if not built.exists():
            made = built.with_suffix(".new")
            built_by = [*command[:1], str(SOURCE), *command[1:], "-o", str(made)]
            done = subprocess.run(built_by, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"the simulated device cannot be built\n{done.stderr[-4000:]}"
            made.rename(built)
    return built


def module() -> types.ModuleType:
    """``torch.sim``, with what torch asks a device's module for."""
    made = types.ModuleType("torch.sim")
    generator = torch.Generator("sim")

    def set_state(state: torch.Tensor, device: object = 0) -> None:
        generator.set_state(state)

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=0: generator.get_state(),
        "set_rng_state": set_state,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(made, name, function)
    return made


def give_float64(there: bool) -> None:
    """Give float64 to the device, or take it away, as it is missing on Apple's MPS."""
    ctypes.CDLL(str(library())).sim_float64(ctypes.c_bool(there))


def register() -> None:
    """Make "sim" a device of torch in this process."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", module())
    torch.utils.generate_methods_for_privateuse1_backend()


if __name__ == "__main__":
    register()
    from tests.device.calls import main

    main()
