"""A model, a loss and data as a problem, the subject of all analyses; and its layers if they are a chain."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core.devices import Device, Dtype, check_default_device, check_dtype
from landscape.core.errors import InputError
from landscape.core.options import NonNegative, checked, fit, of_run
from landscape.problem import batchnorm, checks, layout
from landscape.problem.batches import count_samples
from landscape.problem.checks import Check, ignores_first_label, moved
from landscape.problem.data import Data
from landscape.problem.layout import Layout, Vector, unwrapped
from landscape.problem.losses import Terms, describe_loss, is_softmax_loss, output_loss, placed_loss
from landscape.problem.mean_check import check_mean, refuse_nan
from landscape.problem.mean_loss import Loss as Loss
from landscape.problem.mean_loss import MeanLoss, Penalty
from landscape.problem.metrics import Metrics, check_metrics, metrics_of
from landscape.problem.ranks import is_sharded
from landscape.problem.sharded import ShardedProblem

# What to do with a model whose forward pass is random even in eval mode.
RANDOMNESS = ("refuse", "seed")


def number_of_draws(randomness: str | int) -> int:
    """Return the number of draws of random numbers over which the loss is the mean; 0 for "refuse".

    Args:
        randomness: one of :data:`RANDOMNESS`, or a number of draws, also as a text.

    Raises:
        InputError: another value.

    Example:
        >>> [number_of_draws(r) for r in ("refuse", "seed", 8)]
        [0, 1, 8]
    """
    if randomness in RANDOMNESS:
        return RANDOMNESS.index(str(randomness))
    text = str(randomness)
    if isinstance(randomness, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InputError(f"randomness: {randomness!r}, it must be 'refuse', 'seed' or a number of draws ≥ 1")
    return int(text)


class Problem(MeanLoss):
    """L(θ) = mean over the data of loss(model_θ(x), y), for any ``nn.Module``.

    θ is the flat vector of the model's trainable parameters (``layout`` says which slice is which).

    Args:
        model: any module; it is copied, put in eval mode, and never changed. A part that merges or caches its
            parameters in eval mode (LoRA), so that they have no effect, is put in training mode if the loss
            is the same there, and else refused. A dict x is passed to the model as ``model(**x)``, a tuple or
            list as ``model(*x)``, any other object as ``model(x)``. DataParallel, DistributedDataParallel and
            torch.compile are removed. For a model with DTensors as parameters (FSDP2, tensor parallelism) the
            result is a :class:`landscape.ShardedProblem`.
        loss: ``loss(outputs, targets)``, the *mean* over the samples of a batch; None if the model computes
            its loss itself and returns it as ``.loss`` or ["loss"] (Hugging Face models). A module is copied
            to the problem's device and precision. A metric that returns a number of Python or NumPy
            (scikit-learn) has no gradient, and is allowed for losses and contours only.
        data: ``(x, y)``, a torch.utils.data.Dataset, or an iterable (not an iterator) of batches (x, y). x
            and y are tensors or NumPy arrays with the samples first, or nested tuples, lists and dicts of
            these; other objects are passed on unchanged. One dict may replace a pair: its "labels" are the
            targets (the whole dict if it has none), and the model receives them only if ``loss`` is None. A
            dict, a tuple of two or a list of two tensors is moved to the device once, or in parts if it does
            not fit there; an iterable is moved batch by batch. Minibatches can be drawn from such tensors,
            and from a :class:`.Stream`.
        weights: (P,), the center; default: the model's parameters.
        device, dtype: default: those of the model's first parameter.
        terms: ``terms(targets)`` returns (B,), the number of terms of each sample in the mean. Default: one
            each; for cross-entropy and negative log-likelihood of PyTorch, the number of targets other than
            ``ignore_index``, or the sum of their class weights; for a model's own loss with integer "labels",
            the number of labels other than −100, without the first of each sequence if the loss does not
            depend on it (causal language models; two passes over the first samples decide).
        penalty: ``penalty(parameters)``, one number computed from a dict of the trainable parameters, added
            to the mean loss. A regularizer belongs here, because a loss that reads the parameters of the
            original model would not see other weights.
        weight_decay: λ adds λ/2·‖θ‖², whose gradient is that of torch.optim.SGD(weight_decay=λ).
        randomness: for a model or loss that draws random numbers in eval mode: "refuse" it; "seed" fixes the
            random numbers, so that the loss is a function of θ; a number of draws makes the loss the mean
            over that many fixed draws.
        metrics: other quantities from the same forward passes, columns of contours and lines. A dict of
            names and functions ``(outputs, targets)``, which return (B,) values (the metric is their mean
            over the samples), or one number of all samples (scikit-learn); or of objects with ``update``
            and ``compute`` (torchmetrics). Or a list of names: accuracy, error, top5, mse, mae, nll, margin,
            perplexity, f1, calibration. These leave out the targets that the loss leaves out.
        name: the label of results, for titles, legends and tables.
        check: "quick" tests on a few samples that the loss depends on all of θ and on nothing else, is the
            mean over the samples, and that two passes over batches are equal; "full" tests the same on more
            samples, at more weights; "off" tests nothing.

    Attributes:
        model, criterion, layout, weights: the copy of the model, the loss, the parameters' places in θ, and
            the center (P,).
        data: the samples, on the device or in batches (:class:`landscape.problem.data.Data`).
        batchnorm: the statistics that BatchNorm uses (:class:`landscape.problem.batchnorm.BatchNormPolicy`).

    Raises:
        InputError: weights that are not finite, complex or no parameters, no samples, tensors of unequal
            length, an exhausted iterator, or a failed check.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy
        >>> landscape.Problem(model, loss, (x, y), weight_decay=1e-4)
        Problem(Linear, 8 parameters, cross_entropy, 20 samples, float32 on cpu)
    """

    @checked(unchecked=("model", "loss"))
    @torch.inference_mode(False)  # the problem's tensors are used outside of inference mode, too
    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        data: Any,
        *,
        weights: Vector | None = None,
        device: Device | None = None,
        dtype: Dtype | None = None,
        terms: Callable[[Any], Tensor] | None = None,
        penalty: Penalty | None = None,
        weight_decay: NonNegative = 0.0,
        randomness: str | int = "refuse",
        metrics: Metrics | None = None,
        name: str = "",
        check: Check = "quick",
    ) -> None:
        check_default_device()
        self.check, self.name = check, name
        check_kinds(model, loss)
        original = unwrapped(model)
        # This also sets the layout, the device, the dtype and the model's own weights.
        self._set_model(layout.independent_copy(original), device, dtype)
        self.criterion = output_loss if loss is None else placed_loss(loss, self.device, self.dtype)
        self.penalty, self.weight_decay = penalty, weight_decay
        self.randomness, self.draws = str(randomness), number_of_draws(randomness)
        # check_fit() sets these two attributes, see :class:`.MeanLoss`.
        self.differentiates = self.draws_elsewhere = False
        self.batch_bytes, self.metrics = 0, metrics_of(metrics)
        self.batchnorm = batchnorm.BatchNormPolicy()
        # The results of checks that are made once, such as "the Hessian is symmetric". Copies share the dict.
        self.checked: dict[tuple[Any, ...], bool] = {}
        self.weights = layout.vector_of(weights, self.weights)
        if self.weights.is_inference():
            self.weights = self.weights.clone()
        infinite_count = int((~torch.isfinite(self.weights)).sum())
        if infinite_count:
            words = f"{infinite_count} of {self.layout.size} are NaN or infinite, all must be finite"
            raise InputError(f"weights: {words}")
        self.data = Data(data, self.device, self.dtype, model_has_loss=self.criterion is output_loss)
        term_counter = Terms(self.criterion, terms)
        if self.data.indexed and not self.data.samples:
            self.data.count_terms(term_counter)  # only raises the InputError for data without samples
        else:
            batch = self.data.first_batch(term_counter)
            count_samples(*batch)  # raises InputError for a batch without tensors
            # Causal language models shift the labels by one, and ignore the first label of each sequence.
            term_counter.shifted = ignores_first_label(self, *batch)
            # The number of θ at which the checks compare losses (our choice).
            theta_count = {"off": 0, "quick": 1, "full": 3}[check]
            moved_weights = [moved(self, seed) for seed in range(theta_count)]
            if moved_weights:
                checks.check_problem(self, original, batch, moved_weights)
            if moved_weights and self.data.resident is None:
                self.batch_bytes = self.saved_bytes(*batch)
            self._count_terms(term_counter, batch, moved_weights)
            if self.metrics:
                check_metrics(self, batch)
        # Each chunk draws its own random numbers. With a fixed size, copies of this problem in another
        # precision have the same chunks.
        if self.draws and self.data.resident is not None:
            self.data.chunk_size = self.chunk

    if not TYPE_CHECKING:  # type checkers see that Problem(…) is a Problem

        @functools.wraps(__init__)
        def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
            if not (isinstance(model, nn.Module) and is_sharded(unwrapped(model))):
                return super().__new__(cls)
            return ShardedProblem(model, *args, **options)

    def hessian(self, weights: Tensor | None = None, *, matrix: str = "hessian", **options: Any) -> Any:
        """Return the Hessian of the loss at ``weights``, as a linear operator.

        Args:
            weights: θ (P,); default: the problem's center.
            matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
            options: further arguments of :class:`landscape.HessianOperator`, such as ``part``.

        Returns:
            A :class:`landscape.HessianOperator`.

        Raises:
            InputError: an unknown matrix or part, or wrong second derivatives.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
            >>> problem.hessian() @ torch.eye(2)  # the mean of 2xxᵀ
            tensor([[1., 0.],
                    [0., 9.]])
        """
        # Imported by name, because this package must not depend on landscape.curvature.
        curvature = importlib.import_module("landscape.curvature.hessian")
        return curvature.HessianOperator(self, weights, matrix=matrix, **options)

    def to_curvlinops(
        self, operator: str = "HessianLinearOperator", weights: Tensor | None = None, **options: Any
    ) -> Any:
        """Return a linear operator of the package curvlinops for this problem.

        Args:
            operator: a class of curvlinops, such as "KFACLinearOperator" or "GGNLinearOperator".
            weights: θ (P,); default: the problem's center.
            options: further arguments of that class.

        Returns:
            The operator. Its vectors have the order of θ. :func:`landscape.trace` and similar functions
            accept it.

        Raises:
            OperationError: curvlinops is not installed.
            InputError: an unknown operator, a problem with a penalty or without a pair of tensors as data, or
                a layer or loss that the operator does not support.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (x, y), weight_decay=1)
            >>> problem.to_curvlinops()  # weight decay is refused
            Traceback (most recent call last):
            landscape.core.errors.InputError: to_curvlinops: curvlinops knows no penalty and ...
        """
        peers = importlib.import_module("landscape.curvature.peers")
        return peers.to_curvlinops(self, operator, weights, **options)

    def _count_terms(self, terms: Terms, first: tuple[Any, Any], moved_weights: Sequence[Tensor]) -> None:
        """Count samples and terms of the loss's mean, and check that two passes over them are equal."""
        self.data.count_terms(terms)
        self.data.check_terms(self.data.terms)
        if not moved_weights:
            return
        sums = list[Tensor]()
        may_vary = self.data.checksum is not None and not isinstance(self.data.batches, (list, tuple))
        second_pass = [self.data.second_pass(sums)] if may_vary else []  # the first call of batches() uses it

        def batches() -> Iterator[tuple[Any, Any]]:
            data = self.data.in_chunks(self.chunk) if self.resident is not None else self.data
            return map(self.data.place, second_pass.pop() if second_pass else data.pieces())

        check_mean(self, terms, first, moved_weights[0], batches)
        if may_vary:
            for unused_pass in second_pass:  # check_mean needed no batches
                for _ in unused_pass:
                    pass
            self.data.compare(sums, ordered=self.draws > 0 or self.data.loss_mixes_samples)
        if terms.count is not None or terms.by_batch:
            self.data.count_terms(terms)
            self.data.check_terms(self.data.terms)
        if self.data.has_nan:
            refuse_nan(self, terms, batches)

    def __repr__(self) -> str:
        loss = describe_loss(self.criterion).split(".")[-1]
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Problem({f'{self.name}: ' if self.name else ''}{type(self.model).__name__}, "
            f"{self.layout.size:,} parameters, {loss}, {self.samples:,} samples, {dtype} on {self.device})"
        )

    def _set_model(
        self, model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        if str(device) == "meta" or any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise InputError("model: it is on the device 'meta'; call to_empty, and load its weights")
        self.layout = Layout.of(model)
        if self.layout.size == 0:
            raise InputError("model: no trainable parameters; make some, or run one batch through it before")
        first = next(p for p in model.parameters() if p.requires_grad and p.numel())
        if any(p.is_complex() for p in model.parameters() if p.requires_grad):
            raise InputError("model: it has complex parameters, they must be real; use two real ones each")
        self.padding = layout.padding_rows(model, self.layout)
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        check_dtype(self.device, self.dtype)
        model.to(self.device, self.dtype)
        named = dict(model.named_parameters())
        self.weights = self.layout.flatten({s.name: named[s.name].detach() for s in self.layout.slots})
        self.model = layout.in_eval_mode(model)


def check_kinds(model: Any, loss: Any) -> None:
    """Raise InputError unless ``model`` is a module of known sizes, and ``loss`` a function or None."""
    if not isinstance(model, nn.Module):
        raise InputError("model", model, allowed="an nn.Module, which has the parameters")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model: a TorchScript module is not allowed; give the nn.Module it was made of")
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise InputError("model: it has lazy layers; run one batch through it before, by model(x)")
    if isinstance(loss, type) or not (loss is None or callable(loss)):
        raise InputError("loss", loss, allowed="a function, or None")


class Run(Protocol):
    """A run, which functions accept in place of its problem, such as a :class:`landscape.Checkpoint`."""

    def problem(self) -> Problem:
        """Return the run's problem: its model and training set, centered on w_a."""

    def about(self) -> Mapping[str, object]:
        """Return the run's label, split and file, which results keep."""


def problem_of(subject: Any, *, sharded: bool = False) -> Problem:
    """Return a problem, or the problem of a run.

    Args:
        subject: a problem or a run.
        sharded: whether a :class:`landscape.ShardedProblem` is allowed, too.

    Raises:
        InputError: another object.

    Example:
        >>> problem_of("last.h5")
        Traceback (most recent call last):
        landscape.core.errors.InputError: problem: 'last.h5' is not allowed, it must be a Problem or ...
    """
    kind = Problem | ShardedProblem if sharded else Problem
    return fit("problem", of_run(subject), Annotated[kind, "a Problem or a run"])


# Modules that act on each number by itself, so that inputs may have any dimensions.
ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Identity,
)  # fmt: skip


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a chain: the names of its weight and bias in the layout."""

    weight: str
    bias: str | None


Layer = LinearLayer | nn.Module


def chain(problem: Problem) -> list[Layer] | None:
    """Return the layers of a model that is a chain of linear layers and element-wise functions; else None.

    The first layer may be Flatten, which is not returned. The model must be an ``nn.Sequential`` itself (a
    subclass may have another forward pass), without hooks or parametrizations. Each parameter of θ must
    belong to one linear layer, which is used once. The inputs must be (N, features) or, with Flatten, (N, …),
    and the loss a sum or a mean over samples.
    """
    model, tensors = problem.model, problem.data.tensors
    if tensors is None or not problem.separable or type(model) is not nn.Sequential:
        return None
    for module in model.modules():
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        is_other_container = list(module.children()) and type(module) is not nn.Sequential
        if has_hooks or is_other_container:
            return None
    layers: list[Layer] = []
    leaves = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if not list(m.children())]
    for i, (name, module) in enumerate(leaves):
        if type(module) is nn.Flatten and i == 0 and (module.start_dim, module.end_dim) == (1, -1):
            continue
        if type(module) is nn.Linear:
            has_bias = module.bias is not None
            layers.append(LinearLayer(f"{name}.weight", f"{name}.bias" if has_bias else None))
        elif type(module) in ELEMENTWISE and not getattr(module, "inplace", False):
            layers.append(module)
        else:
            return None
    linear_layers = [layer for layer in layers if isinstance(layer, LinearLayer)]
    names = [name for layer in linear_layers for name in (layer.weight, layer.bias) if name]
    # The names differ from those of θ if a parameter is tied or frozen, or the nn.Sequential's own.
    if not linear_layers or sorted(names) != sorted(slot.name for slot in problem.layout.slots):
        return None
    inputs, _ = tensors
    _, first_layer = leaves[0]
    if type(first_layer) is not nn.Flatten and inputs.dim() != 2:
        return None
    return layers


def stacked_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean losses (K,) of K sets of outputs (K, C, B), each with its own targets (K, B, ...).

    The loss receives contiguous outputs (B, C), as from the network.
    """
    if is_softmax_loss(loss) and targets.dim() == 2 and targets.dtype == torch.int64:
        return F.cross_entropy(outputs, targets, reduction="none").mean(1)
    return torch.stack([loss(o.T.contiguous(), t) for o, t in zip(outputs, targets, strict=True)])
