"""Batches of any structure: tensors in nested tuples, lists and dicts, with the samples first."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from landscape.core.devices import kept_randomness, random_states
from landscape.core.errors import InputError, LandscapeError

T = TypeVar("T")

# Samples that a stream hands over at once (our choice: enough to hide that, few enough for a large network).
STREAM_BATCH = 64


# Models whose parameters must not be views of θ at any place: view_as_complex takes even ones only.
UNALIGNED: WeakSet[nn.Module] = WeakSet()


def attempt(function: Callable[..., T], *args: Any) -> T | None:
    """Call ``function(*args)``; None where the user's model or loss does not take such samples."""
    try:
        return function(*args)
    except LandscapeError:
        raise
    except Exception:  # they raise any kind of error
        return None


def tree_map(
    function: Callable[[Any], Tensor],
    tree: Any,
    kind: type = Tensor,
    replaced: dict[int, Tensor] | None = None,
) -> Any:
    """``tree`` with every tensor (or object of ``kind``) replaced; mappings become dicts, all else stays.

    A tensor that is in ``tree`` twice is replaced by one tensor: a loss may differentiate outputs in inputs
    that are its targets, too. ``replaced`` has those that were replaced already, by their id. (An inner
    function that calls itself would hold them until Python looks for cycles.)
    """
    replaced = {} if replaced is None else replaced
    if isinstance(tree, kind):
        if id(tree) not in replaced:
            replaced[id(tree)] = function(tree)
        return replaced[id(tree)]
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value, kind, replaced) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = (tree_map(function, value, kind, replaced) for value in tree)
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def as_tensors(tree: Any) -> Any:
    """``tree`` with NumPy arrays as tensors; an iterable that is no tuple, list or dict stays as it is."""
    return tree_map(torch.from_numpy, tree, np.ndarray)


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``tree``, each with where it is, such as "inputs['mask']" or "targets[1]"."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_tensors(value, f"{name}[{key!r}]")


def graph_nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the graph that ``tensors`` were computed by."""
    queue = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        new = {below for below, _ in node.next_functions if below is not None} - seen
        seen |= new
        queue += new


def leaves(value: Any) -> list[Tensor]:
    """The tensors that require gradients and that ``value`` was computed from."""
    tensors = [tensor for _, tensor in named_tensors(value)]
    variables = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    variables += [node.variable for node in graph_nodes(tensors) if hasattr(node, "variable")]
    return list({id(variable): variable for variable in variables}.values())


def opened(outputs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A model's outputs as a tree of tensors, and a function that makes outputs of such a tree again."""
    if isinstance(outputs, Mapping) and type(outputs) is not dict:
        return dict(outputs), lambda tree: type(outputs)(**tree)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        return dict(vars(outputs)), lambda tree: dataclasses.replace(outputs, **tree)
    return outputs, lambda tree: tree


def strided(tensor: Tensor) -> Tensor:
    """``tensor``, or the indices and values of a sparse one, such as the adjacency of a graph."""
    if tensor.layout is torch.strided:
        return tensor
    tensor = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    values = tensor.values()
    return torch.cat((tensor.indices().to(values), values[None]))


def clone(tree: Any) -> Any:
    """``tree`` with every tensor cloned."""
    return tree_map(lambda tensor: tensor.clone(), tree)


def take(tree: Any, index: Any) -> Any:
    """``tensor[index]`` for every tensor of ``tree``."""
    return tree_map(lambda tensor: tensor[index], tree)


