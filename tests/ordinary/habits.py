"""Ways of writing losses, data and training that belong to no field."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.battery.cases_data import Rows
from tests.ordinary.use import BATCHES, COUNTED, TOGETHER, Parts, Theme, once, per_batch

habits = Theme("habits")


def network(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs))


def samples(count: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 5), torch.randint(3, (count,))


@habits("class weights in a lambda", says=COUNTED)
def class_weights_lambda() -> Parts:
    weight = torch.tensor([1.0, 3.0, 10.0])
    return network(), lambda o, y: F.cross_entropy(o, y, weight=weight.to(o)), samples(12)


@habits("class weights in a lambda, batches of a DataLoader", says=COUNTED)
def class_weights_loader() -> Parts:
    weight = torch.tensor([1.0, 3.0, 10.0])
    data = DataLoader(TensorDataset(*samples(12)), batch_size=5)
    return network(), lambda o, y: F.cross_entropy(o, y, weight=weight.to(o)), data


@habits("ignore_index=−1 in a lambda, batches of a DataLoader", says=COUNTED)
def ignored_in_loader() -> Parts:
    x, y = samples(15)
    y[torch.tensor([0, 1, 3, 7, 8])] = -1
    data = DataLoader(TensorDataset(x, y), batch_size=5)
    return network(), lambda o, y: F.cross_entropy(o, y, ignore_index=-1), data


@habits("a first batch whose targets are all ignored")
def all_ignored_first() -> Parts:
    x, y = samples(12)
    y[:4] = -100
    return network(), nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]


@habits("half of the labels are unknown (−1): semi-supervised loss by a mask", says=COUNTED)
def semi_supervised() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        known = y >= 0
        return F.cross_entropy(o[known], y[known])

    x, y = samples(14)
    y[torch.tensor([1, 2, 5, 6, 9, 12])] = -1
    return network(), loss, (x, y)


@habits("a model in bfloat16", says="float32 arithmetic")
def bfloat16() -> Parts:
    x, y = samples(12)
    return network().to(torch.bfloat16), nn.CrossEntropyLoss(), (x.to(torch.bfloat16), y)


@habits("a model in float16", says="float32 arithmetic")
def float16() -> Parts:
    x, y = samples(12)
    return network().half(), nn.CrossEntropyLoss(), (x.half(), y)


def without_autocast(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return loss(model.net(data[0]), data[1])


@habits("autocast to bfloat16 inside of forward", inside=torch.bfloat16, total=without_autocast,
    says="float32 arithmetic")  # fmt: skip
def autocast() -> Parts:
    @module(net=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    def model(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x)

    return model, lambda o, y: F.cross_entropy(o.float(), y), samples(12)


@habits("a model in float64, data in float32")
def double_model() -> Parts:
    x, y = samples()
    return network().double(), nn.CrossEntropyLoss(), (x, y)


@habits("activation checkpointing, use_reentrant=False",
    says="activation checkpointing.*products are differences of gradients")  # fmt: skip
def checkpointed() -> Parts:
    @module(block=nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5)), head=nn.Linear(5, 3))
    def model(self, x: Tensor) -> Tensor:
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))

    return model, nn.CrossEntropyLoss(), samples()


def mean_of_sum(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def with_penalty(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1]) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


@habits.refused("L2 term in the loss by model.parameters() (a closure)",
    "the loss reads the parameters of the module that was given, which do not move with θ", "penalty",
    after=with_penalty,
    names={"penalty": lambda parameters: 1e-2 * sum(p.pow(2).sum() for p in parameters.values())})  # fmt: skip
def l2_closure() -> Parts:
    model = network()

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())

    return model, loss, samples()


def broadcast(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return ((model(data[0]) - data[1][:, None]) ** 2).mean()


@habits.random("F.dropout(x, 0.5) without training=self.training", "dropout stays on in eval mode")
def functional_dropout() -> Parts:
    @module(fc1=nn.Linear(5, 6), fc2=nn.Linear(6, 3))
    def model(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.5))

    return model, nn.CrossEntropyLoss(), samples()


@habits("NumPy arrays")
def numpy_arrays() -> Parts:
    x, y = samples()
    return network(), nn.CrossEntropyLoss(), (np.asarray(x), np.asarray(y))


@habits.refused("a generator of batches", "it gives its batches once, and many passes are needed",
    "iterat|generator|exhaust")  # fmt: skip
def generator() -> Parts:
    x, y = samples()
    return network(), nn.CrossEntropyLoss(), ((x[i : i + 5], y[i : i + 5]) for i in (0, 5))


@habits("labels of shape (N, 1), squeezed in the loss")
def squeezed_labels() -> Parts:
    x, y = samples()
    return network(), lambda o, y: F.cross_entropy(o, y.squeeze(1).long()), (x, y[:, None].float())


@habits("batches as dicts with 'labels', a loss of the logits")
def dict_batches() -> Parts:
    def batch(n: int) -> dict[str, Tensor]:
        x, y = samples(n)
        return {"features": x, "scale": torch.rand(n) + 0.5, "labels": y}

    model = module(net=network())(lambda self, features, scale: self.net(features * scale[:, None]))
    return model, nn.CrossEntropyLoss(), [batch(6), batch(4)]


@habits("a model that returns its loss, in training mode, with BatchNorm and Dropout")
def training_mode() -> Parts:
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)
    model = nn.Sequential(*layers, nn.Linear(6, 3)).train()
    x, y = samples()
    model(x)
    return model, nn.CrossEntropyLoss(), (x, y)


@habits("a model that returns (logits, features)")
def tuple_outputs() -> Parts:
    @module(body=nn.Linear(5, 6), head=nn.Linear(6, 3))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.relu(self.body(x))
        return self.head(z), z

    return model, lambda out, y: F.cross_entropy(out[0], y) + 1e-3 * out[1].abs().mean(), samples()


@habits("deep ensemble: a ModuleList, logits averaged")
def ensemble() -> Parts:
    @module(members=nn.ModuleList(network() for _ in range(3)))
    def model(self, x: Tensor) -> Tensor:
        return torch.stack([m(x) for m in self.members]).mean(0)

    return model, nn.CrossEntropyLoss(), samples()


@habits("co-teaching: the mean of the smallest losses of the batch", says=TOGETHER)
def small_losses() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(o, y, reduction="none")
        return each.sort().values[: int(0.7 * len(each))].mean()

    return network(), loss, samples(12)


@habits("co-teaching, a list of batches", says=BATCHES, total=per_batch)
def small_losses_batches() -> Parts:
    _, loss, _ = small_losses()
    return network(), loss, [samples(8), samples(8)]


@habits("positives and negatives averaged apart (balanced BCE)", says=TOGETHER)
def balanced_bce() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(o.squeeze(1), y, reduction="none")
        return 0.5 * each[y == 1].mean() + 0.5 * each[y == 0].mean()

    y = torch.zeros(14)
    y[torch.tensor([0, 3, 4, 9, 13])] = 1
    return network(1), loss, (torch.randn(14, 5), y)


@habits.no_hessian("two losses with detach as a weight: loss / loss.detach()",
    "the gradient treats the detached factor as a constant; the loss does not")  # fmt: skip
def detached_weight() -> Parts:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(o, y, reduction="none")
        return (each * each.detach().clamp(max=3.0)).mean()

    return network(), loss, samples()


@habits.undefined("EMA of the loss kept in the loss object", "two passes over the same data give two losses",
    "pass|state|keeps")  # fmt: skip
def stateful_loss() -> Parts:
    @module(average=0.0)
    def loss(self, o: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(o, y)
        self.average = 0.9 * self.average + 0.1 * float(value.detach())
        return value - self.average

    return network(), loss, samples()


@habits("a first batch without any label, ignored by default, in a lambda", says=COUNTED)
def batch_without_labels() -> Parts:
    x, y = samples()
    y[:5] = -100
    return network(), lambda o, t: F.cross_entropy(o, t), [(x[:5], y[:5]), (x[5:], y[5:])]


@habits.random("LayerDrop: a block is left out at random, by Python's random, in eval mode, too",
    "the block is drawn in each pass")  # fmt: skip
def layer_drop() -> Parts:
    @module(inner=nn.Linear(5, 5), block=nn.Linear(5, 5), head=nn.Linear(5, 3))
    def model(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh()
        if random.random() > 0.2:
            x = x + self.block(x).tanh()
        return self.head(x)

    return model, nn.CrossEntropyLoss(), samples()


@habits.refused("a target is NaN", "the loss is NaN, and so would be all that follows", "NaN in targets")
def nan_target() -> Parts:
    y = torch.randn(10, 1)
    y[3] = float("nan")
    return network(1), nn.MSELoss(), (torch.randn(10, 5), y)


# fmt: off
habits("a DataLoader that shuffles, mean loss", name="shuffled_loader")(
    lambda: (network(), nn.CrossEntropyLoss(),
    DataLoader(TensorDataset(*samples(12)), batch_size=5, shuffle=True)))
habits("a DataLoader with a smaller last batch", name="ragged_loader")(
    lambda: (network(), nn.CrossEntropyLoss(), DataLoader(TensorDataset(*samples(11)), batch_size=4)))
habits.undefined("random augmentation in the Dataset's __getitem__",
    "each pass over the data has other images: there is no one loss", "augment|pass", name="augmentation")(
    lambda: (network(), nn.CrossEntropyLoss(),
    DataLoader(Rows(*samples(12), lambda x, y: (x + 0.1 * torch.randn(5), y)), batch_size=4)))
habits.undefined("CrossEntropyLoss(reduction='sum')",
    "a sum grows with the data; the message says to give the mean", "sum", after=mean_of_sum,
    name="reduction_sum")(
    lambda: (network(), nn.CrossEntropyLoss(reduction="sum"), samples()))
habits.undefined("reduction='none'", "a loss is one number", "one number", after=mean_of_sum,
    name="reduction_none")(
    lambda: (network(), nn.CrossEntropyLoss(reduction="none"), samples()))
habits.undefined("outputs (N, 1) against targets (N,): an error that broadcasts",
    "each output is compared with each target; nearly always a mistake", "broadcast|\\(N, 1\\)|shape",
    after=broadcast, name="broadcasting")(
    lambda: (network(1), lambda o, y: ((o - y) ** 2).mean(), (torch.randn(10, 5), torch.randn(10))))
habits.no_hessian("accuracy as the loss", "it has no gradient", words="gradient|derivative", name="accuracy")(
    lambda: (network(), lambda o, y: 1 - (o.argmax(1) == y).float().mean(), samples()))
habits.no_hessian("loss.item()", "a number without a graph has no gradient", words="gradient|derivative",
    total=lambda model, loss, data: torch.as_tensor(once(model, loss, data)), name="item")(
    lambda: (network(), lambda o, y: F.cross_entropy(o, y).item(), samples()))
habits.random("noise added to the inputs in the loss", "the noise is drawn in each pass", name="noisy_loss")(
    lambda: (network(), lambda o, y: F.cross_entropy(o + 0.1 * torch.randn_like(o), y), samples()))
habits("entropy bonus and confidence penalty, torch.distributions in the loss", name="confidence_penalty")(
    lambda: (network(),
    lambda o, y: F.cross_entropy(o, y) - 0.1 * torch.distributions.Categorical(logits=o).entropy().mean(),
    samples()))
habits("nn.DataParallel around the model", name="data_parallel")(
    lambda: (nn.DataParallel(network()), nn.CrossEntropyLoss(), samples()))
