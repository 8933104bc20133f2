"""Permutations of hidden units that match the units of two networks, and leave both functions unchanged.

The module :mod:`.symmetry` finds the groups of units; each is tested on the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from landscape.core.devices import widest_dtype
from landscape.core.errors import InputError, first_words
from landscape.core.options import choose
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.checks import moved
from landscape.problem.layout import FOLLOW, Layout
from landscape.problem.mean_loss import MeanLoss
from landscape.problem.symmetry import NATURAL, Place, Space, activations, main_outputs, spaces, traced_axes

# The largest relative change of outputs that counts as rounding (our choice; in float64 it is far below).
UNCHANGED = 1e-5
# Samples on which groups are tested (our choice: statistics of BatchNorm need several).
TRIED = 32
# The most bytes of a network's activations; and the smallest standard deviation of the activations of a unit
# that is not dead, relative to their root mean square (our choices).
READ_BYTES, ALIVE = 2**28, 1e-6
Blocks = dict[str, Tensor]
ALIGN = ("weights", "activations")


@dataclass(frozen=True, eq=False)
class Group:
    """Hidden units that may be permuted among each other.

    A block is a parameter or activation, reshaped to one axis for each space of :mod:`.symmetry`.

    Attributes:
        name: the first parameter with these units.
        size: the number of units.
        axes: by parameter or activation, the axes of its block that run over these units.
        space: the units' space in :mod:`.symmetry`.
        outer: by parameter or activation, the axis of its block along which the permutation may differ: the
            numbers of attention heads may be permuted differently in each head. Empty if there is none.
    """

    name: str
    size: int
    axes: Mapping[str, tuple[int, ...]]
    space: Space
    outer: Mapping[str, int] = field(default_factory=dict)

    def permute(self, blocks: Blocks, index: Tensor) -> Blocks:
        """Return the blocks that have these units, with unit ``index[i]`` in place i.

        Args:
            blocks: all blocks, by parameter or activation.
            index: (size,); or, with ``outer``, a permutation for each place of the outer axis, (outer, size).
        """
        permuted_blocks = {name: blocks[name] for name in self.axes if name in blocks}
        for name, tensor in permuted_blocks.items():
            for dim in self.axes[name]:
                if not self.outer:
                    tensor = tensor.index_select(dim, index)
                    continue
                shape, outer_dim = [1] * tensor.dim(), self.outer[name]
                shape[dim], shape[outer_dim] = index.shape[1], index.shape[0]
                ordered = index if outer_dim < dim else index.T
                tensor = tensor.take_along_dim(ordered.reshape(shape), dim)
            permuted_blocks[name] = tensor
        return permuted_blocks


@dataclass(frozen=True)
class Symmetry:
    """The permutations of hidden units of a model that leave its function unchanged.

    Attributes:
        layout: the parameters' places in θ.
        shapes: by parameter or activation, the shape of its block.
        groups: the groups of units that may be permuted.
        fixed: by parameter, the reason why its units must keep their places, except units whose order is that
            of the data, of the outputs, or of places in an image or a block.
        read: the places of activations in a pass; the text of a place is the name of its activation.
    """

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[Group, ...]
    fixed: Mapping[str, str]
    read: tuple[Place, ...] = ()

    @classmethod
    def of(cls, problem: MeanLoss) -> Symmetry:
        """Return the symmetry of a problem's model, tested on the model: see :func:`_tested`."""
        problem = problem.on(problem.data.few(TRIED))
        traced = traced_axes(_wide(problem))
        parameters = {name: spaces(axes) for name, axes in traced.parameters.items()}
        read = {str(activation): spaces(axes) for activation, axes in traced.activations.items()}
        shapes = {name: tuple(space.size for space in axes) for name, axes in (parameters | read).items()}
        groups, fixed = [], dict[str, str]()
        for space in dict.fromkeys(space for axes in parameters.values() for space in axes):
            group = _group(space, parameters, read)
            if not space.why_fixed:
                groups.append(group)
            elif space.why_fixed not in NATURAL:
                fixed.setdefault(group.name, space.why_fixed)
        return _tested(problem, cls(problem.layout, shapes, tuple(groups), fixed, tuple(traced.activations)))

    def blocks(self, weights: Tensor) -> Blocks:
        """Return the blocks of ``weights`` (P,), by parameter."""
        return {name: view.reshape(self.shapes[name]) for name, view in self.layout.views(weights).items()}

    def flat(self, blocks: Blocks) -> Tensor:
        """Return weights (P,) from their :meth:`blocks`."""
        return torch.cat([blocks[slot.name].flatten() for slot in self.layout.slots])

    def of_activations(self) -> Symmetry:
        """Return the symmetry without the units that no activation has, such as those between two factors."""
        names = {*map(str, self.read)}
        unread = {g.name: "no activation has them" for g in self.groups if names.isdisjoint(g.axes)}
        groups = tuple(group for group in self.groups if group.name not in unread)
        return replace(self, groups=groups, fixed={**self.fixed, **unread})

    @cached_property
    def inner(self) -> dict[Group, list[Group]]:
        """By group, the groups whose permutation may differ in each of its units."""
        return {g: [c for c in self.groups if c.outer and _outer_of(c.space) is g.space] for g in self.groups}


