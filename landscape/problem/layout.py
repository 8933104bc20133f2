"""The parameters of a module as one flat vector θ of P numbers, and back, by named slices."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core.errors import InputError, first_words
from landscape.core.options import near

Array = np.ndarray[Any, Any]
# The remedy for a model that runs in one precision.
FOLLOW = "let its forward pass follow the dtype of its weights, x.to(self.weight.dtype)"
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def gradients(
    outputs: Any, inputs: Sequence[Tensor], grad_outputs: Any = None, *, keep: bool = False
) -> list[Tensor]:
    """Return the gradients of ``outputs`` by ``inputs``; zero for an input without influence.

    ``keep``: whether to keep the graph of the outputs. The gradients are detached, because PyTorch up to 2.6
    returns zeros that require gradients.
    """
    if isinstance(outputs, Tensor):
        differentiable(outputs)
    with of_a_whole_graph():
        parts = torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep, materialize_grads=True)
    return [part.detach() for part in parts]


def backward(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the :func:`gradients` of a loss by its ``backward()``, and reset ``grad`` of the inputs.

    Reentrant activation checkpointing does not allow ``torch.autograd.grad``.
    """
    with of_a_whole_graph():
        differentiable(loss).backward()  # type: ignore[no-untyped-call]
    parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    return parts


@contextlib.contextmanager
def of_a_whole_graph() -> Iterator[None]:
    """Return a context that raises InputError if model or loss freed the graph by a gradient of its own."""
    try:
        yield
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        words = "model or loss: it takes a gradient that frees the graph; give create_graph=True"
        raise InputError(words) from error


def differentiable(loss: Tensor) -> Tensor:
    """Return ``loss``; raise InputError if it has no gradient."""
    if not loss.requires_grad:
        check_recording()
        raise InputError("loss: it has no gradient (accuracy, detach); use it in losses and contours alone")
    return loss


def check_recording() -> None:
    """Raise InputError inside of torch.inference_mode, which allows no gradients."""
    if torch.is_inference_mode_enabled():
        raise InputError("torch.inference_mode: nothing has a derivative inside of it; call outside of it")


def as_array(tensor: Tensor) -> Array:
    """Return ``tensor`` as a NumPy array, bfloat16 as float32, because NumPy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside (Decentralized/Distributed)DataParallel and torch.compile.

    This package's wrappers have the module as ``wrapped_module``.
    """
    while True:
        inner = getattr(module, "_orig_mod", None) or getattr(module, "wrapped_module", None)
        if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


# The attributes that every module has.
ATTRIBUTES_OF_ALL_MODULES = vars(nn.Module()).keys()


def copies_of_computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return copies, by id, of tensors that a pass left as attributes: deepcopy() refuses such tensors."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    return {id(t): t.detach().clone() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}


def independent_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that allows second derivatives: without torch.compile and sparse gradients.

    Tensors that a forward pass left as attributes, such as the weights of spectral_norm, are copied by value.
    Cached properties are left out. A model in which a module has a train() or eval() of its own is put in
    training mode, which undoes what the module's eval() did to its parameters.
    """
    try:
        # For a tensor whose id is in ``memo``, deepcopy() takes the copy from ``memo``.
        copied = copy.deepcopy(model, memo=copies_of_computed_tensors(model))
    except Exception as error:  # objects in the user's module raise any kind of error
        reason = f"{type(error).__name__}: {first_words(error, 200)}"
        raise InputError(f"model: it cannot be copied ({reason})") from error
    if any(has_own_mode(module) and not module.training for module in copied.modules()):
        with contextlib.suppress(NotImplementedError):  # exported programs have no training mode
            copied.train()
    uses = Counter(id(p) for _, p in copied.named_parameters(remove_duplicate=False))
    for parent in list(copied.modules()):
        for name in vars(parent).keys() - ATTRIBUTES_OF_ALL_MODULES:
            if isinstance(getattr(type(parent), name, None), cached_property):
                delattr(parent, name)
        for name, child in list(parent.named_children()):
            if unwrapped(child) is not child:
                setattr(parent, name, unwrapped(child))
        if isinstance(parent, (nn.Embedding, nn.EmbeddingBag)):
            parent.sparse = False
        if type(parent) is nn.Embedding and uses[id(parent.weight)] > 1:
            parent.padding_idx = None  # the padding row of a tied matrix has a gradient, from the other layer
        if getattr(parent, "_compiled_call_impl", None) is not None:
            parent._compiled_call_impl = None
    return copied


def has_own_mode(module: nn.Module) -> bool:
    """Return whether a module has a train() or eval() of its own, which may merge or cache parameters."""
    pairs = (module.train, nn.Module.train), (module.eval, nn.Module.eval)
    return any(getattr(method, "__func__", None) is not plain for method, plain in pairs)


def in_eval_mode(model: nn.Module, training: Collection[str] = ()) -> nn.Module:
    """Put ``model`` in eval mode, and return it.

    The modules named in ``training`` (but not the modules inside them) are put in training mode, in which a
    module computes with its parameters, and not with numbers that its eval() computed from them.
    """
    model.eval()  # its result is not used: a module's own train() may return None
    for name in training:
        model.get_submodule(name).train()
    for name, module in model.named_modules():
        if training and name not in training:
            module.training = False
        # Without dropout both modes are one function, but cuDNN has a backward pass in training mode only.
        if isinstance(module, nn.RNNBase) and not module.dropout:
            module.train()
    return model


#: How parameters are grouped, see :meth:`Layout.groups`.
GROUPINGS = ("block", "layer", "parameter")


def _group_of(name: str, by: str) -> str:
    """Return the name of the group of the parameter ``name``, by one of GROUPINGS."""
    names = name.split(".")
    if by == "parameter" or len(names) == 1:
        return name
    for i, component in enumerate(names):
        if by == "block" and component.isdigit():
            return ".".join(names[: i + 1])
    return ".".join(names[:-1])


@dataclass(frozen=True)
class Slot:
    """The place of one parameter tensor in θ: ``theta[offset:offset + size].view(shape)``.

    Attributes:
        name, shape: the parameter's name and shape.
        offset, size: the index of its first number in θ, and the number of its numbers.
        role: "norm" for a parameter of a normalization layer, "bias" for any other tensor of at most one
            dimension, else "weight". Filter normalization distinguishes them.
        layer: "embedding" for a parameter of an embedding, "head" for one of the last layer with a matrix,
            else ""; files do not contain it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    role: str
    layer: str = field(default="", compare=False)

    @property
    def place(self) -> slice:
        """The parameter's slice of θ."""
        return slice(self.offset, self.offset + self.size)


