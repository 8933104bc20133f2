"""A rank's part of a sharded model, the exchanges between ranks, and the checks that all ranks make together.

A check that fails raises its error on all ranks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.devices import double, gather_bytes, inner
from landscape.core.errors import InputError, LandscapeError, OperationError, first_words
from landscape.problem import counts
from landscape.problem.batches import attempt, call, named_tensors, tree_map
from landscape.problem.checks import tolerance
from landscape.problem.counts import Count, Equation, Samples
from landscape.problem.data import not_a_number
from landscape.problem.layout import Slot
from landscape.problem.losses import Terms, check_labels, is_mean, output_loss
from landscape.problem.mean_check import Losses, say_count

T = TypeVar("T")

# Errors of torch.distributed about other ranks are RuntimeErrors that only their texts distinguish.
_LOST = re.compile(r"connection|socket|\bpeer|timed? ?out|remote|aborted", re.IGNORECASE)


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of ``model`` are DTensors, as with FSDP2 and tensor parallelism.

    Raises InputError for FSDP1, whose parameters are parts of one vector.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InputError("model: FullyShardedDataParallel is not allowed, use fully_shard of FSDP2")
    # The second test is for FSDP2 after a forward pass, when its parameters may be gathered. (Modules are not
    # tested for device_mesh, an attribute that all modules of Lightning have.)
    has_dtensors = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    return has_dtensors or any(hasattr(module, "reshard") for module in model.modules())


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, or a tensor that all ranks have, in the same memory."""
    detached: Tensor = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def whole(tensor: Any) -> Tensor:
    """Return a DTensor, gathered from all ranks, or a tensor that all ranks have."""
    detached: Tensor = tensor.detach()
    return detached.full_tensor() if hasattr(detached, "full_tensor") else detached