def _outer_of(space: Space) -> Space | None:
    """Return the one space in whose units ``space`` repeats; None if there are none or several."""
    outer_leaves = space.outer.leaves() if space.outer is not None else ()
    return outer_leaves[0] if len(outer_leaves) == 1 and outer_leaves[0] is not space else None


def _group(space: Space, parameters: Mapping[str, list[Space]], read: Mapping[str, list[Space]]) -> Group:
    """Return the group of the units of a space, with the axes of parameters and activations that have them.

    If every parameter with these units also has the space in which they repeat, their permutation may differ
    in each unit of that space; activations without that space are then left out.
    """
    outer = _outer_of(space)

    def is_nested(block_spaces: list[Space]) -> bool:
        return outer is not None and block_spaces.count(space) == block_spaces.count(outer) == 1

    owners = {name: block_spaces for name, block_spaces in parameters.items() if space in block_spaces}
    all_nested = all(map(is_nested, owners.values()))
    for name, block_spaces in read.items():
        if space in block_spaces and (is_nested(block_spaces) or not all_nested):
            owners[name] = block_spaces
    axes = {name: tuple(k for k, a in enumerate(found) if a is space) for name, found in owners.items()}
    outer_axes = {name: found.index(outer) for name, found in owners.items()} if all_nested and outer else {}
    return Group(next(iter(owners)), space.size, axes, space, outer_axes)


def permuted(symmetry: Symmetry, weights: Tensor, seed: int) -> Tensor:
    """Return ``weights`` (P,) with the units of every group permuted at random.

    All units move, in one cycle: a random permutation may be the identity, and would test nothing. If a
    group's permutation may differ along an outer axis, it is the identity at the first place there: the test
    then fails for units that must be permuted alike at all places.
    """
    generator, blocks = torch.Generator().manual_seed(seed), symmetry.blocks(weights)
    for group in symmetry.groups:
        outer_size = [blocks[group.name].shape[group.outer[group.name]]] if group.outer else []
        order = torch.rand(*outer_size, group.size, generator=generator).argsort(-1)
        index = order.scatter(-1, order, order.roll(1, -1))
        if outer_size:
            index[0] = torch.arange(group.size)
        blocks |= group.permute(blocks, index.to(weights.device))
    return symmetry.flat(blocks)


