"""Graphs, recommendation, survival and special layers, as public repositories' training scripts have them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.ordinary.scripts import net
from tests.ordinary.use import (
    BATCHES,
    EITHER,
    Parts,
    Theme,
    by_count,
    by_size,
    once,
    per_batch,
)

table_scripts = Theme("table scripts")


@dataclass
class Batch:
    """Graphs in one object: PyG's fields."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor

    @property
    def num_graphs(self) -> int:
        return int(self.batch[-1]) + 1


def graphs(sizes: list[int], y: Tensor | None = None) -> Batch:
    """Rings of ``sizes`` nodes."""
    index, start = [], 0
    for n in sizes:
        ring = torch.arange(n) + start
        index += [torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])]
        start += n
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.randint(2, (len(sizes),)) if y is None else y
    return Batch(torch.randn(start, 3), torch.cat(index, 1), owner, y)


class Rings(nn.Module):
    """A GIN layer; with ``pool`` the sums of the nodes of each graph."""

    def __init__(self, outputs: int = 2, pool: bool = True) -> None:
        super().__init__()
        self.mlp, self.head, self.pool = nn.Linear(3, 4), nn.Linear(4, outputs), pool

    def forward(self, data: Any) -> Tensor:
        row, col = data.edge_index
        z = torch.tanh(self.mlp(data.x.index_add(0, col, data.x[row])))
        if self.pool:
            z = z.new_zeros(int(data.batch[-1]) + 1, 4).index_add(0, data.batch, z)
        return self.head(z)


def with_targets(*batches: Batch) -> list[Any]:
    return [(batch, batch.y) for batch in batches]


@table_scripts("OGB's molecules: an object, targets NaN where there is no label (late), BCE of the others, two graphs a batch",
    source="snap-stanford/ogb: examples/graphproppred/mol/main_pyg.py", small=True,
    total=by_count(lambda x, y: (y == y).sum()), other=per_batch, says=EITHER)  # fmt: skip
def ogb_molecules() -> Parts:
    criterion = nn.BCEWithLogitsLoss()

    def loss(pred: Tensor, y: Tensor) -> Tensor:
        labeled = y == y
        return criterion(pred[labeled], y[labeled])

    nan = float("nan")
    targets = [[[1, 0], [0, 0]], [[0, 1], [1, 1]], [[nan, nan], [1, nan]], [[0, nan]]]
    sizes = [[3, 4], [5, 3], [4, 4], [6]]
    data = with_targets(*(graphs(n, torch.tensor(y).float()) for n, y in zip(sizes, targets, strict=True)))
    return Rings(), loss, data


@table_scripts("DGL's GIN: model(graph, features) with a graph as an object, labels of graphs, three graphs or two",
    source="dmlc/dgl: examples/pytorch/gin/train.py", small=True, total=by_size)  # fmt: skip
def dgl_gin() -> Parts:
    @module(net=Rings())
    def model(self, graph: Batch, feat: Tensor) -> Tensor:
        return self.net(Batch(feat, graph.edge_index, graph.batch, graph.y))

    batches = [graphs([3, 4, 5]), graphs([4, 3, 3]), graphs([6, 4])]
    return model, nn.CrossEntropyLoss(), [((b, b.x), b.y) for b in batches]


@dataclass
class Atoms:
    """Configurations in one object, which is the target as well: MACE's fields."""

    positions: Tensor
    ptr: Tensor
    energy: Tensor
    forces: Tensor
    weight: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


