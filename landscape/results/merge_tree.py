"""The basins of losses on a grid, and where they merge: the merge tree of sublevel sets, by union-find.

As a level rises, each local minimum begins a component of the points below it. Where two components meet, at
a saddle, the one with the higher minimum ends: the saddle's height above its minimum is its persistence
(Edelsbrunner and Harer 2010, section VII.1, "elder rule").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from landscape.core.hdf5 import Array


@dataclass(frozen=True)
class MergeTree:
    """Basins in order of persistence, the largest first; those that merge with no deeper one are first.

    Attributes:
        minimum: (M,), the place of each basin's lowest point in the flattened grid.
        saddle: (M,), the place where it merges with a deeper basin; −1: nowhere.
        into: (M,), the number of that basin; −1: none.
        persistence: (M,), the loss at the saddle less that at the minimum; infinite where there is no saddle.
        first: (M,), the rise above its minimum at which it first merges with any other, deeper or not;
            infinite for one that never does.
        basin: (ny, nx), the basin to which a descent from each point leads, from neighbour to lowest
            neighbour; −1 where the loss is not finite.

    Example:
        >>> tree = merge_tree(np.array([[0.0, 3.0, 1.0, 5.0, 2.0]]))
        >>> tree.minimum.tolist(), tree.persistence.tolist(), tree.first.tolist()
        ([0, 4, 2], [inf, 3.0, 2.0], [3.0, 3.0, 2.0])
        >>> tree.basin.tolist(), tree.without(2.5).basin.tolist()
        ([[0, 0, 2, 2, 1]], [[0, 0, 0, 0, 1]])
    """

    minimum: Array
    saddle: Array
    into: Array
    persistence: Array
    first: Array
    basin: Array

    def without(self, least: float) -> MergeTree:
        """The tree without basins of a persistence below ``least``: parts of those that they merge with.

        Example:
            >>> len(merge_tree(np.array([[0.0, 3.0, 1.0]])).without(2.5).minimum)
            1
        """
        kept = int(np.searchsorted(-self.persistence, -least, "right"))
        target = np.arange(len(self.minimum) + 1)  # the last one stands for −1
        for k in range(kept, len(self.minimum)):
            target[k] = target[self.into[k]]  # a deeper basin, whose persistence is not smaller
        return MergeTree(
            self.minimum[:kept], self.saddle[:kept], self.into[:kept], self.persistence[:kept],
            self.first[:kept], np.where(self.basin < 0, -1, target[self.basin]),
        )  # fmt: skip


def merge_tree(loss: Array) -> MergeTree:
    """The merge tree of ``loss`` (ny, nx), where a point has eight neighbours.

    Losses that are not finite are above all others and belong to no basin. A plateau is one minimum at most.

    Example:
        >>> merge_tree(np.array([[1.0, 1.0, 1.0]])).minimum.tolist()
        [0]
    """
    ny, nx = loss.shape
    value = loss.ravel()
    order = np.argsort(np.where(np.isfinite(value), value, np.inf), kind="stable")
    order = order[: int(np.isfinite(value).sum())]
    rank = np.full(value.size, -1)
    rank[order] = np.arange(len(order))
    root = np.full(value.size, -1).tolist()  # of a point that was not reached: −1
    merged: dict[int, tuple[int, int]] = {}  # minimum -> (minimum it merges into, saddle)
    first: dict[int, float] = {}
    owner = np.full(value.size, -1)

    def find(point: int) -> int:
        while root[point] != point:
            root[point] = root[root[point]]
            point = root[point]
        return point

    for point in order.tolist():
        y, x = divmod(point, nx)
        around = [
            j * nx + i
            for j in range(max(y - 1, 0), min(y + 2, ny))
            for i in range(max(x - 1, 0), min(x + 2, nx))
        ]
        met = sorted({find(other) for other in around if root[other] >= 0}, key=rank.__getitem__)
        elder = met[0] if met else point
        root[point] = elder
        lowest = min((other for other in around if root[other] >= 0), key=rank.__getitem__)
        owner[point] = owner[lowest] if met else point
        for other in met[1:]:
            root[other] = elder
            merged[other] = elder, point
        apart = [minimum for minimum in met if value[minimum] < value[point]]  # others are of one plateau
        for minimum in apart if len(apart) > 1 else []:
            first.setdefault(minimum, float(value[point] - value[minimum]))
    return _sorted(value, owner.reshape(ny, nx), merged, first)


def _sorted(
    value: Array, owner: Array, merged: dict[int, tuple[int, int]], first: dict[int, float]
) -> MergeTree:
    """The tree with its basins in order; minima of persistence 0 belong to the basin that they merge with."""
    every = np.unique(owner[owner >= 0])
    rise = {m: value[merged[m][1]] - value[m] if m in merged else np.inf for m in every.tolist()}
    order = sorted(every.tolist(), key=lambda m: (-rise[m], value[m], m))
    number = {m: k for k, m in enumerate(order)}
    tree = MergeTree(
        minimum=np.array(order, dtype=np.int64),
        saddle=np.array([merged[m][1] if m in merged else -1 for m in order], dtype=np.int64),
        into=np.array([number[merged[m][0]] if m in merged else -1 for m in order], dtype=np.int64),
        persistence=np.array([rise[m] for m in order], dtype=np.float64),
        first=np.array([first.get(m, np.inf) for m in order], dtype=np.float64),
        basin=np.vectorize(lambda m: number.get(m, -1), otypes=[np.int64])(owner),
    )
    return tree.without(float(np.nextafter(0, 1)))