@dataclass(frozen=True)
class Piece:
    """A trainable parameter; each of its numbers on this rank is on 1/``share`` ranks."""

    slot: Slot
    parameter: nn.Parameter
    share: float

    @classmethod
    def of(cls, slot: Slot, parameter: nn.Parameter) -> Piece:
        """Return the piece of the parameter of a slot."""
        sharded: Any = parameter
        placements = getattr(sharded, "placements", ())
        if any(placement.is_partial() for placement in placements):
            raise InputError(f"model: {slot.name} is a sum over ranks, it must be in shards or copies")
        # One copy of the parameter is divided among math.prod(sizes) ranks.
        sizes = [sharded.device_mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate()]
        return cls(slot, parameter, math.prod(sizes) / dist.get_world_size())

    @property
    def local(self) -> Tensor:
        """The numbers on this rank, in the parameter's memory."""
        return local_part(self.parameter)

    def gradient(self) -> Tensor:
        """Return the gradient of these numbers after a backward pass; zero if it has computed none."""
        gradient: Any = self.parameter.grad
        if gradient is None:
            return torch.zeros_like(self.local)
        like: Any = self.parameter
        if hasattr(gradient, "placements") and gradient.placements != like.placements:
            gradient = gradient.redistribute(placements=like.placements)
        return local_part(gradient)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's numbers of a tensor that all ranks have, in the parameter's shape."""
        like: Any = self.parameter
        if not hasattr(like, "placements"):
            return whole
        from torch.distributed.tensor import DTensor, Replicate  # a slow import, already done by the model

        mesh = like.device_mesh
        copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return copies.redistribute(placements=like.placements).to_local()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Return a context in which Ctrl-C takes effect only at its end."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)


class LostError(OperationError):
    """Another rank is lost, or did not answer in time."""


class SharedError(InputError):
    """An error of one rank, which all of them raise."""


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Return a context that raises LostError, in one line, for an error about a lost rank."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LandscapeError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        words = f"another rank is lost, or did not answer in time ({first_words(error)})"
        raise LostError(f"rank {dist.get_rank()}: {words}") from error


class Exchanges:
    """Exchanges of numbers, objects and errors between all ranks of torch.distributed.

    Attributes:
        ranks: the number of ranks.
        device: the device of this rank.
    """

    ranks: int
    device: torch.device

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of their values.

        Args:
            values: a tensor, of one shape on all ranks.

        Returns:
            The sum, the same on all ranks.

        Raises:
            OperationError: another rank is lost, or did not answer in time.

        Example:
            >>> float(problem.total(gradient @ gradient))  # doctest: +SKIP
            0.25
        """
        summed = values.detach().to(self.device, copy=True).contiguous()
        with naming_lost_ranks():
            dist.all_reduce(summed)
        return summed.to(values.device)

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values of all ranks.

        Args:
            values: a tensor, of one shape on all ranks.

        Returns:
            (ranks, ...), the same on all ranks.

        Example:
            >>> float(problem.gathered(torch.tensor(seconds)).max())  # doctest: +SKIP
            0.25
        """
        rows = values.new_zeros(self.ranks, *values.shape)
        rows[dist.get_rank()] = values
        return self.total(rows)

    def agree(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Check that all ranks make the same call; otherwise they would wait forever, or mix results.

        Args:
            call: the name of the function.
            arguments: its arguments by name. Numbers, texts, bools and lists of them are compared by value,
                directions by their seed, and other objects by their type.

        Raises:
            InputError: a rank calls another function, or has another argument; it is raised on all ranks.

        Example:
            >>> problem.agree("trace", {"probes": 8})  # doctest: +SKIP
        """
        plain = {name: _text(value) for name, value in arguments.items()}
        first, *other_ranks = self._gathered_objects({"call": call, **plain})
        for rank, other in enumerate(other_ranks, 1):
            for name in first | other:
                value, other_value = first.get(name, "nothing"), other.get(name, "nothing")
                if value != other_value:
                    words = f"{other_value} on rank {rank}, but {value} on rank 0; all ranks need the same"
                    raise SharedError(f"{name}: {words}")

    def _by_rank(self, *values: float) -> Tensor:
        """Return the numbers of all ranks: (ranks, values), or (ranks,) for one value."""
        return self.gathered(torch.tensor(values, dtype=torch.float64)).squeeze(1)

    def _mean(self, value: float) -> float:
        """Return the mean of a number over the ranks."""
        return float(self._by_rank(value).mean())

    def _on_all(self, function: Callable[[], T]) -> T:
        """Return ``function()``; an error on one rank is raised on all of them, in one line."""
        result, error = None, None
        try:
            result = function()
        except (SharedError, LostError):
            raise
        except Exception as failure:  # the user's data, model and loss raise any kind of error
            error = failure
        self._share(error)
        return cast(T, result)

    def _share(self, error: Exception | None = None) -> None:
        """Raise the first rank's ``error`` on all ranks, in one line, if any has one."""
        if not bool(self._by_rank(error is not None).any()):
            return
        prefix = "" if isinstance(error, LandscapeError) else f"model, loss or data: {type(error).__name__}: "
        texts = self._gathered_objects("" if error is None else " ".join(f"{prefix}{error}".split()))
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise SharedError(f"{text} (rank {rank})") from error

    def _pass_on_all(self, function: Callable[[], T]) -> T:
        """Return ``function()``, a pass of the model; errors are raised on all ranks, as by :meth:`_on_all`.

        After an error on one rank, the others would wait for its part of the next block of FSDP2. Therefore
        the ranks exchange errors before each block.
        """

        def share(module: nn.Module, inputs: Any) -> None:
            if hasattr(module, "reshard"):
                self._share()

        hook = nn.modules.module.register_module_forward_pre_hook(share)
        try:
            return self._on_all(function)
        finally:
            hook.remove()

    def _gathered_objects(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank: tensors, numbers and texts in tuples, lists and dicts."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with naming_lost_ranks():
            messages = gather_bytes(buffer.getvalue(), self.device)
        return [torch.load(io.BytesIO(m), map_location="cpu", weights_only=True) for m in messages]


def _text(value: Any) -> str:
    """Return a plain value as text, directions as their seed and norm, and any other object as its type."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    is_drawn = hasattr(value, "norm") and hasattr(value, "seed")
    return f"seed {value.seed}, norm {value.norm}" if is_drawn else f"a {type(value).__name__}"


# The check of the gradient: the step relative to the norm of the weights, and the allowed relative error (our
# choices). A gradient that is the sum over ranks instead of their mean is at least twice too large.
STEP, ALLOWED = 1e-3, 0.2
# The divisions of each batch for weights of classes, if each part needs its own pass (our choice).
DIVISIONS = 4
# The eps of a model's own loss, relative to that of its outputs (our choice: the allowed difference of a loss
# is 1,000 eps, which are then two roundings of an output).
COARSE = 2e-3
# The most samples, and the most numbers in their outputs, that a rank sends to the others (our choice).
MAX_ROWS, MAX_NUMBERS = 64, 1 << 22


def check_batches(problem: Any) -> None:
    """Raise InputError unless all ranks have the same number of batches."""
    data = problem.data
    numbers = problem._by_rank(1 if data.resident else sum(1 for _ in data.pairs())).tolist()
    fewest, most = min(numbers), max(numbers)
    if fewest < most:
        raise InputError(
            f"data: rank {numbers.index(fewest)} has {fewest:g} and rank {numbers.index(most)} has {most:g} "
            "batches; all ranks need as many, such as list(zip(x.tensor_split(8), y.tensor_split(8)))"
        )


def check_ranks(problem: Any, x: Any, y: Any, terms: Terms) -> None:
    """Raise InputError unless the gradient is that of the loss of all ranks, on the first batch of each."""
    small_problem = problem._on_batch(x, y, float(terms(x, y).sum()))
    value, g = small_problem.loss(), small_problem.gradient()
    _check_gradient(problem, small_problem, g, _rounding(problem, value))


def _rounding(problem: Any, value: float) -> float:
    """Return the largest difference by rounding of two passes over the same samples, with loss ``value``."""
    return 10 * torch.finfo(problem.pieces[0].parameter.dtype).eps * max(1.0, abs(value))


def check_random(problem: Any, x: Any, y: Any) -> None:
    """Raise InputError unless two passes over the first batch of each rank have the same loss."""
    if problem._mean(sum(float((~torch.isfinite(piece.local)).sum()) for piece in problem.pieces)):
        raise InputError("weights: some are NaN or infinite, all must be finite")
    value, again = (_loss(problem, x, y) for _ in range(2))
    differ = not (abs(again - value) <= _rounding(problem, value) or str(again) == str(value))
    words = f"two passes over a batch give {value:.6g} and {again:.6g}"
    random = InputError(f"model or loss: random even in eval mode: {words}")
    problem._share(random if differ else None)


def _loss(problem: Any, x: Any, y: Any) -> float:
    """Return the loss of this rank's batch, while the others compute theirs; errors are raised on all."""

    def loss() -> float:
        outputs = call(problem.model, {}, x)
        check_labels(problem.criterion, outputs, y)
        return float(whole(torch.as_tensor(problem.criterion(outputs, y))))

    with problem._passes(None):
        value: float = problem._pass_on_all(loss)
        return value


def check_finite(problem: Any, terms: Terms, every: bool = False) -> None:
    """Raise InputError, with batch and rank, for a loss of a batch that is NaN or infinite.

    It checks the first batches; with ``every``, or NaN in the data, it checks all batches.
    """
    error, every = None, bool(problem._by_rank(every or problem.data.has_nan).any())
    for number, (x, y) in enumerate(_rank_batches(problem)):
        value = _loss(problem, x, y)
        if error is None and not math.isfinite(value) and float(terms(x, y).sum()):
            error = not_a_number(x, y, value, f"batch {number} (the first one is batch 0)")
        if not every:
            break
    problem._share(error)


def _losses_on_ranks(problem: Any, model_has_loss: bool) -> Losses:
    """Return the losses of samples on this rank; each forward pass is one of all ranks together.

    ``model_has_loss``: whether the loss is in the model's outputs, so that parts need passes of their own.
    """

    def outputs(weights: Tensor, x: Any) -> Any:
        problem._by_rank(1)  # tells the ranks that wait in _joint_passes() that another pass follows
        try:
            return problem._pass_on_all(lambda: tree_map(whole, call(problem.model, {}, x)))
        except SharedError as error:
            if model_has_loss:  # the model may not accept a part of a batch
                raise RuntimeError(str(error)) from error
            raise

    def loss_of_model(outputs: Any, targets: Any) -> Tensor:
        return double(whole(output_loss(outputs, targets)))

    passes: Any = SimpleNamespace(data=problem.data, device=problem.device, draws=0, outputs=outputs)
    passes.criterion = loss_of_model if model_has_loss else problem.criterion
    passes.evaluating = lambda seed: contextlib.nullcontext()
    losses = Losses(passes, problem.weights, cuts_outputs=not model_has_loss)
    if model_has_loss:
        losses.eps = max(losses.eps, COARSE * torch.finfo(problem.coarse).eps)
    return losses


@contextlib.contextmanager
def _joint_passes(problem: Any) -> Iterator[None]:
    """Return a context for passes by :func:`_losses_on_ranks`, of which each rank may make another number.

    A rank that has made its own passes joins those of the others, until no rank makes another pass.
    """
    with problem._passes(None):
        yield
        while bool(problem._by_rank(0).any()):
            with contextlib.suppress(SharedError):
                problem._pass_on_all(lambda: call(problem.model, {}, next(_rank_batches(problem))[0]))


def check_mean(problem: Any, terms: Terms) -> None:
    """Check that the loss is a mean over the terms of all ranks, and find how many terms each sample has.

    If an :class:`.Equation` between losses does not hold with the assumed ``terms``, another count of terms
    with which all equations hold is used. Raises InputError, on all ranks, if there is no such count.
    """
    _, targets = next(_rank_batches(problem))
    numbers_per_sample = sum(t[:1].numel() for _, t in named_tensors(targets))
    raggedness, numbers = problem._by_rank(problem.data.ragged, numbers_per_sample).T  # both: (ranks,)
    ragged = bool(raggedness.any()) or len(numbers.unique()) > 1
    if is_mean(problem.criterion) and not ragged:
        return
    model_has_loss = problem.criterion is output_loss
    losses = _losses_on_ranks(problem, model_has_loss)

    def batch_equations(divisions: int = 1) -> list[Equation]:
        """Return the equations of this rank's batches, by ``divisions`` different divisions of each batch."""
        with _joint_passes(problem):
            equations = losses.equations(_rank_batches(problem), ragged, divisions)
            return [equation.without_outputs() for equation in equations]

    equations = batch_equations()
    with _joint_passes(problem):  # an equation of the first samples of this rank and of the rank before
        batch = losses.samples(*next(_rank_batches(problem)))
        # At most MAX_ROWS samples, whose tensors hold at most MAX_NUMBERS numbers; but at least one sample.
        sample_count = min(MAX_ROWS, max(1, MAX_NUMBERS * batch.size // max(1, batch.numbers)))
        first_samples = batch.rows(slice(sample_count))
        inputs = first_samples.x if model_has_loss else None  # other losses need the outputs only
        gathered = problem._gathered_objects([first_samples.outputs, inputs, first_samples.y])
        samples = [Samples(*values).on(problem.device) for values in gathered]
        joint_equation = attempt(losses.of_two, samples[dist.get_rank() - 1], samples[dist.get_rank()])
    if joint_equation is not None:
        equations.append(joint_equation.without_outputs())
    if not equations:
        # With no equation, every count would hold on this rank. With this equation, no count holds.
        equations = [Equation(whole=1.0, parts=[], rounding=0.0)]

    def remaining_of(candidates: Sequence[Any]) -> list[Any]:
        """Return the counts with which the equations of all ranks hold."""
        if not candidates:
            return []
        verdicts = problem._by_rank(*(bool(counts.that_hold([count], equations)) for count in candidates))
        holds_on_all = verdicts.view(problem.ranks, -1).all(0)  # (counts,)
        return [count for count, holds in zip(candidates, holds_on_all, strict=True) if holds]

    if remaining_of([terms]):
        return
    rank_candidates = list[list[Any]]()  # the fields of each count, which ranks can exchange
    for x, y in _rank_batches(problem):
        rank_candidates += [[*vars(count).values()] for count in counts.candidates(x, y)]
    by_code = dict[str, Count]()
    for fields in itertools.chain.from_iterable(problem._gathered_objects(rank_candidates)):
        count = Count(*fields)
        by_code[count.code] = count
    remaining = remaining_of([counts.ONES, *by_code.values()])
    if not remaining:
        batches = sum(1 for _ in problem.data.pieces())
        # All batches together give at least 2 · MAX_CLASSES equations. If the model has the loss, each part
        # of a batch needs its own pass, and there are fewer equations.
        divisions = DIVISIONS if model_has_loss else math.ceil(2 * counts.MAX_CLASSES / batches)
        more_equations = equations + batch_equations(divisions)
        remaining = remaining_of(counts.class_counts(more_equations, gather=problem._gathered_objects))
    if not remaining:
        check_finite(problem, terms, every=True)  # a loss that is NaN gets an error of its own
        raise InputError("loss: no mean over samples or over a standard count of targets; give terms=")
    rank_totals = [sum(float(count(x, y).sum()) for x, y in _rank_batches(problem)) for count in remaining]
    totals = problem._by_rank(*rank_totals).view(problem.ranks, -1)
    terms.count = counts.unambiguous(remaining, totals)
    say_count(terms.count)
    problem._count_terms(terms)


def _rank_batches(problem: Any) -> Iterator[tuple[Any, Any]]:
    """Return an iterator over this rank's batches, on its device."""
    return map(problem.data.place, problem.data.pieces())


def _check_gradient(problem: Any, small_problem: Any, g: Tensor, rounding: float) -> None:
    """Raise InputError unless g is the gradient of the loss of some samples of all ranks."""
    triples = zip(problem.pieces, problem.parts(problem.weights), problem.parts(g), strict=True)
    copies = [t.double() for piece, *values in triples if piece.share * problem.ranks == 1 for t in values]
    squares = problem._by_rank(*(float(t.square().sum()) for t in copies))
    if not torch.allclose(squares.amin(0), squares.amax(0), rtol=tolerance(problem.dtype), atol=0):
        raise InputError("model: parameters that all ranks have differ from rank to rank; give the same data")
    generator = torch.Generator().manual_seed(0)
    random = problem.along_weights(problem.draw(lambda p: torch.randn(p.slot.shape, generator=generator)))
    theta = problem.weights
    along = random / problem.norm(random) + g / max(problem.norm(g), 1e-30)
    step = STEP * problem.norm(theta) / problem.norm(along)
    expected = float(problem.total(inner(g, along)))
    ends = [small_problem.loss(theta + times * step * along) for times in (1, -1, 2, -2)]
    slope, wider_slope = (ends[0] - ends[1]) / (2 * step), (ends[2] - ends[3]) / (4 * step)
    allowed = ALLOWED * max(abs(expected), abs(slope)) + abs(slope - wider_slope) + rounding / step
    if not abs(slope - expected) <= allowed:
        raise InputError(
            f"model: its gradient is not that of the mean loss of all ranks: the slope is {slope:.3g}, "
            f"by the gradient {expected:.3g}; let ranks average gradients"
        )
