"""A rank's part of a sharded model, what ranks tell each other, and the checks that they make together.

A check raises its refusal on all ranks.
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
    """Return whether parameters of ``model`` are DTensors, as those of FSDP2 and tensor parallelism are.

    InputError for FSDP1, whose parameters are parts of one vector.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InputError("model: FullyShardedDataParallel is not allowed, use fully_shard of FSDP2")
    # After a forward pass, FSDP2's parameters may be whole for a while. A module of Lightning's has the
    # attribute device_mesh, too, whatever its parameters are.
    split = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    return split or any(hasattr(module, "reshard") for module in model.modules())


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or a tensor that each rank has; it shares its memory."""
    detached: Tensor = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def whole(tensor: Any) -> Tensor:
    """A DTensor, gathered from all ranks, or a tensor that each rank has."""
    detached: Tensor = tensor.detach()
    return detached.full_tensor() if hasattr(detached, "full_tensor") else detached


@dataclass(frozen=True)
class Piece:
    """A trainable parameter, whose numbers on this rank are on 1/``share`` ranks."""

    slot: Slot
    parameter: nn.Parameter
    share: float

    @classmethod
    def of(cls, slot: Slot, parameter: nn.Parameter) -> Piece:
        """The piece of the parameter of a slot."""
        sharded: Any = parameter
        kinds = getattr(sharded, "placements", ())
        if any(kind.is_partial() for kind in kinds):
            raise InputError(f"model: {slot.name} is a sum over ranks, it must be in shards or copies")
        sizes = [sharded.device_mesh.size(i) for i, kind in enumerate(kinds) if not kind.is_replicate()]
        return cls(slot, parameter, math.prod(sizes) / dist.get_world_size())

    @property
    def local(self) -> Tensor:
        """The numbers on this rank, in the parameter's memory."""
        return local_part(self.parameter)

    def gradient(self) -> Tensor:
        """The gradient of these numbers that a backward pass left: zero where it left none."""
        gradient: Any = self.parameter.grad
        if gradient is None:
            return torch.zeros_like(self.local)
        like: Any = self.parameter
        if hasattr(gradient, "placements") and gradient.placements != like.placements:
            gradient = gradient.redistribute(placements=like.placements)
        return local_part(gradient)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's numbers of a tensor like the parameter, which all ranks have."""
        like: Any = self.parameter
        if not hasattr(like, "placements"):
            return whole
        from torch.distributed.tensor import DTensor, Replicate  # takes a second, and is there already

        mesh = like.device_mesh
        copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return copies.redistribute(placements=like.placements).to_local()


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


class LostError(OperationError):
    """Another rank is lost, or did not answer in time."""


class SharedError(InputError):
    """An error of one rank, which all of them raise."""


@contextlib.contextmanager
def all_ranks() -> Iterator[None]:
    """Raise LostError, in one line, for an error in the block that says that another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LandscapeError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        words = f"another rank is lost, or did not answer in time ({first_words(error)})"
        raise LostError(f"rank {dist.get_rank()}: {words}") from error


class Exchanges:
    """The numbers, objects and errors that all ranks of torch.distributed tell each other."""

    ranks: int
    device: torch.device

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of what each of them has.

        Args:
            values: of one shape on all ranks.

        Returns:
            The sum, the same on all ranks.

        Raises:
            OperationError: another rank is lost, or did not answer in time.

        Example:
            >>> float(problem.total(gradient @ gradient))  # doctest: +SKIP
            0.25
        """
        summed = values.detach().to(self.device, copy=True).contiguous()
        with all_ranks():
            dist.all_reduce(summed)
        return summed.to(values.device)

    def gathered(self, values: Tensor) -> Tensor:
        """The values of each rank.

        Args:
            values: of one shape on all ranks.

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
        """Check that all ranks make the same call: else they would wait for each other, or mix results.

        Args:
            call: the name of what is called.
            arguments: by name; numbers, texts, flags and lists of them are compared, directions by their
                seed, and all else by its kind.

        Raises:
            InputError: a rank calls another function, or has another argument; on all ranks.

        Example:
            >>> problem.agree("trace", {"probes": 8})  # doctest: +SKIP
        """
        plain = {name: _text(value) for name, value in arguments.items()}
        first, *other_ranks = self._gathered_objects({"call": call, **plain})
        for rank, theirs in enumerate(other_ranks, 1):
            for name in first | theirs:
                on_first, on_other = first.get(name, "nothing"), theirs.get(name, "nothing")
                if on_first != on_other:
                    words = f"{on_other} on rank {rank}, but {on_first} on rank 0; all ranks need the same"
                    raise SharedError(f"{name}: {words}")

    def _by_rank(self, *values: float) -> Tensor:
        """Numbers of each rank, (ranks, ...)."""
        return self.gathered(torch.tensor(values, dtype=torch.float64)).squeeze(1)

    def _mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        return float(self._by_rank(value).mean())

    def _on_all(self, function: Callable[[], T]) -> T:
        """``function()``; an error in it on one rank is raised on all of them, in one line."""
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
        """``function()``, a pass of the model, as :meth:`_on_all`.

        An error may end it on one rank while the others wait for that rank's part of the next block of FSDP2,
        so that before each of these the ranks tell each other of errors.
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
        """``value`` of each rank: tensors, numbers and texts in tuples, lists and dicts, never code."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with all_ranks():
            messages = gather_bytes(buffer.getvalue(), self.device)
        return [torch.load(io.BytesIO(m), map_location="cpu", weights_only=True) for m in messages]


def _text(value: Any) -> str:
    """A plain value as text, and directions by what they were drawn with; of anything else the kind."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    is_drawn = hasattr(value, "norm") and hasattr(value, "seed")
    return f"seed {value.seed}, norm {value.norm}" if is_drawn else f"a {type(value).__name__}"


# The check of the gradient moves the weights by so much of their norm, and allows so large a relative error:
# a gradient that is a sum over ranks instead of their mean is off by a factor of 2 at least (our choices).
STEP, ALLOWED = 1e-3, 0.2
# How often batches are divided for weights of classes, where each part takes a pass of its own (our choice).
CUTS = 4
# The eps of a loss that the model takes itself, as a share of that of its outputs (our choice: parts of a
# batch may differ by 1,000 times as much, two roundings of an output).
COARSE = 2e-3
# Samples that each rank shows the others, and numbers of their outputs (our choice).
MAX_ROWS, MAX_NUMBERS = 64, 1 << 22


def check_batches(problem: Any) -> None:
    """Raise InputError unless all ranks have as many batches."""
    data = problem.data
    numbers = problem._by_rank(1 if data.resident else sum(1 for _ in data.pairs())).flatten().tolist()
    fewest, most = min(numbers), max(numbers)
    if fewest < most:
        raise InputError(
            f"data: rank {numbers.index(fewest)} has {fewest:g} and rank {numbers.index(most)} has {most:g} "
            "batches; all ranks need as many, such as list(zip(x.tensor_split(8), y.tensor_split(8)))"
        )


def check_ranks(problem: Any, x: Any, y: Any, terms: Terms) -> None:
    """Raise InputError unless the gradient is that of the loss of all ranks, on the first batch of each."""
    few = problem._on(x, y, float(terms(x, y).sum()))
    value, g = few.loss(), few.gradient()
    _check_gradient(problem, few, g, _rounding(problem, value))


def _rounding(problem: Any, value: float) -> float:
    """How far two passes over the same samples may differ, with the loss ``value``."""
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
    """The loss of a batch of this rank, while the others take that of theirs; an error is raised on all."""

    def loss() -> float:
        outputs = call(problem.model, {}, x)
        check_labels(problem.criterion, outputs, y)
        return float(whole(torch.as_tensor(problem.criterion(outputs, y))))

    with problem._passes(None):
        value: float = problem._pass_on_all(loss)
        return value


def check_finite(problem: Any, terms: Terms, every: bool = False) -> None:
    """Raise InputError, with batch and rank, for a loss of a batch that is NaN or infinite.

    Of the first batches, unless ``every`` one is asked for, or there is NaN in the data.
    """
    refusal, every = None, bool(problem._by_rank(every or problem.data.has_nan).any())
    for number, (x, y) in enumerate(_placed(problem)):
        value = _loss(problem, x, y)
        if refusal is None and not math.isfinite(value) and float(terms(x, y).sum()):
            refusal = not_a_number(x, y, value, f"batch {number} (the first one is batch 0)")
        if not every:
            break
    problem._share(refusal)


