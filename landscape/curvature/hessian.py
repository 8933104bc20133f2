"""Products of the loss Hessian, or its Gauss-Newton part, with vectors, over the whole data of a problem."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.core.devices import GRAPHS, Captured, double, finite, generator, normal, recordable
from landscape.core.errors import InputError, LandscapeError, OperationError, ProblemWarning, warn_caller
from landscape.core.memory import require_besides, spare, with_saved_bytes
from landscape.core.options import Natural, OneOf, checked
from landscape.curvature import differences, double_backward
from landscape.curvature.double_backward import holds_but_for_rounding
from landscape.curvature.operators import Products, SymmetricOperator
from landscape.evaluation.needs import GRAPH_BYTES, NO_SECOND, difference_bytes, lacks_second
from landscape.problem.batches import OUTPUTS_ARE_RECOMPUTED, aligned, named_tensors, recomputes
from landscape.problem.layout import Vector, check_recording, cut, differentiable, gradients, put, vector_of
from landscape.problem.losses import finite_gradient
from landscape.problem.problem import Problem, Run, problem_of
from landscape.problem.sharded import on_ranks

# Random vectors of the test of symmetry; one pair might miss an asymmetry, 4 vectors make 6 (our choice).
VECTORS = 4
# Weights with more bytes are not copied for products (our choice).
SHARED = 2**28

Part = str | Sequence[str] | None


@contextlib.contextmanager
def twice_differentiable(problem: Problem) -> Iterator[None]:
    """Return a context in which all operations have second derivatives, and none is in half precision.

    Fused attention and recurrent layers of cuDNN, which have no double backward, are replaced. Any other
    operation without a second derivative raises InputError.
    """
    has_recurrent = any(isinstance(layer, nn.RNNBase) for layer in problem.model.modules())
    cudnn = torch.backends.cudnn.flags(enabled=False) if has_recurrent else contextlib.nullcontext()
    is_half = problem.checked.get(double_backward.HALF_INSIDE)
    precision = double_backward.FullPrecision(problem.dtype) if is_half else contextlib.nullcontext()
    attention, decomposed = sdpa_kernel(SDPBackend.MATH), double_backward.Decomposed()
    with attention, cudnn, decomposed, precision, double_backward.missing_named():
        yield


class HessianChunk:
    """The products of ∇²L of one chunk of data, from the graph of its gradient (Pearlmutter 1994)."""

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], active: list[Tensor], x: Any, y: Any):
        loss = problem.criterion(problem.call(leaves, x), y)
        self.model, self.active = problem.model, active
        self.live: list[int] = []
        self.gradients: list[Tensor] = []
        if not loss.requires_grad and len(active) < len(leaves):  # it depends on no active parameter
            return
        parts = torch.autograd.grad(differentiable(loss), active, create_graph=True, materialize_grads=True)
        self.live = [i for i, part in enumerate(parts) if part.grad_fn]
        self.gradients = [parts[i] for i in self.live]

    def product(self, vectors: list[Tensor], keep: bool) -> Sequence[Tensor] | None:
        """Return ∇²L·v by parameter; None if the gradient does not depend on θ."""
        if not self.live:
            return None
        live_vectors = aligned(self.model, [vectors[i] for i in self.live])
        return gradients(self.gradients, self.active, live_vectors, keep=keep)


class GaussNewtonChunk:
    """The products of JᵀH_L J of one chunk: J = ∂z/∂θ for the outputs z, H_L = ∂²loss/∂z².

    Schraudolph 2002, section 3. Jv is computed as the derivative of Jᵀu by a dummy u, because the graph of
    Jᵀu can be kept, like that of the gradient for the Hessian.
    """

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], active: list[Tensor], x: Any, y: Any):
        self.model, self.active = problem.model, active
        self.outputs = problem.call(leaves, x)
        self.gradients: Sequence[Tensor] = ()
        if not isinstance(self.outputs, Tensor):
            raise InputError("matrix: 'gauss-newton' needs outputs of one tensor; use 'hessian'")
        self.live = self.outputs.requires_grad
        if not self.live:  # the outputs depend on no active parameter
            return
        self.z = self.outputs.detach().requires_grad_()
        try:
            loss = problem.criterion(self.z, y)
        except RuntimeError as error:
            if not problem.differentiates:
                raise
            words = "matrix: 'gauss-newton' needs a loss of the outputs alone; use 'hessian'"
            raise InputError(words) from error
        graph: Any = {"create_graph": True, "materialize_grads": True}
        self.loss_gradient = torch.autograd.grad(differentiable(loss), self.z, **graph)[0]
        self.u = torch.zeros_like(self.z, requires_grad=True)
        self.gradients = torch.autograd.grad(self.outputs, active, self.u, **graph)
        self.reached = [i for i, part in enumerate(self.gradients) if part.grad_fn]
        # A loss that is linear in the outputs has no curvature.
        self.live = self.loss_gradient.grad_fn is not None

    def product(self, vectors: list[Tensor], keep: bool) -> Sequence[Tensor] | None:
        """Return JᵀH_L J·v by parameter; None if it is zero for all v."""
        if not self.live:
            return None
        vjp = [self.gradients[i] for i in self.reached]
        reached_vectors = aligned(self.model, [vectors[i] for i in self.reached])
        jvp = torch.autograd.grad(vjp, self.u, reached_vectors, retain_graph=True)[0]
        hessian_jvp = torch.autograd.grad(self.loss_gradient, self.z, jvp, retain_graph=keep)[0]
        return gradients(self.outputs, self.active, hessian_jvp, keep=keep)


Chunk = HessianChunk | GaussNewtonChunk
CHUNKS: dict[str, type[Chunk]] = {"hessian": HessianChunk, "gauss-newton": GaussNewtonChunk}
MATRICES = tuple(CHUNKS)
DERIVATIVES = ("auto", "exact", "differences")
Derivatives = Annotated[str, OneOf(DERIVATIVES)]


class PenaltyHessian:
    """The products of ∇²R at one θ (P,), with R the penalty and weight decay of a problem."""

    def __init__(self, problem: Problem, weights: Tensor) -> None:
        self.weights = weights.detach().clone().requires_grad_()
        value = problem.penalty_value(self.weights)
        self.gradient = torch.zeros_like(weights)
        if value.requires_grad:
            self.gradient = torch.autograd.grad(value, self.weights, create_graph=True)[0]

    def __call__(self, v: Tensor) -> Tensor:
        """Return ∇²R·v, (P,) -> (P,)."""
        if not self.gradient.requires_grad:  # R is linear
            return torch.zeros_like(v)
        return gradients(self.gradient, [self.weights], v, keep=True)[0]


def penalty_hessians(problem: Problem, weights: Sequence[Tensor]) -> list[PenaltyHessian]:
    """Return a PenaltyHessian for each of ``weights``; [] if the problem is not regularized."""
    with recordable(problem.device):
        return [PenaltyHessian(problem, at) for at in weights] if problem.regularised else []


class HessianOperator(SymmetricOperator):
    """The Hessian ∇²L(θ) at a fixed θ as a linear operator, averaged over all samples of ``problem``.

    ``h @ v`` takes a vector (size,) or a block (size, m). The Hessian of the problem's penalty and weight
    decay is added, also to "gauss-newton". Graphs of data chunks are kept as far as they fit in
    ``graph_bytes``; other chunks' graphs are built again for every product or block.

    Args:
        problem: the loss, or a run.
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for JᵀH_L J (see Schraudolph 2002, section 3), which is positive
            semi-definite for the usual losses.
        part: names or name prefixes of parameters, such as "1" or "1.weight", to use only their
            diagonal block (``size`` numbers in the order of θ); default: all P.
        derivatives: "exact": by double backward; "differences": by differences of gradients, which are
            computed as in training; "auto": exact if model and loss have correct second derivatives, else
            differences, with a warning.
        graph_bytes: the most bytes of graphs.

    Attributes:
        shape: (size, size).
        dtype, device: the dtype and the device of the products.
        size: the length of the vectors.
        derivatives: "exact" or "differences".
        arithmetic: the precision in words, such as "float32" or "differences of float64 gradients".
        products: the number of products so far; a block counts as its m vectors.

    Raises:
        InputError: an unknown matrix or part; products of a matrix that is not symmetric; "gauss-newton" for
            outputs that are not one tensor (at the first product); products that are NaN or infinite while
            the gradient is finite.
        OperationError: at a product, the loss or the gradient is NaN or infinite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(1, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> h = landscape.HessianOperator(problem)
        >>> h.shape, h @ torch.ones(1)  # the mean of 2x²
        ((1, 1), tensor([10.]))
    """

    @checked(unchecked=("problem",))
    def __init__(
        self,
        problem: Problem | Run,
        weights: Vector | None = None,
        *,
        matrix: Literal["hessian", "gauss-newton"] = "hessian",
        part: Part = None,
        derivatives: Derivatives = "auto",
        graph_bytes: Natural = GRAPH_BYTES,
    ) -> None:
        problem = problem_of(problem)
        check_recording()  # nothing has a derivative in inference mode
        self.matrix = matrix
        if matrix != "hessian" and derivatives == "differences":
            raise InputError(f"derivatives: 'differences' is not allowed with matrix '{matrix}'; use 'exact'")
        self.slots = problem.layout.select(part)
        self.size = sum(slot.size for slot in self.slots)
        self.derivatives, self._graph_bytes = derivatives, graph_bytes
        self.fast: Products | None = None  # if set, computes the products without the chunks' graphs
        self.root: Tensor | None = None  # if set, the matrix is diag(root) H diag(root)
        # problem.checked has this key if exact products of this part have failed before.
        failure_key = (NO_SECOND, *(slot.name for slot in self.slots))
        must_be_exact = matrix != "hessian" or derivatives == "exact"
        may_be_exact = derivatives != "differences" and failure_key not in problem.checked
        if must_be_exact or may_be_exact:
            try:
                self._set_exact(problem, weights)
                return
            except double_backward.NoSecondDerivative as error:
                if must_be_exact:
                    raise
                # A public function checks at its start that the memory it needs is free. For a model that is
                # already known to lack second derivatives, this includes the bytes of differences. For other
                # models, the bytes of differences are checked here.
                if not lacks_second(problem):
                    require_besides("differences of gradients", problem.device, difference_bytes(problem))
                problem.checked[failure_key] = True
                # The error's message ends with a remedy after ";", which is left out here.
                words = "products are differences of gradients, with their errors"
                warn_caller(f"{str(error).split(';')[0]}; {words}", ProblemWarning)
        theta = vector_of(weights, problem.weights)
        self.problem, self.derivatives = problem, "differences"
        self.dtype, self.device = torch.promote_types(problem.dtype, torch.float32), problem.device
        self.differences = differences.Differences(problem, theta, self.slots)
        self.arithmetic = self.differences.arithmetic

    def _set_exact(self, problem: Problem, weights: Tensor | None) -> None:
        """Prepare products by double backward.

        Raise NoSecondDerivative if the model has no correct second derivative.
        """
        if recomputes(problem.model):  # activation checkpointing
            raise double_backward.NoSecondDerivative(OUTPUTS_ARE_RECOMPUTED)
        problem = double_backward.in_full_precision(problem)
        weights = vector_of(weights, problem.weights)
        self.problem = problem.at(weights)
        self.dtype, self.device = problem.dtype, problem.device
        self.arithmetic = str(problem.dtype).removeprefix("torch.")
        self._leaves = {name: view.detach() for name, view in problem.layout.views(weights).items()}
        # Weights are copied: copies are aligned in memory, so that kernels round alike on all devices. Only
        # the problem's own large weights are shared with it, to save memory; a change of them is detected.
        shares_weights = weights is problem.weights and weights.nbytes > SHARED
        self._shared = (weights, weights._version) if shares_weights else None
        if not shares_weights:
            self._leaves = {name: leaf.clone() for name, leaf in self._leaves.items()}
        self._active = [self._leaves[slot.name].requires_grad_() for slot in self.slots]
        # Each chunk whose autograd graph is kept, and the chunk's share of the mean loss.
        self._kept_chunks: list[tuple[Chunk, float]] = []
        self._budget = min(self._graph_bytes, spare())  # bytes left for graphs of more chunks
        self._budget_is_spent = self._keeps_all_chunks = False
        self._captured = Captured()
        # A replayed CUDA graph would not notice a change of these tensors, so their versions are compared.
        data = [t for _, t in named_tensors(problem.resident)]
        self._fixed = [*problem.model.parameters(), *problem.model.buffers(), *data]
        self._penalties = penalty_hessians(problem, [weights])
        check_symmetric(problem, weights, self)
        self.derivatives = "exact"

    def _images(self, rows: Tensor) -> Tensor:
        if self.derivatives == "differences":
            return super()._images(rows)
        product = self.fast or self._by_graphs
        return product(rows) if self.root is None else self.root.to(rows) * product(self.root.to(rows) * rows)

    def _not_finite(self) -> LandscapeError:
        differences, problem = self.differences, self.problem
        theta = differences.finest.weights if differences else problem.layout.flatten(self._leaves).detach()
        finite_gradient(*problem.loss_and_gradient(theta.to(problem.dtype)))
        is_exact = self.matrix == "hessian" and not differences
        remedy = double_backward.WHAT_TO_DO if is_exact else "; write it in other operations"
        words = "its second derivatives are NaN or infinite at these weights, its gradient is not"
        return double_backward.NoSecondDerivative(f"model or loss: {words}{remedy}")

    def _by_graphs(self, rows: Tensor) -> Tensor:
        """Return the products with the rows (k, size), summed over chunks in the precision of the rows."""
        if self._shared and self._shared[0]._version != self._shared[1]:
            raise OperationError("weights: they were changed in place since; call hessian() again")
        if not self._keeps_all_chunks or self.device.type not in GRAPHS:
            return self._sums(rows)
        versions = sum(t._version for t in self._fixed if not t.is_inference())
        return self._captured(self._sums, rows, state=versions)

    def _sums(self, rows: Tensor) -> Tensor:
        sizes, total = [slot.size for slot in self.slots], torch.zeros_like(rows)
        # Each row as tensors in the shapes of the parameters.
        all_vectors = []
        for row in rows:
            pieces = zip(torch.split(row, sizes), self._active, strict=True)
            all_vectors.append([piece.to(a).view(a.shape) for piece, a in pieces])
        last = len(all_vectors) - 1
        for chunk, share, keep in self._chunks():
            for i, vectors in enumerate(all_vectors):
                with twice_differentiable(self.problem):
                    parts = chunk.product(vectors, keep or i < last)
                if parts is not None:
                    # One parameter at a time: the product as one flat vector would need a copy.
                    for image, part in zip(torch.split(total[i], sizes), parts, strict=True):
                        image.add_(part.flatten().to(rows), alpha=share)
        for penalty in self._penalties:
            for image, row in zip(total, rows, strict=True):
                theta_row = put(rows.new_zeros(self.problem.layout.size), self.slots, row)
                image += cut(penalty(theta_row.to(penalty.weights)).to(rows), self.slots)
        return total

    def _chunks(self) -> Iterator[tuple[Chunk, float, bool]]:
        """Yield three values for each chunk: the chunk, its share of the samples, and whether it is kept.

        A chunk has the autograd graph of its gradient. Chunks that an earlier pass has kept are used again.
        New chunks are kept while their graphs fit into the budget of memory.
        """
        if self._keeps_all_chunks:
            yield from ((chunk, share, True) for chunk, share in self._kept_chunks)
            return
        for i, (x, y, count, seed) in enumerate(self.problem.parts()):
            if i < len(self._kept_chunks):
                chunk, share = self._kept_chunks[i]
                yield chunk, share, True
                continue
            build = functools.partial(self._build_chunk, x, y, seed)
            chunk, saved_bytes = with_saved_bytes(build, excluding=self._leaves.values())
            share = count / self.problem.samples
            saved_bytes += sum(part.nbytes for part in chunk.gradients)
            if saved_bytes > self._budget:
                self._budget_is_spent = True
            if not self._budget_is_spent:
                self._budget -= saved_bytes
                self._kept_chunks.append((chunk, share))
            yield chunk, share, not self._budget_is_spent
        self._keeps_all_chunks = not self._budget_is_spent
        if self._budget_is_spent and self.problem.resident is None:  # None: the data are an iterable
            # The iterable may change the order of its batches. In the next pass, a kept chunk could then
            # stand for another batch. Therefore either all chunks are kept, or none.
            self._kept_chunks = []

    def _build_chunk(self, x: Any, y: Any, seed: int | None) -> Chunk:
        evaluation = self.problem.evaluating(seed)
        with twice_differentiable(self.problem), evaluation, recordable(self.device):
            return CHUNKS[self.matrix](self.problem, self._leaves, self._active, x, y)


def check_symmetric(problem: Problem, weights: Tensor, operator: HessianOperator) -> None:
    """Raise InputError if the products on a few samples are not those of a Hessian.

    A Hessian is symmetric: vᵀ(Hu) = uᵀ(Hv) up to rounding. If a layer's second derivative is wrong, the two
    differ by about ‖Hu‖. The gradient must also be the derivative of the loss.

    Each problem, part and matrix is checked once; a part is not checked after all parameters, and with
    ``check="off"`` there is no check.
    """
    kind = "symmetric", operator.matrix, problem.batchnorm.name
    whole_key = (*kind, *(slot.name for slot in problem.layout.slots))
    key = (*kind, *(slot.name for slot in operator.slots))
    if key in problem.checked or whole_key in problem.checked or problem.check == "off":
        return
    small_problem = operator.problem.on(problem.data.few())
    double_backward.check_gradient(small_problem, weights, operator.slots)
    if not holds_but_for_rounding(small_problem, lambda part: _is_symmetric(part, weights, operator)):
        remedy = "" if operator.matrix == "gauss-newton" else ", or use matrix 'gauss-newton'"
        raise double_backward.NoSecondDerivative(
            f"model: its products (matrix '{operator.matrix}') are not symmetric: a second derivative of it, "
            f"or of the loss, is wrong; write it in differentiable operations{remedy}"
        )
    problem.checked[key] = True


def _is_symmetric(small_problem: Problem, weights: Tensor, operator: HessianOperator) -> bool:
    """Return whether products of the matrix at ``weights`` (P,) are symmetric up to rounding.

    The products are those of the first chunk of ``small_problem``, which has only a few samples.

    Raises NoSecondDerivative if products are NaN or infinite, or if differences of gradients contradict them.
    """
    views = small_problem.layout.views(weights.to(small_problem.dtype))
    leaves = {name: view.detach().clone() for name, view in views.items()}
    active = [leaves[slot.name].requires_grad_() for slot in operator.slots]
    rng = generator(0, weights.device, len(weights))
    draws = []  # VECTORS random vectors u_k, each as tensors like the operator's parameters
    for _ in range(VECTORS):
        random = normal(len(weights), rng).to(small_problem.weights)
        # along_weights sets the entries of an embedding's padding rows to zero.
        views = small_problem.layout.views(small_problem.along_weights(random))
        draws.append([views[slot.name] for slot in operator.slots])
    # Σ_k u_k, one tensor for each parameter.
    sum_of_draws = [sum(tensors[1:], tensors[0]) for tensors in zip(*draws, strict=True)]
    x, y, _, seed = next(small_problem.parts())
    with twice_differentiable(small_problem), small_problem.evaluating(seed):
        chunk = CHUNKS[operator.matrix](small_problem, leaves, active, x, y)
        forms = torch.zeros(VECTORS, VECTORS, dtype=torch.float64)  # [k, l] = u_lᵀ(H u_k)
        nonlinearity = [torch.zeros_like(a) for a in active]  # Σ_k H u_k − H Σ_k u_k: only rounding errors
        largest_norm = 0.0
        for k, vector in enumerate([*draws, sum_of_draws]):
            # None stands for a product of zero.
            image = chunk.product(vector, keep=True) or [torch.zeros_like(a) for a in active]
            largest_norm = max(largest_norm, float(double_backward.norm(image)))
            for total, part in zip(nonlinearity, image, strict=True):
                total.add_(part, alpha=1 if k < VECTORS else -1)
            if k < VECTORS:
                forms[k] = torch.stack([double_backward.inner(u, image) for u in draws])
            if k == 0:
                first_image = list(image)
        if isinstance(chunk, HessianChunk):
            double_backward.check_graph(chunk.gradients)
    del chunk, image, random  # frees memory for the differences of gradients
    if not (finite(forms) and math.isfinite(largest_norm)):
        raise operator._not_finite()
    eps = torch.finfo(small_problem.dtype).eps
    # As in operators.rounding_of (our choice).
    rounding = 100 * float(double_backward.norm(nonlinearity)) + eps**0.5 * largest_norm
    # If only the image of the sum has NaN, ``rounding`` is NaN, and ``not … <=`` is True. (``max`` above has
    # then ignored the NaN, and ``largest_norm`` is finite.)
    if not bool((forms - forms.T).abs().max() <= rounding):
        return False
    if operator.matrix == "hessian":
        first_draw = draws[0]
        del draws[:], vector, sum_of_draws, nonlinearity, views  # frees memory
        double_backward.check_differences(small_problem, leaves, active, first_draw, first_image)
    return True


@dataclass(frozen=True)
class HessianOptions:
    """The options of :class:`landscape.HessianOperator` that choose a matrix.

    With ``precondition`` the matrix is P^{-1/2} H P^{-1/2}.
    """

    matrix: Literal["hessian", "gauss-newton"] = "hessian"
    part: Part = None
    precondition: Preconditioner | None = None
    derivatives: str = "auto"

    def at(self, problem: Problem, weights: Tensor | None = None) -> HessianOperator:
        """Return the matrix of ``problem`` at ``weights`` (P,)."""
        if on_ranks(problem):
            return problem.hessian(weights)
        options: Any = {"matrix": self.matrix, "part": self.part, "derivatives": self.derivatives}
        hessian = HessianOperator(problem, weights, **options)
        if self.precondition:
            (hessian.differences or hessian).root = self.precondition.root(problem, self.part)
        return hessian


FULL_HESSIAN = HessianOptions(derivatives="exact")


def exact_only(problem: Problem, who: str) -> None:
    """Raise NoSecondDerivative unless ``problem`` has exact products, which the function ``who`` needs."""
    try:
        FULL_HESSIAN.at(problem)
    except double_backward.NoSecondDerivative as error:
        words = f"{str(error).split(';')[0]}; {who} takes exact products only"
        raise double_backward.NoSecondDerivative(words) from error


def gradient_curvature(
    problem: Problem, weights: Tensor | None = None, *, derivatives: str = "exact"
) -> tuple[float, float, float]:
    """Return gᵀHg/‖g‖², ‖g‖², and the error of gᵀHg/‖g‖², where g = ∇L(θ) and H = ∇²L(θ).

    Args:
        problem: L, the mean loss over a minibatch.
        weights: θ (P,); default: the problem's center.
        derivatives: "exact", "differences" of gradients, or "auto".

    Raises:
        OperationError: the gradient is zero, or the loss or the gradient is NaN or infinite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> round(gradient_curvature(problem, torch.tensor([1.0, 0.0]))[0], 4)  # H = diag(1, 9)
        1.0
    """
    problem = double_backward.in_full_precision(problem)
    weights = vector_of(weights, problem.weights)
    g = finite_gradient(*problem.loss_and_gradient(weights))
    # ``verified`` returns the products with vectors (one a row), and bounds on the errors of these products.
    (image,), (error,) = HessianOperator(problem, weights, derivatives=derivatives).verified(g[None])
    g_squared = float(double(g) @ double(g))
    g_hessian_g = float(double(g) @ double(image))
    if g_squared == 0:  # ``batch`` is the option of the public function that calls this one
        raise OperationError(f"batch: the gradient of a minibatch of {problem.samples} samples is zero")
    # For the error e of Hg, |gᵀe|/‖g‖² is at most ‖e‖/‖g‖.
    return g_hessian_g / g_squared, g_squared, error / math.sqrt(g_squared)


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """A positive diagonal P: steps are w ← w − η P⁻¹ u, with the gradient or a momentum of gradients u.

    With P fixed, these are steps without a preconditioner in the coordinates P^{1/2} w, in which the Hessian
    is P^{-1/2} H P^{-1/2}. Steps are stable if η times its largest eigenvalue is below the limit of the
    method without preconditioner (Cohen et al. 2022, arXiv:2207.14484).

    Attributes:
        diagonal: (P,), in the order of θ.
        name: the optimizer's name.
        lr: η; NaN if unknown.
        limit: the largest stable ηλ of the optimizer with P fixed; NaN if unknown.

    Raises:
        InputError: the diagonal is not positive and finite.

    Example:
        >>> Preconditioner(torch.tensor([1.0, 4.0]), name="torch:Adam", lr=0.1, limit=38.0).limit
        38.0
    """

    diagonal: Tensor
    name: str = "given"
    lr: float = math.nan
    limit: float = math.nan

    def __post_init__(self) -> None:
        wrong = ~(torch.isfinite(self.diagonal) & (self.diagonal > 0))
        if self.diagonal.dim() != 1 or bool(wrong.any()):
            raise InputError(
                f"precondition: {int(wrong.sum())} of {wrong.numel()} numbers are not positive and finite; "
                "give the diagonal (P,) of a positive matrix"
            )

    def root(self, problem: Problem, part: Part = None) -> Tensor:
        """Return P^{-1/2} for the parameters of a part.

        Args:
            problem: the problem with these parameters.
            part: names or name prefixes of parameters; default: all.

        Returns:
            (P',) in float64.

        Raises:
            InputError: the diagonal has another length than θ.

        Example:
            >>> import landscape
            >>> x, y = torch.eye(2), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
            >>> Preconditioner(torch.tensor([1.0, 4.0])).root(problem).tolist()
            [1.0, 0.5]
        """
        size = problem.layout.size
        if self.diagonal.shape != (size,):
            raise InputError(f"precondition: shape {tuple(self.diagonal.shape)}, it must be {(size,)}")
        diagonal = cut(self.diagonal, problem.layout.select(part))
        return double(diagonal.to(problem.device)).rsqrt()


def as_preconditioner(precondition: Preconditioner | Tensor | None) -> Preconditioner | None:
    """Return a preconditioner unchanged, or make one from its diagonal (P,).

    Example:
        >>> as_preconditioner(torch.tensor([1.0, 4.0])).name
        'given'
    """
    return Preconditioner(precondition) if isinstance(precondition, Tensor) else precondition
