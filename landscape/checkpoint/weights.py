"""Weights from users' objects and from files of other programs.

No code in a file is run. Its tensors are mapped to memory, and read when they are used. A state and its model
become a checkpoint (:func:`import_state`), or θ of a problem (:func:`network_of`). Parameters are matched by
name. All other tensors of a model must equal the problem's, except the statistics of BatchNorm, which belong
to the weights.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint import states
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint, mean_buffer, storable, unknown_data
from landscape.checkpoint.storage import load
from landscape.core import hdf5
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.files import read_regular
from landscape.core.hdf5 import Array
from landscape.core.options import checked, ends_in, near
from landscape.problem.batchnorm import BatchNormPolicy, buffer_names
from landscape.problem.layout import Layout, unwrapped, vector_of
from landscape.problem.problem import Problem
from landscape.problem.sharded import on_ranks

# Prefixes that wrappers add to every name: DataParallel and DistributedDataParallel; Lightning. torch.compile
# adds its prefix to the name of each compiled module.
PREFIXES = ("module.", "model.")
COMPILED = "_orig_mod."

# The dtypes in a file that a floating-point tensor of the model can be read from, and an integer one.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def _reason_unfit(value: Tensor, target: Tensor) -> str:
    """Return the reason why ``value`` cannot be copied to ``target``; "" if it can."""
    if value.is_meta:
        return "is on the device 'meta' and holds no numbers"
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"is {kind}, a plain tensor is needed (.dequantize() or .to_dense() makes one)"
    allowed = FLOATS if target.is_floating_point() else (target.dtype,) if target.is_complex() else INTEGERS
    if value.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        return f"holds {str(value.dtype).removeprefix('torch.')}, the model needs one of {names}"
    return ""


def _is_finite(value: Tensor, own: Tensor) -> bool:
    """Return whether all numbers are finite, or, of a constant, infinite as in the model's ``own`` tensor."""
    infinite = ~torch.isfinite(value)
    is_constant = not (own.requires_grad or own.is_meta)
    return not infinite.any() or (is_constant and torch.equal(value[infinite], own.to(value)[infinite]))


def unwrapped_state(
    origin: str | Path, state: Mapping[str, Any], names: set[str], message: states.Message = lambda line: None
) -> dict[str, Any]:
    """Return ``state`` without the prefixes that wrappers add to the ``names`` of the model's tensors.

    The model may also be an attribute of the module that was saved, as in Lightning's checkpoints. If exactly
    one prefix fits all names, only the tensors with this prefix are returned. In messages, ``origin`` names
    the file or argument that has the state.
    """
    state = dict(state)
    if any(COMPILED in name for name in state) and not any(COMPILED in name for name in names):
        state = {name.replace(COMPILED, ""): value for name, value in state.items()}
        message(f"{origin}: dropped '{COMPILED}'")
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not any(n.startswith(prefix) for n in names):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            message(f"{origin}: dropped '{prefix}'")
    # A prefix that fits all names fits the first name. Only the prefixes of the first name are tried.
    first_name = min(names, default="")
    if first_name in state:
        return state  # the names have no prefix
    prefixes = [name.removesuffix(first_name) for name in state if name.endswith(f".{first_name}")]
    complete_prefixes = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    if len(complete_prefixes) != 1:
        return state
    prefix = complete_prefixes[0]
    left_out = [name for name in state if not name.startswith(prefix)]
    words = f"{origin}: took '{prefix}'"
    if left_out:
        listed = ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else "")
        words += f", left out {len(left_out)} more ({listed})"
    message(words)
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


# The adapter's name in peft's names of parameters, which the files of an adapter leave out.
ADAPTER = re.compile(r"\.modules_to_save\.\w+|(?<=\.)(lora_\w+)\.\w+(?=\.weight$|$)")


