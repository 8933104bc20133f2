"""Images, as public repositories' training scripts have them: detection, segmentation, depth, and critics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.ordinary.scripts import net
from tests.ordinary.use import BATCHES, COUNTED, EITHER, TOGETHER, Parts, Theme, by_count, by_size, per_batch

image_scripts = Theme("image scripts")


def convolutions(outputs: int, inputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, outputs, 1))


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """By element: alpha 0.25, gamma 2."""
    p, ce = torch.sigmoid(logits), F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (0.25 * targets + 0.75 * (1 - targets)) * ce * (1 - p_t) ** 2


@image_scripts("torchvision's segmentation: dict of outputs, one crop a batch, each of its own size; one is all 255",
    source="pytorch/vision: references/segmentation/train.py", small=True,
    total=by_count(lambda x, y: (y != 255).sum()), says=COUNTED)  # fmt: skip
def segmentation_crops() -> Parts:
    @module(body=nn.Conv2d(1, 3, 3, padding=1), out=nn.Conv2d(3, 3, 1), aux=nn.Conv2d(3, 3, 1))
    def model(self, x: Tensor) -> dict[str, Tensor]:
        z = torch.tanh(self.body(x))
        return {"out": self.out(z), "aux": self.aux(z)}

    def criterion(inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        losses = {k: F.cross_entropy(x, target, ignore_index=255) for k, x in inputs.items()}
        return losses["out"] + 0.5 * losses["aux"]

    def batch(h: int, w: int, ignored: float) -> tuple[Tensor, Tensor]:
        y = torch.randint(3, (1, h, w))
        return torch.randn(1, 1, h, w), y.masked_fill(torch.rand(1, h, w) < ignored, 255)

    return model, criterion, [batch(3, 4, 0.0), batch(4, 4, 0.3), batch(3, 3, 1.1), batch(5, 3, 0.6)]


@image_scripts("torchvision's optical flow: a list of refined flows, the mean over valid and invalid pixels",
    source="pytorch/vision: references/optical_flow/utils.py", small=True)  # fmt: skip
def optical_flow() -> Parts:
    @module(first=convolutions(2, 2), update=nn.Conv2d(2, 2, 3, padding=1))
    def model(self, a: Tensor, b: Tensor) -> list[Tensor]:
        flow = self.first(torch.cat([a, b], 1))
        flows = [flow]
        for _ in range(2):
            flows.append(flows[-1] + 0.1 * torch.tanh(self.update(flows[-1])))
        return flows

    def loss(flows: list[Tensor], y: Any) -> Tensor:
        truth, valid = y
        stacked = torch.stack(flows)
        difference = ((stacked - truth).abs() * valid[:, None]).mean(axis=(1, 2, 3, 4))
        return (difference * 0.8 ** torch.arange(len(stacked) - 1, -1, -1)).sum()

    def batch(n: int, valid: float) -> Any:
        inputs = torch.randn(n, 1, 4, 4), torch.randn(n, 1, 4, 4)
        return inputs, (torch.randn(n, 2, 4, 4), (torch.rand(n, 4, 4) < valid).float())

    return model, loss, [batch(2, 1.0), batch(2, 0.5), batch(1, 0.0)]


@image_scripts("torchvision's similarity: the mean over all triplets with a positive loss, three images a batch",
    source="pytorch/vision: references/similarity/loss.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def triplets_of_the_batch() -> Parts:
    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        dist = (embeddings[:, None] - embeddings[None]).pow(2).sum(-1)
        value = dist.unsqueeze(2) - dist.unsqueeze(1) + 1.0
        same, other = labels[None] == labels[:, None], ~torch.eye(len(labels), dtype=torch.bool)
        value = (same & other).unsqueeze(2) * (~same).unsqueeze(1) * value
        value[value < 0] = 0
        return value.sum() / ((value > 1e-16).sum() + 1e-16)

    model = net()
    labels = [[0, 0, 1], [1, 1, 0], [2, 0, 2]]
    return model, loss, [(torch.randn(3, 4), torch.tensor(y)) for y in labels]


@image_scripts("torchvision's RetinaNet: each image's sum / its foreground, the mean over images; the last have none",
    source="pytorch/vision: torchvision/models/detection/retinanet.py", small=True)  # fmt: skip
def retinanet_images() -> Parts:
    def loss(logits: Tensor, y: Any) -> Tensor:
        classes, foreground = y
        losses = []
        for each, target, chosen in zip(logits.flatten(2).transpose(1, 2), classes, foreground, strict=True):
            losses.append(focal(each, target).sum() / max(1, chosen.sum()))
        return sum(losses) / len(classes)

    n, foreground = 5, torch.rand(5, 9) < 0.3
    foreground[3:] = False
    classes = F.one_hot(torch.randint(2, (n, 9)), 2).float() * foreground[..., None]
    data = [
        (x, (c, f))
        for x, c, f in zip(
            torch.randn(n, 1, 3, 3).split(2), classes.split(2), foreground.split(2), strict=True
        )
    ]
    return convolutions(2), loss, data


@image_scripts("torchvision's FCOS: sums / foreground of the batch (1 if there is none), as tensors; the last have none",
    source="pytorch/vision: torchvision/models/detection/fcos.py", says=TOGETHER)  # fmt: skip
def fcos() -> Parts:
    def loss(out: Tensor, y: Any) -> Tensor:
        classes, boxes = y
        out = out.flatten(2).transpose(1, 2)
        chosen = classes >= 0
        target = torch.zeros_like(out[..., :2])
        target[chosen, classes[chosen]] = 1.0
        count = max(1, chosen.sum().item())
        box = F.smooth_l1_loss(out[..., 2:][chosen], boxes[chosen], reduction="sum")
        return focal(out[..., :2], target).sum() / count + box / count

    classes = torch.where(torch.rand(7, 9) < 0.3, torch.randint(2, (7, 9)), -1)
    classes[4:] = -1
    return convolutions(6), loss, (torch.randn(7, 1, 3, 3), (classes, torch.randn(7, 9, 4)))


@image_scripts("CenterNet: heat maps / number of peaks, or the plain sum where there is none, one image a batch",
    source="xingyizhou/CenterNet: src/lib/models/losses.py", small=True, says=None, total=per_batch)  # fmt: skip
def centernet() -> Parts:
    def loss(out: Tensor, y: Any) -> Tensor:
        gt, mask, wh = y
        pred = torch.clamp(out[:, :1].sigmoid(), min=1e-4, max=1 - 1e-4)
        positive, negative = gt.eq(1).float(), gt.lt(1).float()
        pos = (torch.log(pred) * (1 - pred) ** 2 * positive).sum()
        neg = (torch.log(1 - pred) * pred**2 * (1 - gt) ** 4 * negative).sum()
        count = positive.sum()
        heat = -neg if count == 0 else -(pos + neg) / count
        sizes = F.l1_loss(out[:, 1:] * mask, wh * mask, reduction="sum") / (mask.sum() + 1e-4)
        return heat + 0.1 * sizes

    def batch(peaks: int) -> Any:
        gt = 0.9 * torch.rand(1, 1, 4, 4)
        gt.view(-1)[torch.randperm(16)[:peaks]] = 1.0
        mask = (gt == 1).float().expand(1, 2, 4, 4)
        return torch.randn(1, 1, 4, 4), (gt, mask, torch.rand(1, 2, 4, 4))

    return convolutions(3), loss, [batch(1), batch(2), batch(0), batch(3)]


@image_scripts("DETR: Hungarian matching by SciPy, targets a tuple of dicts, class weights and boxes / number of boxes",
    source="facebookresearch/detr: models/detr.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def detr() -> Parts:
    @module(queries=nn.Embedding(4, 3), key=nn.Linear(2, 3), classes=nn.Linear(3, 3), boxes=nn.Linear(3, 4))
    def model(self, x: Tensor) -> dict[str, Tensor]:
        k = self.key(x)
        z = torch.tanh(self.queries.weight + torch.softmax(self.queries.weight @ k.transpose(1, 2), -1) @ k)
        return {"pred_logits": self.classes(z), "pred_boxes": self.boxes(z).sigmoid()}

    class SetCriterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("empty_weight", torch.tensor([1.0, 1.0, 0.1]))

        @torch.no_grad()
        def match(self, logits: Tensor, boxes: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            cost = (
                torch.cdist(boxes, target["boxes"].to(boxes), p=1) - logits.softmax(-1)[:, target["labels"]]
            )
            i, j = linear_sum_assignment(cost.cpu().numpy())
            return torch.as_tensor(i), torch.as_tensor(j)

        def forward(self, out: dict[str, Tensor], targets: Any) -> Tensor:
            logits, boxes = out["pred_logits"], out["pred_boxes"]
            classes, distance = torch.full(logits.shape[:2], 2), logits.new_zeros(())
            count = max(sum(len(t["labels"]) for t in targets), 1)
            for b, target in enumerate(targets):
                i, j = self.match(logits[b], boxes[b], target)
                classes[b, i] = target["labels"][j]
                distance = distance + (boxes[b, i] - target["boxes"][j]).abs().sum()
            ce = F.cross_entropy(logits.transpose(1, 2), classes, self.empty_weight)
            return ce + 5 * distance / count

    def batch(*numbers: int) -> Any:
        targets = tuple({"labels": torch.randint(2, (n,)), "boxes": torch.rand(n, 4)} for n in numbers)
        return torch.randn(len(numbers), 5, 2), targets

    return model, SetCriterion(), [batch(1, 2), batch(3, 1), batch(0, 2)]


@image_scripts.no_hessian("YOLOv3: boxes of the batch in one tensor (M, 6), loss × batch size, objectness by a detached IoU",
    "the target of the objectness is detached: the gradient is not that of the loss",
    words="derivative|gradient", source="eriklindernoren/PyTorch-YOLOv3: pytorchyolo/utils/loss.py", small=True,
    says=BATCHES, total=per_batch)  # fmt: skip
def yolo() -> Parts:
    @module(net=convolutions(6))
    def model(self, x: Tensor) -> Tensor:
        return self.net(x).permute(0, 2, 3, 1)

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        b, c = targets[:, :2].long().T
        gj, gi = (targets[:, 2:4] * 3).long().clamp(0, 2).T
        objects, lbox, lcls = torch.zeros_like(out[..., 0]), torch.zeros(1).to(out), torch.zeros(1).to(out)
        if len(targets):
            chosen = out[b, gj, gi]
            wh = chosen[:, 2:4].sigmoid() * 2
            inter = torch.min(wh, targets[:, 4:6]).prod(1)
            iou = inter / (wh.prod(1) + targets[:, 4:6].prod(1) - inter + 1e-9)
            lbox = lbox + (1.0 - iou).mean()
            objects[b, gj, gi] = iou.detach().clamp(0)
            lcls = lcls + F.binary_cross_entropy_with_logits(chosen[:, 5], c.to(out))
        lobj = F.binary_cross_entropy_with_logits(out[..., 4], objects)
        return ((0.05 * lbox + lobj + 0.5 * lcls) * len(out)).squeeze()

    def batch(n: int, boxes: int) -> Any:
        image, kind = torch.randint(n, (boxes, 1)).float(), torch.randint(2, (boxes, 1)).float()
        return torch.randn(n, 1, 3, 3), torch.cat([image, kind, torch.rand(boxes, 4)], 1)

    return model, loss, [batch(2, 3), batch(2, 1), batch(1, 0)]


@image_scripts("pytorch-retinanet: the model takes one list [images, boxes] and returns its losses; boxes padded with −1",
    source="yhenon/pytorch-retinanet: retinanet/losses.py", small=True, total=by_size)  # fmt: skip
def retinanet_of_lists() -> Parts:
    anchors = torch.linspace(0, 1, 9)

    @module(net=convolutions(2))
    def model(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        images, annotations = inputs
        out = self.net(images).flatten(2)
        classes, places = [], []
        for (logit, place), boxes in zip(out, annotations, strict=True):
            boxes = boxes[boxes[:, 1] != -1]
            if len(boxes) == 0:
                classes.append(focal(logit, torch.zeros_like(logit)).sum())
                places.append(torch.zeros(()).to(out))
                continue
            near = (anchors.to(out)[:, None] - boxes[:, 0]).abs()
            positive = near.min(1).values < 0.15
            number = positive.sum().clamp(min=1)
            classes.append(focal(logit, positive.to(logit)).sum() / number)
            wanted = boxes[near.argmin(1), 0]
            places.append((F.smooth_l1_loss(place, wanted, reduction="none") * positive).sum() / number)
        return torch.stack(classes).mean(dim=0, keepdim=True), torch.stack(places).mean(dim=0, keepdim=True)

    def batch(*numbers: int) -> Any:
        annotations = torch.full((len(numbers), max(*numbers, 1), 2), -1.0)
        for row, n in zip(annotations, numbers, strict=True):
            row[:n] = torch.rand(n, 2)
        return ([torch.randn(len(numbers), 1, 3, 3), annotations],), annotations

    return model, lambda out, _: out[0].mean() + out[1].mean(), [batch(2, 1), batch(1, 3), batch(0)]


@image_scripts("Ultralytics: BCE of all anchors / sum of the soft targets (1 if less), × batch size; the last has none",
    source="ultralytics/ultralytics: ultralytics/utils/loss.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def ultralytics() -> Parts:
    def loss(out: Tensor, scores: Tensor) -> Tensor:
        total = max(scores.sum(), 1)
        return F.binary_cross_entropy_with_logits(out, scores, reduction="none").sum() / total * len(out)

    def batch(n: int, share: float) -> Any:
        return torch.randn(n, 1, 3, 3), torch.rand(n, 2, 3, 3) * (torch.rand(n, 2, 3, 3) < share)

    return convolutions(2), loss, [batch(2, 0.6), batch(2, 0.3), batch(2, 0.0)]


@image_scripts("Pytorch-UNet: one image a batch, BCE + Dice of the batch; the last mask is empty",
    source="milesial/Pytorch-UNet: train.py", small=True, says=None, total=per_batch)  # fmt: skip
def unet_of_single_images() -> Parts:
    criterion = nn.BCEWithLogitsLoss()

    def loss(out: Tensor, mask: Tensor) -> Tensor:
        p, y = torch.sigmoid(out.squeeze(1)), mask.to(out)
        inter, sets = 2 * (p * y).sum(dim=(-1, -2, -3)), p.sum(dim=(-1, -2, -3)) + y.sum(dim=(-1, -2, -3))
        dice = (inter + 1e-6) / (torch.where(sets == 0, inter, sets) + 1e-6)
        return criterion(out.squeeze(1), y) + 1 - dice.mean()

    masks = torch.rand(4, 5, 5) < 0.4
    masks[3] = False
    data = DataLoader(TensorDataset(torch.randn(4, 1, 5, 5), masks.long()), batch_size=1)
    return convolutions(1), loss, data


@image_scripts("Lovász-softmax: mean over the classes that are present in the batch, a class comes late, two images a batch",
    source="bermanmaxim/LovaszSoftmax: pytorch/lovasz_losses.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def lovasz_softmax() -> Parts:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        p = F.softmax(logits, 1).permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
        labels = labels.reshape(-1)
        p, labels = p[labels != 255], labels[labels != 255]
        losses = []
        for c in range(p.shape[1]):
            fg = (labels == c).to(p)
            if fg.sum() == 0:
                continue
            errors, order = torch.sort((fg - p[:, c]).abs(), 0, descending=True)
            gt = fg[order]
            jaccard = 1.0 - (gt.sum() - gt.cumsum(0)) / (gt.sum() + (1 - gt).cumsum(0))
            losses.append(torch.dot(errors, torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])))
        return sum(losses) / len(losses)

    def batch(n: int, classes: int) -> Any:
        y = torch.randint(classes, (n, 4, 4))
        y[:, 0, 0] = 255
        y[0, 1, 1] = classes - 1
        return torch.randn(n, 1, 4, 4), y

    return convolutions(3), loss, [batch(2, 2), batch(2, 2), batch(2, 3)]


@image_scripts("PSMNet: smooth L1 where the disparity is below a maximum; late pixels are beyond it, two pairs a batch",
    source="JiaRenChang/PSMNet: main.py", small=True, total=by_count(lambda x, y: (y < 1.5).sum()),
    other=per_batch, says=EITHER)  # fmt: skip
def psmnet() -> Parts:
    @module(net=convolutions(3, 2))
    def model(self, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        return self.net(torch.cat([left, right], 1)).split(1, 1)

    def loss(outputs: Any, truth: Tensor) -> Tensor:
        mask = truth < 1.5
        value = 0.0
        for weight, out in zip((0.5, 0.7, 1.0), outputs, strict=True):
            value = value + weight * F.smooth_l1_loss(torch.squeeze(out, 1)[mask], truth[mask])
        return value

    def batch(n: int, scale: float) -> Any:
        return (torch.randn(n, 1, 4, 4), torch.randn(n, 1, 4, 4)), scale * torch.rand(n, 4, 4)

    return model, loss, [batch(2, 1.4), batch(2, 1.4), batch(2, 4.0), batch(1, 2.0)]


@image_scripts("sparse depth: the mean square where there is a measurement (target > 0), one image a batch",
    source="fangchangma/self-supervised-depth-completion: criteria.py", small=True,
    total=by_count(lambda x, y: (y > 0).sum()), other=per_batch, says=EITHER)  # fmt: skip
def depth_completion() -> Parts:
    def loss(pred: Tensor, target: Tensor) -> Tensor:
        valid = (target > 0).detach()
        return ((target - pred)[valid] ** 2).mean()

    def batch(share: float) -> Any:
        return torch.randn(1, 1, 4, 4), torch.rand(1, 1, 4, 4) * (torch.rand(1, 1, 4, 4) < share)

    return convolutions(1), loss, [batch(1.1), batch(1.1), batch(0.2), batch(0.6)]


@image_scripts("BTS: the scale-invariant loss of the batch's valid pixels, a root of a variance, two images a batch",
    source="cleinc/bts: pytorch/bts.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def bts_silog() -> Parts:
    def loss(out: Tensor, depth: Tensor) -> Tensor:
        mask = depth > 0.1
        d = torch.log(F.softplus(out)[mask]) - torch.log(depth[mask])
        return torch.sqrt((d**2).mean() - 0.85 * (d.mean() ** 2)) * 10.0

    data = [(torch.randn(n, 1, 4, 4), 2 * torch.rand(n, 1, 4, 4)) for n in (2, 2, 2)]
    return convolutions(1), loss, data


@image_scripts("StyleGAN2's critic: standard deviation of the minibatch as a feature, R1 by autograd.grad in forward",
    source="rosinality/stylegan2-pytorch: train.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def stylegan_critic() -> Parts:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 2, 3), nn.Linear(9, 1)

        def score(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.conv(x))
            std = torch.sqrt(z.var(0, unbiased=False) + 1e-8).mean()
            return self.last(torch.cat([z.flatten(1), std.expand(len(x), 1)], 1))

        def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            real = real.detach().requires_grad_(True)
            score = self.score(real)
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            return score, self.score(fake), slope.pow(2).flatten(1).sum(1).mean()

    def loss(out: Any, _: Any) -> Tensor:
        real, fake, penalty = out
        return F.softplus(-real).mean() + F.softplus(fake).mean() + 5 * penalty

    data = [((torch.randn(n, 1, 4, 4), torch.randn(n, 1, 4, 4)), torch.zeros(n)) for n in (3, 3, 3)]
    return Critic(), loss, data


@image_scripts("PyTorch's fast_neural_style: features of a frozen network, Gram matrices of the batch against one style",
    source="pytorch/examples: fast_neural_style/neural_style/neural_style.py", small=True, total=by_size)  # fmt: skip
def neural_style() -> Parts:
    frozen = nn.Conv2d(1, 3, 3).requires_grad_(False)

    def gram(z: Tensor) -> Tensor:
        z = z.flatten(2)
        return z.bmm(z.transpose(1, 2)) / z.shape[1:].numel()

    style = gram(torch.tanh(frozen(torch.randn(1, 1, 5, 5)))).repeat(3, 1, 1)

    def loss(y: Tensor, x: Tensor) -> Tensor:
        weight, bias = frozen.weight.to(y), frozen.bias.to(y)
        of_y, of_x = (torch.tanh(F.conv2d(image, weight, bias)) for image in (y, x))
        return F.mse_loss(of_y, of_x) + 10 * F.mse_loss(gram(of_y), style[: len(x)].to(y))

    x = torch.randn(7, 1, 5, 5)
    return convolutions(1), loss, DataLoader(TensorDataset(x, x), batch_size=3)


@image_scripts("timm's JSD with AugMix: each batch is three views one after the other, clean labels and divergences",
    source="huggingface/pytorch-image-models: timm/loss/jsd.py", small=True, total=by_size, other=per_batch,
    says=EITHER)  # fmt: skip
def jsd() -> Parts:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        size = len(out) // 3
        logits = out.split(size)
        value = F.cross_entropy(logits[0], target[:size], label_smoothing=0.1)
        p = [F.softmax(z, dim=1) for z in logits]
        mean = torch.clamp(torch.stack(p).mean(axis=0), 1e-7, 1).log()
        return value + 12 * sum(F.kl_div(mean, q, reduction="batchmean") for q in p) / 3

    model = net()
    data = [(torch.randn(3 * n, 4), torch.randint(3, (n,)).repeat(3)) for n in (2, 2, 1)]
    return model, loss, data


# Its meters take the mean over batches. In parts of other images nothing tells that both means, over labeled
# and unlabeled ones, grow with the first ones: the inputs of a batch have two lengths.
@image_scripts("FixMatch: labeled images and three times as many unlabeled, pseudo-labels above a threshold, one pass",
    source="kekmodel/FixMatch-pytorch: train.py", small=True, total=per_batch, says=BATCHES)  # fmt: skip
def fixmatch() -> Parts:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        n = len(targets)
        weak, strong = logits[n:].chunk(2)
        top, pseudo = torch.softmax(weak.detach(), dim=-1).max(-1)
        mask = top.ge(0.4).to(logits)
        unlabeled = (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean()
        return F.cross_entropy(logits[:n], targets) + unlabeled

    data = [
        ((torch.randn(n, 4), torch.randn(3 * n, 4), torch.randn(3 * n, 4)), torch.randint(3, (n,)))
        for n in (2, 2, 1)
    ]
    model = module(net=net())(lambda self, x, weak, strong: self.net(torch.cat((x, weak, strong))))
    return model, loss, data


@image_scripts("LDAM with deferred re-weighting: a module with a list of margins and class weights, the rare class last",
    source="kaidic/LDAM-DRW: losses.py", small=True, says=COUNTED)  # fmt: skip
def ldam_drw() -> Parts:
    class LDAMLoss(nn.Module):
        def __init__(self, counts: list[int], weight: Tensor) -> None:
            super().__init__()
            margins = 1.0 / torch.tensor(counts).float().sqrt().sqrt()
            self.margins, self.weight = margins * (0.5 / margins.max()), weight

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            chosen = F.one_hot(target, x.shape[1]).bool()
            x = torch.where(chosen, x - self.margins.to(x)[target][:, None], x)
            return F.cross_entropy(5 * x, target, weight=self.weight.to(x))

    y = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 2])
    model = net()
    criterion = LDAMLoss([5, 4, 1], torch.tensor([0.5, 0.7, 2.0]))
    return model, criterion, DataLoader(TensorDataset(torch.randn(10, 4), y), batch_size=3)


@image_scripts("class-balanced focal loss: weights by effective numbers, a sum / number of labels, sorted by class",
    source="vandit15/Class-balanced-loss-pytorch: class_balanced_loss.py")  # fmt: skip
def class_balanced() -> Parts:
    counts, beta = torch.tensor([7.0, 4.0, 2.0]), 0.9
    weights = (1.0 - beta) / (1.0 - beta**counts)
    weights = weights / weights.sum() * 3

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        onehot = F.one_hot(labels, 3).to(logits)
        each = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none")
        modulator = torch.exp(-2.0 * onehot * logits - 2.0 * torch.log1p(torch.exp(-logits)))
        return (weights.to(logits)[labels][:, None] * modulator * each).sum() / onehot.sum()

    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
    return net(), loss, (torch.randn(13, 4), y)


def two_heads() -> nn.Module:
    @module(body=nn.Linear(4, 2), head=nn.Linear(2, 3))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.body(x))
        return z, self.head(z)

    return model


class CenterLoss(nn.Module):
    """Its centers are parameters of the loss, which are trained as well."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        distances = (x[:, None] - self.centers.to(x)).pow(2).sum(-1)
        chosen = distances * F.one_hot(labels, 3)
        return chosen.clamp(min=1e-12, max=1e12).sum() / len(x)


