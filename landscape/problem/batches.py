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

# Samples in a batch of a stream (our choice: enough to hide the cost of a batch, few enough for any network).
STREAM_BATCH = 64


# Models whose parameters cannot be views at odd offsets of θ: view_as_complex needs an even offset.
UNALIGNED: WeakSet[nn.Module] = WeakSet()


def attempt(function: Callable[..., T], *args: Any) -> T | None:
    """Return ``function(*args)``, or None if the user's model or loss raises an error for these samples."""
    try:
        return function(*args)
    except LandscapeError:
        raise
    except Exception:  # a user's model and loss raise any kind of error
        return None


def tree_map(
    function: Callable[[Any], Tensor], tree: Any, kind: type = Tensor, memo: dict[int, Tensor] | None = None
) -> Any:
    """Return ``tree`` with ``function(tensor)`` in place of each tensor; mappings become dicts.

    If a tensor occurs several times, the same new tensor replaces it each time. This matters for inputs that
    are also targets, if the loss differentiates by them.

    Args:
        function: a function of a tensor.
        tree: tensors in nested tuples, lists and mappings; other objects stay as they are.
        kind: the type of objects to replace.
        memo: the new tensors by the ids of the old ones; only the recursive calls give it.
    """
    # A nested function that calls itself would be a reference cycle, which keeps the tensors in memory.
    memo = {} if memo is None else memo
    if isinstance(tree, kind):
        if id(tree) not in memo:
            memo[id(tree)] = function(tree)
        return memo[id(tree)]
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value, kind, memo) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = (tree_map(function, value, kind, memo) for value in tree)
        is_named_tuple = hasattr(tree, "_fields")
        return type(tree)(*values) if is_named_tuple else type(tree)(values)
    return tree


def as_tensors(tree: Any) -> Any:
    """Return ``tree`` with tensors in place of NumPy arrays."""
    return tree_map(torch.from_numpy, tree, np.ndarray)


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``tree`` with their places, such as "inputs['mask']" or "targets[1]"."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_tensors(value, f"{name}[{key!r}]")


def graph_nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of autograd's graph of ``tensors``."""
    queue = [t.grad_fn for t in tensors if t.grad_fn is not None]
    visited = set(queue)
    while queue:
        node = queue.pop()
        yield node
        inputs = {input_node for input_node, _ in node.next_functions if input_node is not None}
        queue += inputs - visited
        visited |= inputs


def leaves(value: Any) -> list[Tensor]:
    """Return the leaf tensors with gradients in autograd's graph of ``value``, without repeats."""
    tensors = [tensor for _, tensor in named_tensors(value)]
    variables = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    variables += [node.variable for node in graph_nodes(tensors) if hasattr(node, "variable")]
    return list({id(variable): variable for variable in variables}.values())


