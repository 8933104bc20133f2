"""Graphs and sets, as PyTorch Geometric's examples write them, with plain tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import module
from tests.ordinary.use import COUNTED, TOGETHER, Parts, Theme, by_size, per_batch

graphs = Theme("graphs")
NODES = 9


def edges(nodes: int = NODES, count: int = 14) -> Tensor:
    """(2, E): both ways, and a loop at each node."""
    half = torch.randint(nodes, (2, count))
    return torch.cat([half, half.flip(0), torch.arange(nodes).expand(2, -1)], 1)


class GCNConv(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(i, o, bias=False), nn.Parameter(torch.zeros(o))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        deg = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(
            0, col, torch.ones(col.size(0), dtype=x.dtype)
        )
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        x = self.lin(x)
        out = torch.zeros_like(x).index_add(0, col, norm[:, None] * x[row])
        return out + self.bias


class PyGCN(nn.Module):
    """Kipf and Welling's code: the adjacency, normalized, is a matrix."""

    def __init__(self, adj: Tensor | None = None) -> None:
        super().__init__()
        self.gc1, self.gc2 = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("adj", adj)

    def forward(self, x: Tensor, adj: Tensor | None = None) -> Tensor:
        adj = self.adj if adj is None else adj.to(x.dtype)
        return F.log_softmax(torch.spmm(adj, self.gc2(F.relu(torch.spmm(adj, self.gc1(x))))), dim=1)


def adjacency() -> Tensor:
    matrix = torch.zeros(NODES, NODES)
    matrix[tuple(edges())] = 1.0
    return matrix / matrix.sum(1, keepdim=True)


@graphs("pygcn: model(features, adj) with a sparse matrix, idx_train in the loss, a list of one batch")
def pygcn_sparse() -> Parts:
    idx_train, y = torch.arange(5), torch.randint(3, (NODES,))
    data = [((torch.randn(NODES, 4), adjacency().to_sparse()), y)]
    return PyGCN(), lambda output, labels: F.nll_loss(output[idx_train], labels[idx_train]), data


class GCN(nn.Module):
    def __init__(self, hidden: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(4, hidden), GCNConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def planetoid() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(NODES, 4), edges()), torch.randint(3, (NODES,))


TRAIN_MASK = torch.tensor([True, True, False, True, False, True, True, False, True])


@graphs("Planetoid: log_softmax and nll_loss, labels −1 outside of the training set")
def gcn_minus_one() -> Parts:
    class LogGCN(GCN):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return F.log_softmax(super().forward(x, edge_index), dim=1)

    x, y = planetoid()
    return LogGCN(), nn.NLLLoss(ignore_index=-1), [(x, y.masked_fill(~TRAIN_MASK, -1))]


class Data:
    """A graph as an object with attributes."""

    def __init__(self, **parts: Tensor) -> None:
        self.__dict__.update(parts)


@graphs("model(data) with a graph as one object, a list of one batch")
def graph_object() -> Parts:
    (x, edge_index), y = planetoid()
    model = module(gcn=GCN())(lambda self, data: self.gcn(data.x, data.edge_index))
    return model, F.cross_entropy, [(Data(x=x, edge_index=edge_index), y)]


