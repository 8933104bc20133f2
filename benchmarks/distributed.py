"""Two processes, 10 million parameters: samples a second against DistributedDataParallel, and the decomposition.

"wrapper" is DecentralizedDataParallel in a user's loop, "ssgd" and "dpsgd" are the trainer.

First over loopback as it is; then in a network namespace of its own whose loopback is shaped so that one
exchange takes about as long as one gradient (needs ip, tc and the right to make a namespace). Before these,
the curvature of a model that two ranks divide, against one rank.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import landscape
from benchmarks.harness import MATCHING, add_row, few, judged, on_shaped_link, say, synthetic
from landscape.training.processes.process_group import Group
from landscape.training.run import generator
from landscape.training.run.loop import Trainer
from tests.groups import together
from tests.nets import GPT2, fsdp

WIDTHS, LOCAL, STEPS, ROUNDS = [784, few(2800, 8), few(2800, 8), 10], few(256, 8), few(10, 2), few(9, 1)


def trainer(group: Group, algorithm: dict[str, object], decompose: int = 0, split: bool = True) -> Trainer:
    # The whole training set is one step's samples: the exact g costs what one step's gradients cost.
    chosen = synthetic(
        "distributed", learners=2, batch=2 * LOCAL, samples=2 * LOCAL, algorithm=algorithm,
        model={"name": "mlp", "widths": WIDTHS}, decompose={"every": decompose, "split": split},
    )  # fmt: skip
    return Trainer(chosen, group=group)


def ours(one: Trainer) -> Callable[[], object]:
    def run() -> None:
        for _ in range(STEPS):
            one._step(one.step + 1)

    return run


def ddp(one: Trainer, rank: int) -> Callable[[], object]:
    """What one would write."""
    model = torch.nn.parallel.DistributedDataParallel(landscape.models.build("mlp", widths=WIDTHS))
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.01), one, rank)


def loop(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, one: Trainer, rank: int
) -> Callable[[], object]:
    """A user's loop, with the minibatches of ``one``."""
    assert one.train_problem.tensors is not None
    x, y = one.train_problem.tensors

    def run() -> None:
        for t in range(1, STEPS + 1):
            rows = torch.randint(len(y), (2, LOCAL), generator=generator(0, "batch", t))[rank]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            float(loss.detach())

    return run


def wrapper(one: Trainer, rank: int, algorithm: str, **options: object) -> Callable[[], object]:
    """The same loop, with the wrapper in place of DistributedDataParallel."""
    network = landscape.models.build("mlp", widths=WIDTHS)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    model = landscape.DecentralizedDataParallel(network, optimizer, algorithm, **options)
    return loop(model, optimizer, one, rank)


def measure(group: Group) -> dict[str, list[float]]:
    """Seconds of each round of STEPS steps, by what ran; in turns."""
    one = trainer(group, {"name": "ssgd"})
    gradients = torch.empty_like(one.weights)

    def gradient() -> None:
        for t in range(STEPS):
            one.stack.gradients(one.weights, *one._minibatches(t + 1), out=gradients)

    flat = torch.empty_like(one.weights)
    ssgd, dpsgd = ours(one), ours(trainer(group, MATCHING))
    # What is compared runs within a few seconds: a machine's speed changes over a minute.
    times = in_turns(
        {
            "ddp": ddp(one, group.rank),
            "ssgd": ssgd,
            "wrapper, ssgd": wrapper(one, group.rank, "ssgd"),
            "dpsgd": dpsgd,
            "wrapper": wrapper(one, group.rank, "dpsgd", mixing="random-matching"),
        }
    )
    decomposed = in_turns(
        {
            "ssgd": ssgd,
            "ssgd, decomposed": ours(trainer(group, {"name": "ssgd"}, 10)),
            "dpsgd": dpsgd,
            "dpsgd, decomposed": ours(trainer(group, MATCHING, 10, split=False)),
            "dpsgd, decomposed and split": ours(trainer(group, MATCHING, 10)),
        }
    )
    for name, mine in decomposed.items():
        times[name if "decomposed" in name else f"{name}, beside"] = mine
    return times | in_turns(
        {"gradient": gradient, "exchange": lambda: [dist.all_reduce(flat) for _ in range(STEPS)]}
    )


def in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each run in each round, after one round to warm up; every other round in reverse order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(ROUNDS + 1):
        for name, run in list(runs.items())[:: 1 if k % 2 else -1]:
            dist.barrier()
            clock = time.perf_counter()
            run()
            dist.barrier()
            if k:
                times[name].append(time.perf_counter() - clock)
    return times


