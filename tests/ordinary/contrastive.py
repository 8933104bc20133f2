"""Representations: samples against samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.ordinary.use import BATCHES, TOGETHER, Parts, Theme, per_batch

contrastive = Theme("contrastive")
N = 8


def encoder(inputs: int = 5, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 6), nn.ReLU(), nn.Linear(6, outputs))


def two_views(samples: int = N) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 5)
    return x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)


class Siamese(nn.Module):
    """One network for two views."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x1), self.net(x2)


def nt_xent(z1: Tensor, z2: Tensor, temperature: float = 0.5) -> Tensor:
    n = len(z1)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(similarity, targets)


@contrastive("SimCLR: views are neighbors in the batch, arange ^ 1", says=TOGETHER)
def simclr_neighbors() -> Parts:
    def loss(z: Tensor, _: Tensor) -> Tensor:
        z = F.normalize(z, dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)) ^ 1)

    x = torch.stack(two_views(), 1).flatten(0, 1)
    return encoder(), loss, (x, torch.zeros(len(x)))


class TwoTowers(nn.Module):
    """CLIP's: two encoders and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = encoder(5), nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 4))
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits_per_image = self.logit_scale.exp() * i @ t.t()
        return logits_per_image, logits_per_image.t()


def clip_loss(logits: Any, _: Any) -> Tensor:
    ground_truth = torch.arange(len(logits[0]))
    return (F.cross_entropy(logits[0], ground_truth) + F.cross_entropy(logits[1], ground_truth)) / 2


def captions(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(n, 5), torch.randint(7, (n, 3))), torch.zeros(n)


@contrastive("SigLIP: a sigmoid for each pair, sum / N", says=TOGETHER)
def siglip() -> Parts:
    def loss(logits: Any, _: Tensor) -> Tensor:
        labels = 2 * torch.eye(len(logits[0])) - 1
        return -F.logsigmoid(labels * (logits[0] - 2)).sum() / len(logits[0])

    return TwoTowers(), loss, captions(N)


def off_diagonal(x: Tensor) -> Tensor:
    n = x.shape[0]
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


@contrastive("Barlow Twins: cross-correlation of two views", says=TOGETHER)
def barlow_twins() -> Parts:
    def loss(z: Any, _: Tensor, lambd: float = 0.0051) -> Tensor:
        z1, z2 = ((v - v.mean(0)) / v.std(0) for v in z)
        c = z1.T @ z2 / len(z1)
        return (torch.diagonal(c) - 1).pow(2).sum() + lambd * off_diagonal(c).pow(2).sum()

    return Siamese(encoder()), loss, (two_views(12), torch.zeros(12))


@contrastive("VICReg: invariance, variance, covariance", says=TOGETHER)
def vicreg() -> Parts:
    def loss(z: Any, _: Tensor) -> Tensor:
        x, y = z
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_loss = sum(torch.mean(F.relu(1 - torch.sqrt(v.var(dim=0) + 0.0001))) / 2 for v in (x, y))
        cov_loss = sum(off_diagonal(v.T @ v / (len(v) - 1)).pow(2).sum() / v.shape[1] for v in (x, y))
        return 25 * repr_loss + 25 * std_loss + cov_loss

    return Siamese(encoder()), loss, (two_views(12), torch.zeros(12))


@contrastive("BYOL: predictor against a frozen target network, under no_grad")
def byol() -> Parts:
    online = encoder()
    target = copy.deepcopy(online).requires_grad_(False)
    for p in target.parameters():
        p.mul_(0.9)

    @module(online=online, predictor=nn.Linear(4, 4), target=target)
    def model(self, x1: Tensor, x2: Tensor) -> Any:
        q1, q2 = self.predictor(self.online(x1)), self.predictor(self.online(x2))
        with torch.no_grad():
            t1, t2 = self.target(x1), self.target(x2)
        return q1, q2, t1.detach(), t2.detach()

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)

    data = (two_views(), torch.zeros(N))
    return model, lambda o, _: (loss_fn(o[0], o[3]) + loss_fn(o[1], o[2])).mean(), data


@contrastive.no_hessian("SimSiam: negative cosine similarity with a stop-gradient",
    "with a stop-gradient, gradients are not those of the loss's value, and their Jacobian is no Hessian")  # fmt: skip
def simsiam() -> Parts:
    @module(encoder=encoder(), predictor=nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4)))
    def model(self, x1: Tensor, x2: Tensor) -> Any:
        z1, z2 = self.encoder(x1), self.encoder(x2)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    criterion = nn.CosineSimilarity(dim=1)

    def loss(o: Any, _: Tensor) -> Tensor:
        p1, p2, z1, z2 = o
        return -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5

    return model, loss, (two_views(), torch.zeros(N))


@contrastive("TripletMarginLoss on (anchor, positive, negative)")
def triplet() -> Parts:
    @module(net=encoder())
    def model(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Any:
        return self.net(anchor), self.net(positive), self.net(negative)

    criterion = nn.TripletMarginLoss(margin=1.0)
    return model, lambda o, _: criterion(*o), ((*two_views(), torch.randn(N, 5)), torch.zeros(N))


@contrastive("triplets with the hardest of the batch", says=TOGETHER)
def hard_triplets() -> Parts:
    def batch_hard(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
        d = torch.sqrt(((z[:, None] - z[None]) ** 2).sum(-1) + 1e-6)
        same = labels[:, None] == labels[None]
        hardest_positive = d.masked_fill(~same, 0.0).max(1).values
        hardest_negative = d.masked_fill(same, 1e9).min(1).values
        return F.relu(hardest_positive - hardest_negative + margin).mean()

    return encoder(), batch_hard, (torch.randn(12, 5), torch.arange(12) % 3)


@contrastive("Siamese contrastive loss with a margin (Hadsell et al.)")
def siamese_margin() -> Parts:
    def loss(z: Any, label: Tensor, margin: float = 2.0) -> Tensor:
        d = F.pairwise_distance(*z)
        return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(margin - d, min=0.0).pow(2))

    return Siamese(encoder()), loss, (two_views(), torch.randint(2, (N,)).float())


def info_nce(z: Any, _: Any) -> Tensor:
    q, k = (F.normalize(v, dim=-1) for v in z)
    return F.cross_entropy(q @ k.T / 0.07, torch.arange(len(q)))


@contrastive("InfoNCE, a DataLoader in order", says=BATCHES, total=per_batch)
def infonce_loader() -> Parts:
    class OnePair(Siamese):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x[:, 0], x[:, 1])

    data = TensorDataset(torch.stack(two_views(12), 1), torch.zeros(12))
    return OnePair(encoder()), info_nce, DataLoader(data, batch_size=4)


@contrastive.undefined("InfoNCE, a DataLoader that shuffles",
    "each pass has other batches, and the loss depends on which samples are together",
    "shuffle|others in each pass|pass", remedied=True, total=per_batch)  # fmt: skip
def infonce_shuffled() -> Parts:
    model, loss, loader = infonce_loader()
    data = DataLoader(loader.dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    return model, loss, data


@contrastive("supervised contrastive loss (SupCon)", says=TOGETHER)
def supcon() -> Parts:
    def loss(features: Tensor, labels: Tensor, temperature: float = 0.3) -> Tensor:
        features = F.normalize(features, dim=1)
        mask = torch.eq(labels[:, None], labels[None]).to(features)
        logits = features @ features.T / temperature
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        logits_mask = 1 - torch.eye(len(features))
        mask = mask * logits_mask
        log_prob = logits - torch.log((torch.exp(logits) * logits_mask).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1)).mean()

    return encoder(), loss, (torch.randn(12, 5), torch.arange(12) % 3)


@contrastive("ArcFace: normalized class weights, a margin of the angle; labels go into forward")
def arcface() -> Parts:
    @module(backbone=encoder(), weight=nn.Parameter(torch.randn(3, 4)), s=4.0, m=0.3)
    def model(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.backbone(x)), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        theta = torch.acos(cosine)
        return self.s * torch.cos(theta + self.m * F.one_hot(label, 3))

    y = torch.randint(3, (N,))
    return model, nn.CrossEntropyLoss(), ((torch.randn(N, 5), y), y)


@contrastive("MoCo: a queue of negatives in a buffer, keys by a momentum encoder")
def moco() -> Parts:
    query, queue = encoder(), F.normalize(torch.randn(4, 10), dim=0)

    @module(encoder_q=query, encoder_k=copy.deepcopy(query).requires_grad_(False), queue=queue)
    def model(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.2
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)

    return model, lambda o, _: F.cross_entropy(*o), (two_views(), torch.zeros(N))


class SentenceTransformer(nn.Module):
    """Mean-pooled words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 4)

    def encode(self, ids: Tensor) -> Tensor:
        mask = (ids > 0).unsqueeze(-1).float()
        words = self.embedding(ids)
        return self.dense((words * mask.to(words)).sum(1) / mask.sum(1).clamp(min=1e-9)).tanh()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(a), self.encode(b)