OWN = "the loss has trainable parameters of its own, which are no part of θ"


@image_scripts.refused("center loss: a loss with parameters of its own beside cross-entropy, three images a batch",
    OWN, "freeze", source="KaiyangZhou/pytorch-center-loss: center_loss.py", small=True)  # fmt: skip
def center_loss() -> Parts:
    criterion = CenterLoss()

    def loss(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out[1], y) + 0.5 * criterion(out[0], y)

    data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    return two_heads(), loss, DataLoader(data, batch_size=3)


@image_scripts.refused("Proxy Anchor: log-sums over the batch for each proxy, a parameter of the loss; some have no positive",
    OWN, "freeze", source="tjddus9597/Proxy-Anchor-CVPR2020: code/losses.py", small=True, total=per_batch)  # fmt: skip
def proxy_anchor() -> Parts:
    class ProxyAnchor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            cos = F.linear(F.normalize(x), F.normalize(self.proxies).to(x))
            onehot = F.one_hot(labels, 3)
            pos = (torch.exp(-4 * (cos - 0.1)) * onehot).sum(0)
            neg = (torch.exp(4 * (cos + 0.1)) * (1 - onehot)).sum(0)
            return torch.log1p(pos).sum() / (onehot.sum(0) != 0).sum() + torch.log1p(neg).sum() / 3

    model = net()
    labels = [[0, 0, 1], [1, 0, 1], [2, 0, 2]]
    return model, ProxyAnchor(), [(torch.randn(3, 4), torch.tensor(y)) for y in labels]


