"""A class for each pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ordinary.use import BATCHES, COUNTED, TOGETHER, Parts, Theme, per_batch

segmentation = Theme("segmentation")


class UNet(nn.Module):
    """Two levels, a transposed convolution and a skip connection."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()

        def double_conv(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1),
                nn.ReLU(inplace=True),
            )

        self.down1, self.down2 = double_conv(1, 2), double_conv(2, 3)
        self.up, self.conv = nn.ConvTranspose2d(3, 2, 2, 2), double_conv(4, 2)
        self.out = nn.Conv2d(2, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.down1(x)
        x2 = self.down2(F.max_pool2d(x1, 2))
        x = torch.cat([x1, self.up(x2)], dim=1)
        return self.out(self.conv(x))


def masks(samples: int = 6, size: int = 6) -> tuple[Tensor, Tensor]:
    """Objects that cover little of some images and most of others."""
    share = 0.1 + 0.7 * torch.rand(samples, 1, 1, 1)
    return torch.randn(samples, 1, size, size), (torch.rand(samples, 1, size, size) < share).float()


def maps(samples: int = 6, size: int = 6, void: float = 0.2) -> tuple[Tensor, Tensor]:
    """Three classes, and 255 at pixels that nobody labelled; their number differs by image."""
    y = torch.randint(3, (samples, size, size))
    share = void * 2 * torch.rand(samples, 1, 1)
    return torch.randn(samples, 1, size, size), y.masked_fill(torch.rand(y.shape) < share, 255)


@segmentation("U-Net, BCEWithLogitsLoss")
def unet_bce() -> Parts:
    return UNet(), nn.BCEWithLogitsLoss(), masks()


class DiceLoss(nn.Module):
    """Over the whole batch, as segmentation_models.pytorch has it."""

    def __init__(self, smooth: float = 1.0, eps: float = 1e-7) -> None:
        super().__init__()
        self.smooth, self.eps = smooth, eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        y_pred = torch.sigmoid(y_pred).view(y_true.size(0), 1, -1)
        y_true = y_true.view(y_true.size(0), 1, -1)
        intersection = torch.sum(y_pred * y_true, dim=(0, 2))
        cardinality = torch.sum(y_pred + y_true, dim=(0, 2))
        scores = (2.0 * intersection + self.smooth) / (cardinality + self.smooth).clamp_min(self.eps)
        return (1.0 - scores).mean()


@segmentation("U-Net, Dice + BCE", says=TOGETHER)
def unet_dice_bce() -> Parts:
    dice, bce = DiceLoss(), nn.BCEWithLogitsLoss()
    return UNet(), lambda o, y: dice(o, y) + bce(o, y), masks()


@segmentation("U-Net, Dice + BCE, a list of batches", says=BATCHES, total=per_batch)
def unet_dice_bce_batches() -> Parts:
    dice, bce = DiceLoss(), nn.BCEWithLogitsLoss()
    return UNet(), lambda o, y: 0.5 * dice(o, y) + 0.5 * bce(o, y), [masks(4), masks(4), masks(2)]


@segmentation("U-Net, Dice image by image")
def unet_dice_each() -> Parts:
    def dice_loss(logits: Tensor, targets: Tensor) -> Tensor:
        probs = logits.sigmoid().flatten(1)
        targets = targets.flatten(1)
        score = (2.0 * (probs * targets).sum(1) + 1) / (probs.sum(1) + targets.sum(1) + 1)
        return 1 - score.mean()

    return UNet(), dice_loss, masks()


@segmentation("CrossEntropyLoss(ignore_index=255)")
def ignore_255() -> Parts:
    return UNet(3), nn.CrossEntropyLoss(ignore_index=255), maps()


@segmentation("ignore_index=255 in a lambda", says=COUNTED)
def ignore_255_lambda() -> Parts:
    return UNet(3), lambda o, y: F.cross_entropy(o, y, ignore_index=255), maps()


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 4.0])


@segmentation("CrossEntropyLoss with class weights")
def class_weights() -> Parts:
    return UNet(3), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone()), maps(void=0)


@segmentation("class weights in a function", says=COUNTED)
def class_weights_function() -> Parts:
    def criterion(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, weight=CLASS_WEIGHTS.to(o))

    return UNet(3), criterion, maps(void=0)


@segmentation("class weights and ignore_index in a function", says=COUNTED)
def class_weights_and_void() -> Parts:
    def criterion(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, weight=CLASS_WEIGHTS.to(o), ignore_index=255)

    return UNet(3), criterion, maps()


@segmentation("U-Net paper: a map of weights beside the labels, mean over all pixels")
def weight_map() -> Parts:
    def loss(o: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        y, w = target
        return (w * F.cross_entropy(o, y, reduction="none")).mean()

    x, y = maps(void=0)
    return UNet(3), loss, (x, (y, 1 + torch.rand(y.shape)))


@segmentation("a map of weights, normalised by its sum", says=COUNTED)
def weight_map_normalised() -> Parts:
    def loss(o: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        y, w = target
        return (w * F.cross_entropy(o, y, reduction="none")).sum() / w.sum()

    x, y = maps(void=0)
    return UNet(3), loss, (x, (y, torch.rand(y.shape)))


@segmentation("sparse depth: MSE at pixels that have one (y > 0)", says=COUNTED)
def sparse_depth() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        valid = y > 0
        return F.mse_loss(o[valid], y[valid])

    x, hit = masks()
    return UNet(), loss, (x, hit * (torch.rand(hit.shape) + 0.5))


@segmentation("boolean mask as a part of the targets: sum of masked errors / sum of the mask", says=COUNTED)
def masked_mse() -> Parts:
    def loss(o: Tensor, target: dict[str, Tensor]) -> Tensor:
        error = (o - target["image"]) ** 2 * target["mask"]
        return error.sum() / target["mask"].sum()

    x, hit = masks()
    return UNet(), loss, (x, {"image": torch.rand(hit.shape), "mask": hit.bool()})