class GATConv(nn.Module):
    def __init__(self, i: int, o: int, heads: int) -> None:
        super().__init__()
        self.lin, self.heads = nn.Linear(i, heads * o, bias=False), heads
        self.att_src, self.att_dst = (nn.Parameter(torch.randn(1, heads, o)) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        x = self.lin(x).view(x.size(0), self.heads, -1)
        alpha = F.leaky_relu((x * self.att_src).sum(-1)[row] + (x * self.att_dst).sum(-1)[col], 0.2)
        top = torch.full((x.size(0), self.heads), float("-inf"), dtype=x.dtype).scatter_reduce(
            0, col[:, None].expand_as(alpha), alpha.detach(), "amax"
        )
        alpha = (alpha - top[col]).exp()
        total = torch.zeros(x.size(0), self.heads, dtype=x.dtype).index_add(0, col, alpha)
        alpha = alpha / total[col]
        return torch.zeros_like(x).index_add(0, col, alpha[..., None] * x[row]).flatten(1)


@graphs("GAT: attention over edges, softmax by scatter")
def gat() -> Parts:
    @module(conv1=GATConv(4, 2, heads=2), conv2=GATConv(4, 3, heads=1))
    def model(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        return self.conv2(x, edge_index)

    return model, nn.CrossEntropyLoss(), [planetoid()]


def scatter_mean(x: Tensor, index: Tensor, size: int) -> Tensor:
    total = torch.zeros(size, x.size(1), dtype=x.dtype).index_add(0, index, x)
    return total / torch.bincount(index, minlength=size).clamp(min=1)[:, None]


@graphs("GraphSAGE: mean of the neighbors, regression of each node")
def graph_sage() -> Parts:
    @module(self1=nn.Linear(4, 4), neigh1=nn.Linear(4, 4, bias=False), out=nn.Linear(8, 1))
    def model(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        x = F.normalize(F.relu(self.self1(x) + self.neigh1(scatter_mean(x[row], col, len(x)))), dim=1)
        return self.out(torch.cat([x, scatter_mean(x[row], col, len(x))], 1)).squeeze(-1)

    (x, edge_index), _ = planetoid()
    return model, F.mse_loss, [((x, edge_index), torch.randn(NODES))]


def molecule_batch(count: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Several graphs as one disconnected one, and which node is of which."""
    sizes = torch.randint(3, 6, (count,)).tolist()
    starts = [sum(sizes[:i]) for i in range(count)]
    index = torch.cat([edges(n, n) + s for n, s in zip(sizes, starts, strict=True)], 1)
    batch = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    return (torch.randn(sum(sizes), 4), index, batch), torch.randint(2, (count,))


class GIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.eps, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(4, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        row, col = edge_index
        x = self.mlp((1 + self.eps) * x + torch.zeros_like(x).index_add(0, col, x[row]))
        count = int(batch.max()) + 1
        return self.head(torch.zeros(count, x.size(1), dtype=x.dtype).index_add(0, batch, x))


@graphs("MoleculeNet: several tasks with missing labels (NaN), masked BCE", says=COUNTED)
def missing_labels() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mask = ~torch.isnan(y)
        return F.binary_cross_entropy_with_logits(out[mask], y[mask])

    y = torch.randint(2, (12, 3)).float()
    y[torch.rand(y.shape) < 0.4] = float("nan")
    y[:, 0] = torch.randint(2, (12,)).float()
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, loss, (torch.randn(12, 4), y)


@graphs("link prediction: edges and negative edges as inputs, one batch")
def link_prediction() -> Parts:
    @module(encoder=GCN(classes=3))
    def model(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:
        z = self.encoder(x, edge_index)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)

    (x, edge_index), _ = planetoid()
    labels = torch.cat([torch.ones(10), torch.zeros(10)])
    pairs = torch.cat([edge_index[:, :10], torch.randint(NODES, (2, 10))], 1)
    return model, nn.BCEWithLogitsLoss(), [((x, edge_index, pairs), labels)]


@graphs("graph autoencoder: adjacency by an inner product, weighted BCE")
def graph_autoencoder() -> Parts:
    @module(encoder=GCN(classes=2))
    def model(self, x: Tensor, edge_index: Tensor) -> Tensor:
        z = self.encoder(x, edge_index)
        return z @ z.t()

    (x, edge_index), _ = planetoid()
    adjacency = torch.zeros(NODES, NODES)
    adjacency[edge_index[0], edge_index[1]] = 1
    return model, nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), [((x, edge_index), adjacency)]


@graphs("dense graphs: (B, N, F) nodes and (B, N, N) adjacency with a mask")
def dense_graphs() -> Parts:
    @module(lin1=nn.Linear(4, 5), lin2=nn.Linear(5, 2))
    def model(self, x: Tensor, adj: Tensor, mask: Tensor) -> Tensor:
        adj = adj / adj.sum(-1, keepdim=True).clamp(min=1)
        x = F.relu(adj @ self.lin1(x)) * mask[..., None]
        return self.lin2(x.sum(1) / mask.sum(1, keepdim=True))

    mask = (torch.arange(5) < torch.randint(2, 6, (8, 1))).float()
    adjacency = (torch.rand(8, 5, 5) < 0.5).float() * mask[:, None] * mask[..., None]
    return model, F.cross_entropy, ((torch.randn(8, 5, 4), adjacency, mask), torch.randint(2, (8,)))


@graphs("PointNet: shared layers, maximum over the points, BatchNorm")
def pointnet() -> Parts:
    @module(conv1=nn.Conv1d(3, 4, 1), bn1=nn.BatchNorm1d(4), conv2=nn.Conv1d(4, 5, 1), fc=nn.Linear(5, 3))
    def model(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x.transpose(1, 2))))
        return F.log_softmax(self.fc(torch.max(self.conv2(x), 2)[0]), dim=1)

    return model, F.nll_loss, (torch.randn(8, 7, 3), torch.randint(3, (8,)))


class SchNet(nn.Module):
    """Energy of atoms by their distances, and forces as its negative gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 3), nn.Linear(3, 1)
        self.filter = nn.Sequential(nn.Linear(4, 3), nn.Softplus())

    def energy(self, z: Tensor, pos: Tensor) -> Tensor:
        d = ((pos[:, :, None] - pos[:, None]).pow(2).sum(-1) + 1e-3).sqrt()
        rbf = torch.exp(-((d[..., None] - torch.arange(4).to(d)) ** 2))
        h = self.embedding(z)
        h = h + (self.filter(rbf) * h[:, None]).sum(2)
        return self.out(torch.tanh(h)).sum((1, 2))


@graphs("SchNet: energies and forces, forces by autograd.grad in forward")
def forces() -> Parts:
    class Potential(SchNet):
        def forward(self, z: Tensor, pos: Tensor) -> dict[str, Tensor]:
            pos = pos.requires_grad_(True)
            energy = self.energy(z, pos)
            (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
            return {"energy": energy, "forces": -gradient}

    def loss(out: Any, target: Any) -> Tensor:
        return F.mse_loss(out["energy"], target["energy"]) + 10 * F.mse_loss(out["forces"], target["forces"])

    z, pos = torch.randint(4, (6, 4)), torch.randn(6, 4, 3)
    return Potential(), loss, ((z, pos), {"energy": torch.randn(6), "forces": torch.randn(6, 4, 3)})


@graphs("recommendation: user and item embeddings with biases, MSE of ratings")
def matrix_factorization() -> Parts:
    @module(user=nn.Embedding(6, 3), item=nn.Embedding(7, 3), user_bias=nn.Embedding(6, 1),
        item_bias=nn.Embedding(7, 1))  # fmt: skip
    def model(self, u: Tensor, i: Tensor) -> Tensor:
        return (self.user(u) * self.item(i)).sum(1) + (self.user_bias(u) + self.item_bias(i)).squeeze(1)

    data = (torch.randint(6, (20,)), torch.randint(7, (20,))), torch.randint(1, 6, (20,)).float()
    return model, nn.MSELoss(), data


@graphs("BPR: pairs of items for a user, −log σ of the difference")
def bpr() -> Parts:
    @module(user=nn.Embedding(6, 3), item=nn.Embedding(7, 3))
    def model(self, u: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        user = self.user(u)
        return (user * self.item(i)).sum(-1), (user * self.item(j)).sum(-1)

    u, i, j = torch.randint(6, (20,)), torch.randint(7, (20,)), torch.randint(7, (20,))
    return model, lambda s, _: -(s[0] - s[1]).sigmoid().log().mean(), ((u, i, j), torch.zeros(20))


# F.normalize is not differentiable at zero. Products are differences, and the search says that it has not converged.
@graphs.no_hessian("graph contrastive learning: nodes of two corrupted graphs, one batch",
    "a node without any feature is normalized: there is no second derivative at zero; the search does not converge, and says so",
    words="no second derivative", total=per_batch, says="differences of gradients")  # fmt: skip
def graph_contrastive() -> Parts:
    @module(gcn=GCN())
    def model(self, x1: Tensor, edge1: Tensor, x2: Tensor, edge2: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.gcn(x1, edge1)), F.normalize(self.gcn(x2, edge2))

    def loss(z: Any, _: Tensor) -> Tensor:
        return F.cross_entropy(z[0] @ z[1].t() / 0.4, torch.arange(len(z[0])))

    (x, edge_index), y = planetoid()
    drop = lambda: (x * (torch.rand(4) > 0.3), edge_index[:, torch.rand(edge_index.shape[1]) > 0.2])  # noqa: E731
    return model, loss, [((*drop(), *drop()), y)]


# fmt: off
graphs("pygcn with a dense matrix, data = ((features, adj), labels)", says=TOGETHER, name="pygcn_dense")(
    lambda: (PyGCN(), F.nll_loss, ((torch.randn(NODES, 4), adjacency()), torch.randint(3, (NODES,)))))
graphs("a graph that the model holds as a buffer, data = (features, labels)", says=TOGETHER,
    name="adjacency_in_the_model")(
    lambda: (PyGCN(adjacency()), F.nll_loss, (torch.randn(NODES, 4), torch.randint(3, (NODES,)))))
graphs.refused("GCN of one graph, data = ((x, edge_index), y)",
    "edges are no samples: as a pair of tensors, each entry of the first dimension would be one", "list|batch",
    remedied=True, name="gcn_pair")(
    lambda: (GCN(), F.cross_entropy, planetoid()))
graphs("GCN of one graph, a list of one batch", name="gcn")(lambda: (GCN(), F.cross_entropy, [planetoid()]))
graphs("GCN, the loss on nodes of train_mask", name="gcn_train_mask")(
    lambda: (GCN(), lambda out, y: F.cross_entropy(out[TRAIN_MASK], y[TRAIN_MASK]), [planetoid()]))
graphs("GIN: graphs in a batch vector, global_add_pool, batches of several sizes", total=by_size, name="gin")(
    lambda: (GIN(), F.cross_entropy, [molecule_batch(4), molecule_batch(4), molecule_batch(2)]))