def _tested(problem: MeanLoss, symmetry: Symmetry) -> Symmetry:
    """Return the symmetry without the groups whose random permutation changes the outputs of some samples.

    All groups are tested together, at random weights. If that changes the outputs, each group is tested by
    itself; one whose permutation may differ along an outer axis is then also tested with equal permutations.
    """
    weights = moved(problem)

    def keeps(*groups: Group) -> bool:
        return change(problem, weights, permuted(replace(symmetry, groups=groups), weights, 0)) <= UNCHANGED

    if keeps(*symmetry.groups):
        return symmetry
    accepted, fixed = list[Group](), dict(symmetry.fixed)
    for group in symmetry.groups:
        variants = (group, replace(group, outer={})) if group.outer else (group,)
        if variant := next(filter(keeps, variants), None):
            accepted.append(variant)
        else:
            fixed[group.name] = "its permutation changes the outputs"
    if not keeps(*accepted):
        raise InputError("model: each group of its units permutes, but not all together; use landscape.line")
    return replace(symmetry, groups=tuple(accepted), fixed=fixed)


def _wide(problem: MeanLoss) -> MeanLoss:
    """Return the problem in the widest precision of its device; raise InputError if its model fails in it."""
    wide = problem.to(widest_dtype(problem.device))
    x, y = wide.data.for_pass(*wide.data.first_batch())
    try:
        with torch.no_grad(), wide.evaluating(0):
            wide.criterion(wide.outputs(wide.weights, x), y)
    except RuntimeError as error:  # PyTorch's error where dtypes do not fit
        reason = first_words(error)
        raise InputError(f"model: it does not run in {wide.dtype} ({reason}); {FOLLOW}") from error
    return wide


@torch.no_grad()
def change(problem: MeanLoss, first: Tensor, second: Tensor, samples: int = SAMPLES) -> float:
    """Return the largest relative change of the loss or of an output between two vectors of weights (P,).

    Changes of the loss are relative to the largest loss of a chunk at ``first``. Changes of outputs are
    relative to the largest output at ``first``. If samples have indices, the first ``samples`` samples are
    evaluated. Otherwise whole batches are evaluated, until they hold at least ``samples`` samples. The passes
    have the widest precision, with statistics of BatchNorm that are estimated at each vector.
    """
    count = min(samples, problem.samples)
    if problem.indexed and count < problem.samples:
        problem = problem.subset(slice(count))
    wide = _wide(problem).with_batchnorm("recalibrate", max(2, count))
    pairs = [(wide.at(weights), weights) for weights in (first.to(wide.weights), second.to(wide.weights))]
    largest_changes, largest_values = [0.0, 0.0], [0.0, 0.0]  # [of the loss, of the outputs]
    evaluated_samples = 0.0
    # With d draws of random numbers, parts() yields each chunk d times, and counts 1/d of its samples.
    for x, y, sample_count, seed in wide.parts():
        values = []  # at each vector: [the loss, the outputs]; [the loss] for outputs of unknown form
        for problem_there, weights in pairs:
            with wide.evaluating(seed):
                outputs = problem_there.outputs(weights, x)
                values.append([wide.criterion(outputs, y), *main_outputs(outputs)])
        at_first, at_second = values
        for k, (a, b) in enumerate(zip(at_first, at_second, strict=True)):
            largest_changes[k] = max(largest_changes[k], float((a - b).abs().nan_to_num(torch.inf).max()))
            largest_values[k] = max(largest_values[k], float(a.abs().max()))
        evaluated_samples += sample_count
        if evaluated_samples >= count:
            break
    return max(c / value if value else c for c, value in zip(largest_changes, largest_values, strict=True))


def matched(symmetry: Symmetry, a: Tensor, b: Tensor, seed: int, read: Sequence[Blocks] = ()) -> Tensor:
    """Return ``b`` (P,), permuted to match ``a`` as in :func:`aligned`; ``read``: activations of a and b."""
    wide = widest_dtype(a.device)
    goal, blocks = symmetry.blocks(a.to(wide)), symmetry.blocks(b.to(wide))
    if read:
        goal, blocks = read[0], blocks | read[1]
    generator, has_improved = torch.Generator().manual_seed(seed), True
    while has_improved:
        has_improved = False
        for k in torch.randperm(len(symmetry.groups), generator=generator).tolist():
            group = symmetry.groups[k]
            permuted_blocks = _matched_units(group, symmetry.inner[group], goal, blocks)
            gain = scale = 0.0
            for name, tensor in permuted_blocks.items():
                if name in goal:
                    gain += float(((tensor - blocks[name]) * goal[name]).sum())
                    scale += float((tensor * goal[name]).abs().sum())
            if gain > 1e-9 * scale:
                blocks |= permuted_blocks
                has_improved = True
    return symmetry.flat(blocks).to(b)


