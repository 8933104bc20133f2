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
    """The gradients of ``outputs`` in ``inputs``, without graphs of their own; zero where nothing depends.

    ``keep``: the graph of the outputs. PyTorch up to 2.6 makes those zeros require a gradient.
    """
    if isinstance(outputs, Tensor):
        differentiable(outputs)
    with of_a_whole_graph():
        parts = torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep, materialize_grads=True)
    return [part.detach() for part in parts]


def backward(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """:func:`gradients` of a loss by its ``backward()``, as in training, which leaves no gradients behind.

    Reentrant activation checkpointing allows nothing else.
    """
    with of_a_whole_graph():
        differentiable(loss).backward()  # type: ignore[no-untyped-call]
    parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    return parts


@contextlib.contextmanager
def of_a_whole_graph() -> Iterator[None]:
    """A context that raises InputError where model or loss took a gradient, which freed the graph."""
    try:
        yield
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        words = "model or loss: it takes a gradient that frees the graph; give create_graph=True"
        raise InputError(words) from error


def differentiable(loss: Tensor) -> Tensor:
    """``loss``; InputError where no gradient was recorded for it."""
    if not loss.requires_grad:
        check_recording()
        raise InputError("loss: it has no gradient (accuracy, detach); use it in losses and contours alone")
    return loss


def check_recording() -> None:
    """InputError inside of torch.inference_mode, where no gradient can be taken."""
    if torch.is_inference_mode_enabled():
        raise InputError("torch.inference_mode: nothing has a derivative inside of it; call outside of it")


def as_array(tensor: Tensor) -> Array:
    """``tensor`` as a NumPy array; bfloat16, which NumPy does not have, as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside (Decentralized/Distributed)DataParallel and torch.compile.

    A wrapper of ours has the module as ``wrapped_module``.
    """
    while True:
        inner = getattr(module, "_orig_mod", None) or getattr(module, "wrapped_module", None)
        if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


# The attributes of all modules.
OF_MODULES = vars(nn.Module()).keys()


def independent_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` without torch.compile and sparse gradients inside, which have no second derivative.

    Tensors that a forward pass left as attributes, such as the weights of spectral_norm, are copied by value;
    cached properties are left out, and what a module's own eval() made of its parameters is taken back.
    """
    attributes = [value for m in model.modules() for value in vars(m).values()]
    memo = {id(t): t.detach().clone() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's module holds
        words = f"{type(error).__name__}: {first_words(error, 200)}"
        raise InputError(f"model: it cannot be copied ({words})") from error
    if any(own_mode(module) and not module.training for module in copied.modules()):
        with contextlib.suppress(NotImplementedError):  # exported programs have no training mode
            copied.train()
    uses = Counter(id(p) for _, p in copied.named_parameters(remove_duplicate=False))
    for parent in list(copied.modules()):
        for name in vars(parent).keys() - OF_MODULES:
            if isinstance(getattr(type(parent), name, None), cached_property):
                delattr(parent, name)
        for name, child in list(parent.named_children()):
            if unwrapped(child) is not child:
                setattr(parent, name, unwrapped(child))
        if isinstance(parent, (nn.Embedding, nn.EmbeddingBag)):
            parent.sparse = False
        if type(parent) is nn.Embedding and uses[id(parent.weight)] > 1:
            parent.padding_idx = None  # of a tied matrix, whose row it would leave a part of the gradient out
        if getattr(parent, "_compiled_call_impl", None) is not None:
            parent._compiled_call_impl = None
    return copied


def own_mode(module: nn.Module) -> bool:
    """Return whether a module has a train() or eval() of its own, which may merge or cache parameters."""
    pairs = (module.train, nn.Module.train), (module.eval, nn.Module.eval)
    return any(getattr(method, "__func__", None) is not plain for method, plain in pairs)


def evaluated(model: nn.Module, training: Collection[str] = ()) -> nn.Module:
    """``model`` in eval mode.

    The modules named in ``training``, but not those inside them, are in training mode, in which a module
    computes with its parameters rather than with what eval() has made of them.
    """
    model.eval()  # which returns nothing where a module's own train() does not
    for name in training:
        model.get_submodule(name).train()
    for name, module in model.named_modules():
        if training and name not in training:
            module.training = False
        if isinstance(module, nn.RNNBase) and not module.dropout:  # the same function; but cuDNN's backward
            module.train()  # pass is there in training mode only
    return model


#: How parameters are grouped, see :meth:`Layout.groups`.
GROUPINGS = ("block", "layer", "parameter")


def _group_of(name: str, by: str) -> str:
    """The name of the group that the parameter ``name`` belongs to, by one of GROUPINGS."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    if by == "parameter" or len(parts) == 1:
        return name
    return ".".join(parts[: numbered[0] + 1] if by == "block" and numbered else parts[:-1])


@dataclass(frozen=True)
class Slot:
    """The place of one parameter tensor in θ: ``theta[offset:offset + size].view(shape)``.

    ``role`` is "norm" for the parameters of a normalization layer, "bias" for any other tensor of at most
    one dimension, "weight" for the rest: the classes that filter normalization treats differently. ``layer``
    is "embedding" for the parameters of an embedding, "head" for those of the last layer that has a matrix,
    else ""; no file has it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    role: str
    layer: str = field(default="", compare=False)

    @property
    def place(self) -> slice:
        """Its slice of θ."""
        return slice(self.offset, self.offset + self.size)


def cut(whole: Tensor, slots: Sequence[Slot]) -> Tensor:
    """The numbers of vectors (..., P) in ``slots``, (..., P')."""
    return torch.cat([whole[..., slot.place] for slot in slots], -1)


def put(whole: Tensor, slots: Sequence[Slot], part: Tensor) -> Tensor:
    """``whole`` (..., P), in which the numbers in ``slots`` are now ``part`` (..., P')."""
    for slot, piece in zip(slots, torch.split(part, [s.size for s in slots], -1), strict=True):
        whole[..., slot.place] = piece
    return whole


@dataclass(frozen=True)
class Layout:
    """The order of a module's parameters in θ. Tied parameters appear once, frozen ones not at all."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of the trainable parameters of ``module``, in ``named_parameters`` order."""
        norms = [
            (prefix, layer) for prefix, layer in module.named_modules() if isinstance(layer, NORM_LAYERS)
        ]
        norm_names = {name for prefix, m in norms for name, _ in m.named_parameters(prefix, recurse=False)}
        slots, offset, layers = [], 0, _layers(module)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            role = "norm" if name in norm_names else "bias" if parameter.dim() <= 1 else "weight"
            size, layer = parameter.numel(), layers.get(id(parameter), "")
            slots.append(Slot(name, tuple(parameter.shape), offset, size, role, layer))
            offset += parameter.numel()
        return cls(tuple(slots))

    @cached_property
    def size(self) -> int:
        """P, the number of scalars in θ."""
        return sum(slot.size for slot in self.slots)

    def select(self, part: str | Sequence[str] | None) -> tuple[Slot, ...]:
        """The slots named by ``part``, in the order of θ: a parameter's name ("1.weight"), a prefix that ends
        before a dot ("1"), or a list of these; None for all. Raises InputError for a name that fits none.
        """
        if part is None:
            return self.slots
        chosen: set[Slot] = set()
        for name in [part] if isinstance(part, str) else part:
            fits = {s for s in self.slots if s.name == name or s.name.startswith(f"{name}.")}
            if not fits:
                hint = near(name, [s.name for s in self.slots])
                names = ", ".join(dict.fromkeys(s.name.split(".")[0] for s in self.slots))
                allowed = f"names such as {self.slots[0].name}, prefixes such as {names}"
                raise InputError(f"part: '{name}' is no trainable parameter{hint} (allowed: {allowed})")
            chosen |= fits
        if not chosen:
            raise InputError("part: an empty list is not allowed, it must name at least one parameter")
        return tuple(s for s in self.slots if s in chosen)

    def groups(self, by: str | Sequence[str]) -> dict[str, tuple[Slot, ...]]:
        """The slots by group, of which each slot has one: name -> slots in the order of θ.

        ``by``: "parameter", each slot by itself; "layer", those of one module; "block", those of the first
        module with a number in its name, such as "h.3", or of one module where there is none; or names,
        prefixes and patterns such as "*.bias", where a slot belongs to the first that fits, and those that
        none fits are "others". Raises InputError for a pattern that has no slot.
        """
        groups: dict[str, tuple[Slot, ...]] = {}
        if isinstance(by, str) and by in GROUPINGS:
            for slot in self.slots:
                name = _group_of(slot.name, by)
                groups[name] = (*groups.get(name, ()), slot)
            return groups
        patterns, rest = dict.fromkeys([by] if isinstance(by, str) else by), list(self.slots)
        for pattern in patterns:
            slots = tuple(s for s in rest if fnmatchcase(s.name, pattern) or s.name.startswith(f"{pattern}."))
            if not slots:
                names = ", ".join(dict.fromkeys(_group_of(s.name, "block") for s in self.slots))
                allowed = f"{', '.join(GROUPINGS)}; or names, prefixes and patterns, such as {names}"
                raise InputError(
                    f"by: '{pattern}' fits no trainable parameter that is left (allowed: {allowed})"
                )
            groups[pattern] = slots
            rest = [slot for slot in rest if slot not in slots]
        return groups | ({"others": tuple(rest)} if rest else {})

    def views(self, weights: Tensor) -> dict[str, Tensor]:
        """Name -> view of ``weights`` (..., P) in the parameter's shape (..., *shape). No copy.

        InputError for weights of another model.
        """
        if weights.shape[-1:] != (self.size,):
            raise InputError(f"weights: shape {tuple(weights.shape)}, the last size must be P = {self.size}")
        lead = weights.shape[:-1]
        return {s.name: weights[..., s.place].view((*lead, *s.shape)) for s in self.slots}

    def leaves(self, weights: Tensor) -> dict[str, Tensor]:
        """:meth:`views` of ``weights`` (..., P) for which gradients are recorded."""
        return {name: view.detach().requires_grad_() for name, view in self.views(weights).items()}

    def flatten(self, tensors: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """Inverse of :meth:`views`: one (..., P) tensor from named ones with ``lead`` leading dimensions."""
        return torch.cat([tensors[s.name].flatten(start_dim=lead) for s in self.slots], dim=-1)


def _layers(module: nn.Module) -> dict[int, str]:
    """The id of a parameter -> "embedding" or "head"; one that is tied to an embedding is that."""
    parameters = [(m, [*m.parameters(recurse=False)]) for m in module.modules()]
    embeddings = [ps for m, ps in parameters if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    heads = [ps for _, ps in parameters if any(p.dim() > 1 for p in ps)][-1:]
    groups = {id(p): "head" for ps in heads for p in ps}
    return groups | {id(p): "embedding" for ps in embeddings for p in ps}


def padding_rows(module: nn.Module, layout: Layout) -> tuple[slice, ...]:
    """The places in θ of the padding rows of embeddings, which are no directions of θ.

    PyTorch gives them no gradient, so that training never moves them. A matrix that is tied to another layer
    has the gradient of that one there.
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
    """θ (P,), given as ``name``, with dtype and device of ``like`` (None: itself); else InputError."""
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
    """w_a (P,), the mean of learners (n, P), in their precision; one function, so that all agree on it."""
    return weights.mean(0)


@contextlib.contextmanager
def placed(module: nn.Module, layout: Layout, weights: Tensor) -> Iterator[dict[str, Tensor]]:
    """Inside, the module itself has ``weights`` (P,); the context is of its parameters by name.

    They are there in a backward pass that computes outputs again, too. Afterwards the module has the values
    of before.
    """
    named, views = dict(module.named_parameters()), layout.views(weights)
    parameters: dict[str, Tensor] = {name: named[name] for name in views}
    with set_back(list(parameters.values())):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.grad = None
                parameter.copy_(views[name])
        yield parameters


@contextlib.contextmanager
def set_back(parameters: Sequence[Tensor]) -> Iterator[None]:
    """The parameters have the values of before once the block has run."""
    saved = [p.detach().clone() for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, saved, strict=True):
                p.copy_(value)
