"""A class for each pixel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import module
from tests.ordinary.use import BATCHES, COUNTED, TOGETHER, Parts, Theme, per_batch

segmentation = Theme("segmentation")


class UNet(nn.Module):
    """Two levels, a transposed convolution and a skip connection."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()

        def double_conv(i: int, o: int) -> nn.Sequential:
            layers = nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
            return nn.Sequential(*layers, nn.Conv2d(o, o, 3, padding=1), nn.ReLU(inplace=True))

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
    """Three classes, and 255 at pixels that nobody labeled; their number differs by image."""
    y = torch.randint(3, (samples, size, size))
    share = void * 2 * torch.rand(samples, 1, 1)
    return torch.randn(samples, 1, size, size), y.masked_fill(torch.rand(y.shape) < share, 255)


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


@segmentation("Tversky loss over the batch", says=TOGETHER)
def tversky() -> Parts:
    def loss(o: Tensor, y: Tensor, alpha: float = 0.3, beta: float = 0.7) -> Tensor:
        p = o.sigmoid().view(-1)
        y = y.view(-1)
        tp, fp, fn = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
        return 1 - (tp + 1) / (tp + alpha * fp + beta * fn + 1)

    return UNet(), loss, masks()


@segmentation("soft Jaccard (IoU) loss, a list of batches", says=BATCHES, total=per_batch)
def jaccard_batches() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        p = o.sigmoid()
        intersection = (p * y).sum()
        return 1 - intersection / (p.sum() + y.sum() - intersection)

    return UNet(), loss, [masks(3), masks(3)]


@segmentation("focal loss for masks (torchvision)")
def sigmoid_focal() -> Parts:
    def sigmoid_focal_loss(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2) -> Tensor:
        p = torch.sigmoid(inputs)
        ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
        p_t = p * targets + (1 - p) * (1 - targets)
        loss = ce_loss * ((1 - p_t) ** gamma)
        alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
        return (alpha_t * loss).mean()

    return UNet(), sigmoid_focal_loss, masks()


@segmentation("DeepLab reference script: dict with 'out' and 'aux', ignore_index=255", says=COUNTED)
def deeplab_criterion() -> Parts:
    @module(backbone=nn.Conv2d(1, 3, 3, 2, padding=1), classifier=nn.Conv2d(3, 3, 3, padding=2, dilation=2),
        aux_classifier=nn.Conv2d(3, 3, 1))  # fmt: skip
    def model(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        z = F.relu(self.backbone(x))
        up = {"size": size, "mode": "bilinear", "align_corners": False}
        return {
            "out": F.interpolate(self.classifier(z), **up),
            "aux": F.interpolate(self.aux_classifier(z), **up),
        }

    def criterion(inputs: Any, target: Tensor) -> Tensor:
        losses = {}
        for name, x in inputs.items():
            losses[name] = nn.functional.cross_entropy(x, target, ignore_index=255)
        return losses["out"] + 0.5 * losses["aux"]

    return model, criterion, maps()


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 4.0])


@segmentation("U-Net paper: a map of weights beside the labels, mean over all pixels")
def weight_map() -> Parts:
    def loss(o: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        y, w = target
        return (w * F.cross_entropy(o, y, reduction="none")).mean()

    x, y = maps(void=0)
    return UNet(3), loss, (x, (y, 1 + torch.rand(y.shape)))


@segmentation("a map of weights, normalized by its sum", says=COUNTED)
def weight_map_normalized() -> Parts:
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


@segmentation("V-Net: volumes and soft Dice, one batch", total=per_batch)
def volumes() -> Parts:
    layers = nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2, affine=True), nn.LeakyReLU()
    model = nn.Sequential(*layers, nn.Conv3d(2, 1, 1), nn.Sigmoid())
    data = [(torch.randn(2, 1, 4, 4, 4), (torch.rand(2, 1, 4, 4, 4) < 0.3).float())]
    return model, lambda o, y: 1 - (2 * (o * y).sum() + 1) / ((o**2).sum() + (y**2).sum() + 1), data


@segmentation("Lovász hinge over the batch: errors are sorted", says=TOGETHER)
def lovasz_hinge() -> Parts:
    def lovasz(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.reshape(-1), labels.reshape(-1)
        errors = 1.0 - logits * (2.0 * labels - 1.0)
        errors_sorted, perm = torch.sort(errors, dim=0, descending=True)
        gt = labels[perm]
        gts = gt.sum()
        intersection, union = gts - gt.cumsum(0), gts + (1 - gt).cumsum(0)
        jaccard = 1.0 - intersection / union
        jaccard = torch.cat((jaccard[:1], jaccard[1:] - jaccard[:-1]))
        return torch.dot(F.elu(errors_sorted) + 1, jaccard)

    model = UNet()
    model.out.weight.data *= 10  # as a trained one, which tells pixels apart
    return model, lovasz, masks()


@segmentation("hard pixels (OHEM): the mean of the largest quarter of the batch's losses", says=TOGETHER)
def hard_pixels() -> Parts:
    def ohem(o: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(o, y, ignore_index=255, reduction="none").view(-1)
        return losses.topk(len(losses) // 4).values.mean()

    return UNet(3), ohem, maps()


# fmt: off
segmentation("U-Net, BCEWithLogitsLoss", name="unet_bce")(lambda: (UNet(), nn.BCEWithLogitsLoss(), masks()))
segmentation("U-Net, DiceLoss over the batch (segmentation_models.pytorch)", says=TOGETHER, name="unet_dice")(
    lambda: (UNet(), DiceLoss(), masks()))
segmentation("CrossEntropyLoss(ignore_index=255)", name="ignore_255")(
    lambda: (UNet(3), nn.CrossEntropyLoss(ignore_index=255), maps()))
segmentation("ignore_index=255 in a lambda", says=COUNTED, name="ignore_255_lambda")(
    lambda: (UNet(3), lambda o, y: F.cross_entropy(o, y, ignore_index=255), maps()))
segmentation("CrossEntropyLoss with class weights", name="class_weights")(
    lambda: (UNet(3), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone()), maps(void=0)))
segmentation("class weights in a function", says=COUNTED, name="class_weights_function")(
    lambda: (UNet(3), lambda o, y: F.cross_entropy(o, y, weight=CLASS_WEIGHTS.to(o)), maps(void=0)))
segmentation("class weights and ignore_index in a function", says=COUNTED, name="class_weights_and_void")(
    lambda: (UNet(3), lambda o, y: F.cross_entropy(o, y, weight=CLASS_WEIGHTS.to(o), ignore_index=255),
    maps()))
