"""Asynchronous SGD with a parameter server: worker processes deliver gradients at their own speed.

Rank 0 is the server: the training loop with the rule async-sgd, schedule "measured", each gradient coming
from the worker that delivers next. Rank k + 1 is worker k: it receives the server's weights, computes a
gradient there on its minibatch, and sends it. The history's column "delay" is the number of updates between.
Momentum, shifted momentum and staleness-aware rates are the rule's, as under simulated schedules.

The order of the workers depends on the machine, so that a run cannot be repeated to the bit, except with one
worker. A resumed run continues from its last checkpoint: workers start again from their copies of then.
While the server evaluates, decomposes or saves, the workers wait. α_e and Δ are recorded, Eq. 4's terms not.
"""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import InputError
from landscape.gradients.learners import Training
from landscape.training.algorithms.async_sgd import AsyncSGD
from landscape.training.processes.process_group import Group
from landscape.training.recipes.recipe import Recipe
from landscape.training.run.loop import Trainer


class _Part(Trainer):
    """The common part of server and worker: a loop without a group, and the group for their messages."""

    def __init__(self, recipe: Recipe, *, group: Group | None = None, **options: Any) -> None:
        super().__init__(recipe, **options)
        assert group is not None
        assert isinstance(self.rule, AsyncSGD)
        self.group, self.async_rule, self.workers = group, self.rule, self.rule.delay + 1
        if self.train.device.type != "cpu":
            raise InputError("device: algorithm.schedule 'measured' is for the CPU, give device='cpu'")
        if self.buffers.local:
            raise InputError(
                f"model: '{self.model.name}' has BatchNorm, whose statistics algorithm.schedule 'measured' "
                "does not collect from its workers"
            )

    def _message(self) -> Tensor:
        """(P + 1,): memory for a gradient and the minibatch's loss."""
        return torch.empty(self.train.layout.size + 1, dtype=self.weights.dtype)


class Server(_Part):
    """Rank 0: the loop, with gradients from the workers."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        self.async_rule.deliver = self._deliver
        # A thread for each worker sends its copy and waits, so that a lost worker is noticed at once.
        self._threads = ThreadPoolExecutor(self.workers)
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._under_way: dict[int, Future[Tensor]] = {}
        self._delivered = self._message()

    def describe_part(self) -> str:
        return f"the server of {self.workers}"

    def run(self) -> Checkpoint:
        end = super().run()
        for k in range(self.workers):
            if k in self._under_way:  # its last gradient is not used
                self._under_way.pop(k).result()
            with self.group.naming():
                self._send(k, self.weights[0], -1 - self.step)
        self._threads.shutdown()
        return end

    def _deliver(self) -> int:
        """Send all waiting workers their copies; the worker whose gradient arrives first, which is stored."""
        for k in set(range(self.workers)) - self._under_way.keys():
            future = self._threads.submit(self._exchange, k)
            self._under_way[k] = future
            future.add_done_callback(lambda _, k=k: self._arrived.put(k))  # type: ignore[misc]
        self.group.step, clock = self.step + 1, time.perf_counter()
        worker = self._arrived.get()
        with self.group.naming():
            self._delivered = self._under_way.pop(worker).result()
        self.comm.waited += time.perf_counter() - clock
        return worker

    def _exchange(self, k: int) -> Tensor:
        """Worker ``k``'s gradient and loss at its copy, which does not change until it has delivered."""
        shared = self.async_rule.shared
        self._send(k, shared["copies"][k], int(shared["fetched"][k]))
        message = self._message()
        dist.recv(message, src=k + 1)
        return message

    def _send(self, k: int, weights: Tensor, version: int) -> None:
        dist.send(torch.tensor([version]), dst=k + 1)
        dist.send(weights, dst=k + 1)

    def _minibatches(self, t: int) -> tuple[Any, Any]:
        """An empty minibatch: only the worker has the samples."""
        return self.train.gather(torch.zeros(1, 0, dtype=torch.long))

    def _compute_gradients(self, points: Tensor, x: Any, y: Any, training: Training) -> Tensor:
        self._gradients.copy_(self._delivered[:-1])
        return self._delivered[-1:]


class Worker(_Part):
    """Rank k + 1: gradients at the weights that the server sends."""

    def describe_part(self) -> str:
        return f"worker {self.group.rank - 1} of {self.workers}"

    def run(self) -> Checkpoint:
        """Deliver until the server's last step; the end has the server's last weights, and no history."""
        k, message, version = self.group.rank - 1, self._message(), torch.zeros(1, dtype=torch.int64)
        while True:
            with self.group.naming():
                dist.recv(version, src=0)
                dist.recv(self.weights[0], src=0)
            self.step = int(version)
            if self.step < 0:
                self.step = -1 - self.step
                return self.checkpoint()
            t = self.group.step = self.step + 1
            x, y = self.minibatches.draw(t, self.workers, slice(k, k + 1))
            losses = self._compute_gradients(self.weights, x, y, self.buffers.training(t))
            torch.cat((self._gradients[0], losses), out=message)
            with self.group.naming():
                dist.send(message, dst=0)