def cut(vectors: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Return the numbers of ``slots`` in vectors (..., P), as (..., P')."""
    return torch.cat([vectors[..., slot.place] for slot in slots], -1)


def put(vectors: Tensor, slots: Sequence[Slot], numbers: Tensor) -> Tensor:
    """Write ``numbers`` (..., P') to ``slots`` of ``vectors`` (..., P), in place, and return the vectors."""
    for slot, slot_numbers in zip(slots, torch.split(numbers, [s.size for s in slots], -1), strict=True):
        vectors[..., slot.place] = slot_numbers
    return vectors


@dataclass(frozen=True)
class Layout:
    """The order of a module's parameters in θ. Tied parameters appear once, frozen ones not at all."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of the trainable parameters of ``module``, in ``named_parameters`` order."""
        norm_names = set[str]()
        for prefix, layer in module.named_modules():
            if isinstance(layer, NORM_LAYERS):
                norm_names |= {name for name, _ in layer.named_parameters(prefix, recurse=False)}
        slots, offset, layers = [], 0, _layers(module)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            role = "bias" if parameter.dim() <= 1 else "weight"
            if name in norm_names:
                role = "norm"
            layer, shape = layers.get(id(parameter), ""), tuple(parameter.shape)
            slots.append(Slot(name, shape, offset, parameter.numel(), role, layer))
            offset += parameter.numel()
        return cls(tuple(slots))

    @cached_property
    def size(self) -> int:
        """P, the number of scalars in θ."""
        return sum(slot.size for slot in self.slots)

    def select(self, part: str | Sequence[str] | None) -> tuple[Slot, ...]:
        """Return the slots of a part of the parameters, in the order of θ.

        Args:
            part: a parameter's name ("1.weight"), a prefix that ends before a dot ("1"), or a list of these;
                None for all parameters.

        Raises:
            InputError: a name that fits no parameter.
        """
        if part is None:
            return self.slots
        selected: set[Slot] = set()
        for name in [part] if isinstance(part, str) else part:
            slots = {s for s in self.slots if s.name == name or s.name.startswith(f"{name}.")}
            if not slots:
                hint = near(name, [s.name for s in self.slots])
                names = ", ".join(dict.fromkeys(s.name.split(".")[0] for s in self.slots))
                allowed = f"names such as {self.slots[0].name}, prefixes such as {names}"
                raise InputError(f"part: '{name}' is no trainable parameter{hint} (allowed: {allowed})")
            selected |= slots
        if not selected:
            raise InputError("part: an empty list is not allowed, it must name at least one parameter")
        return tuple(slot for slot in self.slots if slot in selected)

    def groups(self, by: str | Sequence[str]) -> dict[str, tuple[Slot, ...]]:
        """Return a dict of groups of slots, by name. The slots of one group are in the order of θ.

        Args:
            by: "parameter": each slot is a group. "layer": the slots of one module are a group. "block": the
                slots inside the outermost module whose name ends in a number, such as "h.3", are a group;
                slots outside of such modules are grouped by "layer". Or names, prefixes and patterns such as
                "*.bias": each slot belongs to the first of these that fits, and the remaining slots belong to
                the group "others".

        Raises:
            InputError: a pattern without a slot.
        """
        groups: dict[str, tuple[Slot, ...]] = {}
        if isinstance(by, str) and by in GROUPINGS:
            for slot in self.slots:
                name = _group_of(slot.name, by)
                groups[name] = (*groups.get(name, ()), slot)
            return groups
        remaining = list(self.slots)
        patterns = [by] if isinstance(by, str) else by
        for pattern in dict.fromkeys(patterns):
            prefix = f"{pattern}."
            slots = tuple(s for s in remaining if fnmatchcase(s.name, pattern) or s.name.startswith(prefix))
            if not slots:
                names = ", ".join(dict.fromkeys(_group_of(s.name, "block") for s in self.slots))
                allowed = f"{', '.join(GROUPINGS)}; or names, prefixes and patterns, such as {names}"
                words = f"'{pattern}' fits no trainable parameter that is left (allowed: {allowed})"
                raise InputError(f"by: {words}")
            groups[pattern] = slots
            remaining = [slot for slot in remaining if slot not in slots]
        if remaining:
            groups["others"] = tuple(remaining)
        return groups

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Return views of ``weights`` (..., P) in the parameters' shapes (..., *shape), by name.

        Raises InputError for weights of another model.
        """
        if weights.shape[-1:] != (self.size,):
            raise InputError(f"weights: shape {tuple(weights.shape)}, the last size must be P = {self.size}")
        lead = weights.shape[:-1]
        return {s.name: weights[..., s.place].view((*lead, *s.shape)) for s in self.slots}

    def leaves(self, weights: Tensor) -> dict[str, Tensor]:
        """Return :meth:`views` of ``weights`` (..., P) as leaves that require gradients."""
        return {name: view.detach().requires_grad_() for name, view in self.views(weights).items()}

    def flatten(self, tensors: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """Return one tensor (..., P) from named ones with ``lead`` leading dimensions; inverts views."""
        return torch.cat([tensors[s.name].flatten(start_dim=lead) for s in self.slots], dim=-1)


def _layers(module: nn.Module) -> dict[int, str]:
    """Return "embedding" or "head" by the id of a parameter; one of both is in "embedding"."""
    heads, embeddings = dict[int, str](), dict[int, str]()
    for submodule in module.modules():
        ids = [id(parameter) for parameter in submodule.parameters(recurse=False)]
        if any(parameter.dim() > 1 for parameter in submodule.parameters(recurse=False)):
            heads = dict.fromkeys(ids, "head")  # the last one remains
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)):
            embeddings |= dict.fromkeys(ids, "embedding")
    return heads | embeddings


def padding_rows(module: nn.Module, layout: Layout) -> tuple[slice, ...]:
    """Return the places in θ of the padding rows of embeddings, which are no directions of θ.

    They have no gradient, so that training never moves them. A matrix that is tied to another layer has no
    padding row: it has that layer's gradient there.
    """
    uses = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    offsets = {slot.name: slot.offset for slot in layout.slots}
    rows = []
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.padding_idx is not None:
            offset = offsets.get(f"{name}.weight" if name else "weight")
            if offset is not None and uses.count(id(layer.weight)) == 1:
                first = offset + layer.padding_idx * layer.embedding_dim
                rows.append(slice(first, first + layer.embedding_dim))
    return tuple(rows)


A_VECTOR = (
    "a vector (P,) of floating-point numbers; that of a model is problem.layout.flatten(model.state_dict())"
)
#: θ, as an argument.
Vector = Annotated[Tensor, A_VECTOR]


def vector_of(weights: Any, like: Tensor, name: str = "weights") -> Tensor:
    """Return a user's argument ``name`` as θ (P,), with dtype and device of ``like``; None means ``like``.

    Raises InputError for an argument that is no vector (P,).
    """
    if weights is None or weights is like:
        return like
    vector = weights
    if isinstance(weights, np.ndarray) and weights.dtype.kind in "fiu":
        vector = torch.as_tensor(weights)
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        kind = f"{weights.dtype} vector" if isinstance(vector, Tensor) else type(weights).__name__
        raise InputError(f"{name}: a {kind} is not allowed, it must be {A_VECTOR}")
    if vector.shape != like.shape:
        raise InputError(f"{name}: shape {tuple(vector.shape)}, it must be {tuple(like.shape)}")
    return vector.detach().to(like)


def average(weights: Tensor) -> Tensor:
    """Return w_a (P,), the mean of learners (n, P), in their precision; one function, so that all agree."""
    return weights.mean(0)


@contextlib.contextmanager
def placed(module: nn.Module, layout: Layout, weights: Tensor) -> Iterator[dict[str, Tensor]]:
    """Return a context inside which the module itself has ``weights`` (P,); it yields the parameters by name.

    So a backward pass that computes outputs again also uses these weights. At the end the former values are
    restored.
    """
    named, views = dict(module.named_parameters()), layout.views(weights)
    parameters: dict[str, Tensor] = {name: named[name] for name in views}
    with restoring(list(parameters.values())):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.grad = None
                parameter.copy_(views[name])
        yield parameters


@contextlib.contextmanager
def restoring(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Return a context that restores the values of some parameters at its end."""
    saved = [p.detach().clone() for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, saved, strict=True):
                p.copy_(value)