def check_mean(problem: Any, terms: Terms) -> None:
    """Find by which count of targets the losses of parts combine, of all batches of all ranks together.

    Raises InputError, on all ranks, where none of the standard counts is right.
    """
    targets = next(_placed(problem))[1]
    shapes = problem._by_rank(problem.data.ragged, sum(t[:1].numel() for _, t in named_tensors(targets)))
    ragged = bool(shapes[:, 0].any()) or len(shapes.unique(dim=0)) > 1
    if is_mean(problem.criterion) and not ragged:
        return
    models_own = problem.criterion is output_loss

    def outputs(weights: Tensor, x: Any) -> Any:
        problem._by_rank(1)
        try:
            return problem._pass_on_all(lambda: tree_map(whole, call(problem.model, {}, x)))
        except SharedError as error:
            raise (RuntimeError(str(error)) if models_own else error) from error  # a model takes no such part

    few: Any = SimpleNamespace(data=problem.data, device=problem.device, draws=0, outputs=outputs)
    few.criterion = (lambda o, y: double(whole(output_loss(o, y)))) if models_own else problem.criterion
    few.evaluating = lambda seed: contextlib.nullcontext()
    losses = Losses(few, problem.weights, by_outputs=not models_own)
    if models_own:
        losses.eps = max(losses.eps, COARSE * torch.finfo(problem.coarse).eps)

    @contextlib.contextmanager
    def in_step() -> Iterator[None]:
        """A block whose passes are made by all ranks together: after its own, each waits for the others'."""
        with problem._passes(None):
            yield
            while bool(problem._by_rank(0).any()):
                with contextlib.suppress(SharedError):
                    problem._pass_on_all(lambda: call(problem.model, {}, next(_placed(problem))[0]))

    def equations(cuts: int = 1) -> list[Equation]:
        with in_step():
            return [e.without_outputs() for e in losses.equations(_placed(problem), ragged, cuts)]

    every = equations()
    with in_step():
        first = losses.samples(*next(_placed(problem)))
        rows = min(MAX_ROWS, max(1, MAX_NUMBERS * first.size // max(1, first.numbers)))
        first = first.rows(slice(rows))
        gathered = problem._gathered_objects([first.outputs, first.x if models_own else None, first.y])
        heads = [Samples(*head).on(problem.device) for head in gathered]
        joined = attempt(losses.of_two, heads[dist.get_rank() - 1], heads[dist.get_rank()], 0)
    every = [*every, *([] if joined is None else [joined.without_outputs()])] or [Equation(0, 1.0, [], 0.0)]

    def that_hold_everywhere(some_counts: Sequence[Any]) -> list[Any]:
        if not some_counts:
            return []
        verdicts = problem._by_rank(*(bool(counts.that_hold([count], every)) for count in some_counts))
        return [*itertools.compress(some_counts, verdicts.view(problem.ranks, -1).all(0))]

    if that_hold_everywhere([terms]):
        return
    listed = [[*vars(count).values()] for x, y in _placed(problem) for count in counts.candidates(x, y)]
    gathered_counts = itertools.chain.from_iterable(problem._gathered_objects(listed))
    by_code = {values[0]: Count(*values) for values in gathered_counts}
    remaining = that_hold_everywhere([counts.ONES, *by_code.values()])
    if not remaining:
        batches = sum(1 for _ in problem.data.pieces())
        cuts = CUTS if models_own else -(-2 * counts.MAX_CLASSES // batches)
        by_class = counts.class_counts([*every, *equations(cuts)], gather=problem._gathered_objects)
        remaining = that_hold_everywhere(by_class)
    if not remaining:
        check_finite(problem, terms, every=True)
        raise InputError("loss: no mean over samples, or a standard count of targets; give terms=")
    totals = problem._by_rank(*(sum(float(c(x, y).sum()) for x, y in _placed(problem)) for c in remaining))
    terms.count = counts.only(remaining, totals.view(problem.ranks, -1))
    say_count(terms.count)
    problem._weigh(terms)


def _placed(problem: Any) -> Iterator[tuple[Any, Any]]:
    """The batches of this rank, on its device."""
    return map(problem.data.place, problem.data.pieces())


def _check_gradient(problem: Any, few: Any, g: Tensor, rounding: float) -> None:
    """Raise InputError unless g is the gradient of the loss of the ``few`` samples on all ranks."""
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
    ends = [few.loss(theta + times * step * along) for times in (1, -1, 2, -2)]
    slope, wider_slope = (ends[0] - ends[1]) / (2 * step), (ends[2] - ends[3]) / (4 * step)
    allowed = ALLOWED * max(abs(expected), abs(slope)) + abs(slope - wider_slope) + rounding / step
    if not abs(slope - expected) <= allowed:
        raise InputError(
            f"model: its gradient is not that of the mean loss of all ranks: the slope is {slope:.3g}, "
            f"by the gradient {expected:.3g}; let ranks average gradients"
        )