def fitting_tensors(
    path: str | Path, state: Mapping[str, Any], model: nn.Module, name: str,
    message: states.Message = lambda line: None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield (name in the model, tensor of the state); raise OperationError for a tensor that does not fit.

    A tied tensor has several names in the model. One of these names is enough in the state. BatchNorm's
    counters ``num_batches_tracked`` may be missing, as in files older than PyTorch 0.4.1. If the model has
    frozen parameters and the state has none of them, the state is that of an adapter. The model's own frozen
    parameters and buffers are then yielded together with the adapter's tensors.
    """
    # The constants are the frozen parameters and the buffers.
    constants, parameters = _constants(model), dict(model.named_parameters())
    frozen = constants.keys() & parameters.keys()
    if frozen and not frozen & state.keys():
        # The model has a name such as "q.lora_A.default.weight", with the adapter's name, here "default". The
        # adapter's file has the name "q.lora_A.weight".
        names_in_model = {ADAPTER.sub(r"\1", key): key for key in parameters.keys() - frozen}
        state = constants | {names_in_model.get(key, key): value for key, value in state.items()}
        message(f"{path}: an adapter; the frozen parameters of {name} do not change")
    model_state = model.state_dict(keep_vars=True)
    model_tensors = {key: value for key, value in model_state.items() if isinstance(value, Tensor)}
    for key in state:
        if key not in model_state and isinstance(state[key], Tensor):
            raise OperationError(f"{path}: '{key}' is not in the model {name}{near(key, model_state)}")
    names_of_tensor: dict[int, list[str]] = {}  # by id; a tied tensor has several names
    for key, value in model_tensors.items():
        names_of_tensor.setdefault(id(value), []).append(key)
    for keys in names_of_tensor.values():
        values = {key: state[key] for key in keys if key in state}
        if not values and keys[0].endswith("num_batches_tracked"):
            continue
        if not values:
            raise OperationError(f"{path}: it lacks '{keys[0]}' of the model {name}{near(keys[0], state)}")
        first_key = next(iter(values))
        for key, value in values.items():
            shape = tuple(model_tensors[key].shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                reason = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is no tensor"
                raise OperationError(f"{path}: '{key}' {reason}, the model {name} needs shape {shape}")
            reason = _reason_unfit(value, model_tensors[key])
            if reason:
                raise OperationError(f"{path}: '{key}' {reason}")
            if not _is_finite(value, model_tensors[key]):
                raise OperationError(f"{path}: '{key}' holds NaN or infinite numbers, all must be finite")
            if key != first_key and not torch.equal(value, values[first_key]):
                words = f"'{first_key}' and '{key}' differ, but are one tensor in {name}"
                raise OperationError(f"{path}: {words}")
        yield keys[0], values[first_key].detach()


@checked()
def import_state(
    paths: str | Path | Sequence[str | Path],
    model: nn.Module,
    *,
    name: str = "",
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    message: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """Return a checkpoint of weights from files of other programs, with one learner for each file or folder.

    θ has the trainable parameters; frozen parameters are stored with the buffers. Numbers with less precision
    than float32 become float32.

    Args:
        paths: .pt, .pth, .bin, .ckpt or .safetensors files, indices of several files (.index.json), or
            folders of save_pretrained. All must have weights of ``model``.
        model: the model, with any weights; it does not change.
        name: the model's name in the checkpoint, built-in or "module:factory"; default: "module:class".
        options: the options of a built-in model or of the factory.
        data: the data in the checkpoint (see :class:`landscape.Checkpoint`); default: unknown.
        message: a function that receives a line of text when names are changed or entries left out.

    Returns:
        The checkpoint, with n learners and no history; it is not saved yet.

    Raises:
        InputError: the model has no trainable parameters.
        OperationError: a file cannot be read or does not fit; the message names the parameter.

    Example:
        >>> import tempfile, torch, landscape
        >>> model, folder = torch.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> torch.save(model.state_dict(), f"{folder}/net.pt")
        >>> run = landscape.import_state(f"{folder}/net.pt", model)
        >>> run.learners, tuple(run.weights.shape)
        (1, (1, 8))
    """
    path_list = [paths] if isinstance(paths, (str, Path)) else paths
    state_paths = [Path(path) for path in path_list]
    if not state_paths:
        raise InputError("paths: an empty list is not allowed, it must name a file of weights")
    name = name or f"{type(model).__module__}:{type(model).__qualname__}"
    layout = Layout.of(model)
    if layout.size == 0:
        raise InputError(f"model: {name} has no trainable parameters, at least one is needed")
    slices, tensor_names = {slot.name: slot.place for slot in layout.slots}, {*model.state_dict()}
    weights, buffers = list[Tensor](), list[dict[str, Tensor]]()  # an entry for each learner
    for path in state_paths:
        _check_lora_scale(path, model)
        state = unwrapped_state(path, states.read_state(path, message, tensor_names), tensor_names, message)
        theta, other_tensors = torch.empty(layout.size, dtype=torch.float32), dict[str, Tensor]()
        # The tensors come one by one, so that memory never holds all of them beside θ.
        for key, value in fitting_tensors(path, state, model, name, message):
            if key in slices:
                theta = theta.to(torch.promote_types(theta.dtype, value.dtype))
                theta[slices[key]] = value.flatten()
            else:
                other_tensors[key] = storable(value).clone()
        weights.append(theta)
        buffers.append(other_tensors)
    # The recipe of imported weights only lists the files and their digests.
    recipe = ""
    for path in state_paths:
        for file in states.files_of(path):
            recipe += f'[[import]]\nfile = {json.dumps(file.name)}\nsha256 = "{hdf5.sha256(file)}"\n'
    # Only the buffers that all files have: some may lack BatchNorm's counters ``num_batches_tracked``.
    common_names = [key for key in buffers[0] if all(key in learner_buffers for learner_buffers in buffers)]
    return Checkpoint(
        weights=torch.stack(weights) if len(weights) > 1 else weights[0][None],  # one learner: no copy
        layout=layout,
        step=0,
        epoch=0.0,
        algorithm=IMPORTED,
        recipe=recipe,
        model={"name": name, "options": options or {}},
        buffers={key: torch.stack([of_learner[key] for of_learner in buffers]) for key in common_names},
        data=data or unknown_data(),
    )


@checked()
def load_weights(path: str | Path, into: nn.Module) -> nn.Module:
    """Load weights from a file or folder into a model, in place, after a check that all of them fit.

    Args:
        path: a file or folder as for :func:`import_state`, or the file of a run, whose w_a is loaded.
        into: the model. Numbers are rounded to the dtypes of its tensors. The file of an adapter does not
            change the model's frozen parameters.

    Returns:
        The model.

    Raises:
        InputError: the model is on the device "meta".
        OperationError: the file cannot be read, or does not fit; the message names the parameter.

    Example:
        >>> import tempfile, torch, landscape
        >>> model, folder = torch.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> torch.save(model.state_dict(), f"{folder}/net.pt")
        >>> other = landscape.load_weights(f"{folder}/net.pt", into=torch.nn.Linear(3, 2))
        >>> torch.equal(other.weight, model.weight)
        True
    """
    model = unwrapped(into)
    names = {*model.state_dict()}
    if any(tensor.is_meta for tensor in model.state_dict().values() if isinstance(tensor, Tensor)):
        raise InputError("into: a model on the device 'meta' has no numbers; make it on another device")
    content = _content_of_file(Path(path), name="path", model=model)
    state = unwrapped_state(path, _tensors_of(model, content, str(path), names), names)
    tensors = dict(fitting_tensors(path, state, model, type(model).__name__))
    model.load_state_dict(tensors, strict=False)  # the dict has only one name of each tied tensor
    return into


ALLOWED = "a vector (P,), a Problem, a model, a state dict, a run, or the name of a file of one"
Weights = Annotated[
    Tensor | Array | Problem | nn.Module | Mapping[str, Any] | Checkpoint | str | Path, ALLOWED
]


#: The dtypes of parameters in a file, by name.
Kinds = Mapping[str, torch.dtype]


@dataclass(frozen=True, eq=False)
class Network:
    """The weights of a network.

    Attributes:
        theta: θ (P,), as in the problem.
        statistics: BatchNorm's buffers by name; None if they are unknown.
        kinds: the dtypes of the parameters in their source.
    """

    theta: Tensor
    statistics: Mapping[str, Tensor] | None
    kinds: Kinds = field(default_factory=dict)

    def own_loss(self, problem: Problem) -> float:
        """Return the loss with the network's own statistics; NaN if they are unknown."""
        if self.statistics is None:
            return float("nan")
        with_statistics = problem.on(problem.data)
        with_statistics.batchnorm = BatchNormPolicy(buffers=self.statistics)
        return with_statistics.loss(self.theta)

    def shares_statistics(self, problem: Problem) -> bool:
        """Return whether its statistics are known and equal those in the buffers of the problem's model."""
        if self.statistics is None:
            return False
        buffers = dict(problem.model.named_buffers())  # with counts of batches, which no loss depends on
        return all(torch.equal(t, buffers[n]) for n, t in self.statistics.items() if t.is_floating_point())


def network_of(problem: Problem, source: Any, name: str) -> Network:
    """Return the network with the weights of ``source``, the user's argument ``name``.

    Raises:
        InputError: the source has no weights, or is of another model.
        OperationError: a file cannot be read, a tensor does not fit, or a number is not finite.
    """
    names = {*problem.model.state_dict()}
    if on_ranks(problem) and not isinstance(source, (Tensor, np.ndarray, type(None))):
        words = "it must be a vector; load it into the model and give problem.weights"
        raise InputError(f"{name}: a {type(source).__name__} is not allowed with a sharded model, {words}")
    if isinstance(source, (str, os.PathLike)):
        source, name = _content_of_file(Path(source), name, problem.model), f"{name}: {source}"
    if isinstance(source, (Tensor, np.ndarray)):
        theta, buffers = vector_of(source, problem.weights, name), dict(problem.model.named_buffers())
        stats = {key: buffers[key] for key in buffer_names(problem.model)}
        known = stats if not stats or torch.equal(theta, problem.weights) else None
        kind = torch.as_tensor(source).dtype
        network = Network(theta, known, {slot.name: kind for slot in problem.layout.slots})
    else:
        state = unwrapped_state(name, _tensors_of(problem.model, source, name, names), names)
        network = _network(problem, state, name)
    if not bool(torch.isfinite(network.theta).all()):
        raise OperationError(f"{name}: its weights are NaN or infinite, all must be finite")
    return network


def networks_of(problem: Problem, weights: Any, labels: Sequence[str] = ()) -> list[Network]:
    """Return :func:`network_of` each entry of the argument ``weights``, a list or vectors (n, P)."""
    is_one_network = isinstance(weights, (str, os.PathLike, Mapping, nn.Module, Problem, Checkpoint))
    is_vector = getattr(weights, "ndim", 2) == 1
    if is_one_network or is_vector or not isinstance(weights, Iterable):
        kind = "vector" if is_vector else type(weights).__name__
        raise InputError(f"weights: a {kind} is not allowed, it must be a list, each entry {ALLOWED}")
    rows = list(weights)
    if labels and len(labels) != len(rows):
        raise InputError(f"labels: {len(labels)} for {len(rows)} weights, each needs one")
    names = labels or [f"weights[{k}]" for k in range(len(rows))]
    return [network_of(problem, row, name) for row, name in zip(rows, names, strict=True)]


def _check_lora_scale(path: Path, model: nn.Module) -> None:
    """Raise OperationError if a file of peft has a LoRA adapter with another scale than the model's."""
    of_layers = [getattr(module, "scaling", None) for module in model.modules()]
    model_scales = {scale for scales in of_layers if isinstance(scales, dict) for scale in scales.values()}
    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    if model_scales and file.is_file():
        with states.as_operation_errors(file):
            config = json.loads(read_regular(file, states.MAX_BYTES))
            scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
        if not min(abs(scale - one) for one in model_scales) <= 1e-9 * scale:
            words = f"{scale:g}, the model's is {', '.join(f'{one:g}' for one in sorted(model_scales))}"
            raise OperationError(f"{file}: lora_alpha/r is {words}; make the model with this configuration")


def _content_of_file(path: Path, name: str, model: nn.Module) -> Any:
    """Return the content of a file: a run or a result of this project, or the state of another program."""
    foreign, names = states.names_state(path), {*model.state_dict()}
    if not foreign and not path.is_dir():
        ends_in(name, path, (".h5", *states.SUFFIXES))
    try:
        if foreign:
            _check_lora_scale(path, model)
        return states.read_state(path, names=names) if foreign else load(path)
    except LandscapeError as error:
        raise type(error)(f"{name}: {error}") from error


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and frozen parameters of a model, by name."""
    state = model.state_dict(keep_vars=True).items()
    return {name: t for name, t in state if isinstance(t, Tensor) and not t.requires_grad}


def _layers(model: nn.Module) -> Counter[str]:
    """Return the number of layers of each class, without those that do nothing in eval mode."""
    idle = (nn.Identity, nn.modules.dropout._DropoutNd)
    leaves = (m for m in model.modules() if not [*m.children()] and not isinstance(m, idle))
    return Counter(getattr(m, "original_name", type(m).__name__) for m in leaves)  # of TorchScript, too


def _tensors_of(own: nn.Module, source: Any, name: str, names: set[str]) -> dict[str, Any]:
    """Return the tensors of ``source``, a network like ``own``, by name.

    The BatchNorm statistics at the mean of a run's learners are left out if the run did not record them.
    """
    if isinstance(source, Mapping):
        return states.state_in(name, source, names=names)
    if isinstance(source, Checkpoint):
        buffers = {key: mean_buffer(rows) for key, rows in source.buffers.items()} | source.mean_buffers
        state = _constants(own) | buffers | source.layout.views(source.mean)
        unknown = buffer_names(own) if source.learners > 1 and not source.mean_buffers else ()
        return {key: t for key, t in state.items() if key not in unknown}
    if not isinstance(source, (Problem, nn.Module)):
        raise InputError(f"{name}: a {type(source).__name__} is not allowed, it must be {ALLOWED}")
    model = source.model if isinstance(source, Problem) else unwrapped(source)
    if lacking := _layers(own) - _layers(model):
        kinds = ", ".join(sorted(lacking))
        raise InputError(f"{name}: it lacks layers ({kinds}) of the problem's model, it must be alike")
    if isinstance(source, Problem):
        return _constants(model) | source.layout.views(source.weights) | dict(source.at().batchnorm.buffers)
    return model.state_dict()


def _network(problem: Problem, state: dict[str, Any], name: str) -> Network:
    """Return the network of a state; raise InputError if its constants differ from the problem's model."""
    model, fixed, statistics = problem.model, _constants(problem.model), buffer_names(problem.model)
    unknown = {key for key in statistics if key not in state and not key.endswith("num_batches_tracked")}
    state |= {key: fixed[key] for key in unknown}
    tensors = dict(fitting_tensors(name, state, model, type(model).__name__))
    constants = {key: t.to(fixed[key], copy=True) for key, t in tensors.items() if key in fixed}
    for key in constants.keys() - {*statistics}:
        t = fixed[key]
        is_count = t.numel() == 1 and not t.is_floating_point()  # outputs do not depend on counts of steps
        if not is_count and not torch.equal(constants[key], t):
            kind = "frozen parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise InputError(f"{name}: its {kind} '{key}' is not the problem's; give a vector of θ alone")
    theta = problem.layout.flatten(tensors).to(problem.weights)
    saved_statistics = None if unknown else {key: t for key, t in constants.items() if key in statistics}
    kinds = {slot.name: tensors[slot.name].dtype for slot in problem.layout.slots}
    return Network(theta, saved_statistics, kinds)