@table_scripts("MACE: the batch is input and target, energies by configuration and forces by atom, two or one a batch",
    source="ACEsuit/mace: mace/modules/loss.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def mace() -> Parts:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(1, 1)

        def forward(self, ref: Atoms) -> dict[str, Tensor]:
            with torch.enable_grad():
                positions = ref.positions.detach().requires_grad_(True)
                energies = [self.pairs(positions[a:b]) for a, b in itertools.pairwise(ref.ptr.tolist())]
                energy = torch.stack(energies)
                (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
            return {"energy": energy, "forces": -slope}

        def pairs(self, x: Tensor) -> Tensor:
            i, j = torch.triu_indices(len(x), len(x), 1)
            return self.net((x[i] - x[j]).pow(2).sum(1, keepdim=True)).sum()

    def loss(pred: dict[str, Tensor], ref: Atoms) -> Tensor:
        number = ref.ptr[1:] - ref.ptr[:-1]
        energy = torch.mean(ref.weight * torch.square((ref["energy"] - pred["energy"]) / number))
        weights = torch.repeat_interleave(ref.weight, number).unsqueeze(-1)
        return energy + 10 * torch.mean(weights * torch.square(ref["forces"] - pred["forces"]))

    def batch(*sizes: int) -> tuple[Atoms, Atoms]:
        n, ptr = sum(sizes), torch.tensor([0, *itertools.accumulate(sizes)])
        atoms = Atoms(
            torch.randn(n, 3), ptr, torch.randn(len(sizes)), torch.randn(n, 3), torch.ones(len(sizes))
        )
        return atoms, atoms

    return Potential(), loss, [batch(3, 2), batch(4, 2), batch(2)]


@table_scripts("DLRM: embedding bags, offsets (tables, B) and indices of several lengths as lists, three rows a batch",
    source="facebookresearch/dlrm: dlrm_s_pytorch.py", small=True, total=by_size, differences=True)  # fmt: skip
def dlrm() -> Parts:
    @module(emb=nn.ModuleList(nn.EmbeddingBag(5, 2, mode="sum") for _ in range(2)), bottom=nn.Linear(3, 2),
        top=nn.Linear(5, 1))  # fmt: skip
    def model(self, dense_x: Tensor, offsets: Tensor, indices: list[Tensor]) -> Tensor:
        x = torch.relu(self.bottom(dense_x))
        parts = [x] + [e(i, o) for e, i, o in zip(self.emb, indices, offsets, strict=True)]
        t = torch.stack(parts, 1)
        z = torch.bmm(t, t.transpose(1, 2))
        i, j = torch.tril_indices(3, 3, -1)
        return torch.sigmoid(self.top(torch.cat([x, z[:, i, j]], 1)))

    def batch(n: int) -> Any:
        lengths = torch.randint(1, 4, (2, n))
        indices = [torch.randint(5, (int(row.sum()),)) for row in lengths]
        return (torch.randn(n, 3), lengths.cumsum(1) - lengths, indices), torch.randint(2, (n, 1)).float()

    return model, nn.BCELoss(), [batch(3), batch(3), batch(2)]


@table_scripts("CORN: conditional subsets by rank, sum / number of examples in them, sorted by rank, three rows a batch",
    source="Raschka-research-group/coral-pytorch: coral_pytorch/losses.py", small=True, says=EITHER,
    other=per_batch)  # fmt: skip
def corn() -> Parts:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        value, examples = 0.0, 0
        for i in range(3):
            chosen = y > i - 1
            label = (y[chosen] > i).to(torch.int64)
            if len(label) < 1:
                continue
            examples += len(label)
            pred = logits[chosen, i]
            value = value - torch.sum(F.logsigmoid(pred) * label + (F.logsigmoid(pred) - pred) * (1 - label))
        return value / examples

    y = torch.tensor([0, 0, 0, 1, 0, 0, 1, 1, 2, 3, 3])
    return net(), loss, DataLoader(TensorDataset(torch.randn(11, 4), y), batch_size=3)


@table_scripts.refused("DeepSurv: log partial likelihood of the batch + norms of the model's weights, by name (a closure)",
    "the loss reads the parameters of the module that was given, which do not move with θ", "penalty",
    source="czifan/DeepSurv.pytorch: networks.py")  # fmt: skip
def deepsurv() -> Parts:
    model = net(4, 1)

    def loss(risk: Tensor, target: Tensor) -> Tensor:
        y, e = target[:, :1], target[:, 1:]
        mask = torch.ones(len(y), len(y))
        mask[(y.T - y) > 0] = 0
        log = torch.log((torch.exp(risk) * mask).sum(0) / mask.sum(0)).reshape(-1, 1)
        norms = sum(torch.norm(w, p=2) for name, w in model.named_parameters() if "weight" in name)
        return -torch.sum((risk - log) * e) / torch.sum(e) + 0.01 * norms

    events = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1.0])[:, None]
    return model, loss, (torch.randn(8, 4), torch.cat([torch.rand(8, 1), events], 1))