def report(where: str, needs: dict[str, float]) -> float:
    """Print ratios; the seconds that one gradient takes."""
    found, _ = together(2, measure, timeout=120.0, deadline=1200.0)
    if not isinstance(found, dict):
        raise SystemExit(f"distributed, {where}: {found}")
    middle = {name: statistics.median(times) for name, times in found.items()}
    pairs = [(name, "ddp") for name in ("ssgd", "dpsgd", "wrapper", "wrapper, ssgd")]
    pairs += [("wrapper", "dpsgd"), ("wrapper, ssgd", "ssgd")]
    pairs += [(name, f"{name.partition(',')[0]}, beside") for name in found if "decomposed" in name]
    for name, peer in pairs:
        rounds = sorted(b / a for a, b in zip(found[name], found[peer], strict=True))
        # Of ratios, not of times: neighbors in time are alike.
        ratio, need = statistics.median(rounds), needs.get(f"{name} against {peer}")
        peer = peer.removesuffix(", beside")
        add_row(f"{where}, 2 processes, {name} against {peer}", rounds, ratio, need)
        verdict = "" if need is None else f"; needed {need:g}×: {judged(ratio, need)}"
        say(
            f"{where}, 2 processes, {name} against {peer}: {ratio:.2f}× the samples/s "
            f"(rounds {rounds[0]:.2f}…{rounds[-1]:.2f}{verdict})"
        )
    gradient, exchange = (middle[name] / STEPS for name in ("gradient", "exchange"))
    say(f"  a gradient takes {1e3 * gradient:.0f} ms, an all-reduce {1e3 * exchange:.0f} ms")
    return gradient


# A GPT-2 of 13 million parameters (ours).
SIZE = {"vocabulary": 2048, "length": 32, "width": few(384, 8), "layers": few(7, 2), "heads": 2}
SEQUENCES = 8


def status(field: str) -> float:
    """MiB of a field of the process's memory, such as VmHWM, its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def on_ranks(group: Group, size: dict[str, int]) -> landscape.ShardedProblem:
    """The loss of a GPT-2 under FSDP2, with random weights that do not depend on the number of ranks."""
    with torch.device("meta"):
        model = fsdp(GPT2(**size), group.size)  # no rank ever has it whole
    model.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            part = torch.randn(p.shape, generator=draw).mul_(0.05).add_(float(p.dim() == 1))
            p.copy_(distribute_tensor(part, p.device_mesh, p.placements))
    words = torch.randint(size["vocabulary"], (SEQUENCES, size["length"] + 1), generator=draw)
    words = words.chunk(group.size)[group.rank]
    loss = torch.nn.functional.cross_entropy
    return landscape.ShardedProblem(model, loss, [(words[:, :-1], words[:, 1:])])


def curved(group: Group) -> tuple[float, float, float]:
    """gᵀHg, seconds of a product, and the MiB of a rank for the model and a product with its error.

    A search has a basis besides, of 1 GiB at most in each process.
    """
    tiny = on_ranks(group, {"vocabulary": 8, "length": 4, "width": 4, "layers": 1, "heads": 2})
    tiny.hessian().verified(tiny.gradient()[None])  # all that is imported on the way takes memory, too
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now on
    before = status("VmRSS")
    problem = on_ranks(group, SIZE)
    hessian, v, times = problem.hessian(), problem.gradient(), []
    image = hessian.verified(v[None])[0][0]
    peak = status("VmHWM") - before
    for _ in range(ROUNDS):
        dist.barrier()
        clock = time.perf_counter()
        hessian @ v
        times.append(time.perf_counter() - clock)
    seconds = problem.gathered(torch.tensor(statistics.median(times))).max()
    return float(problem.total(v @ image)), float(seconds), float(problem.gathered(torch.tensor(peak)).max())


def sharded() -> None:
    """Two ranks against one, one thread each, each rank with its share of the data."""
    (one, seconds, memory), *_ = together(1, curved, timeout=120.0, deadline=1200.0)
    (two, each, part), *_ = together(2, curved, timeout=120.0, deadline=1200.0)
    say(
        f"sharded GPT-2, 2 ranks against 1: a product takes {each / seconds:.2f}× the time, a rank "
        f"{part / memory:.2f}× the memory ({part:.0f} against {memory:.0f} MiB); gᵀHg {two:.5g}, {one:.5g}"
    )


def main() -> None:
    sharded()
    needs = {"ssgd against ddp": 0.98, "wrapper, ssgd against ddp": 0.97, "dpsgd against ddp": 1.05}
    needs |= {"wrapper against dpsgd": 0.99, "dpsgd, decomposed and split against dpsgd, beside": 0.82}
    needs |= {f"{name}, decomposed against {name}, beside": 0.9 for name in ("ssgd", "dpsgd")}
    gradient = report("loopback", needs)
    # Each process sends P float32 an exchange, through the one queue that loopback has.
    rate = 2 * 8 * 4 * sum(a * b for a, b in itertools.pairwise(WIDTHS)) / gradient
    on_shaped_link(
        rate,
        "from benchmarks.distributed import report; report('shaped link', {'ssgd against ddp': 0.98, 'dpsgd against ddp': 1.33})",
    )


if __name__ == "__main__":
    main()
