"""SGD against AdamW on one network: which minimum is flatter, in numbers and in one picture.

    python examples/two_optimizers.py [FOLDER]

Flatter is whose loss rises less along random directions, scaled filter by filter (Li et al. 2018), and whose
Hessian has the smaller λ_max; of cross-entropy both shrink with the loss itself, so that is printed, too.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import landscape


def network() -> nn.Module:
    torch.manual_seed(0)  # both start at the same weights
    return nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def train(folder: Path, name: str, data: landscape.data.Dataset, steps: int = 600) -> landscape.Problem:
    model, (x, y) = network(), data.train
    optimizer = OPTIMIZERS[name](model.parameters())
    recorder = landscape.Recorder(folder, model, data.loss, data.train, test=data.test, optimizer=optimizer)
    with recorder:
        for _ in range(steps):
            rows = torch.randint(len(y), (100,))
            optimizer.zero_grad()
            data.loss(model(x[rows]), y[rows]).backward()
            with recorder.step():
                optimizer.step()
    return landscape.Problem(model, data.loss, data.train)


def main(folder: str = "runs/two") -> None:
    data, surfaces = landscape.data.load("digits"), []
    for name in OPTIMIZERS:
        problem = train(Path(folder, name), name, data)
        plane = landscape.random_plane(problem, norm="filter", seed=1)
        surfaces.append(landscape.contour(problem, plane, grid=(15, 15), span=1.0, label=name))
        sharpness = landscape.top_eigenvalues(problem, 1).values[0]
        rise = surfaces[-1].loss.mean() - problem.loss()
        print(f"{name}: loss {problem.loss():.2g}, mean rise around it {rise:.3f}, λ_max {sharpness:.3g}")
    landscape.draw(surfaces, f"{folder}/two.png")
    runs = [landscape.load(Path(folder, name, "last.h5")) for name in OPTIMIZERS]
    landscape.draw(runs, f"{folder}/training.png")


if __name__ == "__main__":
    main(*sys.argv[1:2])
