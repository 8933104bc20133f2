"""Classification, regression and detection of images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.battery.cases_data import Rows
from tests.ordinary.use import TOGETHER, Parts, Theme

vision = Theme("vision")


def pictures(samples: int = 8, channels: int = 1, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, channels, size, size), torch.randint(classes, (samples,))


@vision("MNIST example: convolutions, dropout modules, log_softmax, nll_loss")
def mnist_example() -> Parts:
    @module(conv1=nn.Conv2d(1, 3, 3, 1), conv2=nn.Conv2d(3, 4, 3, 1), dropout1=nn.Dropout(0.25),
        dropout2=nn.Dropout(0.5), fc1=nn.Linear(16, 6), fc2=nn.Linear(6, 4))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        return F.log_softmax(self.fc2(x), dim=1)

    return model, F.nll_loss, pictures()


@vision("CIFAR-10 tutorial: LeNet and a DataLoader in order")
def cifar_tutorial() -> Parts:
    @module(conv1=nn.Conv2d(3, 2, 3), pool=nn.MaxPool2d(2, 2), conv2=nn.Conv2d(2, 4, 3, padding=1),
        fc1=nn.Linear(4, 6), fc2=nn.Linear(6, 4))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        return self.fc2(F.relu(self.fc1(x)))

    loader = DataLoader(TensorDataset(*pictures(10, 3, 8)), batch_size=4, shuffle=False)
    return model, nn.CrossEntropyLoss(), loader


@vision("ResNet: basic blocks with BatchNorm and a shortcut")
def resnet() -> Parts:
    class BasicBlock(nn.Module):
        def __init__(self, inputs: int, planes: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(planes)
            self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(planes)
            self.shortcut = nn.Sequential()
            if stride != 1 or inputs != planes:
                shortcut = nn.Conv2d(inputs, planes, 1, stride, bias=False)
                self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(planes))

        def forward(self, x: Tensor) -> Tensor:
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.shortcut(x)
            return F.relu(out)

    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, 1, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU(inplace=True), BasicBlock(2, 2, 1),
        BasicBlock(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4),
    )  # fmt: skip
    x, y = pictures()
    model.train()
    model(x)
    return model, nn.CrossEntropyLoss(), (x, y)


class Attention(nn.Module):
    """As lucidrains writes it."""

    def __init__(self, dim: int, heads: int = 2, dim_head: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        inner = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.dropout(self.attend(dots)), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


@vision("ViT: patches, class token, position embedding, own attention")
def vit() -> Parts:
    @module(to_patch=nn.Conv2d(1, 4, 4, 4), pos_embedding=nn.Parameter(torch.randn(1, 5, 4)),
        cls_token=nn.Parameter(torch.randn(1, 1, 4)), attention=Attention(4, dropout=0.1),
        ff=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.1), nn.Linear(6, 4)),
        head=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))  # fmt: skip
    def model(self, img: Tensor) -> Tensor:
        x = self.to_patch(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(img), -1, -1), x), dim=1)
        x = x + self.pos_embedding[:, : x.shape[1]]
        x = self.attention(x) + x
        x = self.ff(x) + x
        return self.head(x[:, 0])

    return model, nn.CrossEntropyLoss(), pictures()


@vision("MLP-Mixer, label smoothing")
def mlp_mixer() -> Parts:
    @module(embed=nn.Conv2d(1, 3, 4, 4), norm1=nn.LayerNorm(3), norm2=nn.LayerNorm(3),
        tokens=nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
        channels=nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)), head=nn.Linear(3, 4))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))

    return model, nn.CrossEntropyLoss(label_smoothing=0.1), pictures()


@vision("ConvNeXt block: depthwise convolution, LayerNorm, layer scale, soft targets")
def convnext() -> Parts:
    @module(dwconv=nn.Conv2d(3, 3, 3, padding=1, groups=3), norm=nn.LayerNorm(3, eps=1e-6),
        mlp=nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3)), gamma=nn.Parameter(0.1 * torch.ones(3)))  # fmt: skip
    def block(self, x: Tensor) -> Tensor:
        z = self.gamma * self.mlp(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))
        return x + z.permute(0, 3, 1, 2)

    model = nn.Sequential(
        nn.Conv2d(1, 3, 4, 4), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)
    )
    x, y = pictures()
    return model, nn.CrossEntropyLoss(), (x, F.one_hot(y, 4).float() * 0.9 + 0.025)


@vision("MobileNet: inverted residual, ReLU6, BatchNorm in eval mode")
def mobilenet() -> Parts:
    def conv(i: int, o: int, kernel: int, groups: int = 1) -> nn.Sequential:
        layers = nn.Conv2d(i, o, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o)
        return nn.Sequential(*layers, nn.ReLU6(inplace=True))

    class InvertedResidual(nn.Module):
        def __init__(self, dim: int, expand: int) -> None:
            super().__init__()
            layers = conv(dim, expand, 1), conv(expand, expand, 3, expand)
            self.conv = nn.Sequential(*layers, nn.Conv2d(expand, dim, 1, bias=False), nn.BatchNorm2d(dim))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    layers = conv(1, 2, 3), InvertedResidual(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)
    model = nn.Sequential(*layers, nn.Linear(2, 4))
    return model.eval(), F.cross_entropy, pictures()


@vision("EfficientNet: squeeze and excitation, SiLU, stochastic depth in training")
def squeeze_excitation() -> Parts:
    @module(fc1=nn.Conv2d(3, 2, 1), fc2=nn.Conv2d(2, 3, 1))
    def excited(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))))

    @module(conv=nn.Conv2d(3, 3, 3, padding=1), se=excited, drop=0.2)
    def block(self, x: Tensor) -> Tensor:
        out = self.se(F.silu(self.conv(x)))
        if self.training:
            out = out * (torch.rand(len(x), 1, 1, 1) > self.drop) / (1 - self.drop)
        return x + out

    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)
    )
    return model, nn.CrossEntropyLoss(), pictures()


@vision("binary classification: BCELoss on sigmoid outputs, y.view(-1, 1)")
def binary_bce() -> Parts:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 1), nn.Sigmoid())
    x, y = pictures(classes=2)
    return model, nn.BCELoss(), (x, y.float().view(-1, 1))


@vision("mixup: targets are (y_a, y_b) and the loss a blend")
def mixup() -> Parts:
    lam = 0.7
    x, y_a = pictures()
    index = torch.randperm(8)
    criterion = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Conv2d(1, 2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))
    data = lam * x + (1 - lam) * x[index], (y_a, y_a[index])
    return model, lambda pred, y: lam * criterion(pred, y[0]) + (1 - lam) * criterion(pred, y[1]), data


@vision("transfer learning: a frozen backbone and a new head")
def frozen_backbone() -> Parts:
    @module(features=nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        fc=nn.Linear(16, 10))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))

    for param in model.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(16, 4)
    return model, nn.CrossEntropyLoss(), pictures()


@vision("Inception: two outputs, loss = main + 0.4 · auxiliary")
def auxiliary_head() -> Parts:
    @module(stem=nn.Conv2d(1, 3, 3, 2), aux=nn.Linear(3, 4), head=nn.Linear(27, 4))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x).tanh()
        return self.head(x.flatten(1)), self.aux(x.mean((2, 3)))

    criterion = nn.CrossEntropyLoss()

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return criterion(outputs[0], labels) + 0.4 * criterion(outputs[1], labels)

    return model, loss, pictures()


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


@vision("multi-task with learned uncertainties (Kendall) as parameters of the model")
def uncertainty_weighting() -> Parts:
    class MultiTask(Detector):
        def __init__(self) -> None:
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {**super().forward(images), "log_vars": self.log_vars}

    def loss(out: Any, target: Any) -> Tensor:
        tasks = torch.stack(
            (F.cross_entropy(out["logits"], target["labels"]), F.mse_loss(out["boxes"], target["boxes"]))
        )
        return (torch.exp(-out["log_vars"]) * tasks + out["log_vars"]).sum()

    x, y = pictures()
    return MultiTask(), loss, (x, {"labels": y, "boxes": torch.rand(8, 4)})


@vision("super-resolution: PixelShuffle and L1 loss")
def super_resolution() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.PReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    return model, nn.L1Loss(), (torch.rand(6, 1, 4, 4), torch.rand(6, 1, 8, 8))


@vision("depth estimation: the scale-invariant log loss over the batch", says=TOGETHER)
def scale_invariant_depth() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ELU(), nn.Conv2d(3, 1, 3, padding=1), nn.Softplus()
    )

    def silog(pred: Tensor, depth: Tensor) -> Tensor:
        d = torch.log(pred) - torch.log(depth)
        return torch.sqrt((d**2).mean() - 0.85 * d.mean() ** 2)

    return model, silog, (torch.rand(6, 1, 5, 5), torch.rand(6, 1, 5, 5) + 0.5)


@vision("key points: heat maps with MSE, visibility as a weight")
def keypoints() -> Parts:
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))

    def joints_mse(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        heat, weight = target
        return 0.5 * F.mse_loss(output * weight[:, :, None, None], heat * weight[:, :, None, None])

    data = torch.rand(6, 1, 6, 6), (torch.rand(6, 2, 6, 6), torch.randint(2, (6, 2)).float())
    return model, joints_mse, data


@vision("spatial transformer: affine_grid and grid_sample")
def spatial_transformer() -> Parts:
    last = nn.Linear(36, 6)
    last.weight.data.mul_(0.1)
    last.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    @module(localization=nn.Sequential(nn.Flatten(), last), fc=nn.Linear(36, 3))
    def model(self, x: Tensor) -> Tensor:
        theta = self.localization(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return F.log_softmax(self.fc(F.grid_sample(x, grid, align_corners=False).flatten(1)), dim=1)

    return model, F.nll_loss, pictures(size=6, classes=3)


@vision.random("masked autoencoder: forward draws which patches it hides",
    "the masks are random numbers, also in eval mode")  # fmt: skip
def masked_autoencoder() -> Parts:
    @module(encoder=nn.Linear(4, 5), decoder=nn.Linear(5, 4), mask_token=nn.Parameter(torch.zeros(4)))
    def model(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(patches.shape[:2], device=patches.device).argsort(1) < 3
        x = torch.where(mask[..., None], self.mask_token, patches)
        return self.decoder(F.gelu(self.encoder(x))), mask

    def loss(out: Any, patches: Tensor) -> Tensor:
        pred, mask = out
        error = ((pred - patches) ** 2).mean(-1)
        return (error * mask).sum() / mask.sum()

    x = torch.randn(8, 6, 4)
    return model, loss, (x, x)


# fmt: off
vision("multi-label classification, BCEWithLogitsLoss with pos_weight", name="multi_label")(
    lambda: (nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0, 3.0])),
    (pictures()[0], torch.randint(2, (8, 3)).float())))
vision("a Dataset of one's own, handed over as it is", name="own_dataset")(
    lambda: (nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 3)), nn.CrossEntropyLoss(),
    Rows(*pictures(9, size=6, classes=3), lambda image, label: (image, int(label)))))
vision("age regression: model(x).squeeze() and MSE", name="age_regression")(
    lambda: (nn.Sequential(nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1)),
    lambda out, age: F.mse_loss(out.squeeze(), age), (pictures()[0], torch.rand(8) * 5)))
