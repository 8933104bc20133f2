"""The buffers of the learners' networks: running statistics of BatchNorm, of each learner separately.

A learner's statistics are updated by its minibatches and are not averaged over learners. The statistics of
w_a are estimated separately, at w_a, on a fixed sample of the training set, whenever w_a is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import set_tensors
from landscape.core.errors import FailedError, InputError
from landscape.gradients.learners import Training
from landscape.problem.batches import call, fixed_randomness
from landscape.problem.batchnorm import buffer_names, sample_parts
from landscape.problem.problem import Problem
from landscape.train.processes.comm import Comm
from landscape.train.run.randomness import generator


class Buffers:
    """The BatchNorm statistics of this process's learners, and of the mean.

    ``local`` name -> (n_local, ...); empty for a network without BatchNorm. The statistics of the mean are
    estimated from ``samples`` samples of the training set.
    """

    def __init__(self, train: Problem, test: Problem, comm: Comm, seed: int, samples: int) -> None:
        self._train, self._models, self._comm = train, (train.model, test.model), comm
        self._seed, self._samples = seed, samples
        model, trained = train.model, {slot.name for slot in train.layout.slots}
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        saved = model.state_dict().keys() - trained
        saved_tensors = {name: t.detach() for name, t in state.items() if name in saved}
        learners = set(buffer_names(model))
        self.local = {
            name: _rows(t, comm.n_local).clone() for name, t in saved_tensors.items() if name in learners
        }
        #: Frozen parameters and constants, the same for all learners.
        self._fixed = {name: t for name, t in saved_tensors.items() if name not in learners}

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
        """The options of a training pass of this process's learners at ``step``: buffers and seeds."""

        def seed(learner: int, micro: int) -> int:
            index = self._comm.local.start + learner
            return generator(self._seed, "dropout", step, index, micro).initial_seed()

        return Training(self.local, seed)

    def at_mean(self, theta: Tensor) -> dict[str, Tensor]:
        """Name -> statistics at ``theta`` = w_a, which the problems for training and test are given, too.

        An average over batches of 250 samples, which the processes share.
        """
        if not self.local:
            return {}
        parts = sample_parts(self._train.samples, self._samples)
        share = parts[self._comm.share(len(parts))]
        statistics = self._train.batchnorm_statistics(theta, (self._train.gather(part)[0] for part in share))
        statistics = {name: value for name, value in statistics.items() if value.is_floating_point()}
        if self._comm.size > 1:
            flat = torch.cat([value.flatten().double() for value in statistics.values()])
            flat = self._comm.totals(flat.mul_(len(share) / len(parts)))
            split = torch.split(flat, [value.numel() for value in statistics.values()])
            statistics = {
                n: t.view_as(v).to(v.dtype) for (n, v), t in zip(statistics.items(), split, strict=True)
            }
        for model in self._models:
            set_tensors(model, statistics)
        return statistics

    def rows(self) -> dict[str, Tensor]:
        """The buffers for a checkpoint, name -> (n_local, ...)."""
        local = {name: t.clone() for name, t in self.local.items()}  # the next step changes them in place
        return {**local, **{name: _rows(t.clone(), self._comm.n_local) for name, t in self._fixed.items()}}

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Take the buffers of a checkpoint. FailedError if it lacks a learner's statistics."""
        for name in self.local:
            if name not in rows:
                raise FailedError(f"checkpoint: holds no buffer '{name}', it cannot be resumed")
            self.local[name] = rows[name].to(self.local[name], copy=True)
        for model in self._models:
            set_tensors(model, {name: rows[name][0] for name in self._fixed if name in rows})


def _rows(tensor: Tensor, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape)
