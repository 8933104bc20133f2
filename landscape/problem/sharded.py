"""A model whose parameters are shared among the ranks of torch.distributed, as one problem of all of them."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.options import choose
from landscape.problem.batches import count_samples, named_tensors, take
from landscape.problem.checks import CHECKS, tolerance, with_other_first_labels
from landscape.problem.data import Data
from landscape.problem.layout import Layout, check_recording, differentiable, padding_rows, unwrapped
from landscape.problem.losses import Terms, describe_loss, output_loss, placed_loss

# Errors of torch.distributed about other ranks are RuntimeErrors, which their texts tell from the model's own.
_LOST = re.compile(r"gloo|nccl|connection|socket|peer|timed? ?out|process group", re.IGNORECASE)
# The check of the gradient moves the weights by so much of their norm, and allows so large a relative error:
# a gradient that is a sum over ranks instead of their mean is off by a factor of 2 at least (both ours).
STEP, ALLOWED = 1e-3, 0.2


def is_sharded(model: nn.Module) -> bool:
    """Test whether parameters of ``model`` are DTensors, as those of FSDP2 and tensor parallelism are."""
    parts = [*model.parameters(), *model.modules()]  # after a forward pass, FSDP2's may be whole for a while
    return any(hasattr(part, "device_mesh") or hasattr(part, "reshard") for part in parts)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or a tensor that each rank has; it shares its memory."""
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found