@table_scripts.refused("micrograd's demo: hinge loss of moons + the squares of all parameters (a closure)",
    "the loss reads the parameters of the module that was given, which do not move with θ", "penalty",
    source="karpathy/micrograd: demo.ipynb")  # fmt: skip
def micrograd() -> Parts:
    model = net(2, 1)

    def loss(scores: Tensor, y: Tensor) -> Tensor:
        return (1 - y * scores.squeeze(1)).relu().mean() + 1e-4 * sum(
            (p * p).sum() for p in model.parameters()
        )

    return model, loss, (torch.randn(12, 2), torch.randint(2, (12,)).float() * 2 - 1)


@table_scripts("allRank's RankNet: BCE over all pairs of documents of a list whose relevance differs; −1 is padding",
    source="allegro/allRank: allrank/models/losses/rankNet.py", says=EITHER)  # fmt: skip
def ranknet_lists() -> Parts:
    def loss(pred: Tensor, true: Tensor) -> Tensor:
        pred, true = pred.clone(), true.clone()
        mask = true == -1
        pred[mask], true[mask] = float("-inf"), float("-inf")
        pairs = list(itertools.product(range(true.shape[1]), repeat=2))
        truths, preds = true[:, pairs], pred[:, pairs]
        differences = truths[:, :, 0] - truths[:, :, 1]
        chosen = (differences > 0) & ~torch.isinf(differences)
        scores = (preds[:, :, 0] - preds[:, :, 1])[chosen]
        return nn.BCEWithLogitsLoss()(scores, torch.ones_like(scores))

    rows = [2, 1, 0, 0], [0, 1, 2, 1], [1, 0, 0, -1], [2, 0, -1, -1], [1, 1, 1, 1], [0, 0, -1, -1]
    true = torch.tensor([*rows, [2, 1, 0, 3]]).float()
    model = module(net=net(3, 1))(lambda self, x: self.net(x).squeeze(-1))
    return model, loss, (torch.randn(7, 4, 3), true)


@table_scripts("TabNet: outputs and a sparsity term that is a mean of the batch, loss − λ · term, three rows a batch",
    source="dreamquark-ai/tabnet: pytorch_tabnet/abstract_model.py", small=True)  # fmt: skip
def tabnet() -> Parts:
    @module(attention=nn.Linear(4, 4), net=net())
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.softmax(self.attention(x), -1)
        return self.net(mask * x), torch.mean(torch.sum(mask * torch.log(mask + 1e-15), dim=1))

    data = TensorDataset(torch.randn(7, 4), torch.randint(3, (7,)))
    return model, lambda out, y: F.cross_entropy(out[0], y) - 0.1 * out[1], DataLoader(data, batch_size=3)


@table_scripts("LightGCN: sparse propagation over the whole graph, BPR by softplus, norms of the batch's embeddings / batch",
    source="gusye1234/LightGCN-PyTorch: code/model.py", small=True)  # fmt: skip
