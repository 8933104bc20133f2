"""The forward pass of a convolutional model in eval mode, with BatchNorm folded into the convolutions."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from landscape.problem.batches import call, tree_map

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Pair(NamedTuple):
    """A convolution and the BatchNorm that is the only user of its output, by module name."""

    convolution: str
    norm: str


class FoldedForward:
    """The forward pass of a model with BatchNorm folded into the convolutions, at any weights.

    Weights and inputs of four dimensions have the channels-last layout, which CPUs and GPUs convolve fastest.

    Args:
        graph: the traced model.
        pairs: the pairs to fold.
        dtype: of the arithmetic; outputs are in float32 or wider.
        trainable: the ids of the model's trainable parameters.

    Attributes:
        convolves: whether the model has convolutions.
    """

    def __init__(
        self, graph: fx.GraphModule, pairs: list[Pair], dtype: torch.dtype, trainable: set[int]
    ) -> None:
        self._graph, self._pairs, self._dtype = graph, pairs, dtype
        self.convolves = any(isinstance(module, CONVOLUTIONS) for module in graph.modules())
        # The trace leaves out layers that the forward pass does not use.
        self._names = {name for name, _ in graph.named_parameters(remove_duplicate=False)}
        # Frozen parameters and buffers are converted to the precision of the weights.
        self._fixed: dict[str, Tensor] = {n: p for n, p in graph.named_parameters() if id(p) not in trainable}
        self._fixed |= dict(graph.named_buffers())
        self._norms: dict[str, Any] = {pair.norm: graph.get_submodule(pair.norm) for pair in pairs}

    def converted(self, dtype: torch.dtype) -> FoldedForward:
        """Return the same forward pass in another precision."""
        copied = copy.copy(self)
        copied._dtype = dtype
        return copied

    def _lay_out(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    def weights(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the graph's folded parameters and buffers, by name, at the weights ``views``, by name."""
        tensors = self._fixed | {name: view for name, view in views.items() if name in self._names}
        for pair in self._pairs:
            weight, bias = f"{pair.convolution}.weight", f"{pair.convolution}.bias"
            norm = self._norms[pair.norm]
            scale, shift = tensors.pop(f"{pair.norm}.weight", None), tensors.pop(f"{pair.norm}.bias", None)
            convolution = tensors[weight], tensors[bias], norm.running_mean, norm.running_var
            tensors[weight], tensors[bias] = fuse_conv_bn_weights(*convolution, norm.eps, scale, shift)
        return {name: self._lay_out(tensor) for name, tensor in tensors.items()}

    def __call__(self, weights: dict[str, Tensor], x: Any) -> Any:
        """Return the outputs for the inputs ``x`` at ``weights``, those of :meth:`weights`."""
        outputs = call(self._graph, weights, tree_map(self._lay_out, x))
        return outputs.float() if isinstance(outputs, Tensor) and outputs.itemsize < 4 else outputs


def fold(model: nn.Module, dtype: torch.dtype) -> FoldedForward | None:
    """Return the folded forward pass of ``model`` (in eval mode), or None if torch.fx cannot trace the model.

    A convolution and a BatchNorm after it are folded if the BatchNorm tracks statistics and the model uses
    both modules once. Without such pairs, only the memory layout and ``dtype`` differ from the model. A trace
    drops hooks and follows one branch, so it may compute another function than the model does; the caller
    must compare the two.
    """
    # In a trace an optional argument is never None: a branch "if mask is not None" would always be taken.
    arguments = inspect.signature(model.forward).parameters.values()
    if any(argument.default is not argument.empty for argument in arguments):
        return None
    # The copy of the model shares the model's tensors.
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model, tensors))
    except Exception:  # control flow on values, or unsupported code: fx raises errors of any type
        return None
    modules = dict(graph.named_modules())
    pairs = []
    for node in list(graph.graph.nodes):
        pair = _foldable_pair(graph, modules, node)
        if pair is None:
            continue
        convolution, norm = modules[pair.convolution], modules[pair.norm]
        if convolution.bias is None:
            convolution.bias = nn.Parameter(torch.zeros_like(norm.running_mean))
        node.replace_all_uses_with(node.args[0])  # the convolution's output takes the place of BatchNorm's
        graph.graph.erase_node(node)
        pairs.append(pair)
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # returns the same numbers, and accepts the channels-last layout
    graph.recompile()
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return FoldedForward(graph, pairs, dtype, trainable)


def _foldable_pair(graph: fx.GraphModule, modules: dict[str, nn.Module], node: fx.Node) -> Pair | None:
    """Return the BatchNorm at ``node`` and the convolution before it, or None if they cannot be folded."""
    source = node.args[0] if node.op == "call_module" and node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return None
    pair = Pair(str(source.target), str(node.target))
    norm, convolution = modules[pair.norm], modules[pair.convolution]
    if type(norm) not in BATCHNORMS or type(convolution) not in CONVOLUTIONS:
        return None
    if norm.training or norm.running_mean is None:
        return None
    counts = Counter(id(tensor) for _, tensor in graph.named_parameters(remove_duplicate=False))
    targets = [str(other.target) for other in graph.graph.nodes if other.op in ("call_module", "get_attr")]
    for name, module in ((pair.convolution, convolution), (pair.norm, norm)):
        has_tied_weights = any(counts[id(parameter)] > 1 for parameter in module.parameters())
        uses = sum(target == name or target.startswith(f"{name}.") for target in targets)
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if has_tied_weights or uses != 1 or has_hooks or list(module.children()):
            return None
    return pair