def sentences(n: int = N) -> Tensor:
    ids = torch.randint(1, 9, (n, 5))
    return ids.masked_fill(torch.arange(5) >= torch.randint(2, 6, (n, 1)), 0)


@contrastive("sentence-transformers: MultipleNegativesRankingLoss", says=TOGETHER)
def multiple_negatives() -> Parts:
    def loss(embeddings: Any, _: Tensor, scale: float = 20.0) -> Tensor:
        a, b = (F.normalize(e, p=2, dim=1) for e in embeddings)
        scores = a @ b.T * scale
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return SentenceTransformer(), loss, ((sentences(), sentences()), torch.zeros(N))


@contrastive("sentence-transformers: CosineSimilarityLoss against scores")
def cosine_scores() -> Parts:
    criterion = nn.MSELoss()
    data = (sentences(), sentences()), torch.rand(N)
    return SentenceTransformer(), lambda e, score: criterion(torch.cosine_similarity(*e), score), data


@contrastive("DINO: student against a frozen teacher, centered and sharpened")
def dino() -> Parts:
    @module(student=encoder(), teacher=encoder().requires_grad_(False), center=0.1 * torch.randn(1, 4))
    def model(self, global_view: Tensor, local_view: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = F.softmax((self.teacher(global_view) - self.center) / 0.2, dim=-1)
        return self.student(local_view) / 0.5, teacher

    data = (two_views(), torch.zeros(N))
    return model, lambda o, _: torch.sum(-o[1] * F.log_softmax(o[0], dim=-1), dim=-1).mean(), data


@contrastive("alignment and uniformity (Wang & Isola): log of a mean over pairs", says=TOGETHER)
def uniformity() -> Parts:
    def loss(z: Any, _: Tensor) -> Tensor:
        x, y = (F.normalize(v, dim=1) for v in z)
        align = (x - y).norm(p=2, dim=1).pow(2).mean()
        square = (x[:, None] - x[None]).pow(2).sum(-1)
        i, j = torch.triu_indices(len(x), len(x), 1)
        return align + square[i, j].mul(-2).exp().mean().log()

    return Siamese(encoder()), loss, (two_views(), torch.zeros(N))


# fmt: off
contrastive("SimCLR: NT-Xent of two views", says=TOGETHER, name="simclr")(
    lambda: (Siamese(encoder()), lambda z, _: nt_xent(*z), (two_views(), torch.zeros(N))))
contrastive("SimCLR: (N, 2, …) views in one tensor, in a list of batches", says=BATCHES, total=per_batch,
    name="simclr_stacked")(
    lambda: (encoder(), lambda z, labels: nt_xent(z[:, 0], z[:, 1], 0.1),
    [((x := torch.stack(two_views(12), 1))[:6], torch.zeros(6)), (x[6:], torch.zeros(6))]))
contrastive("CLIP: logits per image and per text, symmetric cross-entropy", says=TOGETHER, name="clip")(
    lambda: (TwoTowers(), clip_loss, captions(N)))
contrastive("CLIP, a list of batches", says=BATCHES, total=per_batch, name="clip_batches")(
    lambda: (TwoTowers(), clip_loss, [captions(5), captions(5), captions(3)]))
contrastive("InfoNCE with negatives of the batch", says=TOGETHER, name="infonce")(
    lambda: (Siamese(encoder()), info_nce, (two_views(), torch.zeros(N))))
