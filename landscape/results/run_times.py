"""Predicted times of a step on W workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class RunTimes(Result):
    """Predicted times, a row for each number of workers, algorithm and mixing.

    ``workers``, ``algorithm`` ("ssgd", "ssgd*", "dpsgd awc", "dpsgd atc"), ``mixing`` ("" without), all
    (rows,); in seconds ``gradient_s`` and ``update_s`` that a worker computes without stragglers,
    ``exchange_s`` that an exchange takes if nobody is late, ``step_s`` a step with its standard error
    ``step_error`` (of the simulation alone), ``run_s`` = ``steps`` × step_s for the recipe's samples;
    ``waiting``, the share of a step that a worker does not compute in; ``samples_per_s``; ``speedup``, that
    over SSGD's with the same workers; ``efficiency``, it over that of workers which exchange nothing and have
    no stragglers.
    """

    schema: ClassVar[str] = "landscape.plan"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "workers", "algorithm", "mixing", "gradient_s", "update_s", "exchange_s", "step_s", "step_error",
            "steps", "run_s", "waiting", "samples_per_s", "speedup", "efficiency",
        ),
        "rows+",
    )  # fmt: skip

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
        """The recipe with the size of its network, and the link."""
        rate = f"{8e-9 * self.bandwidth:.3g} Gbit/s"
        slow = f", stragglers {self.straggler:g}" if self.straggler else ""
        slow += f", one worker {self.slow:g}× slower" if self.slow != 1 else ""
        network = f"{self.recipe}, {self.parameters:,} parameters"
        return f"{network}\n{rate}, {1e6 * self.latency:.3g} µs{slow}"