def lightgcn() -> Parts:
    pairs = (torch.rand(4, 5) < 0.5).float()
    adjacency = torch.cat(
        [torch.cat([torch.zeros(4, 4), pairs], 1), torch.cat([pairs.T, torch.zeros(5, 5)], 1)]
    )
    degree = adjacency.sum(1).clamp(min=1).rsqrt()
    graph = (degree[:, None] * adjacency * degree).to_sparse()

    @module(users=nn.Embedding(4, 2), items=nn.Embedding(5, 2))
    def model(self, user: Tensor, pos: Tensor, neg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        start = torch.cat([self.users.weight, self.items.weight])
        layers = [start]
        for _ in range(2):
            layers.append(torch.sparse.mm(graph.to(start), layers[-1]))
        u, i = torch.stack(layers, 1).mean(1).split([4, 5])
        norms = sum(e(k).pow(2).sum(1) for e, k in ((self.users, user), (self.items, pos), (self.items, neg)))
        return (u[user] * i[pos]).sum(1), (u[user] * i[neg]).sum(1), norms

    def loss(out: Any, _: Any) -> Tensor:
        pos, neg, norms = out
        return torch.mean(F.softplus(neg - pos)) + 1e-2 * 0.5 * norms.sum() / len(norms)

    columns = torch.randint(4, (7,)), torch.randint(5, (7,)), torch.randint(5, (7,))
    data = [((u, p, n), torch.zeros(len(u))) for u, p, n in zip(*(c.split(3) for c in columns), strict=True)]
    return model, loss, data


class ActNorm(nn.Module):
    """Shift and scale are set by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, 4)), nn.Parameter(torch.ones(1, 4))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0, keepdim=True))
                self.scale.data.copy_(1 / (x.std(0, keepdim=True) + 1e-6))
            self.initialized.fill_(1)
        return self.scale * (x + self.loc), torch.sum(torch.log(torch.abs(self.scale)))


@table_scripts("Glow: ActNorm set by a first batch, invertible matrix in its LU form, coupling, bits per dimension",
    source="rosinality/glow-pytorch: train.py")  # fmt: skip
def glow() -> Parts:
    @module(norm=ActNorm(), lower=nn.Parameter(torch.randn(4, 4) / 4),
        diagonal=nn.Parameter(torch.randn(4) / 4), coupling=net(2, 4))  # fmt: skip
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, log_det = self.norm(x)
        matrix = torch.tril(self.lower, -1) + torch.diag(torch.exp(self.diagonal))
        x, log_det = x @ matrix, log_det + self.diagonal.sum()
        a, b = x.chunk(2, 1)
        log_s, t = self.coupling(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        z = torch.cat([a, (b + t) * s], 1)
        log_p = (-0.5 * math.log(2 * math.pi) - 0.5 * z**2).sum(1)
        return log_p, log_det + torch.log(s).sum(1)

    def loss(out: Any, _: Any) -> Tensor:
        log_p, log_det = out
        return (-(-math.log(32) * 4 + log_det + log_p) / (math.log(2) * 4)).mean()

    x = torch.randn(9, 4)
    with torch.no_grad():
        model(x)
    return model, loss, (x, x)


class CachedLinear(nn.Module):
    """In eval mode the matrix and its log-determinant are kept until train() is called."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self._weight = (
            nn.Parameter(torch.zeros(3)),
            nn.Parameter(torch.eye(3) + torch.randn(3, 3) / 4),
        )
        self.cache: Any = None

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.cache = None
        return super().train(mode)

    def of_weight(self) -> tuple[Tensor, Tensor]:
        return self._weight.clone(), torch.linalg.slogdet(self._weight).logabsdet

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            weight, log_det = self.of_weight()
        else:
            if self.cache is None:
                self.cache = self.of_weight()
            weight, log_det = self.cache
        return F.linear(x, weight, self.bias), log_det * torch.ones(len(x)).to(x)


def flow_in_training(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """Without what eval mode keeps: there is nothing else that the mode changes."""
    model.train()
    return once(model, loss, data)


@table_scripts("nflows with using_cache=True: eval mode keeps the matrix and its determinant until train()",
    source="bayesiains/nflows: nflows/transforms/linear.py", total=flow_in_training)  # fmt: skip
def nflows_cache() -> Parts:
    @module(linear=CachedLinear(), shift=nn.Linear(1, 2))
    def model(self, x: Tensor) -> Tensor:
        z, log_det = self.linear(x)
        z = torch.cat([z[:, :1], z[:, 1:] + torch.tanh(self.shift(z[:, :1]))], 1)
        return -0.5 * (z**2).sum(1) + log_det

    x = torch.randn(9, 3)
    return model, lambda log_prob, _: -log_prob.mean(), (x, x)


class LoraLinear(nn.Linear):
    """loralib's, with its default merge_weights=True: eval() adds the product to the frozen weight."""

    def __init__(self, i: int, o: int, rank: int = 2) -> None:
        super().__init__(i, o)
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.randn(rank, i) / 2),
            nn.Parameter(torch.randn(o, rank) / 2),
        )
        self.weight.requires_grad = False
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode == self.merged and hasattr(self, "lora_B"):
            self.weight.data += (-1 if mode else 1) * (self.lora_B @ self.lora_A).data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        result = F.linear(x, self.weight, self.bias)
        return result if self.merged else result + x @ self.lora_A.T @ self.lora_B.T