def aligned(
    problem: MeanLoss, a: Tensor, b: Tensor, align: str = "weights", seed: int = 0
) -> tuple[Tensor, Symmetry]:
    """Permute the hidden units of ``b`` (P,) to match ``a`` (P,); return the weights and the symmetry.

    Coordinate descent (Ainsworth et al. 2023, Algorithm 1): each step chooses the permutation of one group of
    units that maximizes ⟨a, b⟩ while the other groups stay fixed. A permutation is accepted only if it raises
    ⟨a, b⟩. The descent ends when no group's permutation raises ⟨a, b⟩. Attention heads are units with units
    inside. First the units inside are matched, for each pair of one head of ``a`` and one head of ``b``. Then
    the heads are matched. With ``align="activations"``, ⟨a, b⟩ is the inner product of the standardized
    activations of the two networks on the same samples, which is the sum of the correlations of units (Li et
    al. 2015, section 3).

    Raises:
        InputError: the aligned weights compute another function than ``b``, or the outputs of ``b`` are NaN
            or infinite.
    """
    choose("align", align, ALIGN)
    symmetry = Symmetry.of(problem)
    activations: list[Blocks] = []
    if align == "activations":
        symmetry = symmetry.of_activations()
        activations = _activations(problem, symmetry, (a, b)) if symmetry.groups else []
    permuted_weights = matched(symmetry, a, b, seed, activations)
    relative_change = change(problem, b, permuted_weights)
    if relative_change <= UNCHANGED:
        return permuted_weights, symmetry
    # The change from ``b`` to ``b`` is 0, unless outputs of ``b`` are NaN or infinite.
    if not math.isfinite(relative_change) and change(problem, b, b) != 0:
        raise InputError("b: its outputs are NaN or infinite, they must be finite")
    names = ", ".join(group.name for group in symmetry.groups)
    raise InputError(f"b: permuting {names} changes the outputs by {relative_change:.1g}; use landscape.line")


@torch.no_grad()
def _activations(problem: MeanLoss, symmetry: Symmetry, ends: Sequence[Tensor]) -> list[Blocks]:
    """Return the activations of networks (P,) on the same samples, with mean 0 and norm 1 for each unit.

    There are at most SAMPLES samples and READ_BYTES bytes; indexed samples are drawn at random. BatchNorm
    uses statistics that are estimated for each network.
    """
    wide = _wide(problem).with_batchnorm("recalibrate")
    small_data = wide.data.few(TRIED)
    inputs = [next(small_data.chunks())[0]]
    if problem.indexed and not problem.data.loss_mixes_samples:
        numbers = sum(math.prod(activation.shape) for activation in symmetry.read)
        most = max(small_data.samples, READ_BYTES * small_data.samples // (numbers * wide.weights.itemsize))
        order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(0))
        batches = torch.split(order[: min(SAMPLES, most)], small_data.samples)
        inputs = [wide.gather(batch)[0] for batch in batches if len(batch) == small_data.samples]
    blocks = []
    for weights in ends:
        weights = weights.to(wide.weights)
        at = wide.at(weights)
        passes = [activations(at, weights, x, symmetry.read) for x in inputs]
        names = map(str, symmetry.read)
        blocks.append({name: _standardized(symmetry, name, [p[name] for p in passes]) for name in names})
    return blocks


