"""A model whose parameters are shared among the ranks of torch.distributed, as one problem of all of them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.devices import check_default_device, finite
from landscape.core.errors import InputError, OperationError
from landscape.core.options import fit
from landscape.problem import ranks
from landscape.problem.batches import call, count_samples, named_tensors, opened, take
from landscape.problem.batchnorm import BatchNormPolicy
from landscape.problem.checks import Check
from landscape.problem.data import Data
from landscape.problem.layout import Layout, check_recording, differentiable, padding_rows, unwrapped
from landscape.problem.losses import (
    Terms,
    correct,
    describe_loss,
    finite_gradient,
    output_loss,
    placed_loss,
    with_other_first_labels,
)
from landscape.problem.ranks import Exchanges, Piece

T = TypeVar("T")

#: Models whose pass ended in an error and cannot be reset: before 2.13, PyTorch has no ``reset_iter_state``.
ENDED = weakref.WeakSet[nn.Module]()


class ShardedProblem(Exchanges):
    """L(θ) of a model under FSDP2, tensor parallelism or DistributedDataParallel, the same on every rank.

    Every rank makes the same calls, in the same order. The model is not copied: it makes its own passes, in
    eval mode. Other weights are written into its parameters for an evaluation, and the former ones are
    restored to the bit, also after an error or Ctrl-C (which waits for the end of the pass).

    A vector (n,) has the numbers of the parameters on this rank, each times 1/√k if k ranks have the number,
    so that an inner product is the sum of the products on all ranks (:meth:`total`). :meth:`parts` returns
    its parts by parameter.

    Args:
        model: a model with DTensors as parameters (``fully_shard``, ``parallelize_module``), or in a
            DistributedDataParallel.
        loss, data: as for :class:`landscape.Problem`; the data are this rank's share in batches, with the
            same number of batches on all ranks, and the loss is the mean over the samples of all ranks. Ranks
            that divide a layer among them have the same data.
        terms, name: as for :class:`landscape.Problem`.
        check: "quick" tests that the loss is a mean over the samples of all ranks, and, on the first batch of
            each, that it is finite and not random, that its gradient is right, and that the ranks have the
            same number of batches and equal copies of parameters; "full" tests on every batch that the loss
            is finite; "off" tests nothing.
        options: the other arguments of :class:`landscape.Problem`, which are refused.

    Attributes:
        model, criterion, layout: the model itself, the loss, and the order of the parameters.
        samples: the number of samples of all ranks; the same data on several ranks count once.
        coarse: the coarsest precision in a pass.
        mask: (n,), 0 for padding rows of embeddings, which training never moves, else 1.

    Raises:
        InputError: another kind of model, no process group, weights that are not finite, or a failed check.
            An error of data, model or loss on one rank is raised on all.
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
        name: str = "",
        check: Check = "quick",
        **options: Any,
    ) -> None:
        check_default_device()
        self.name = name
        inner = unwrapped(model)
        if not dist.is_initialized():
            raise InputError("model: no process group; call torch.distributed.init_process_group first")
        if not (ranks.is_sharded(inner) or isinstance(model, nn.parallel.DistributedDataParallel)):
            raise InputError(
                f"model: a {type(model).__name__} on several ranks is not allowed, its parameters must be "
                "DTensors (fully_shard, parallelize_module), or it must be a DistributedDataParallel"
            )
        self.model, self.ranks = model, dist.get_world_size()
        self._reshard()  # a pass of the user may have left gathered parameters
        parameters: dict[str, Any] = dict(inner.named_parameters())
        self.layout = Layout.of(inner)
        # A vector consists of the entries of the ``chosen`` parameters. Here all are chosen; the method of()
        # chooses some.
        self.pieces = self.chosen = tuple(Piece.of(s, parameters[s.name]) for s in self.layout.slots)
        if not self.pieces:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first_part = self.pieces[0].local
        self.device = first_part.device
        # FSDP2 may offload parameters to the CPU, but it computes on the devices of the mesh.
        trained: list[Any] = [piece.parameter for piece in self.pieces]
        mesh_types = {p.device_mesh.device_type for p in trained if hasattr(p, "device_mesh")}
        other_types = mesh_types - {self.device.type}
        if other_types:
            self.device = torch.device(next(iter(other_types)), torch.accelerator.current_device_index())
        self.dtype = torch.promote_types(first_part.dtype, torch.float32)
        self.agree("ShardedProblem", {"terms": terms, "check": check, **options})
        if options:
            option = next(iter(options))
            raise InputError(f"{option}: it is not allowed with a sharded model, only terms, name, check are")
        fit("terms", terms, Callable | None)  # raises InputError for another type
        self.check = fit("check", check, Check)
        self.criterion = output_loss if loss is None else placed_loss(loss, self.device, first_part.dtype)
        term_counter = Terms(self.criterion, terms)
        self.samples, self.draws, self.randomness = 1, 0, "refuse"  # samples: counted below
        x, y = self._on_all(lambda: self._set_data(data, term_counter))
        if check != "off":
            ranks.check_batches(self)
            ranks.check_random(self, x, y)
        if terms is None:
            # The first label of each sequence is no term of a loss that ignores it. The loss of a batch with
            # other first labels is then the same.
            changed_batch = with_other_first_labels(self.criterion, x, y)
            if changed_batch:
                changed_loss = self._on_batch(*changed_batch, terms=1.0).loss()
                term_counter.shifted = self._on_batch(x, y, terms=1.0).loss() == changed_loss
        self._count_terms(term_counter)
        self.coarse = self._coarsest_dtype(x, y)
        if check != "off" and terms is None:
            ranks.check_mean(self, term_counter)
            # check_mean() may have found other terms. The first samples that have terms may then be others.
            x, y = self._on_all(lambda: self._first_samples(term_counter))
        if check != "off":
            ranks.check_finite(self, term_counter, every=check == "full")
        # Ranks that divide a layer among them have the same data, which count once.
        checksum = sum(float(t.double().sum()) for _, t in named_tensors((x, y)))
        share_of_distinct_data = len(set(self._by_rank(checksum).tolist())) / self.ranks
        self.samples = round(float(self._by_rank(self.data.samples).sum()) * share_of_distinct_data)
        self.mask = self._mask()
        # Functions for problems of any kind read these attributes. ``separable`` is False, so that
        # methods which divide the data are not used.
        self.batchnorm, self.separable, self.regularised = BatchNormPolicy(), False, False
        if check != "off":
            ranks.check_ranks(self, x, y, term_counter)

    def _set_data(self, data: Any, count: Terms) -> tuple[Any, Any]:
        """Set the data, and return the samples of :meth:`_first_samples`."""
        self.data = Data(data, self.device, self.pieces[0].local.dtype, self.criterion is output_loss)
        self.data.chunk_size = self.data.samples or None
        first = self._first_samples(count)
        self.data.count_terms(count)
        if self.check != "off" and self.data.checksum is not None and not isinstance(data, (list, tuple)):
            sums = list[Tensor]()
            for _ in self.data.second_pass(sums):
                pass
            self.data.compare(sums, ordered=False)
        return first

    def _first_samples(self, count: Terms) -> tuple[Any, Any]:
        """Return the first batch of this rank in which a target counts; of resident data, two samples."""
        first, resident = self.data.first_batch(count), self.data.resident
        terms = count(*resident) if resident else torch.zeros(1)
        if resident and terms.dim() == 1 and bool(terms[2:].any()) and not bool(terms[:2].any()):
            index = int(terms.gt(0).nonzero()[0])
            return take(resident, slice(index, index + 2))
        return first

    def _count_terms(self, count: Terms) -> None:
        """Count the terms of this rank's data; raise InputError if no target counts on any rank."""
        self._on_all(lambda: self.data.count_terms(count))
        self._mean_terms = self._mean(self.data.terms)
        self.data.check_terms(self._mean_terms)

    def __repr__(self) -> str:
        loss, dtype = describe_loss(self.criterion).split(".")[-1], str(self.dtype).removeprefix("torch.")
        return (
            f"ShardedProblem({type(unwrapped(self.model)).__name__}, {self.layout.size:,} parameters on "
            f"{self.ranks} ranks, {loss}, {dtype} on {self.device})"
        )

    def with_batchnorm(self, bn: str, samples: int = 0) -> Self:
        """Return this problem itself, in which BatchNorm uses the statistics in the model's buffers.

        Args:
            bn: "center".
            samples: not used.

        Returns:
            The problem.

        Raises:
            InputError: another policy.

        Example:
            >>> problem.with_batchnorm("center") is problem
            True
        """
        if bn != "center":
            raise InputError(f"bn: '{bn}' is not allowed with a sharded model, it must be 'center'")
        return self

    def hessian(self, weights: Tensor | None = None) -> Any:
        """Return the Hessian of the loss, as a linear operator on the vectors of each rank.

        Its products are differences of gradients, with errors that are measured.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            A ``ShardedHessian``: as :class:`landscape.HessianOperator` with ``@``, ``shape``, ``products``.

        Example:
            >>> hessian = problem.hessian()
            >>> image = hessian @ gradient  # doctest: +SKIP
        """
        # Imported by name, because this package must not depend on landscape.curvature.
        return importlib.import_module("landscape.curvature.differences").ShardedHessian(self, weights)

    def of(self, part: str | Sequence[str] | None) -> Self:
        """Return a problem with vectors of some parameters only.

        Args:
            part: names or name prefixes of parameters; None: all.

        Returns:
            A problem that shares everything else with this one.

        Raises:
            InputError: a name that fits none.

        Example:
            >>> problem.of("head").size  # doctest: +SKIP
            65536
        """
        self.agree("of", {"part": part})
        names = {slot.name for slot in self.layout.select(part)}
        restricted = copy.copy(self)
        restricted.chosen = tuple(piece for piece in self.pieces if piece.slot.name in names)
        restricted.mask = restricted._mask()
        return restricted

    # Vectors.

    @property
    def weights(self) -> Tensor:
        """The model's own weights, (n,)."""
        return self.flatten(piece.local for piece in self.chosen)

    @property
    def size(self) -> int:
        """P, the number of numbers in the chosen parameters, on all ranks together."""
        return sum(piece.parameter.numel() for piece in self.chosen)

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the vector (n,) of this rank's numbers of each parameter.

        Args:
            tensors: a tensor for each chosen parameter, in their order.

        Returns:
            (n,), in float32 or float64.

        Example:
            >>> len(problem.flatten(gradients))  # doctest: +SKIP
            15728640
        """
        pairs = zip(self.chosen, tensors, strict=True)
        return torch.cat([t.flatten().to(self.dtype) * math.sqrt(piece.share) for piece, t in pairs])

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return this rank's numbers of a vector, by chosen parameter.

        Args:
            vector: (n,).

        Returns:
            Tensors in the shapes of the parameters' local parts.

        Raises:
            InputError: a vector of another length.

        Example:
            >>> [tuple(t.shape) for t in problem.parts(gradient)]  # doctest: +SKIP
            [(2048, 1024), (512,)]
        """
        local = [piece.local for piece in self.chosen]
        sizes = [t.numel() for t in local]
        if vector.shape != (sum(sizes),):
            raise InputError(f"weights: shape {tuple(vector.shape)}, on this rank it must be ({sum(sizes)},)")
        triples = zip(torch.split(vector, sizes), local, self.chosen, strict=True)
        return [part.view(t.shape) / math.sqrt(piece.share) for part, t, piece in triples]

    def norm(self, vector: Tensor) -> float:
        """Return the norm of a vector on all ranks.

        Args:
            vector: (n,).

        Returns:
            The norm, the same on all ranks.

        Example:
            >>> problem.norm(problem.gradient())  # doctest: +SKIP
            0.5
        """
        return float(self.total(vector.double().square().sum()).sqrt())

    def draw(self, function: Callable[[Piece], Tensor]) -> Tensor:
        """Return a random vector that does not depend on the number of ranks.

        Args:
            function: returns random numbers in the shape of a parameter, the same on all ranks.

        Returns:
            (n,).

        Example:
            >>> v = problem.draw(lambda piece: torch.randn(piece.slot.shape))  # doctest: +SKIP
        """
        pairs = ((piece, function(piece).to(piece.local.device, self.dtype)) for piece in self.chosen)
        return self.flatten(piece.cut(whole) for piece, whole in pairs)

    def along_weights(self, directions: Tensor) -> Tensor:
        """Set ``directions`` to zero along the padding rows of embeddings, which training never moves.

        Args:
            directions: (..., n), changed in place.

        Returns:
            ``directions``.

        Example:
            >>> problem.along_weights(v)  # doctest: +SKIP
        """
        return directions.mul_(self.mask)

    # Passes.

    @contextlib.contextmanager
    def _passes(self, weights: Tensor | None) -> Iterator[None]:
        """Return a context with the model at ``weights`` in eval mode; its end restores the model exactly."""
        check_recording()
        if self.model in ENDED:
            raise OperationError("model: a pass of it ended in an error; build it anew, or use PyTorch 2.13")
        modes = {module: module.training for module in self.model.modules()}
        with ranks.uninterrupted(), torch.no_grad():
            self._reshard()
            gradients = [piece.parameter.grad for piece in self.pieces]
            tensors = [piece.local for piece in self.pieces]
            tensors += [ranks.local_part(buffer) for buffer in self.model.buffers()]
            # DistributedDataParallel may write to the memory of these gradients.
            if self.model is not unwrapped(self.model):
                tensors += [ranks.local_part(gradient) for gradient in gradients if gradient is not None]
            saved_values = [tensor.clone() for tensor in tensors]
            try:
                for module in modes:  # cuDNN has a backward pass of recurrent layers in training mode only
                    module.training = isinstance(module, nn.RNNBase) and not module.dropout
                for piece in self.pieces:
                    piece.parameter.grad = None
                own_parts = [piece.local for piece in self.chosen]
                # An error, such as for weights of another length, is raised on all ranks.
                parts = self._on_all(lambda: own_parts if weights is None else self.parts(weights))
                for piece, part in zip(self.chosen, parts, strict=True):
                    piece.local.copy_(part)
                with ranks.naming_lost_ranks():
                    yield
            except BaseException:
                self._reset()
                raise
            finally:
                self._reshard()
                for tensor, value in zip(tensors, saved_values, strict=True):
                    tensor.copy_(value)
                for piece, gradient in zip(self.pieces, gradients, strict=True):
                    piece.parameter.grad = gradient
                for module, training in modes.items():
                    module.training = training

    def _reshard(self) -> None:
        """Let FSDP2 free gathered parameters: otherwise the next pass would use them with the old weights."""
        for module in self.model.modules():
            getattr(module, "reshard", lambda: None)()

    def _reset(self) -> None:
        """Let FSDP2 forget a pass that ended in an error: otherwise the next one would read freed memory."""
        module: Any
        for module in self.model.modules():
            if hasattr(module, "reset_iter_state"):
                with contextlib.suppress(RuntimeError):  # FSDP2 allows it for the outermost module only
                    module.reset_iter_state()
            elif hasattr(module, "reshard") and module._get_fsdp_state()._training_state.name != "IDLE":
                ENDED.add(self.model)

    def _outputs_and_loss(self, x: Any, y: Any, errors: list[Exception]) -> tuple[Any, Tensor | None]:
        """Return the outputs and the loss of a batch at the model's present weights, differentiable.

        An error of the loss is appended to ``errors``; the caller raises it after all ranks have ended their
        passes. The loss is then None.
        """
        outputs = call(self.model, {}, x)
        try:
            value: Any = self.criterion(outputs, y)
        except Exception as error:  # the user's loss raises any kind of error
            errors.append(error)
            return outputs, None
        return outputs, value.full_tensor() if hasattr(value, "full_tensor") else value

    def _batches(self) -> Iterator[tuple[Any, Any, float]]:
        """Yield (x, y, weight) of this rank; with these weights, the mean over ranks is that over all terms.

        Batches without a term are included, because the ranks make each pass together.
        """
        for x, y, count in self.data.chunks(empty=True):
            yield x, y, count / self.data.samples * self.data.terms / self._mean_terms

    metrics: tuple[Any, ...] = ()  # on several ranks no metrics are computed

    def totals(self, weights: Tensor | None = None) -> Tensor:
        """Return the sums that :meth:`evaluate` divides by the number of samples.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            (2,) float64, the same on all ranks: the loss and the number of correct predictions.

        Example:
            >>> problem.totals(torch.tensor([1.0, 0.0, 0.0, 1.0]))[1].item()
            2.0
        """
        sums, errors = torch.zeros(3, dtype=torch.float64), list[Exception]()
        with self._passes(weights):
            for x, y, weight in self._batches():
                outputs, value = self._outputs_and_loss(x, y, errors)
                if weight and value is not None:
                    sums[0] += float(value) * weight
                sums[1:] += correct(outputs, y, self.data.terms_in).sum(1).cpu()
                self._reshard()
        self._share(*errors[:1])
        loss, right, counted = self.total(sums)
        return torch.stack((loss / self.ranks, right / counted)) * self.samples

    def evaluate(self, weights: Tensor | None = None) -> tuple[float, float]:
        """Return mean loss and accuracy over the data of all ranks.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            (loss, accuracy), the same on all ranks; see :meth:`landscape.Problem.evaluate`.

        Example:
            >>> round(problem.evaluate()[0], 3), problem.evaluate()[1]  # doctest: +SKIP
            (3.217, nan)
        """
        loss, accuracy = (self.totals(weights) / self.samples).tolist()
        return loss, accuracy

    def loss(self, weights: Tensor | None = None) -> float:
        """Return the mean loss over the data of all ranks.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            L(θ), the same on all ranks.

        Example:
            >>> round(problem.loss(torch.zeros(4)), 3)
            0.693
        """
        return self.evaluate(weights)[0]

    def loss_and_gradient(self, weights: Tensor | None = None) -> tuple[float, Tensor]:
        """Return the mean loss over the data of all ranks, and its gradient.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            L(θ), the same on all ranks, and (n,), in float32 or float64, whatever the model's precision.

        Example:
            >>> loss, gradient = problem.loss_and_gradient(torch.zeros(4))
            >>> round(loss, 3), gradient.tolist()
            (0.693, [-0.25, 0.25, 0.25, -0.25])
        """
        losses, gradient = self._losses_and_gradient(weights)
        return float(losses.mean()), gradient

    def _losses_and_gradient(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the losses (ranks,), whose mean is the loss of all data, and its gradient (n,)."""
        total, errors = 0.0, list[Exception]()
        with self._passes(weights):
            gradient = torch.zeros_like(self.weights)
            for x, y, weight in self._batches():
                with torch.enable_grad():
                    outputs, value = self._outputs_and_loss(x, y, errors)
                    if value is None or not weight:  # zero times the outputs: all ranks make a backward pass
                        tensors = [t for _, t in named_tensors(opened(outputs)[0]) if t.requires_grad]
                        value = torch.stack([t.flatten()[0] * 0.0 for t in tensors if t.dim()]).sum()
                    else:
                        value = differentiable(value * weight)
                value.backward()  # type: ignore[no-untyped-call]
                total += float(value.detach())
                gradient += self.flatten(piece.gradient() for piece in self.chosen)
                for piece in self.pieces:
                    piece.parameter.grad = None
        self._share(*errors[:1])
        return self._by_rank(total).flatten(), gradient

    def gradient(self, weights: Tensor | None = None) -> Tensor:
        """Return the gradient of the mean loss over the data of all ranks.

        Args:
            weights: (n,); default: the model's own.

        Returns:
            (n,), in float32 or float64, whatever the model's precision.

        Raises:
            OperationError: it, or the loss, is NaN or infinite; on all ranks.

        Example:
            >>> problem.gradient(torch.zeros(4)).tolist()
            [-0.25, 0.25, 0.25, -0.25]
        """
        losses, gradient = self._losses_and_gradient(weights)
        bad_ranks = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad_ranks and len(bad_ranks) < self.ranks:
            words = f"the loss on rank {bad_ranks[0]} is {losses[bad_ranks[0]]:g}"
            raise OperationError(f'data: {words}; give check="full", which names the batch')
        finite_gradient(float(losses.mean()), self._by_rank(0.0 if finite(gradient) else torch.nan))
        return gradient

    def _coarsest_dtype(self, x: Any, y: Any) -> torch.dtype:
        """Return the coarsest precision of the parameters, and of all modules' outputs for one batch."""
        dtypes = {piece.local.dtype for piece in self.pieces}

        def add_dtypes(module: nn.Module, args: Any, outputs: Any) -> None:
            dtypes.update(t.dtype for _, t in named_tensors(outputs) if t.is_floating_point())

        hook = nn.modules.module.register_module_forward_hook(add_dtypes)
        try:
            self._on_batch(x, y, 1.0).loss()
        finally:
            hook.remove()
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _mask(self) -> Tensor:
        """Return :attr:`mask` for the chosen parameters."""
        padding = padding_rows(unwrapped(self.model), self.layout)

        def ones(piece: Piece) -> Tensor:
            first, mask = piece.slot.offset, torch.ones(piece.slot.size)
            for rows in padding:
                if first <= rows.start < first + piece.slot.size:
                    mask[rows.start - first : rows.stop - first] = 0
            return mask.view(piece.slot.shape)

        return (self.draw(ones) > 0).to(self.dtype)

    def _on_batch(self, x: Any, y: Any, terms: float) -> Self:
        """Return a problem with the same loss on one batch of each rank."""
        problem = copy.copy(self)
        problem.data = copy.copy(self.data)
        problem.data.resident, problem.data.batches, problem.data.sample_terms = (x, y), (), None
        problem.data.samples = problem.data.chunk_size = count_samples(x, y)
        problem.data.terms, problem._mean_terms = terms, self._mean(terms)
        return problem


def on_all(problem: Any, function: Callable[[], T]) -> T:
    """Return ``function()``; for a sharded ``problem``, an error on one rank is raised on all."""
    result: T = problem._on_all(function) if on_ranks(problem) else function()
    return result


def on_ranks(problem: Any) -> bool:
    """Return whether a problem is a :class:`ShardedProblem`."""
    return isinstance(problem, ShardedProblem)
