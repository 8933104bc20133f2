"""Loss and accuracy at a block of points at a time, for chains of linear layers.

θ is linear in (x, y) up to the first nonlinearity, so the first layer costs three products a data chunk,
shared by all points; later layers take a block of points as one batched product, with features before
samples in memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from landscape.core.errors import FailedError, PathWarning
from landscape.core.memory import MemoryBudget
from landscape.core.progress import Progress
from landscape.evaluation.paths import ACTIVATION_COPIES, DISPLACEMENT, PlaneLoss, Totals
from landscape.problem.chain import LinearStep, Step, stacked_losses
from landscape.problem.checks import tolerance
from landscape.problem.problem import Problem

# Measured on 2 cores, 784-50-50-10: 1,000 samples a chunk with 16 to 32 points a block is the fastest, with
# 64 it takes 1.3 times as long. The activations of a block must stay in cache, hence the bound in bytes, too.
CHUNK = 1000
BLOCK_BYTES = 16 * 2**20
MAX_BLOCK = 20
# Compiling takes 6 to 40 s on 2 cores and makes the rest about 1.7 times as fast: worth it from here on. In
# points × samples × numbers a sample needs (weights after the first layer, and outputs of all layers): with
# 784-50-50-10 and 10,000 images, 50,000 points, which take 90 s.
COMPILE_WORK = 1.5e12

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def block_size(
    problem: Problem, steps: list[Step], count: int, budget: MemoryBudget, forced: bool
) -> tuple[int, int] | None:
    """(samples a chunk, points a block) of the batched path; None if one of each exceeds the memory.

    With ``forced`` InputError in place of None.
    """
    shapes = {slot.name: slot.shape for slot in problem.layout.slots}
    linear = [step for step in steps if isinstance(step, LinearStep)]
    first, widest = shapes[linear[0].weight][0], max(shapes[step.weight][0] for step in linear)
    later = problem.layout.size - first * shapes[linear[0].weight][1]  # weights after the first layer
    item = problem.theta.itemsize
    # Center and directions in one tensor; for one sample the first products and one point's activations.
    fixed, sample = (
        3 * problem.theta.nbytes + ACTIVATION_COPIES * later * item,
        (3 * first + ACTIVATION_COPIES * widest) * item,
    )
    if fixed + sample > budget.remaining:
        if forced:
            budget.require(fixed + sample)
        return None
    chunk = int(min(CHUNK, problem.data.samples, (budget.remaining - fixed) // sample))
    point = max(chunk * widest, later) * item
    rest = budget.remaining - fixed - 3 * first * chunk * item
    by_memory = rest // (ACTIVATION_COPIES * point)
    return chunk, int(max(1, min(MAX_BLOCK, count, BLOCK_BYTES // point, by_memory)))


def long_enough(problem: Problem, steps: list[Step], count: int) -> bool:
    """Whether compiling saves time for ``count`` points; on CUDA it has not been measured."""
    shapes = {slot.name: slot.shape for slot in problem.layout.slots}
    weights = [shapes[step.weight] for step in steps if isinstance(step, LinearStep)]
    numbers = sum(out for out, _ in weights) + sum(out * fan_in for out, fan_in in weights[1:])
    return problem.device.type == "cpu" and count * problem.data.samples * numbers > COMPILE_WORK


class _Memory:
    """Memory for the outputs of layers, in turn one of two pieces, which every block uses again.

    Fresh memory of this size comes from the system page by page, and takes as long as the arithmetic.
    """

    def __init__(self, like: Tensor) -> None:
        self._pieces = [like.new_empty(0), like.new_empty(0)]

    def take(self, *shape: int) -> Tensor:
        """Memory of ``shape``, other than that taken last."""
        self._pieces.reverse()
        size = math.prod(shape)
        if len(self._pieces[0]) < size:
            self._pieces[0] = self._pieces[0].new_empty(size)
        return self._pieces[0][:size].view(shape)


@dataclass
class _Blocks:
    """The parts of the batched path: the first layer's products, and a block of points for them."""

    problem: Problem
    steps: list[Step]
    views: dict[str, Tensor]  # centre and directions, (3, *shape) each
    labels: Tensor | None  # (samples,) classes that count as right; None: accuracy has no meaning

    @classmethod
    def of(cls, loss: PlaneLoss, steps: list[Step]) -> _Blocks:
        problem = loss.problem
        views = problem.layout.views(torch.stack((loss.center, *loss.directions)))
        assert problem.data.tensors is not None
        y = problem.data.tensors[1]
        last = next(step for step in reversed(steps) if isinstance(step, LinearStep))
        outputs = views[last.weight].shape[1]
        classes = y.dim() == 1 and not y.is_floating_point() and outputs > 1
        labels = y.long() if classes and bool(((y >= 0) & (y < outputs)).all()) else None
        return cls(problem, steps, views, labels)

    def products(self, i: int, chunk: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """W·x, U·x, V·x (3, out, samples) of the chunk at ``i``, its targets and labels."""
        first = self.steps[0]
        assert isinstance(first, LinearStep)
        assert self.problem.data.tensors is not None
        x, y = (t[i : i + chunk] for t in self.problem.data.tensors)
        weights = self.views[first.weight].flatten(0, 1)  # (3·out, in)
        labels = None if self.labels is None else self.labels[i : i + chunk]
        return (weights @ x.flatten(1).T).view(3, -1, len(x)), y, labels

    def run(self, c: Tensor, shared: Tensor, y: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean losses (k,) and hits (k,) of the points c (k, 3) on one chunk, as it is compiled."""
        return _block(self.problem, self.steps, self.views, c, shared, y, labels)

    def run_in_memory(self) -> Run:
        """:meth:`run` without a compiler, all blocks in the same memory."""
        memory = _Memory(self.problem.theta)

        def run(c: Tensor, shared: Tensor, y: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
            return _block(self.problem, self.steps, self.views, c, shared, y, labels, memory)

        return run

    def totals(self, size: tuple[int, int], run: Run) -> Totals:
        """The sums by ``run``, in chunks of samples and blocks of points of ``size``."""
        problem, samples, (chunk, block) = self.problem, self.problem.data.samples, size

        def totals(points: Tensor, progress: Progress) -> Tensor:
            rest = -len(points) % block  # the last point again, so that all blocks have one shape
            padded = torch.cat((points, points[-1:].expand(rest, 2)))
            coords = torch.cat((torch.ones(len(padded), 1), padded), 1).to(problem.device, problem.dtype)
            total = torch.zeros(len(padded), 2, dtype=torch.float64, device=problem.device)
            for i in range(0, samples, chunk):
                shared, yc, labels = self.products(i, chunk)
                for k in range(0, len(padded), block):
                    means, hits = run(coords[k : k + block], shared, yc, labels)
                    total[k : k + block, 0] += means.double() * len(yc)
                    total[k : k + block, 1] += hits
                    progress((i + len(yc) * (k + block) / len(padded)) / samples)
                del shared  # before the next products, which take as much
            return total[: len(points)]

        return totals


@torch.no_grad()
def batched(loss: PlaneLoss, steps: list[Step], size: tuple[int, int]) -> Totals:
    """The totals of a chain's ``steps``, in chunks of samples and blocks of points of ``size``."""
    blocks = _Blocks.of(loss, steps)
    return blocks.totals(size, blocks.run_in_memory())


@torch.no_grad()
def compiled_totals(
    loss: PlaneLoss, steps: list[Step], size: tuple[int, int], *, forced: bool
) -> tuple[Totals, str]:
    """The batched totals under torch.compile, and "compiled"; without it, and "batched", where that fails.

    With ``forced`` FailedError in place of these.
    """
    problem, blocks = loss.problem, _Blocks.of(loss, steps)
    compiled = torch.compile(blocks.run, dynamic=False)
    points = torch.linspace(-DISPLACEMENT, DISPLACEMENT, size[1], dtype=problem.dtype, device=problem.device)
    trial = torch.stack((torch.ones_like(points), points, -points), 1), *blocks.products(0, size[0])
    try:
        means, expected = compiled(*trial)[0], blocks.run(*trial)[0]
        allowed = tolerance(problem.dtype)
        if torch.allclose(means, expected, rtol=allowed, atol=allowed, equal_nan=True):
            return blocks.totals(size, compiled), "compiled"
        reason = f"its losses differ by up to {float((means - expected).abs().max()):.2g}"
    except Exception as error:  # no compiler, or one that fails: it raises what it likes
        reason = str(error).strip().split("\n")[0]
    if forced:
        raise FailedError(f"path: 'compiled' fails here ({reason}); use 'batched'")
    warnings.warn(f"path: 'batched' in place of 'compiled' ({reason})", PathWarning, stacklevel=5)
    return blocks.totals(size, blocks.run_in_memory()), "batched"


def _block(
    problem: Problem,
    steps: list[Step],
    views: dict[str, Tensor],
    c: Tensor,
    products: Tensor,
    targets: Tensor,
    labels: Tensor | None,
    memory: _Memory | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean losses (k,) and hits (k,) of the points c (k, 3) on one chunk of data.

    ``products`` (3, out, samples) are the first layer's, ``views`` the centre and directions, (3, *shape).
    With ``memory`` the layers write there, otherwise to fresh memory.
    """

    def place(outputs: int) -> Tensor | None:  # (k, outputs, samples)
        return memory.take(len(c), outputs, products.shape[2]) if memory else None

    def at_points(name: str) -> Tensor:  # (k, *shape)
        return (c @ views[name].flatten(1)).view(len(c), *views[name].shape[1:])

    first = steps[0]
    assert isinstance(first, LinearStep)
    a, b = c[:, 1, None, None], c[:, 2, None, None]
    h = torch.addcmul(products[0], a, products[1], out=place(products.shape[1])).addcmul_(b, products[2])
    if first.bias:
        h += at_points(first.bias).unsqueeze(-1)
    for step in steps[1:]:
        if isinstance(step, LinearStep):
            w, out = at_points(step.weight), place(views[step.weight].shape[1])
            if step.bias:
                h = torch.baddbmm(at_points(step.bias).unsqueeze(-1), w, h, out=out)
            else:
                h = torch.bmm(w, h, out=out)
        elif memory and type(step) is nn.ReLU:
            h = h.relu_()
        else:
            h = step(h)
    losses = stacked_losses(problem.criterion, h, targets.expand(len(c), *targets.shape))
    return losses, _correct(h, labels)


def _correct(outputs: Tensor, labels: Tensor | None) -> Tensor:
    """(K,) how many samples each of outputs (K, C, samples) classifies right; NaN without ``labels``."""
    if labels is None:
        return torch.full((len(outputs),), torch.nan, dtype=torch.float64, device=outputs.device)
    # In eager mode argmax along a middle dimension is 40 times slower than amax on a CPU: it serves where
    # outputs tie. To see that, a GPU would have to be waited for.
    if torch.compiler.is_compiling() or outputs.is_cuda:
        return (outputs.argmax(1) == labels).sum(1).double()
    best = outputs == outputs.amax(1, keepdim=True)
    if int(best.sum()) == best[:, 0].numel():
        return best.gather(1, labels.expand(len(best), 1, -1)).sum((1, 2)).double()
    return (outputs.argmax(1) == labels).sum(1).double()