def opened(outputs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model's outputs as a tree of tensors, and a function that makes outputs from such a tree."""
    if isinstance(outputs, Mapping) and type(outputs) is not dict:
        return dict(outputs), lambda tree: type(outputs)(**tree)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        return dict(vars(outputs)), lambda tree: dataclasses.replace(outputs, **tree)
    return outputs, lambda tree: tree


def strided(tensor: Tensor) -> Tensor:
    """Return a plain tensor unchanged, and a sparse one as its indices and values."""
    if tensor.layout is torch.strided:
        return tensor
    tensor = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    values = tensor.values()
    return torch.cat((tensor.indices().to(values), values[None]))


def has_changed(before: Any, after: Any) -> bool:
    """Return whether any tensor of ``after`` has other numbers than its original in ``before``."""
    pairs = zip(named_tensors(before), named_tensors(after), strict=True)
    return not all(torch.equal(strided(a).nan_to_num(), strided(b).nan_to_num()) for (_, a), (_, b) in pairs)


def clone(tree: Any) -> Any:
    """Return ``tree`` with a clone of every tensor."""
    return tree_map(lambda tensor: tensor.clone(), tree)


def take(tree: Any, index: Any) -> Any:
    """Return ``tree`` with ``tensor[index]`` in place of every tensor."""
    return tree_map(lambda tensor: tensor[index], tree)


def concatenate(trees: Sequence[Any]) -> Any:
    """Return one tree with the samples of all ``trees``, which have the same structure.

    An object that is no tensor is taken from the first tree. Raises InputError if samples differ in shape.
    """
    first = trees[0]
    if isinstance(first, Tensor):
        shapes = list(dict.fromkeys(tuple(tree.shape[1:]) for tree in trees))
        if len(shapes) > 1:
            words = f"its batches have samples of shapes {shapes[0]} and {shapes[1]}"
            raise InputError(f"data: {words}; pad all to one length")
        return torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [concatenate(items_of_trees) for items_of_trees in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def aligned(model: nn.Module, views: Iterable[Tensor]) -> list[Tensor]:
    """Return ``views`` of flat vectors, or clones of them for a model in UNALIGNED."""
    return [view.clone() for view in views] if model in UNALIGNED else list(views)


OUTPUTS_ARE_RECOMPUTED = (
    "model: it computes outputs again in its backward pass (activation checkpointing), with the module's own "
    "parameters, so that this gradient would be that of other weights; switch that off (the problem's "
    "gradient, eigenvalues, trace, density and spectrum do not need it)"
)


def mark_as_recomputing(model: nn.Module) -> None:
    """Record for :func:`recomputes`, in a model and its later copies, that it computes outputs again."""
    model._landscape_recomputes = True  # type: ignore[assignment]


def recomputes(model: nn.Module) -> bool:
    """Return whether a backward pass of a model computes outputs again, as activation checkpointing does."""
    return "_landscape_recomputes" in vars(model)


def _by_all_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` under all names of tied parameters and buffers.

    A module that is used twice counts once. The option ``tie_weights`` of functional_call does not serve: it
    replaces a tensor of such a module twice, and then leaves its own replacement in the user's model (PyTorch
    2.13).
    """
    tensors_by_place = {
        f"{prefix}.{key}" if prefix else key: tensor
        for prefix, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    new = {id(tensors_by_place[name]): tensor for name, tensor in tensors.items()}
    return {name: new[id(tensor)] for name, tensor in tensors_by_place.items() if id(tensor) in new}


def call(model: nn.Module, weights: dict[str, Tensor], x: Any) -> Any:
    """Return the model's outputs with ``weights`` in place of its parameters, differentiable in them.

    A dict x is passed as ``model(**x)``, a tuple or list as ``model(*x)``, any other object as ``model(x)``.
    Raises InputError if gradients are recorded and the model computes outputs again in its backward pass.
    """
    if recomputes(model) and torch.is_grad_enabled() and any(w.requires_grad for w in weights.values()):
        raise InputError(OUTPUTS_ARE_RECOMPUTED)
    if torch.nn.utils.parametrize._cache_enabled:
        raise InputError("torch.nn.utils.parametrize.cached: make the call outside of it")
    weights = _by_all_names(model, dict(zip(weights, aligned(model, weights.values()), strict=True)))
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
    """Return the outputs of a problem's model with the module's own parameters (see :func:`.placed`)."""
    if recomputes(problem.model) and problem.batchnorm.buffers:
        raise InputError("bn: only 'center' is allowed with activation checkpointing; switch that off")
    return call(problem.model, dict(problem.batchnorm.buffers), x)


# Keys of a dict that probably hold its targets, which are tried first (our choice).
TARGETS = ("label", "target", "targets", "y", "class", "classes")


def other_forms(x: Any, y: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield other forms of the data (x, y): a description in words, the inputs and the targets."""
    if isinstance(x, (Mapping, tuple, list)):
        yield f"the model takes one {type(x).__name__}: give data as ((inputs,), targets)", (x,), y
    # For a dict d without "labels", y is d itself: one of the other entries may hold the targets.
    keys = list(x)[::-1] if isinstance(x, Mapping) and isinstance(y, Mapping) else []
    for target_key in sorted(keys, key=lambda key: key not in TARGETS):
        words, end = "a dict d without 'labels' has no targets: give", f"d[{target_key!r}])"
        inputs, targets = {key: value for key, value in x.items() if key != target_key}, x[target_key]
        codes = [f"d[{key!r}]" for key in inputs]
        if len(inputs) == 1:
            yield f"{words} ({codes[0]}, {end}", *inputs.values(), targets
        items = ", ".join(f"{key!r}: d[{key!r}]" for key in inputs)
        yield f"{words} ({{{items}}}, {end}", inputs, targets
        yield f"{words} (({', '.join(codes)}), {end}", tuple(inputs.values()), targets
        yield f"{words} ((d,), {end}", (x,), targets


# The end of messages, for users with several inputs, or with inputs only.
FORMS = ", such as ((a, b), targets) of two inputs; (x, x) where the targets are the inputs"


def is_resident(data: Any) -> bool:
    """Return whether ``data`` is all samples in one, as (inputs, targets), and no iterable of batches.

    A dict, a tuple of two, and a list of two tensors are. Raises InputError for one tensor, and for a tuple
    of two pairs, which could also be two batches.
    """
    if isinstance(data, Tensor):
        raise InputError(f"data: one tensor is not allowed, it must be (inputs, targets){FORMS}")
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return isinstance(data, Mapping)
    if isinstance(data, list):
        return all(isinstance(item, Tensor) for item in data)
    if (types := _types_of_pair(data[0])) and types == _types_of_pair(data[1]):
        words = "two pairs in a tuple may be two batches; give batches in a list, inputs in a dict"
        raise InputError(f"data: {words}")
    return True


def _types_of_pair(pair: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """Return the dtypes and the shapes of samples of a pair of tensors; [] for any other object."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return []
    types = [(t.dtype, t.shape[1:]) for t in pair if isinstance(t, Tensor) and t.dim()]
    return types if len(types) == 2 else []


def split(batch: Any, model_has_loss: bool) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch: a pair, or one dict, as from a collator of Hugging Face.

    The targets of a dict are its "labels", or the whole dict if it has none. With ``model_has_loss`` the
    model computes its loss from the labels, which then stay among the inputs. The entry "num_items_in_batch"
    is removed: with it, a model would divide by a trainer's number of labels, and not return a mean.
    """
    if isinstance(batch, Mapping):
        batch = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
        labels = batch.get("labels")
        if labels is None or model_has_loss:
            return batch, dict(batch) if labels is None else labels
        return {key: value for key, value in batch.items() if key != "labels"}, labels
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    words = f"a batch is a {type(batch).__name__}{length}, it must be (inputs, targets) or a dict{FORMS}"
    raise InputError(f"data: {words}")


def count_samples(x: Any, y: Any, *, equal_lengths: bool = False, remedy: str = "") -> int:
    """Return the number of samples of a batch.

    The number is the length of the first tensor of the targets. If the targets have no tensor, it is the
    length of the first tensor of the inputs. If the targets are a list with one dict for each image, it is
    the length of the list. If inputs and targets hold no tensor, and the targets are an object such as a
    graph, it is 1 (unless ``equal_lengths``).

    Args:
        x, y: inputs and targets.
        equal_lengths: whether InputError is raised for a tensor of another length.
        remedy: code that this InputError recommends. The code puts all data into a list of one batch, in
            which tensors may differ in length, as the nodes and edges of a graph do. "" for no such code.
    """
    tensors = [*named_tensors(y, "targets"), *named_tensors(x, "inputs")]
    if not tensors and hasattr(y, "__dict__") and not equal_lengths:
        return 1
    needed = "it needs tensors with the samples along axis 0; use DataLoader(…)"
    if not tensors:
        raise InputError(f"data: a batch holds no tensor, {needed}")
    counted_name, counted_tensor = tensors[0]
    # A tensor without dimensions holds no samples, and neither do targets that are a Python number.
    if counted_tensor.dim() == 0 or isinstance(y, (bool, int, float)):
        number_name = counted_name if counted_tensor.dim() == 0 else "targets"
        raise InputError(f"data: a batch holds a single number as {number_name}, {needed}")
    length = len(counted_tensor)
    is_list_of_images = isinstance(y, list) and bool(y) and all(isinstance(entry, Mapping) for entry in y)
    if is_list_of_images:  # an image's tensors have a row for each of its objects, such as boxes
        counted_name, length = "targets", len(y)
    if not equal_lengths:
        return length
    for name, tensor in tensors:
        is_sparse = tensor.layout is not torch.strided
        # A list of images is refused: take() would index the rows of each image's tensors, not the images.
        if is_list_of_images or tensor.dim() == 0 or len(tensor) != length or is_sparse:
            actual = f"{len(tensor) if tensor.dim() else 'no'} samples"
            if is_sparse:
                layout = str(tensor.layout).removeprefix("torch.")
                actual = f"a {layout} tensor (.to_dense() makes a plain one)"
            or_list = ", or be in a list of one batch (as for a graph)" if remedy else ""
            words = (
                f"{actual}, but {counted_name}: {length} samples; all must have one row per sample{or_list}"
            )
            raise InputError(f"data: {name}: {words}", remedy=remedy)
    return length


class Stream(ABC):
    """Samples that do not fit on the device, and are read when they are used.

    Iteration yields batches (x, y) of all samples, each once, always in the same order.

    Attributes:
        samples: the number of samples.
    """

    samples: int
    #: The targets of all samples, if they are known without reading the samples; else None.
    labels: Tensor | None = None

    @abstractmethod
    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """Return (x, y) of the samples ``indices`` (B,), repeats allowed."""

    @abstractmethod
    def part(self, rows: slice) -> Stream:
        """Return a stream of the samples ``rows`` only."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for indices in torch.split(torch.arange(self.samples), STREAM_BATCH):
            yield self.gather(indices)


@dataclass(frozen=True)
class HostStream(Stream):
    """A stream of inputs ``x`` and targets ``y`` (tensors, or trees of them) in host memory."""

    x: Any
    y: Any
    samples: int

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        return take(self.x, indices), take(self.y, indices)

    def part(self, rows: slice) -> Stream:
        return HostStream(take(self.x, rows), take(self.y, rows), len(range(self.samples)[rows]))


def random_state(device: torch.device) -> tuple[bytes, Any]:
    """Return (the state of PyTorch's generators, the states of NumPy's and Python's generators)."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    elsewhere = numpy[1].tobytes(), numpy[2:], random.getstate()
    return torch.cat(random_states(device)).numpy().tobytes(), elsewhere


@contextlib.contextmanager
def fixed_randomness(device: torch.device, seed: int | None, elsewhere: bool) -> Iterator[None]:
    """Return a context whose random numbers come from ``seed``, and which restores the generators' states.

    It sets PyTorch's generators, and with ``elsewhere`` also those of NumPy and Python. A seed of None
    changes nothing.
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
        torch.default_generator.manual_seed(seed)  # torch.manual_seed is as slow as a small network's pass
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        yield


@contextlib.contextmanager
def quiet(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Return a context without cuDNN's warning that weights of recurrent layers are not contiguous.

    They are views of θ, and new ones in each pass.
    """
    if device.type == "cpu" or not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield
