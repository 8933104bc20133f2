"""landscape plan"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from landscape.cli import common
from landscape.cli.completion import Choice, names
from landscape.cli.options import SHARED, Group, command, group, options_of
from landscape.core.options import quantity
from landscape.results.training import RunTimes
from landscape.training.planning.calibration import in_words
from landscape.training.planning.calibration import plan as compute_plan
from landscape.training.planning.plan import ALL_REDUCE, SCALINGS
from landscape.training.recipes import recipe as recipes
from landscape.training.recipes.settings import parsed

_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
#: In bytes per second, and in seconds.
BANDWIDTHS: dict[str, float] = _BITS | _BYTES
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class Quantity(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """A number with one of the ``units``."""

    name = "quantity"

    def __init__(self, units: dict[str, float], *, zero: bool = False) -> None:
        self.units, self.zero = units, zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, in bytes per second or in seconds."""
        return quantity(param.opts[-1] if param else "", str(value), self.units, zero=self.zero)


OPTIONS = options_of(
    compute_plan,
    workers={},
    learners_per_worker={"metavar": "K"},
    scaling={"type": Choice(SCALINGS)},
    bandwidth={
        "metavar": "B",
        "type": Quantity(BANDWIDTHS),
        "help": "Of a worker's link, such as 10Gbit/s. [default: loopback's]",
    },
    latency={
        "metavar": "T",
        "type": Quantity(TIMES, zero=True),
        "help": "Of a message, such as 50us. [default: loopback's]",
    },
    straggler={"metavar": "S"},
    slow={"metavar": "F"},
    mixings={"flag": "--mixing", "metavar": "SPEC"},
    all_reduce={"type": Choice(ALL_REDUCE)},
    exchange_loss={"flag": "--exchange-loss/--alone"},
    per_machine={"metavar": "K"},
    **{name: SHARED[name] for name in ("allow_code", "device", "data_dir")},
)


@command(
    recipe={"argument": True, "metavar": "RECIPE", "shell_complete": names(recipes.names)},
    about=Group(dict, OPTIONS),
    target=group(common.Target, output={"help": "Keep the table, too. [default: only printed]"}),
)
def plan(*, recipe: str, settings: tuple[str, ...], about: dict[str, Any], target: common.Target) -> None:
    """Predict the time of a run on other machines.

    It predicts the time of a step, and of a run of RECIPE, on more workers than this machine has.

    The table has SSGD, SSGD*, and DPSGD in both orders over each topology. The computing time of a worker is
    measured on this machine in some seconds; a message costs latency + bytes/bandwidth. Columns: "waiting" is
    the share of a step in which a worker does not compute; "× SSGD" is samples/s relative to SSGD on as many
    workers; "efficiency" is samples/s relative to as many workers without communication and stragglers.

    Args:
        settings: Change a key of the recipe.

    Example:
        landscape plan mnist-fig2b-dpsgd --workers 8,64,512 --bandwidth 10Gbit/s --latency 50us
        --straggler 0.2 --plot plan.png
    """
    path = Path(target.output) if target.output else None
    common.check_targets(path, target.picture, target.force)
    with common.progress_bar("plan") as bar:
        result = compute_plan(recipe, **about, message=common.message, progress=bar, **parsed(settings))
    common.message(assumptions(result))
    common.values(table(result))
    if path:
        result.save(path)
    common.show([result], path, target.picture)


def assumptions(r: RunTimes) -> str:
    """The assumptions of the numbers, a line each."""
    slow = f", one worker {r.slow:g}× slower" if r.slow != 1 else ""
    wait = (
        "before each update, an exchange of the previous loss"
        if r.exchange_loss
        else "no exchange of the loss (--alone)"
    )
    return (
        f"assumed: {r.all_reduce} all-reduce; {wait}; straggler coefficient {r.straggler:g}{slow}\n"
        "not counted: decomposition, evaluation, checkpoints"
    )


def table(r: RunTimes) -> str:
    """The rows, a line each."""
    head = (
        f"{'workers':>7} {'algorithm':10} {'mixing':21} {'step':>15} {'waiting':>8} {'samples/s':>10} "
        f"{'run':>9} {'× SSGD':>7} {'efficiency':>10}"
    )
    lines = [head]
    for i, (algorithm, mixing) in enumerate(zip(r.algorithm, r.mixing, strict=True)):
        if i and r.workers[i] != r.workers[i - 1]:
            lines.append("")
        error = f" ± {r.step_error[i] / r.step_s[i]:.1%}" if r.step_error[i] else ""
        lines.append(
            f"{r.workers[i]:7d} {algorithm:10} {mixing:21} {in_words(r.step_s[i]) + error:>15} "
            f"{r.waiting[i]:8.0%} {r.samples_per_s[i]:10,.0f} {in_words(r.run_s[i]):>9} {r.speedup[i]:7.2f} "
            f"{r.efficiency[i]:10.0%}"
        )
    return "\n".join(lines)
