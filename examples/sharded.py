"""Curvature of a model that is divided among processes by FSDP2, on each process's own part of the data.

cd examples
torchrun --standalone --nproc-per-node 2 sharded.py
landscape plot runs/sharded/contour.h5
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import landscape


def batches(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of the data: as many batches on each rank."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=draw)
    y = (x @ torch.randn(32, 8, generator=draw)).argmax(1)
    rows = slice(rank * 512 // ranks, (rank + 1) * 512 // ranks)
    return list(zip(x[rows].split(64), y[rows].split(64), strict=True))


def main(folder: str = "runs/sharded", steps: int = 30) -> None:
    accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator().type if accelerator else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=2))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if accelerator:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
    mesh = init_device_mesh(device, (ranks,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    data, optimizer = batches(rank, ranks), torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

    problem = landscape.Problem(model, F.cross_entropy, data)  # on every rank, as are all calls below
    ends = landscape.extreme_eigenvalues(problem)
    trace = landscape.trace(problem, 30)
    surface = landscape.contour(problem, landscape.random_plane(problem, norm="filter"), grid=11, span=1.0)
    if rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        surface.save(Path(folder) / "contour.h5")
        print(problem)
        print(
            f"λ_max {ends.max:.4f} ± {ends.residual_max:.1e}, λ_min {ends.min:.4f} ± {ends.residual_min:.1e}"
        )
        print(
            f"trace {trace.value:.3f} ± {trace.standard_error:.2f}; {ends.products + trace.products} products"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
