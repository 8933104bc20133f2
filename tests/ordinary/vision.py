"""Classification, regression and detection of images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.ordinary.use import TOGETHER, Parts, Theme

vision = Theme("vision")


def pictures(samples: int = 8, channels: int = 1, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, channels, size, size), torch.randint(classes, (samples,))


@vision("MNIST example: convolutions, dropout modules, log_softmax, nll_loss")
def mnist_example() -> Parts:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 3, 3, 1)
            self.conv2 = nn.Conv2d(3, 4, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(16, 6)
            self.fc2 = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = F.max_pool2d(x, 2)
            x = self.dropout1(x)
            x = torch.flatten(x, 1)
            x = F.relu(self.fc1(x))
            x = self.dropout2(x)
            return F.log_softmax(self.fc2(x), dim=1)

    return Net(), F.nll_loss, pictures()


@vision("CIFAR-10 tutorial: LeNet and a DataLoader in order")
def cifar_tutorial() -> Parts:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 2, 3)
            self.pool = nn.MaxPool2d(2, 2)
            self.conv2 = nn.Conv2d(2, 4, 3, padding=1)
            self.fc1 = nn.Linear(4, 6)
            self.fc2 = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            return self.fc2(F.relu(self.fc1(x)))

    loader = DataLoader(TensorDataset(*pictures(10, 3, 8)), batch_size=4, shuffle=False)
    return Net(), nn.CrossEntropyLoss(), loader


@vision("mixup: targets are (y_a, y_b) and the loss a blend")
def mixup() -> Parts:
    lam = 0.7
    x, y_a = pictures()
    index = torch.randperm(8)
    criterion = nn.CrossEntropyLoss()

    def mixup_criterion(pred: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return lam * criterion(pred, y[0]) + (1 - lam) * criterion(pred, y[1])

    model = nn.Sequential(nn.Conv2d(1, 2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))
    return model, mixup_criterion, (lam * x + (1 - lam) * x[index], (y_a, y_a[index]))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.box, self.label = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        z = self.backbone(images)
        return {"boxes": self.box(z), "logits": self.label(z)}


@vision("detection, multi-task: dicts of outputs and of targets, cross-entropy + smooth L1")
def detection() -> Parts:
    def loss(out: Any, target: Any) -> Tensor:
        return F.cross_entropy(out["logits"], target["labels"]) + F.smooth_l1_loss(
            out["boxes"], target["boxes"]
        )

    x, y = pictures()
    return Detector(), loss, (x, {"labels": y, "boxes": torch.rand(8, 4)})


@vision("depth estimation: the scale-invariant log loss over the batch", says=TOGETHER)
def scale_invariant_depth() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ELU(), nn.Conv2d(3, 1, 3, padding=1), nn.Softplus()
    )

    def silog(pred: Tensor, depth: Tensor) -> Tensor:
        d = torch.log(pred) - torch.log(depth)
        return torch.sqrt((d**2).mean() - 0.85 * d.mean() ** 2)

    return model, silog, (torch.rand(6, 1, 5, 5), torch.rand(6, 1, 5, 5) + 0.5)


@vision("a Dataset of one's own, handed over as it is")
def own_dataset() -> Parts:
    class Faces(Dataset[Any]):
        def __init__(self) -> None:
            self.images, self.labels = torch.randn(9, 1, 6, 6), torch.randint(3, (9,))

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return self.images[i], int(self.labels[i])

    return (
        nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(),
        Faces(),
    )
