"""A loop of the user's own with a recorder against the same loop without one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import landscape
from tests.benchmarks.harness import compare, mnist

BATCH, STEPS = 128, 200
# g of a recorded step: eight minibatches, beside fifty of the loop.
SAMPLES = 1024


def loop(
    data: Any, recorder: Callable[[torch.nn.Module, Any], landscape.Recorder] | None
) -> Callable[[], None]:
    """STEPS steps of SGD with momentum; ``recorder(model, optimizer)`` makes what records them."""
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 300, 100, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = data.train
    own = recorder(model, optimizer) if recorder else None

    def run() -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            rows = torch.randint(len(y), (BATCH,), generator=generator)
            optimizer.zero_grad()
            data.loss(model(x[rows]), y[rows]).backward()
            with own.step() if own else contextlib.nullcontext():
                optimizer.step()

    return run


def main() -> None:
    data = landscape.data.load(**mnist())
    for title, every, need in (
        (f"recorder on every 50th step, g from {SAMPLES:,} samples", 50, 0.65),
        ("recorder, no step due", 0, 0.98),
    ):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

            def recorder(
                model: torch.nn.Module,
                optimizer: Any,
                folder: str = folder,
                every: int = every,
                stack: contextlib.ExitStack = stack,
            ) -> landscape.Recorder:
                options = {"every": every, "samples": SAMPLES, "save_every": 0, "optimizer": optimizer}
                return stack.enter_context(
                    landscape.Recorder(folder, model, data.loss, data.train, **options)
                )

            compare(
                f"own loop, 784-300-100-10, batch {BATCH}, {title}, against no recorder",
                loop(data, recorder), loop(data, None), rounds=9, need=need,
            )  # fmt: skip


if __name__ == "__main__":
    main()