def _standardized(symmetry: Symmetry, name: str, batches: Sequence[Tensor]) -> Tensor:
    """Return the block of an activation, with its batches along a new last axis, and each unit standardized.

    Standardized activations of a unit have mean 0 and norm 1; those of a dead unit are 0.
    """
    block = torch.stack([batch.reshape(symmetry.shapes[name]) for batch in batches], -1)
    unit_dims = {dim for group in symmetry.groups for dim in group.axes.get(name, ())}
    sample_dims = [dim for dim in range(block.dim()) if dim not in unit_dims]
    centered = block - block.mean(sample_dims, keepdim=True)
    norm = torch.linalg.vector_norm(block, dim=sample_dims, keepdim=True)
    centered_norm = torch.linalg.vector_norm(centered, dim=sample_dims, keepdim=True)
    return torch.where(centered_norm > ALIVE * norm, centered / centered_norm, 0.0)


def _matched_units(group: Group, inner_groups: list[Group], a: Blocks, b: Blocks) -> Blocks:
    """Return the blocks of ``b`` that have units of the group, with the units permuted to match ``a``.

    If the group lies inside the units of another group, it is matched in each of those units separately.
    In a group that lies inside no other, units may contain units of ``inner_groups``. These are matched
    first, for each pair of one unit of ``a`` and one unit of ``b``. In the equations of einsum, r stands for
    all axes that have no other letter.
    """
    names = [name for name in group.axes if name in a]
    if group.outer:
        # In each outer unit i: the inner products of each unit n of ``a`` with each unit k of ``b``.
        products = _inner_products(group, names, a, b, "inr,ikr->ink")
        return group.permute(b, _best_assignments(products))
    # (size, size): how well each unit of ``a`` (row) matches each unit of ``b`` (column).
    score = next(iter(a.values())).new_zeros(group.size, group.size)
    inner_permutations = dict[Group, Tensor]()  # (size, size, inner size): for each pair of units
    names_left = names  # the blocks whose units are still to be compared
    for inner in inner_groups:
        inner_names = [name for name in names_left if name in inner.axes]
        names_left = [name for name in names_left if name not in inner_names]
        if not inner_names:
            continue
        # Inner products of each inner unit n of unit i of ``a`` with each inner unit k of unit j of ``b``.
        products = _inner_products(inner, inner_names, a, b, "inr,jkr->ijnk")
        permutations = _best_assignments(products.flatten(0, 1)).view(products.shape[:3])
        inner_permutations[inner] = permutations
        products_of_matched = products.take_along_dim(permutations[..., None], -1)  # (size, size, inner, 1)
        score = score + products_of_matched.sum((-1, -2))
    for name in names_left:
        for dim in group.axes[name]:
            score = score + _rows(a[name], dim) @ _rows(b[name], dim).T
    index = _best_assignments(score[None])[0]
    permuted_blocks = b | group.permute(b, index)
    for inner, permutations in inner_permutations.items():
        units_of_a = torch.arange(len(index), device=index.device)
        inner_index = permutations[units_of_a, index]  # unit i of a is matched with unit index[i] of b
        permuted_blocks |= inner.permute(permuted_blocks, inner_index)
    # Only the blocks that were permuted.
    return {name: tensor for name, tensor in permuted_blocks.items() if tensor is not b[name]}


def _rows(tensor: Tensor, *dims: int) -> Tensor:
    """Return the tensor with the axes ``dims`` first, and all others flattened to one."""
    return tensor.movedim(dims, tuple(range(len(dims))))[..., None].flatten(len(dims))


def _inner_products(group: Group, names: Sequence[str], a: Blocks, b: Blocks, equation: str) -> Tensor:
    """Return the sum over the blocks ``names`` of the inner products of units, by einsum's ``equation``."""
    products = []
    for name in names:
        dims = group.outer[name], group.axes[name][0]
        products.append(torch.einsum(equation, _rows(a[name], *dims), _rows(b[name], *dims)))
    return torch.stack(products).sum(0)


def _best_assignments(scores: Tensor) -> Tensor:
    """Return (K, n): for each of K tables (n, n), the assignment of columns to rows with the largest sum."""
    columns_of_tables = [linear_sum_assignment(table, maximize=True)[1] for table in scores.cpu().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in columns_of_tables]).to(scores.device)
