"""Graphs and sets, as PyTorch Geometric's examples write them, with plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ordinary.use import COUNTED, TOGETHER, Parts, Theme, by_size

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
    """Kipf and Welling's code: the adjacency, normalised, is a matrix."""

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

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(output[idx_train], labels[idx_train])

    return PyGCN(), loss, [((torch.randn(NODES, 4), adjacency().to_sparse()), y)]


@graphs("pygcn with a dense matrix, data = ((features, adj), labels)", says=TOGETHER)
def pygcn_dense() -> Parts:
    return PyGCN(), F.nll_loss, ((torch.randn(NODES, 4), adjacency()), torch.randint(3, (NODES,)))


@graphs("a graph that the model holds as a buffer, data = (features, labels)", says=TOGETHER)
def adjacency_in_the_model() -> Parts:
    return PyGCN(adjacency()), F.nll_loss, (torch.randn(NODES, 4), torch.randint(3, (NODES,)))


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


@graphs(
    "GCN of one graph, data = ((x, edge_index), y)",
    expected="refused",
    why="edges are no samples: as a pair of tensors, each entry of the first dimension would be one",
    words="list|batch",
    remedied=True,
)
def gcn_pair() -> Parts:
    return GCN(), F.cross_entropy, planetoid()


@graphs("GCN of one graph, a list of one batch")
def gcn() -> Parts:
    return GCN(), F.cross_entropy, [planetoid()]


TRAIN_MASK = torch.tensor([True, True, False, True, False, True, True, False, True])


@graphs("GCN, the loss on nodes of train_mask")
def gcn_train_mask() -> Parts:
    return GCN(), lambda out, y: F.cross_entropy(out[TRAIN_MASK], y[TRAIN_MASK]), [planetoid()]


class Data:
    """A graph as an object with attributes."""

    def __init__(self, **parts: Tensor) -> None:
        self.__dict__.update(parts)


@graphs("model(data) with a graph as one object, a list of one batch")
def graph_object() -> Parts:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gcn = GCN()

        def forward(self, data: Data) -> Tensor:
            return self.gcn(data.x, data.edge_index)

    (x, edge_index), y = planetoid()
    return Net(), F.cross_entropy, [(Data(x=x, edge_index=edge_index), y)]


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


@graphs("GIN: graphs in a batch vector, global_add_pool, batches of several sizes", total=by_size)
def gin() -> Parts:
    return GIN(), F.cross_entropy, [molecule_batch(4), molecule_batch(4), molecule_batch(2)]


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


@graphs("dense graphs: (B, N, F) nodes and (B, N, N) adjacency with a mask")
def dense_graphs() -> Parts:
    class DenseGCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> Tensor:
            adj = adj / adj.sum(-1, keepdim=True).clamp(min=1)
            x = F.relu(adj @ self.lin1(x)) * mask[..., None]
            return self.lin2(x.sum(1) / mask.sum(1, keepdim=True))

    mask = (torch.arange(5) < torch.randint(2, 6, (8, 1))).float()
    adjacency = (torch.rand(8, 5, 5) < 0.5).float() * mask[:, None] * mask[..., None]
    return DenseGCN(), F.cross_entropy, ((torch.randn(8, 5, 4), adjacency, mask), torch.randint(2, (8,)))
