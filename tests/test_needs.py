"""What a call takes of memory: forecast before it starts, held, and refused where it is not there."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import landscape
from landscape import InputError, Problem
from landscape.core import memory
from landscape.core.analysis import memory_of
from landscape.core.memory import at_most, memory_in_use
from landscape.evaluation import needs
from tests.test_conformance import MEMORY

MIB = 2**20
LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads and resets peaks in /proc"
)
# Widths of a network with 2·width² parameters, and samples: activations, both, and weights count the most.
SIZES = [(300, 6000), (800, 1000), (1700, 60)]
CALLS = {
    "loss": "problem.loss, ()",
    "gradient": "problem.gradient, ()",
    "random_plane": "landscape.random_plane, (problem,)",
    "extreme_eigenvalues": "landscape.extreme_eigenvalues, (problem,), dict(max_products=20)",
    "by differences": "landscape.extreme_eigenvalues, (problem,), "
    "dict(max_products=20, derivatives='differences')",
    "top_eigenvalues": "landscape.top_eigenvalues, (problem, 2), dict(max_products=20)",
    "trace": "landscape.trace, (problem, 15)",
    "density": "landscape.density, (problem, 2, 10)",
    **MEMORY,
}
MEASURE = """
import ctypes, gc, re, sys, warnings
from pathlib import Path
import torch, landscape
from torch import nn
from landscape.core.analysis import memory_of
from landscape.core.memory import memory_in_use

torch.set_num_threads(1)
torch.manual_seed(0)
warnings.simplefilter("ignore")

def setting(width, samples):
    layers = nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    data = torch.randn(samples, width), torch.arange(samples) % 10
    problem = landscape.Problem(nn.Sequential(*layers, nn.Linear(width, 10)), nn.functional.cross_entropy, data)
    plane = landscape.random_plane(problem)
    return problem, plane, problem.weights + 1e-3 * torch.stack([*plane.directions, -plane.directions[0]])

