"""DPSGD with a network and a loop of one's own, a learner per process; after a failure it goes on where it was.

cd examples
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 1 torchrun_dpsgd.py
landscape contour runs/learners/last.h5 --model own_loop:Net --data own_loop:digits

Without the variable restarted processes may look for the addresses of the first ones (pytorch issue 135712).
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from own_loop import Net, digits
from torch import nn

import landscape


def main(folder: str = "runs/learners", steps: int = 200) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    model, loss, data = Net(), nn.CrossEntropyLoss(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = landscape.DecentralizedDataParallel(model, optimizer, "dpsgd", mixing="full", order="awc")

    last = Path(folder) / "last.h5"
    if last.exists():  # torchrun has started all processes again
        print(f"rank {rank} goes on from step {model.load_checkpoint(last)}")
    x, y = data["train"]
    while model.steps < steps:
        # Minibatches that follow from the step alone are the same after a restart.
        draw = torch.Generator().manual_seed(model.steps)
        rows = torch.randint(len(y), (size, 64), generator=draw)[rank]
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if model.steps % 50 == 0:
            model.save_checkpoint(last)

    mean = model.average_model().eval()
    x, y = data["test"]
    with torch.no_grad():
        accuracy = (mean(x).argmax(1) == y).float().mean()
    if rank == 0:
        print(f"{last}; test accuracy of the mean of {size} learners {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except landscape.OperationError as error:  # another process is lost
        sys.exit(f"torchrun_dpsgd.py: {error}")