def concatenate(trees: Sequence[Any]) -> Any:
    """The samples of all ``trees``, which have one structure, in one; what is no tensor is the first's.

    InputError for tensors whose samples differ in shape.
    """
    first = trees[0]
    if isinstance(first, Tensor):
        shapes = dict.fromkeys(tuple(tree.shape[1:]) for tree in trees)
        if len(shapes) > 1:
            a, b, *_ = shapes
            raise InputError(f"data: its batches have samples of shapes {a} and {b}; pad all to one length")
        return torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [concatenate(part) for part in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def aligned(model: nn.Module, views: Iterable[Tensor]) -> list[Tensor]:
    """``views`` of flat vectors, or copies of them for a model that takes no views at odd places."""
    return [view.clone() for view in views] if model in UNALIGNED else list(views)


AGAIN = (
    "model: it computes outputs again in its backward pass (activation checkpointing), with the module's own "
    "parameters, so that this gradient would be that of other weights; switch that off (the problem's "
    "gradient, eigenvalues, trace, density and spectrum do not need it)"
)


def recomputes(model: nn.Module, seen: bool = False) -> bool:
    """Return whether a backward pass computes outputs again; ``seen``: that it does, for its copies, too."""
    if seen:
        model._landscape_recomputes = True  # type: ignore[assignment]
    return "_landscape_recomputes" in vars(model)


def _everywhere(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` by the name of each place that holds the parameter or buffer, each module counted once.

    functional_call's own ``tie_weights`` replaces twice in a module that is used twice, and what it sets back
    afterwards is its own replacement, which stays in the user's model (PyTorch 2.13).
    """
    tensors_by_place = {
        f"{prefix}.{key}" if prefix else key: tensor
        for prefix, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    new = {id(tensors_by_place[name]): tensor for name, tensor in tensors.items()}
    return {name: new[id(tensor)] for name, tensor in tensors_by_place.items() if id(tensor) in new}


def call(model: nn.Module, weights: dict[str, Tensor], x: Any) -> Any:
    """The model's outputs with ``weights`` in place of its parameters, differentiable in them.

    A dict x is passed as ``model(**x)``, a tuple or list as ``model(*x)``, anything else as ``model(x)``.
    InputError for gradients of a model that computes outputs again in its backward pass.
    """
    if recomputes(model) and torch.is_grad_enabled() and any(w.requires_grad for w in weights.values()):
        raise InputError(AGAIN)
    if torch.nn.utils.parametrize._cache_enabled:
        raise InputError("torch.nn.utils.parametrize.cached: make the call outside of it")
    weights = _everywhere(model, dict(zip(weights, aligned(model, weights.values()), strict=True)))
    args = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    kwargs = dict[str, Any]()
    if isinstance(x, Mapping):
        args, kwargs = (), dict(x)
    try:
        return functional_call(model, weights, args, kwargs, tie_weights=False)
    except RuntimeError as error:
        if model in UNALIGNED or "storage_offset" not in str(error):
            raise
    UNALIGNED.add(model)
    return call(model, weights, x)


def own_outputs(problem: Any, x: Any) -> Any:
    """The outputs of a problem's model with the weights that the module itself has (:func:`.placed`)."""
    if recomputes(problem.model) and problem.batchnorm.buffers:
        raise InputError("bn: only 'center' is allowed with activation checkpointing; switch that off")
    return call(problem.model, dict(problem.batchnorm.buffers), x)


# For those who have several inputs, or inputs alone.
FORMS = ", such as ((a, b), targets) of two inputs; (x, x) where the targets are the inputs"


def is_resident(data: Any) -> bool:
    """Return whether ``data`` is the data itself, samples first, and not an iterable of batches of it.

    It is where it is a dict, a tuple of two, or a list of two tensors. Raises InputError for one tensor, and
    for a tuple of two pairs that may as well be two batches.
    """
    if isinstance(data, Tensor):
        raise InputError(f"data: one tensor is not allowed, it must be (inputs, targets){FORMS}")
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if pair and isinstance(data, tuple) and (kinds := _kinds(data[0])) and kinds == _kinds(data[1]):
        raise InputError(
            "data: two pairs in a tuple may be two batches; give batches in a list, inputs in a dict"
        )
    return isinstance(data, Mapping) or (
        pair and (isinstance(data, tuple) or all(isinstance(part, Tensor) for part in data))
    )


def _kinds(pair: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """The kinds of number and the shapes of the samples of a pair of tensors; [] of anything else."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return []
    kinds = [(t.dtype, t.shape[1:]) for t in pair if isinstance(t, Tensor) and t.dim()]
    return kinds if len(kinds) == 2 else []


def split(batch: Any, model_has_loss: bool) -> tuple[Any, Any]:
    """(inputs, targets) of a batch: a pair, or one dict as Hugging Face's collators make them.

    Of a dict the targets are its "labels", or all of it where it has none. With ``model_has_loss`` the model
    computes its loss from the labels, which are then inputs, too; otherwise the model does not receive them.
    Nor the number by which a trainer has it divide the sum over a step's labels: it takes their mean.
    """
    if isinstance(batch, Mapping):
        batch = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
        labels = batch.get("labels")
        if labels is None or model_has_loss:
            return batch, dict(batch) if labels is None else labels
        return {key: value for key, value in batch.items() if key != "labels"}, labels
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    what = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise InputError(f"data: a batch is a {what}, it must be (inputs, targets) or a dict{FORMS}")


def count_samples(x: Any, y: Any, *, alike: bool, remedy: str = "") -> int:
    """The number of samples of a batch: the length of its first tensor, of the targets where they have one.

    With ``alike``, InputError unless all tensors are of that length; ``remedy``: code that makes a batch of
    those which are not, as of a graph's nodes and edges.
    """
    tensors = [*named_tensors(y, "targets"), *named_tensors(x, "inputs")]
    lone = bool(tensors) and tensors[0][1].dim() == 0
    if not tensors and hasattr(y, "__dict__") and not alike:
        return 1  # an object, such as a graph, that is inputs and targets
    if not tensors or lone or isinstance(y, (bool, int, float)):
        what = f"a single number as {tensors[0][0] if lone else 'targets'}" if tensors else "no tensor"
        raise InputError(f"data: a batch holds {what}, not tensors with samples first; use DataLoader(…)")
    first, length = tensors[0][0], len(tensors[0][1])
    per_image = isinstance(y, list) and bool(y) and all(isinstance(entry, Mapping) for entry in y)
    if per_image:  # the objects of each image, of which tensors hold any number
        first, length = "targets", len(y)
    for name, tensor in tensors if alike else ():
        if per_image or tensor.dim() == 0 or len(tensor) != length or tensor.layout is not torch.strided:
            size = f"{len(tensor) if tensor.dim() else 'no'} samples"
            if tensor.layout is not torch.strided:
                size = f"a {str(tensor.layout).removeprefix('torch.')} tensor (.to_dense() makes a plain one)"
            graph = ", or, as of a graph, be in a list of one batch" if remedy else ""
            raise InputError(
                f"data: {name}: {size}, but {first}: {length} samples; all must hold each sample once{graph}",
                remedy=remedy,
            )
    return length


class Stream(ABC):
    """Samples too many to lie on the device, each of which can be fetched when it is used.

    Iterating gives batches (x, y) of all ``samples``, each once, always in the same order.
    """

    samples: int
    #: The targets of all samples, where they are known without reading the samples.
    labels: Tensor | None = None

    @abstractmethod
    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """(x, y) of the samples ``indices`` (B,), repeats allowed."""

    @abstractmethod
    def part(self, rows: slice) -> Stream:
        """The stream of those samples alone."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for indices in torch.split(torch.arange(self.samples), STREAM_BATCH):
            yield self.gather(indices)


@dataclass(frozen=True)
class HostStream(Stream):
    """A stream of ``x`` and ``y`` (tensors, or what holds them) in host memory."""

    x: Any
    y: Any
    samples: int

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        return take(self.x, indices), take(self.y, indices)

    def part(self, rows: slice) -> Stream:
        return HostStream(take(self.x, rows), take(self.y, rows), len(range(self.samples)[rows]))


def random_state(device: torch.device) -> tuple[bytes, Any]:
    """The states of PyTorch's generators, also of that on ``device``, and of NumPy's and Python's."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    elsewhere = numpy[1].tobytes(), numpy[2:], random.getstate()
    return torch.cat(random_states(device)).numpy().tobytes(), elsewhere


@contextlib.contextmanager
def fixed_randomness(device: torch.device, seed: int | None, elsewhere: bool) -> Iterator[None]:
    """Random numbers drawn inside come from ``seed``, and PyTorch's own state is as before afterwards.

    So do those of NumPy and of Python, if something is drawn ``elsewhere``. None leaves everything as it is.
    """
    if seed is None:
        yield
        return
    with kept_randomness(device), contextlib.ExitStack() as stack:
        if elsewhere:
            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
            stack.callback(random.setstate, random.getstate())
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes as long as a small network's pass
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        yield


@contextlib.contextmanager
def quiet(model: nn.Module, device: torch.device) -> Iterator[None]:
    """No advice of cuDNN's recurrent layers to compact weights, which are those of the pass here."""
    if device.type == "cpu" or not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield
