"""Every call on a simulated second device against the CPU: the same numbers, with float64 on the device and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from landscape import InputError
from landscape.cli import begin
from landscape.core import devices, registry
from landscape.curvature import operators
from landscape.testing import device as self_test
from tests.conftest import Command
from tests.device import simulated
from tests.device.calls import MORE

pytestmark = pytest.mark.xdist_group("device")
Rows = dict[str, dict[str, Any]]
# Calls whose kernels are not the CPU's: attention and recurrent layers are fused there, the sums in float64
# of training begin at another address, and a contour of a chain has larger blocks of points. A search may also
# go another way: bfloat16 is fast on some CPUs, and a comparison's bounds hang on the last bits (6e-3 on an AMD
# EPYC). All others are equal to the bit. Differences are of gradients in float64 where there is float64.
ROUNDING = {
    "of attention": 2e-6,
    "of recurrent": 2e-6,
    "weights of classes": 1e-15,  # its sums begin at another address, too
    "train ": 2e-15,
    "by differences": 1e-4,
    "compare": 1e-2,
    "hessian_grid": 2e-6,
    "density": 1e-13,
    "contour of a run": 5e-7,
}


@pytest.fixture(scope="module")
def everything() -> Rows:
    """What tests/device/calls.py finds in a process in which torch has the device "sim"; warnings are errors."""
    if reason := simulated.missing():
        pytest.skip(reason)
    argv = [sys.executable, "-W", "error", "-m", "tests.device.simulated"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture(params=["float64", "no float64"])
def found(request: pytest.FixtureRequest, everything: Rows) -> dict[str, Any]:
    return everything[request.param]


@pytest.mark.parametrize("call", [*self_test.calls(), *MORE])
def test_a_call_gives_the_numbers_of_the_cpu(call: str, found: dict[str, Any]) -> None:
    allowed = max((value for part, value in ROUNDING.items() if part in call), default=0.0)
    difference = found["calls"][call]
    assert not isinstance(difference, str), difference  # an error
    assert difference <= allowed


def test_float64_is_refused_where_the_device_has_none(everything: Rows) -> None:
    assert everything["float64"]["float64"] == everything["float64"]["package"] == ["done"] * 3
    without = everything["no float64"]
    assert len(without["float64"]) == len(without["package"]) == 3
    assert all("does not support float64" in line for line in without["float64"])
    assert all(line.startswith("dtype: float64 is not allowed on sim") for line in without["package"])


def test_the_device_refuses_what_others_refuse(found: dict[str, Any]) -> None:
    assert len(found["mixed"]) == 5
    assert all("device" in line for line in found["mixed"])


def test_random_numbers_of_a_device_are_fixed_and_kept(everything: Rows) -> None:
    assert [everything[mode]["picked"] for mode in ("float64", "no float64")] == [
        ["sim", "cpu"],
        ["cpu", "cpu"],
    ]
    for found in everything.values():
        assert found["kept"]
        assert found["restored"]
        assert found["drawn"][0] == found["drawn"][1]


@pytest.mark.parametrize("call", ["ends", "top", "trace", "sharpness"])
def test_long_random_vectors_are_the_devices_own(call: str, found: dict[str, Any]) -> None:
    of_call = found["there"][call]
    assert of_call["drawn"] == ["sim", "sim", "cpu"]
    assert of_call["shown"] == [True, True, False]
    assert of_call["twice"] == 0
    assert of_call["ratio"] == pytest.approx(1, abs=0.15)  # a mean of random draws for "sharpness"


def test_the_cpus_generator_serves_short_vectors_of_every_device() -> None:
    assert devices.generator(0, "meta", devices.LONG).device.type == "cpu"
    with pytest.raises(RuntimeError, match="META"):  # a device without random numbers
        devices.generator(0, "meta", devices.LONG + 1)


def test_a_search_reads_ten_steps_at_once_into_a_basis_that_grows(found: dict[str, Any]) -> None:
    cpu, sim = (found["lanczos"][device] for device in ("cpu", "sim"))
    assert cpu["reads"] >= cpu["products"] - 5  # of which a few verify
    assert sim["reads"] <= cpu["reads"] / 3
    assert cpu["products"] <= sim["products"] < cpu["products"] + operators.READ
    assert cpu["blocks"] == [16]
    assert sim["blocks"] == [7, 7, 2]
    for name in ("values", "invariant"):
        assert sim[name] == pytest.approx(cpu[name], rel=1e-5)
    assert max(sim["residuals"]) < 1e-5 * sim["values"][0]


def test_many_small_learners_go_at_once_by_a_rule(found: dict[str, Any]) -> None:
    assert len(found["batched"]) == 9
    assert [call for call, batched in found["batched"].items() if batched] == ["plain, 4"]


def test_a_device_is_named() -> None:
    assert devices.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="^device: 'gpu' is not known.*allowed: auto, cpu, cuda"):
        devices.pick_device("gpu")
    for name in {*devices.DEVICES} - {"auto", "cpu", getattr(devices.accelerator(), "type", "")}:
        with pytest.raises(
            InputError, match=f"^device: '{name}' is not allowed, it must be .* PyTorch finds none"
        ):
            devices.pick_device(name)


def only(monkeypatch: pytest.MonkeyPatch, **calls: Callable[[self_test.Place], Any]) -> None:
    """Let the self-test have these calls alone."""
    monkeypatch.setattr(self_test, "calls", lambda: calls)
    monkeypatch.setattr(begin, "calls", lambda: calls)


def test_doctor_says_which_calls_differ(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[self_test.Place] = []

    def first(at: self_test.Place) -> bool:
        places.append(at)
        return places.index(at) % 4 == 0  # of the two devices of a comparison, which both are asked twice

    def second(at: self_test.Place) -> float:
        return 1.0 if first(at) else 1.02

    def fails(at: self_test.Place) -> float:
        if at is not places[-4]:
            raise RuntimeError("no such\nkernel")
        return 1.0

    only(monkeypatch, right=lambda at: at.x, wrong=second, broken=fails)
    code, out, err = command("doctor", "--device", "cpu")
    assert code == 1
    assert err == "landscape: doctor: cpu differs from the CPU in: wrong, broken\n"
    right, wrong, broken = out.splitlines()[-3:]
    assert right.startswith("| right | 0.0e+00 | 1e-02 |")
    assert right.endswith("| ok |")
    assert float(right.split("|")[4]) > 0  # how many times as long it takes
    assert wrong.startswith("| wrong | 2.0e-02 |")
    assert wrong.endswith("| DIFFERS |")
    assert broken.endswith("| RuntimeError: no such kernel |")
    code, out, err = command("doctor", "--device", "cpu", "--json")
    assert [row["call"] for row in json.loads(out)["calls"]] == ["right", "wrong", "broken"]


def test_every_rule_and_optimizer_is_compared() -> None:
    names = {name.removeprefix("train ") for name in [*self_test.calls(), *MORE]}
    assert {*registry.algorithms.names(), *registry.optimizers.names()} <= names
    assert len([*self_test.calls(), *MORE]) == 89


def test_differences_that_are_allowed() -> None:
    expected = {
        "train in bfloat16": 0.1,
        "loss and accuracy of attention": 1e-3,
        "Hessian product of convolution": 1e-2,
        "train ssgd": 1e-3,
        "noise_scale": 1e-2,
    }
    assert {*expected} <= {*self_test.calls()}
    assert {call: self_test.Compared(call).allowed for call in expected} == expected


def test_what_is_compared() -> None:
    def apart(one: Any, other: Any) -> float:
        return self_test.difference(dict(self_test.numbers(one)), dict(self_test.numbers(other)))

    assert apart({"a": 1.0, "wall_s": 3.0}, {"a": 1.0, "wall_s": 4.0}) == 0
    assert apart([torch.tensor([2.0, 0.0])], [torch.tensor([2.0, 0.02])]) == pytest.approx(0.01)
    assert apart(np.array([1.0, np.nan]), np.array([1.0, np.nan])) == 0
    for other in (np.array([1.0]), np.array([1.0, 2.0]), np.array([np.nan, np.nan])):
        assert apart(np.array([1.0, np.nan]), other) == np.inf
    assert apart({"a": 1.0}, {"b": 1.0}) == np.inf
    assert apart(0.0, 1e-9) == np.inf
    with pytest.raises(AssertionError, match="no number"):
        apart("a", "b")