@table_scripts("escnn: eval() expands the basis of a rotation-equivariant convolution into a filter",
    source="QUVA-Lab/escnn: escnn/nn/modules/conv/r2convolution.py", total=flow_in_training)  # fmt: skip
def escnn() -> Parts:
    class R2Conv(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(outputs, 3) / 2)
            ring = torch.tensor(
                [[0, 0, 0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 0, 1, 0, 1]]
            )
            self.register_buffer("basis", ring.float())

        def expand(self) -> Tensor:
            return (self.weights @ self.basis).view(-1, 1, 3, 3)

        def train(self, mode: bool = True) -> nn.Module:
            if mode:
                self.__dict__.get("_buffers", {}).pop("filter", None)
            elif self.training:
                self.register_buffer("filter", self.expand().detach())
            return super().train(mode)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.expand() if self.training else self.filter, padding=1)

    model = nn.Sequential(R2Conv(2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(8, 1, 5, 5), torch.randint(3, (8,)))


@table_scripts("Fourier neural operator: out.view(batch_size, −1) with the script's constant, relative L2, two fields a batch",
    source="zongyi-li/fourier_neural_operator: fourier_2d.py", small=True, says=None, total=per_batch,
    differences=True)  # fmt: skip
def fno_of_one_batch_size() -> Parts:
    batch_size = 2

    @module(lift=nn.Linear(1, 2), weights=nn.Parameter(torch.randn(2, 2, 2, 2) / 2), down=nn.Linear(2, 1))
    def model(self, x: Tensor) -> Tensor:
        z = self.lift(x).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(z)
        out = torch.zeros_like(spectrum)
        out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :2], self.weights.to(spectrum))
        return self.down(torch.tanh(torch.fft.irfft2(out, s=z.shape[-2:]) + z).permute(0, 2, 3, 1)).squeeze(
            -1
        )

    def loss(out: Tensor, y: Tensor) -> Tensor:
        out, y = out.reshape(batch_size, -1), y.reshape(batch_size, -1)
        return torch.mean(torch.norm(out - y, 2, 1) / torch.norm(y, 2, 1))

    data = TensorDataset(torch.randn(6, 4, 4, 1), torch.randn(6, 4, 4))
    return model, loss, DataLoader(data, batch_size=batch_size)


@table_scripts.undefined("spectral normalization of one's own: each forward pass steps u and v, in eval mode, too",
    "two passes over the same data give two losses", "two|again|same|state|buffer|change",
    source="christiancosgrove/pytorch-spectral-normalization-gan: spectral_normalization.py")  # fmt: skip
