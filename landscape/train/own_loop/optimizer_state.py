"""The state of the user's torch optimizer, as update rules and checkpoints take it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from landscape.checkpoint.parts import storable
from landscape.core.errors import FailedError, InputError
from landscape.train.own_loop.flat import DefaultGroup, FlatParameters

#: The name in a checkpoint of which parameters have a state (n, parameter tensors): one that never had a
#: gradient has none.
PRESENT = "present"


class OptimizerState:
    """The state of one learner's torch optimizer as update rules take it, an :class:`.OptimizerMemory`.

    ``state`` is read and written by rules that average it: name -> (1, …), for each name of torch's the
    parameter tensors one after the other. All processes read it at the same step, since they compare first
    whether theirs have the same parts.
    """

    def __init__(self, parameters: FlatParameters, group: DefaultGroup | None) -> None:
        self._parameters, self._group = parameters, group
        self._first = {p: dict(s) for p, s in self._states() if s}
        if self._first:  # such as Adagrad's, which is made before the first step
            self._first = {p: {k: _copied(v) for k, v in s.items()} for p, s in self._first.items()}

    def _states(self) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        state = self._parameters.optimizer.state
        return [(p, state.get(p, {})) for p in self._parameters.parameters]

    def _parts(self) -> dict[str, list[Tensor]]:
        """Name -> tensors of the parameters that have one."""
        parts: dict[str, list[Tensor]] = {}
        for _, state in self._states():
            for key in sorted(k for k, v in state.items() if isinstance(v, Tensor)):
                parts.setdefault(key, []).append(state[key])
        return parts

    @property
    def counters(self) -> frozenset[str]:
        """Names of tensors that count steps."""
        return frozenset(
            key for key, parts in self._parts().items() if any(t.dim() == 0 or not _real(t) for t in parts)
        )

    @property
    def state(self) -> dict[str, Tensor]:
        parts = self._parts()
        if self._group is not None and self._group.size > 1:
            shapes = [(name, key, tuple(v.shape)) for name, key, v in self._named()]
            digest = hashlib.sha256(repr(shapes).encode()).hexdigest()
            if len(set(self._group.texts(digest))) > 1:
                raise InputError(
                    "optimizer: its state cannot be averaged, since on some process a parameter never had a "
                    "gradient; use all parameters in the first step, or algorithm buffers='keep'"
                )
        return {
            key: torch.cat([t.detach().flatten() for t in tensors])[None] for key, tensors in parts.items()
        }

    @state.setter
    def state(self, rows: dict[str, Tensor]) -> None:
        for key, tensors in self._parts().items():
            sizes = [t.numel() for t in tensors]
            for tensor, part in zip(tensors, torch.split(rows[key][0], sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def reset(self) -> None:
        """The state is again that which the optimizer had when it was wrapped: none, for most."""
        for p, _ in self._states():
            self._parameters.optimizer.state.pop(p, None)
            if p in self._first:
                self._parameters.optimizer.state[p] = {k: _copied(v) for k, v in self._first[p].items()}

    # Checkpoints.

    def _named(self) -> list[tuple[str, str, Tensor]]:
        """(parameter, name, tensor) of all tensors. FailedError for a state that is none."""
        found = []
        for name, (_, state) in zip(self._parameters.names, self._states(), strict=True):
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    found.append((name, key, value.detach()))
                elif value is not None:
                    kind = type(value).__name__
                    raise FailedError(
                        f"optimizer: its state '{key}' is a {kind}, not a tensor, and no checkpoint holds it"
                    )
        return found

    def rows(self) -> dict[str, Tensor]:
        """For a checkpoint: "PARAMETER.NAME" -> (1, …), the same names and shapes on all ranks."""
        mine = {f"{name}.{key}": storable(value) for name, key, value in self._named()}
        facts = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items()}
        texts = self._group.texts(json.dumps(facts)) if self._group is not None else [json.dumps(facts)]
        union: dict[str, Any] = {}
        for text in texts:
            union |= json.loads(text)
        device = self._parameters.device
        rows = {
            name: mine[name].to(device)[None].clone()
            if name in mine
            else torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in sorted(union.items())
        }
        has = [bool(state) for _, state in self._states()]
        return rows | {PRESENT: torch.tensor([has], dtype=torch.uint8, device=device)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`rows` gave, of this learner; the learning rates stay as they are.

        Raises:
            FailedError: where it does not fit the optimizer.
        """
        optimizer, names = self._parameters.optimizer, self._parameters.names
        if PRESENT not in state or state[PRESENT].shape[1:] != (len(names),):
            raise FailedError("checkpoint: its /optimizer does not fit the model's parameters")
        found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for full, rows in state.items():
            name, _, key = full.rpartition(".")
            if name in found:
                found[name][key] = rows[0].clone()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        present = state[PRESENT][0].tolist()
        for name, p, has in zip(names, self._parameters.parameters, present, strict=True):
            optimizer.state.pop(p, None)
            if has:
                group = groups[id(p)]
                optimizer.state[p] = {key: _placed(t, p, group) for key, t in found[name].items()}


def _placed(value: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """``value`` where and in the precision that torch's optimizers have it.

    Their single numbers, such as the step, lie on the CPU unless a kernel on the device reads them.
    """
    if value.dim() == 0:
        return value.to(p.device) if group.get("capturable") or group.get("fused") else value.cpu()
    half = p.itemsize < 4 and value.is_floating_point()
    return value.to(p.device, p.dtype if half else value.dtype)


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