@image_scripts("PointNet: NLL and the orthogonality of each cloud's transform, a tuple of outputs, the last batch has one",
    source="fxia22/pointnet.pytorch: utils/train_classification.py", small=True)  # fmt: skip
def pointnet_transform() -> Parts:
    @module(stn=nn.Linear(3, 9), conv=nn.Conv1d(3, 4, 1), fc=nn.Linear(4, 3))
    def model(self, points: Tensor) -> tuple[Tensor, Tensor]:
        trans = self.stn(points.max(2).values).view(-1, 3, 3) + torch.eye(3).to(points)
        x = self.conv(torch.bmm(points.transpose(2, 1), trans).transpose(2, 1))
        return F.log_softmax(self.fc(torch.max(x, 2)[0]), dim=1), trans

    def loss(out: Any, y: Tensor) -> Tensor:
        pred, trans = out
        identity = torch.eye(3)[None].to(trans)
        penalty = torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2)).mean()
        return F.nll_loss(pred, y) + penalty * 0.1

    data = TensorDataset(torch.randn(7, 3, 6), torch.randint(3, (7,)))
    return model, loss, DataLoader(data, batch_size=3)


@image_scripts("PyTorch's mnist_forward_forward: goodness of positive and negative images, no target",
    source="pytorch/examples: mnist_forward_forward/main.py")  # fmt: skip
def forward_forward() -> Parts:
    @module(layer=nn.Linear(4, 5))
    def model(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, ...]:
        x = positive, negative
        return tuple(
            torch.tanh(self.layer(z / (z.norm(2, 1, keepdim=True) + 1e-4))).pow(2).mean(1) for z in x
        )

    def loss(out: Any, _: Any) -> Tensor:
        good, bad = out
        return torch.log(1 + torch.exp(torch.cat([-good + 0.3, bad - 0.3]))).mean()

    return model, loss, ((torch.randn(9, 4), torch.randn(9, 4)), torch.zeros(9))
