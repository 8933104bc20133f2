"""What ``landscape plan`` predicts against what steps take, with 2 and 4 processes.

A network of 10 million parameters. In every round the processes measure their gradient and their link, all at
once, as the command does, and then take steps of each algorithm: so the ratios bear a machine that is busy
now and then. First over loopback; then in a network namespace whose loopback is one queue of a given rate,
such that an exchange takes about as long as a gradient (needs ip, tc and the right to make a namespace).
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from typing import Any

import torch.distributed as dist

from landscape.training.planning import calibration, plan
from landscape.training.planning.plan import Machines
from landscape.training.processes.process_group import Group
from landscape.training.recipes.recipe import Recipe
from landscape.training.run.loop import Trainer
from tests.benchmarks.harness import MATCHING, few, on_shaped_link, say, synthetic
from tests.groups import together

WIDTHS, LOCAL, STEPS, ROUNDS = [784, few(2800, 8), few(2800, 8), 10], few(64, 8), few(10, 2), few(5, 1)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ssgd": {"name": "ssgd"},
    "dpsgd awc": MATCHING,
    "dpsgd atc": MATCHING | {"order": "atc"},
}


def chosen(algorithm: str, processes: int) -> Recipe:
    return synthetic(
        "plan", learners=processes, batch=processes * LOCAL, samples=1000, algorithm=ALGORITHMS[algorithm],
        model={"name": "mlp", "widths": WIDTHS},
    )  # fmt: skip


def measure(group: Group) -> list[dict[str, Any]]:
    """Of each round: costs, link, and of each algorithm (seconds a step, the share that this rank waits)."""
    found, runs = [], {name: Trainer(chosen(name, group.size), group=group) for name in ALGORITHMS}
    for k in range(ROUNDS + 1):
        costs = calibration.calibrate(chosen("ssgd", group.size), 1, LOCAL, ready=dist.barrier)
        dist.barrier()
        each: dict[str, Any] = {"costs": costs, "link": calibration._exchange(group, costs.size)}
        for name, run in runs.items():
            dist.barrier()
            run.history.rows.clear()
            for _ in range(STEPS + 1):
                run._step(run.step + 1)
            rows = run.history.rows[1:]
            seconds = statistics.median(run.recipe.batch / row["samples_per_s"] for row in rows)
            each[name] = seconds, statistics.median(row["wait_s"] for row in rows) / seconds
        if k:
            found.append(each)
    return found


def report(where: str, processes: int, bandwidth: float | None = None) -> plan.Costs:
    """Print predicted over measured for each algorithm; ``bandwidth``: bytes/s a process, else as measured."""
    ranks = together(processes, measure, timeout=120.0, deadline=900.0)
    if not isinstance(ranks[0], list):
        raise SystemExit(f"plan, {where}: {ranks[0]}")
    ratios: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    waits: dict[str, list[tuple[float, float]]] = {name: [] for name in ALGORITHMS}
    used = []
    for every in zip(*ranks, strict=True):
        of_all = [dataclasses.asdict(each["costs"]) for each in every]
        mean = {name: statistics.mean(c[name] for c in of_all) for name in of_all[0]}
        costs = plan.Costs(**mean)
        latency, rate = (statistics.mean(e["link"][name] for e in every) for name in ("latency", "bandwidth"))
        found = plan.predict(
            chosen("ssgd", processes),
            [processes],
            lambda b, c=costs: c,
            Machines(latency, bandwidth or rate),
            mixings=["random-matching"],
        )
        used.append((costs, rate))
        for name in ALGORITHMS:
            row = found.algorithm.index(name)
            seconds = statistics.mean(e[name][0] for e in every)
            ratios[name].append(found.step_s[row] / seconds)
            waits[name].append((found.waiting[row], statistics.mean(e[name][1] for e in every)))
    gradient, update = (statistics.median(getattr(c, n) for c, _ in used) for n in ("gradient", "update"))
    rate = statistics.median(rate for _, rate in used)
    given = f", given as {8e-9 * bandwidth:.2f}" if bandwidth else ""
    say(
        f"{where}, {processes} processes on {os.cpu_count()} cores: gradient {1e3 * gradient:.0f} ms, update "
        f"{1e3 * update:.0f} ms, link {8e-9 * rate:.2f} Gbit/s{given}"
    )
    for name in ALGORITHMS:
        each = sorted(ratios[name])
        shares = [f"{statistics.median(w):.0%}" for w in zip(*waits[name], strict=True)]
        say(
            f"  {name}: predicted {statistics.median(each):.2f}× the measured time per step (rounds {each[0]:.2f}…"
            f"{each[-1]:.2f}); waiting predicted {shares[0]}, measured {shares[1]}"
        )
    return dataclasses.replace(used[0][0], gradient=gradient)


def main() -> None:
    for processes in (2, 4):
        costs = report("loopback", processes)
        bandwidth = costs.size / costs.gradient
        # What all send goes through the one queue that loopback is.
        code = f"from tests.benchmarks.plan import report; report('shaped link', {processes}, {bandwidth})"
        on_shaped_link(8 * processes * bandwidth, code)


if __name__ == "__main__":
    main()