@dataclass(frozen=True)
class Piece:
    """A trainable parameter, whose numbers on this rank are on 1/``share`` ranks."""

    name: str
    parameter: nn.Parameter
    share: float

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> Piece:
        """The piece of the parameter ``name``."""
        given: Any = parameter
        kinds = getattr(given, "placements", ())
        if any(kind.is_partial() for kind in kinds):
            raise InputError(f"model: {name} is a sum over ranks, a parameter must be in shards or copies")
        shards = math.prod(
            given.device_mesh.size(i) for i, kind in enumerate(kinds) if not kind.is_replicate()
        )
        return cls(name, parameter, shards / dist.get_world_size())

    @property
    def local(self) -> Tensor:
        """The numbers on this rank, in the parameter's memory."""
        return _local(self.parameter)

    def gradient(self) -> Tensor:
        """The gradient of these numbers that a backward pass left: zero where it left none."""
        found: Any = self.parameter.grad
        if found is None:
            return torch.zeros_like(self.local)
        like: Any = self.parameter
        if hasattr(found, "placements") and found.placements != like.placements:
            found = found.redistribute(placements=like.placements)
        return _local(found)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's numbers of a tensor like the parameter, which all ranks have."""
        like: Any = self.parameter
        if not hasattr(like, "placements"):
            return whole
        from torch.distributed.tensor import DTensor, Replicate  # takes a second, and is there already

        copies = DTensor.from_local(
            whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
        )
        cut: Tensor = copies.redistribute(placements=like.placements).to_local()
        return cut


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def all_ranks() -> Iterator[None]:
    """Raise OperationError, in one line, for an error in the block that says that another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LandscapeError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        words = " ".join(str(error).split())[:160]
        raise OperationError(
            f"rank {dist.get_rank()}: another rank is lost, or did not answer in time ({words})"
        ) from error


class ShardedProblem:
    """L(θ) of a model under FSDP2, tensor parallelism or DistributedDataParallel, the same on every rank.

    Every rank makes the same calls, in the same order. The model is taken as it is: passes are those of its
    own training path, in eval mode; there is no copy of it. Where other weights are evaluated, they are moved
    in place, and are afterwards what they were to the bit, also after an error or Ctrl-C (which waits for the
    pass under way).

    A vector holds what belongs to the parameters on this rank, (n,), each number times √s, s = 1 of so many
    ranks with the same one, so that an inner product is the sum of the ranks' own (:meth:`total`).
    :meth:`unflatten` gives its parts by parameter.

    Args:
        model: with parameters as DTensors (``fully_shard``, ``parallelize_module``), or in a
            DistributedDataParallel.
        loss, data: as :class:`landscape.Problem` takes them; the data are this rank's own share in batches,
            as many on each rank, and the loss is the mean over the samples of all. Ranks that divide a layer
            among them have the same data.
        terms: as :class:`landscape.Problem` takes it.
        check: "quick" tests on the first batch that the loss is the mean over its samples and not random,
            that the gradient is the loss's, and that the ranks have as many batches and equal copies; "full"
            is the same; "off" does not test it.

    Attributes:
        model, criterion, layout: the model itself, the loss, and the parameters in order.
        samples: of all ranks together; the same data on several ranks count once.
        coarse: the coarsest precision of a pass.
        mask: (n,), 1 for what a vector moves: 0 for padding rows of embeddings, which training never moves.

    Raises:
        InputError: another kind of model, no process group, weights that are not finite, or a failed check.
        OperationError: another rank is lost, or did not answer within the process group's timeout.

    Example:
        >>> landscape.Problem(model, torch.nn.functional.cross_entropy, batches)  # doctest: +SKIP
        ShardedProblem(GPT, 124,439,808 parameters on 8 ranks, cross_entropy, float32 on cuda:0)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        data: Any,
        *,
        terms: Callable[[Any], Tensor] | None = None,
        check: str = "quick",
    ) -> None:
        self.check = choose("check", check, CHECKS)
        inner = unwrapped(model)
        if not dist.is_initialized():
            raise InputError("model: no process group; call torch.distributed.init_process_group first")
        if not (is_sharded(inner) or isinstance(model, nn.parallel.DistributedDataParallel)):
            raise InputError(
                f"model: a {type(model).__name__} on {dist.get_world_size()} ranks is not allowed, its "
                "parameters must be DTensors (fully_shard, parallelize_module), or it a "
                "DistributedDataParallel"
            )
        self.model, self.ranks = model, dist.get_world_size()
        self._reshard()
        named = dict(inner.named_parameters())
        self.layout = Layout.of(inner)
        self.pieces = self.chosen = tuple(Piece.of(s.name, named[s.name]) for s in self.layout.slots)
        if not self.pieces:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first = self.pieces[0].local
        # With its parameters offloaded to the CPU, FSDP2 still computes on the mesh's devices.
        kinds = {
            p.parameter.device_mesh.device_type for p in self.pieces if hasattr(p.parameter, "device_mesh")
        }
        away = next(iter(kinds - {first.device.type}), None)
        self.device = torch.device(away, torch.accelerator.current_device_index()) if away else first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.criterion = output_loss if loss is None else placed_loss(loss, self.device, first.dtype)
        self.data = Data(data, self.device, first.dtype, self.criterion is output_loss)
        self.data.chunk_size = self.data.samples or None
        count = Terms(self.criterion, terms)
        x, y = self.data.first(count)
        if terms is None and (other := with_other_first_labels(self.criterion, x)):
            pair = [self._on(x, labels, 1.0).loss() for x, labels in ((x, y), (other, other["labels"]))]
            count.shifted = pair[0] == pair[1]
        self.data.weigh(count, equal=check != "off", ordered=False)
        self._mean_terms = self._mean(self.data.terms)
        sums = torch.zeros(self.ranks, dtype=torch.float64)
        sums[dist.get_rank()] = sum(float(t.double().sum()) for _, t in named_tensors((x, y)))
        shares = len(self.total(sums).unique()) / self.ranks  # others have the same data
        self.samples = round(float(self.total(torch.tensor(float(self.data.samples)))) * shares)
        self.coarse = self._coarsest(x, y)
        self.mask = self._trained()
        if check != "off":
            self._check(x, y, count)

    def __repr__(self) -> str:
        loss, dtype = describe_loss(self.criterion).split(".")[-1], str(self.dtype).removeprefix("torch.")
        return (
            f"ShardedProblem({type(unwrapped(self.model)).__name__}, {self.layout.size:,} parameters on "
            f"{self.ranks} ranks, {loss}, {dtype} on {self.device})"
        )

    def of(self, part: str | Sequence[str] | None) -> Self:
        """The same with vectors of some parameters only.

        Args:
            part: names or name prefixes of parameters; None: all.

        Returns:
            A problem that shares everything else with this one.

        Raises:
            InputError: a name that fits none.
        """
        names = {slot.name for slot in self.layout.select(part)}
        other = copy.copy(self)
        other.chosen = tuple(piece for piece in self.pieces if piece.name in names)
        other.mask = other._trained()
        return other

    # Vectors.

    @property
    def size(self) -> int:
        """P, the number of parameters that a vector is about, on all ranks together."""
        return sum(piece.parameter.numel() for piece in self.chosen)

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """The vector (n,) of this rank's numbers of each parameter.

        Args:
            tensors: for each chosen parameter, in their order.

        Returns:
            (n,), in float32 or float64.
        """
        pairs = zip(self.chosen, tensors, strict=True)
        return torch.cat([t.flatten().to(self.dtype) * math.sqrt(piece.share) for piece, t in pairs])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """This rank's numbers of a vector, by parameter.

        Args:
            vector: (n,).

        Returns:
            Name -> tensor in the shape of the parameter's local part.
        """
        local = [piece.local for piece in self.chosen]
        parts = torch.split(vector, [t.numel() for t in local])
        return {
            piece.name: part.view(t.shape) / math.sqrt(piece.share)
            for piece, part, t in zip(self.chosen, parts, local, strict=True)
        }

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of what each of them has.

        Args:
            values: of one shape on all ranks.

        Returns:
            The sum, the same on all ranks.

        Raises:
            OperationError: another rank is lost, or did not answer in time.
        """
        return self.reduced(values, dist.ReduceOp.SUM)

    def norm(self, vector: Tensor) -> float:
        """The norm of a vector (n,) on all ranks."""
        return float(self.total(vector.double().square().sum()).sqrt())

    def reduced(self, values: Tensor, how: Any) -> Tensor:
        """As :meth:`total`, with another reduction of torch.distributed than the sum."""
        found = values.detach().to(self.device, copy=True).contiguous()
        with all_ranks():
            dist.all_reduce(found, how)
        return found.to(values.device)

    def draw(self, function: Callable[[torch.Size], Tensor]) -> Tensor:
        """A random vector that does not depend on the number of ranks.

        Args:
            function: draws the numbers of a parameter, of its shape, the same on all ranks.

        Returns:
            (n,).
        """
        return self.flatten(
            piece.cut(function(piece.parameter.shape).to(piece.local.device, self.dtype))
            for piece in self.chosen
        )

    # Passes.

    @contextlib.contextmanager
    def _passes(self, along: Tensor | None = None) -> Iterator[None]:
        """The model at θ + ``along`` in the block, in eval mode; it is then as it was, to the bit."""
        check_recording()
        modes = {module: module.training for module in self.model.modules()}
        with uninterrupted(), torch.no_grad():
            self._reshard()
            gradients = [piece.parameter.grad for piece in self.pieces]
            kept = [*(piece.local for piece in self.pieces), *map(_local, self.model.buffers())]
            if self.model is not unwrapped(self.model):  # DistributedDataParallel may use their memory again
                kept += [_local(gradient) for gradient in gradients if gradient is not None]
            before = [tensor.clone() for tensor in kept]
            try:
                for module in modes:  # as landscape.Problem: cuDNN's backward pass needs it
                    module.training = isinstance(module, nn.RNNBase) and not module.dropout
                for piece in self.pieces:
                    piece.parameter.grad = None
                moved = {} if along is None else self.unflatten(along)
                for piece in self.chosen if moved else ():
                    piece.local.copy_(piece.local.to(self.dtype) + moved[piece.name])
                with all_ranks():
                    yield
            finally:
                self._reshard()
                for tensor, value in zip(kept, before, strict=True):
                    tensor.copy_(value)
                for piece, gradient in zip(self.pieces, gradients, strict=True):
                    piece.parameter.grad = gradient
                for module, training in modes.items():
                    module.training = training

    def _reshard(self) -> None:
        """Let FSDP2 free whole parameters: after a pass without gradients, the next one would use them."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def _value(self, x: Any, y: Any) -> Tensor:
        """The loss of a batch, differentiable, at the weights of the moment."""
        args, kwargs = tuple(x) if isinstance(x, (tuple, list)) else (x,), dict[str, Any]()
        if isinstance(x, Mapping):
            args, kwargs = (), dict(x)
        value: Any = self.criterion(self.model(*args, **kwargs), y)
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    def _batches(self) -> Iterator[tuple[Any, Any, float]]:
        """(x, y, weight) of this rank: a mean over ranks, with these weights, is one over all terms."""
        for x, y, count in self.data.chunks():
            yield x, y, count / self.data.samples * self.data.terms / self._mean_terms

    def loss(self, along: Tensor | None = None) -> float:
        """The mean loss over the data of all ranks.

        Args:
            along: (n,), added to the weights; None: at the model's own.

        Returns:
            L(θ + along), the same on all ranks.
        """
        found = 0.0
        with self._passes(along):
            for x, y, weight in self._batches():
                found += float(self._value(x, y)) * weight
                self._reshard()
        return self._mean(found)

    def gradient(self, along: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss over the data of all ranks.

        Args:
            along: (n,), added to the weights; None: at the model's own.

        Returns:
            (n,), in float32 or float64, whatever the model's precision.
        """
        with self._passes(along):
            found = torch.zeros_like(self.flatten(piece.local for piece in self.chosen))
            for x, y, weight in self._batches():
                with torch.enable_grad():
                    value = differentiable(self._value(x, y) * weight)
                value.backward()
                found += self.flatten(piece.gradient() for piece in self.chosen)
                for piece in self.pieces:
                    piece.parameter.grad = None
        return found

    def _mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        return float(self.total(torch.tensor([value], dtype=torch.float64))) / self.ranks

    def _coarsest(self, x: Any, y: Any) -> torch.dtype:
        """The coarsest precision of parameters, and of what modules give for one batch."""
        seen = {piece.local.dtype for piece in self.pieces}

        def note(module: nn.Module, args: Any, outputs: Any) -> None:
            seen.update(t.dtype for _, t in named_tensors(outputs) if t.is_floating_point())

        hook = nn.modules.module.register_module_forward_hook(note)
        try:
            self._on(x, y, 1.0).loss()
        finally:
            hook.remove()
        return max(seen, key=lambda dtype: torch.finfo(dtype).eps)

    def _trained(self) -> Tensor:
        """:attr:`mask` of the chosen parameters."""
        padding, whole = padding_rows(unwrapped(self.model), self.layout), []
        for piece, slot in zip(self.pieces, self.layout.slots, strict=True):
            mask = torch.ones(slot.size, device=piece.local.device)
            for rows in padding:
                if slot.offset <= rows.start < slot.offset + slot.size:
                    mask[rows.start - slot.offset : rows.stop - slot.offset] = 0
            if piece in self.chosen:
                whole.append(piece.cut(mask.view(slot.shape)).flatten())
        return torch.cat(whole).to(self.dtype)

    def _on(self, x: Any, y: Any, terms: float) -> Self:
        """The same loss on one batch of each rank."""
        other = copy.copy(self)
        other.data = copy.copy(self.data)
        other.data.resident, other.data.batches, other.data.each = (x, y), (), None
        other.data.samples = other.data.chunk_size = count_samples(x, y, alike=False)
        other.data.terms, other._mean_terms = terms, self._mean(terms)
        return other

    def _same(self, *values: float) -> bool:
        """Test whether numbers are the same on all ranks, up to rounding."""
        found = torch.tensor(values, dtype=torch.float64)
        low, high = self.reduced(found, dist.ReduceOp.MIN), self.reduced(found, dist.ReduceOp.MAX)
        return torch.allclose(low, high, rtol=tolerance(self.dtype), atol=0)

    def _check(self, x: Any, y: Any, terms: Terms) -> None:
        """Raise InputError unless ranks, loss and gradient fit together, on the first batch of each rank."""
        if self._mean(sum(float((~torch.isfinite(piece.local)).sum()) for piece in self.pieces)):
            raise InputError("weights: some are NaN or infinite, all must be finite")
        batches = 1 if self.data.resident else sum(1 for _ in self.data.chunks())
        if not self._same(batches):
            raise InputError(f"data: {batches} batches on rank {dist.get_rank()}, all ranks need as many")
        few = self._on(x, y, float(terms(x, y).sum()))
        value, again, g = few.loss(), few.loss(), few.gradient()
        rounding = 10 * torch.finfo(self.pieces[0].parameter.dtype).eps * max(1.0, abs(value))
        if not abs(again - value) <= rounding:
            raise InputError(
                f"model or loss: random even in eval mode, or NaN: the loss of one batch is {value:.6g}, and "
                f"{again:.6g} in a second pass"
            )
        samples = count_samples(x, y, alike=False)
        halves = [take((x, y), rows) for rows in (slice(samples // 2), slice(samples // 2, None))]
        counts = [float(terms(*half).sum()) if len(half) else 0.0 for half in halves]
        if self.reduced(torch.tensor(counts), dist.ReduceOp.MIN).min() > 0:
            parts = [self._on(*half, count) for half, count in zip(halves, counts, strict=True)]
            mean = sum(part.loss() * part._mean_terms for part in parts) / few._mean_terms
            if abs(mean - value) > tolerance(self.dtype) * max(1.0, abs(value)):
                raise InputError(
                    f"loss: it is no mean over samples: {value:.6g} for a batch, {mean:.6g} by its halves"
                )
        self._check_gradient(few, g, rounding)

    def _check_gradient(self, few: Self, g: Tensor, rounding: float) -> None:
        """Raise InputError unless g is the gradient of the loss of the ``few`` samples on all ranks."""
        copies, parts = [p for p in self.pieces if p.share * self.ranks == 1], self.unflatten(g)
        if not self._same(*(float(t.double().sum()) for p in copies for t in (p.local, parts[p.name].abs()))):
            raise InputError(
                "model: parameters that every rank has, or their gradients, differ from rank to rank; ranks "
                "that divide a layer among them need the same data"
            )
        generator = torch.Generator().manual_seed(0)
        random = self.draw(lambda shape: torch.randn(shape, generator=generator))
        theta = self.flatten(piece.local for piece in self.pieces)
        along = random / self.norm(random) + g / max(self.norm(g), 1e-30)
        step = STEP * self.norm(theta) / self.norm(along)
        expected = float(self.total(g @ along))
        ends = [few.loss(times * step * along) for times in (1, -1, 2, -2)]
        slope, other = (ends[0] - ends[1]) / (2 * step), (ends[2] - ends[3]) / (4 * step)
        allowed = ALLOWED * max(abs(expected), abs(slope)) + abs(slope - other) + rounding / step
        if not abs(slope - expected) <= allowed:
            raise InputError(
                f"model: its gradient is not that of the mean loss of all ranks: the slope is {slope:.3g}, by "
                f"the gradient {expected:.3g}; gradients must be averaged over the ranks with data of their "
                "own, and synchronised"
            )
