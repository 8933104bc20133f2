"""What a network keeps beside its weights: the running statistics of BatchNorm, each learner its own.

A learner's statistics are updated by its own minibatches, and never mixed with others'. Those of w_a are
none of these, nor their mean: they are re-estimated at w_a, on a fixed sample of the training set, whenever
it is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import set_tensors
from landscape.core.errors import FailedError, InputError
from landscape.evaluation.stack import Training
from landscape.problem.batches import call, fixed_randomness
from landscape.problem.batchnorm import buffer_names, sample_parts
from landscape.problem.problem import Problem
from landscape.train.distributed.comm import Comm
from landscape.train.randomness import generator


class Buffers:
    """The BatchNorm statistics of this process's learners, and of the mean.

    ``own`` name -> (n_local, ...); empty for a network without BatchNorm. ``samples`` of the training set are
    what the mean's come from.
    """

    def __init__(self, train: Problem, test: Problem, comm: Comm, seed: int, samples: int) -> None:
        self._train, self._models, self._comm = train, (train.model, test.model), comm
        self._seed, self._samples = seed, samples
        model, trained = train.model, {slot.name for slot in train.layout.slots}
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        saved = model.state_dict().keys() - trained
        kept = {name: t.detach() for name, t in state.items() if name in saved}
        learners = set(buffer_names(model))
        self.own = {name: _rows(t, comm.n_local).clone() for name, t in kept.items() if name in learners}
        #: Frozen parameters and constants, the same for all learners.
        self._fixed = {name: t for name, t in kept.items() if name not in learners}

    def check(self, model: nn.Module, samples: int) -> None:
        """Raise InputError if ``model``, in training mode, does not train by ``samples`` samples at a time.

        That is where BatchNorm has one number a channel, or the model has a state of another kind.
        """
        x, _ = self._train.gather(torch.zeros(min(2, samples), dtype=torch.long))
        try:
            with torch.no_grad(), fixed_randomness(self._train, 0):
                call(model, self._train.layout.views(self._train.theta), x)
        except ValueError as error:
            raise InputError(
                f"batch: {samples} sample{'s' * (samples > 1)} a learner at a time cannot be trained on "
                f"({' '.join(str(error).split())[:120]})"
            ) from error
        now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in self._fixed.items():
            if not torch.equal(now[name], tensor):
                raise InputError(
                    f"model: its buffer '{name}' changes in training, which learners of their own are not "
                    "given; only the statistics of BatchNorm may"
                )

    def training(self, step: int) -> Training:
        """How this process's learners run at ``step``."""

        def seed(learner: int, micro: int) -> int:
            mine = self._comm.local.start + learner
            return generator(self._seed, "dropout", step, mine, micro).initial_seed()

        return Training(self.own, seed)

    def at_mean(self, theta: Tensor) -> dict[str, Tensor]:
        """Name -> statistics at ``theta`` = w_a, which the problems for training and test are given, too.

        An average over batches of 250 samples, which the processes share.
        """
        if not self.own:
            return {}
        parts = sample_parts(self._train.samples, self._samples)
        mine = parts[self._comm.share(len(parts))]
        found = self._train.batchnorm_statistics(theta, (self._train.gather(part)[0] for part in mine))
        found = {name: value for name, value in found.items() if value.is_floating_point()}
        if self._comm.size > 1:
            flat = torch.cat([value.flatten().double() for value in found.values()])
            flat = self._comm.totals(flat.mul_(len(mine) / len(parts)))
            split = torch.split(flat, [value.numel() for value in found.values()])
            found = {n: t.view_as(v).to(v.dtype) for (n, v), t in zip(found.items(), split, strict=True)}
        for model in self._models:
            set_tensors(model, found)
        return found

    def rows(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, name -> (n_local, ...)."""
        own = {name: t.clone() for name, t in self.own.items()}  # the next step changes them in place
        return {**own, **{name: _rows(t.clone(), self._comm.n_local) for name, t in self._fixed.items()}}

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint kept. FailedError if it lacks a learner's statistics."""
        for name in self.own:
            if name not in rows:
                raise FailedError(f"checkpoint: holds no buffer '{name}', it cannot be resumed")
            self.own[name] = rows[name].to(self.own[name], copy=True)
        for model in self._models:
            set_tensors(model, {name: rows[name][0] for name in self._fixed if name in rows})


def _rows(tensor: Tensor, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape)
