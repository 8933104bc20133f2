"""Predicted times of a training step, by the number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class RunTimes(Result):
    """Predicted times of a step, a row for each number of workers, algorithm and mixing.

    Attributes:
        workers: (rows,), number of workers.
        algorithm: (rows,), "ssgd", "ssgd*", "dpsgd awc" or "dpsgd atc".
        mixing: (rows,), "" for algorithms without mixing.
        gradient_s, update_s: (rows,), seconds of computation of a worker without stragglers.
        exchange_s: (rows,), seconds of an exchange if no worker is late.
        step_s, step_error: (rows,), seconds of a step, and the standard error of the simulation.
        steps, run_s: (rows,), steps for the samples of the recipe, and their seconds.
        waiting: (rows,), the share of a step in which a worker does not compute.
        samples_per_s: (rows,), of all workers together.
        speedup: (rows,), ``samples_per_s`` relative to SSGD with the same number of workers.
        efficiency: (rows,), ``samples_per_s`` relative to workers without exchange and stragglers.
        recipe, parameters: name of the recipe, and number of parameters of its network.
        held: learners per worker.
        bandwidth, latency: of the link, in bytes per second and seconds.
        straggler: s, where computing takes (1 + s·E) times as long, E ~ Exp(1) anew for each worker and step.
        slow: factor by which one worker is slower than the others.
        all_reduce: algorithm of the all-reduce.
        news: whether all workers receive the loss of each step before the next one ends.
        seed: of the simulation.

    Example:
        >>> import numpy as np
        >>> one = np.ones(1)
        >>> result = RunTimes(
        ...     workers=np.array([2]), algorithm=("ssgd",), mixing=("",), gradient_s=one, update_s=one,
        ...     exchange_s=one, step_s=3 * one, step_error=0 * one, steps=one, run_s=3 * one, waiting=0 * one,
        ...     samples_per_s=one, speedup=one, efficiency=one, recipe="r", parameters=9, held=1,
        ...     bandwidth=1e9, latency=1e-5, straggler=0.0, slow=1.0, all_reduce="ring", news=True, seed=0)
        >>> print(result.label)
        r, 9 parameters
        8 Gbit/s, 10 µs
    """

    schema: ClassVar[str] = "landscape.plan"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "workers", "algorithm", "mixing", "gradient_s", "update_s", "exchange_s", "step_s", "step_error",
            "steps", "run_s", "waiting", "samples_per_s", "speedup", "efficiency",
        ),
        "row+",
    )  # fmt: skip
    units: ClassVar[Mapping[str, str]] = {
        "gradient_s": "s", "update_s": "s", "exchange_s": "s", "step_s": "s", "step_error": "s", "run_s": "s",
        "samples_per_s": "1/s", "bandwidth": "byte/s", "latency": "s", "waiting": "1", "speedup": "1",
        "efficiency": "1",
    }  # fmt: skip
    table: ClassVar[str] = "row"

    workers: Array
    algorithm: tuple[str, ...]
    mixing: tuple[str, ...]
    gradient_s: Array
    update_s: Array
    exchange_s: Array
    step_s: Array
    step_error: Array
    steps: Array
    run_s: Array
    waiting: Array
    samples_per_s: Array
    speedup: Array
    efficiency: Array
    recipe: str
    parameters: int
    held: int
    bandwidth: float
    latency: float
    straggler: float
    slow: float
    all_reduce: str
    news: bool
    seed: int

    @property
    def label(self) -> str:
        """The recipe with the size of its network, and the link, in two lines."""
        rate = f"{8e-9 * self.bandwidth:.3g} Gbit/s"
        slow = f", stragglers {self.straggler:g}" if self.straggler else ""
        slow += f", one worker {self.slow:g}× slower" if self.slow != 1 else ""
        network = f"{self.recipe}, {self.parameters:,} parameters"
        return f"{network}\n{rate}, {1e6 * self.latency:.3g} µs{slow}"