def spectral_steps() -> Parts:
    class SpectralNorm(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.weight_bar, self.bias = nn.Parameter(torch.randn(o, i)), nn.Parameter(torch.zeros(o))
            self.u = nn.Parameter(F.normalize(torch.randn(o), dim=0), requires_grad=False)
            self.v = nn.Parameter(F.normalize(torch.randn(i), dim=0), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight_bar
            self.v.data = F.normalize(w.data.T @ self.u.data, dim=0)
            self.u.data = F.normalize(w.data @ self.v.data, dim=0)
            return F.linear(x, w / self.u.dot(w.mv(self.v)), self.bias)

    model = nn.Sequential(SpectralNorm(4, 4), nn.Tanh(), nn.Linear(4, 1))
    data = torch.randn(9, 4), torch.randint(2, (9,)) * 2.0 - 1
    return model, lambda out, y: F.relu(1 - y * out.squeeze(1)).mean(), data


NO_GRADIENT = "a metric of NumPy has no gradient"


def metric(of: Any) -> Any:
    """The metric of all outputs, as a tensor."""
    return lambda model, loss, data: torch.as_tensor(of(once(model, lambda out, y: out, data), data[1]))


def rocauc(out: Tensor, y: Tensor) -> float:
    values = []
    for i in range(y.shape[1]):
        labeled = (y[:, i] == y[:, i]).numpy()
        values.append(roc_auc_score(y[labeled, i].numpy(), out[labeled, i].detach().numpy()))
    return sum(values) / len(values)


@table_scripts.no_hessian("OGB's evaluator as the loss of a contour: ROC-AUC of tasks with missing labels, by scikit-learn",
    NO_GRADIENT, words="gradient|derivative|graph", source="snap-stanford/ogb: ogb/graphproppred/evaluate.py",
    says=None, total=metric(rocauc))  # fmt: skip
def ogb_rocauc() -> Parts:
    y = torch.randint(2, (14, 2)).float()
    y[:2], y[9:, 0], y[12:, 1] = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), float("nan"), float("nan")
    return net(4, 2), lambda out, y: rocauc(out, y), (torch.randn(14, 4), y)


def macro_f1(out: Tensor, y: Tensor) -> float:
    return f1_score(y.numpy(), out.detach().argmax(1).numpy(), average="macro", zero_division=0)


@table_scripts.no_hessian(
    "mean absolute error by scikit-learn on NumPy arrays, three rows a batch",
    NO_GRADIENT,
    words="gradient|derivative|graph",
    source="scikit-learn/scikit-learn: sklearn/metrics/_regression.py",
    small=True,
    says=None,
    total=lambda model, loss, data: (
        (model(torch.cat([x for x, _ in data])) - torch.cat([y for _, y in data])).abs().mean()
    ),
)
def sklearn_mae() -> Parts:
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=3)
    return net(4, 1), lambda out, y: mean_absolute_error(y.numpy(), out.detach().numpy()), data


# fmt: off
table_scripts("PyG's GIN on MUTAG: a batch of graphs is one object, data = [(batch, batch.y)], three graphs or one",
    source="pyg-team/pytorch_geometric: examples/mutag_gin.py", small=True, total=by_size, name="mutag_gin")(
    lambda: (Rings(), F.cross_entropy, with_targets(graphs([3, 4, 5]), graphs([6, 3, 4]), graphs([5]))))
table_scripts("PyG's PPI: labels of nodes, BCE over the nodes of two graphs or one as an object",
    source="pyg-team/pytorch_geometric: examples/ppi.py", small=True, total=by_size, other=per_batch, says=None,
    name="ppi")(
    lambda: (Rings(3, pool=False), nn.BCEWithLogitsLoss(),
    with_targets(*[graphs(sizes, torch.randint(2, (sum(sizes), 3)).float()) for sizes in ([3, 4], [8, 5], [4])])))
table_scripts("loralib as it comes (merge_weights=True), biases trained as well",
    source="microsoft/LoRA: loralib/layers.py", total=flow_in_training, name="loralib")(
    lambda: (nn.Sequential(LoraLinear(4, 4), nn.Tanh(), LoraLinear(4, 3)), nn.CrossEntropyLoss(),
    (torch.randn(10, 4), torch.randint(3, (10,)))))
table_scripts.no_hessian("GLUE's compute_metrics as the loss of a contour: macro F1 by scikit-learn, a rare class late",
    NO_GRADIENT, words="gradient|derivative|graph",
    source="huggingface/transformers: examples/pytorch/text-classification/run_glue.py", says=None,
    total=metric(macro_f1), name="glue_f1")(
    lambda: (net(), macro_f1, (torch.randn(14, 4), torch.tensor([0, 1] * 6 + [2, 2]))))