for width, samples in [(10, 60), *{sizes}]:
    problem, plane, weights = setting(width, samples)
    function, args, options = ({call}, {{}})[:3]
    about, _ = memory_of(getattr(type(problem), function.__name__, function), *(
        (problem,) if hasattr(function, "__self__") else ()), *args, **options)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_in_use(problem.device)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    function(*args, **options)
    peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    print(about, peak - before)  # the first call loads what is loaded once
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_peak_is_what_was_forecast(name: str) -> None:
    code = MEASURE.format(sizes=SIZES, call=CALLS[name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pairs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    print(name, [(round(f / MIB), round(p / MIB)) for f, p in pairs])
    for about, peak in pairs[1:]:
        assert peak < 1.3 * about
        assert about < 1.3 * peak + 64 * MIB  # the reserve for libraries, and what malloc gives out again


def small(samples: int = 30) -> Problem:
    layers = nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
    data = torch.randn(samples, 4), torch.arange(samples) % 3
    return Problem(nn.Sequential(*layers), nn.functional.cross_entropy, data)


@pytest.mark.parametrize("name", CALLS)
def test_what_exceeds_max_memory_is_refused(name: str) -> None:
    problem = small()
    plane = landscape.random_plane(problem)
    weights = problem.weights + torch.randn(3, problem.layout.size)
    names = {"landscape": landscape, "problem": problem, "plane": plane, "weights": weights}
    function, args, options = (*eval(CALLS[name], names), {})[:3]
    with pytest.raises(InputError, match=r"^max_memory: 1 MiB is not enough, at least \d+ MiB is needed"):
        function(*args, **options, max_memory=MIB)
    with at_most(MIB), pytest.raises(InputError, match=r"^max_memory: 1 MiB is not enough"):
        function(*args, **options)


@pytest.mark.parametrize(
    ("function", "size"),
    [(landscape.contour, (4000, 4000)), (landscape.hessian_grid, (4000, 3000)), (landscape.line, 10**7)],
)
def test_a_grid_is_refused_before_its_arrays_are_made(function: Any, size: Any) -> None:
    problem = small()
    plane = landscape.random_plane(problem)
    where = plane.directions[0] if function is landscape.line else plane
    limit = memory_in_use(problem.device) + 400 * MIB
    tracemalloc.start()
    with pytest.raises(InputError, match=r"is not enough, at least \d+ MiB"):
        function(problem, where, size, max_memory=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MIB


def test_what_exceeds_the_memory_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 300 * MIB)
    problem = small()
    plane = landscape.random_plane(problem)
    with pytest.raises(InputError, match=r"^contour: it takes about 3,9\d\d MiB of memory, and 300 MiB are"):
        landscape.contour(problem, plane, 5650)
    assert landscape.contour(problem, plane, 3).loss.shape == (3, 3)


def test_graphs_for_which_there_is_no_room_are_built_again_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = small(10_000)
    free = landscape.extreme_eigenvalues(problem, search="exact")
    kept = []
    whole = memory_of(landscape.extreme_eigenvalues, problem)[0]
    monkeypatch.setattr(memory, "RESERVE", 0)
    monkeypatch.setattr(memory, "available_memory", lambda device: whole - 33 * MIB)
    short = landscape.extreme_eigenvalues(
        problem, search="exact", progress=lambda share: kept.append(memory.spare())
    )
    assert max(kept) < whole
    assert (short.min, short.max, short.products) == (free.min, free.max, free.products)
    np.testing.assert_array_equal(short.vectors, free.vectors)


def test_limits_of_control_groups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of this group and those around it, in both versions; cache is what can be taken back."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    files = {
        "a/b/memory.max": "max",
        "a/memory.max": "1000",
        "a/memory.current": "700",
        "a/memory.stat": "file 9\ninactive_file 50\n",
        "memory/job/memory.limit_in_bytes": "500",
        "memory/job/memory.usage_in_bytes": "480",
        "memory/job/memory.stat": "inactive_file 3\ntotal_inactive_file 100\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    membership = tmp_path / "cgroup"
    membership.write_text("7:cpu,memory:/job\n0::/a/b\n")
    assert sorted(memory._free_in_groups(membership)) == [120, 350]


def test_a_part_of_the_hessian_needs_as_much_less() -> None:
    problem = small()
    for function in (landscape.extreme_eigenvalues, landscape.trace, landscape.density):
        assert memory_of(function, problem, part="3.bias")[0] < memory_of(function, problem)[0]


def with_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """The machine has ``free`` bytes, and each call counts, however small."""
    monkeypatch.setattr(memory, "RESERVE", 0)
    monkeypatch.setattr(memory, "available_memory", lambda device: int(free))


def test_the_basis_of_a_search_takes_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)
    data = torch.randn(60, 20, dtype=torch.float64), torch.arange(60) % 5
    problem = Problem(nn.Sequential(*layers).double(), nn.functional.cross_entropy, data)
    vector = problem.weights.nbytes
    with_free(monkeypatch, 2**40)
    wide = landscape.extreme_eigenvalues(problem, 1e-4, search="exact")  # as many as there were before
    monkeypatch.setattr(needs, "BASIS_BYTES", vector)
    need = memory_of(landscape.extreme_eigenvalues, problem)[0]
    found = {}
    for more in (0, 24, 1e6):
        with_free(monkeypatch, need + more * vector)
        found[more] = landscape.extreme_eigenvalues(problem, 1e-4, search="exact")
        assert found[more].converged
        np.testing.assert_allclose([found[more].min, found[more].max], [wide.min, wide.max], rtol=1e-6)
    # Half of what is free besides: 8, 20 and 128 vectors.
    assert found[0].products > found[24].products >= found[1e6].products == wide.products
    limited = landscape.extreme_eigenvalues(problem, 1e-4, search="exact", max_memory=2**40)
    assert limited.products == wide.products  # of a limit, all


def test_products_by_differences_are_counted_and_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    data = torch.randn(20, 30), torch.randn(20, 1)
    problem = Problem(
        nn.Sequential(nn.Linear(30, 40), nn.Hardsigmoid(), nn.Linear(40, 1)), nn.MSELoss(), data
    )
    exact = memory_of(landscape.extreme_eigenvalues, problem, derivatives="exact")[0]
    by_differences = memory_of(landscape.extreme_eigenvalues, problem, derivatives="differences")[0]
    assert by_differences - exact == needs.DIFFERENCES * 8 * problem.layout.size
    # "auto" sees in its first product that PyTorch has no second derivative of this model.
    assert memory_of(landscape.extreme_eigenvalues, problem)[0] == exact
    with_free(monkeypatch, (exact + by_differences) / 2 - memory.RESERVE)
    with pytest.raises(InputError, match=r"^differences of gradients: it takes about .* are free"):
        landscape.extreme_eigenvalues(problem)
    with_free(monkeypatch, 2**40)
    with pytest.warns(landscape.ProblemWarning, match="no second derivative"):
        assert landscape.extreme_eigenvalues(problem).derivatives == "differences"
    monkeypatch.undo()
    assert memory_of(landscape.extreme_eigenvalues, problem)[0] == by_differences  # which is known now
