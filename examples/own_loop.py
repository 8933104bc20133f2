"""A network and a training loop of one's own, recorded, and the landscape around what it found.

cd examples
python own_loop.py
landscape plot runs/own
landscape spectrum runs/own --model own_loop:Net --data own_loop:digits --k 3
"""

import sys

import torch
from torch import nn

import landscape


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x.view(-1, 1, 8, 8)).flatten(1))


def digits() -> dict:
    data = landscape.data.load("digits")  # or your own, as {"train": (x, y), "test": (x, y)}
    return {"train": data.train, "test": data.test}


def main(folder: str = "runs/own", steps: int = 400) -> None:
    torch.manual_seed(0)
    model, loss, data = Net(), nn.CrossEntropyLoss(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, y = data["train"]

    options = {"test": data["test"], "optimizer": optimizer, "every": 20, "save_every": 100}
    with landscape.Recorder(folder, model, loss, data["train"], **options) as recorder:
        for _ in range(steps):
            rows = torch.randint(len(y), (64,))
            optimizer.zero_grad()
            value = loss(model(x[rows]), y[rows])
            value.backward()
            with recorder.step():
                optimizer.step()
            scheduler.step()
        recorder.log(loss=value)

    run = landscape.load(f"{folder}/last.h5")
    problem = run.problem("train", model=Net, data=digits())
    plane = landscape.random_plane(problem, norm="filter")
    landscape.contour(problem, plane, grid=(15, 15), span=0.5).plot().savefig(f"{folder}/contour.png")
    print(f"{folder}/contour.png; test accuracy {run.history['test_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
