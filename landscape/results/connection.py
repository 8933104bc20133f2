"""How two networks are connected: the loss on the line, after alignment, and along a trained curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from landscape.core.hdf5 import Array
from landscape.results.base import Measured, no_values
from landscape.results.shown import Row, own_losses

#: The paths, in this order, and the weights on them.
PATHS = ("line", "aligned line", "curve")
PLACES = ("a", "b", "aligned b", "bend")


@dataclass(frozen=True, kw_only=True)
class Connection(Measured):
    """Loss and accuracy on three paths from a to b, and their barriers.

    Attributes:
        t: (K,), from 0 (a) to 1 (b). Paths are the line from a to b, the line from a to the aligned b, and
            the curve from a to the aligned b.
        loss: (3, K), in nats.
        accuracy: (3, K), between 0 and 1; NaN without class labels.
        barrier: (3,), of each path, in nats (see :func:`landscape.barrier`).
        weights: (4, P): a, b, the aligned b, and the bend of the curve.
        distance, aligned_distance: ‖a − b‖, and the same of the aligned b.
        groups: names of the parameters whose hidden units were permuted, each the first that has them.
        sizes: how many units each has.
        fixed: parameters whose units could not be permuted, with the reason.
        largest_change: the largest difference of the loss, and of the outputs, between b and the aligned b,
            each relative to the largest, in float64, on 1,000 samples.
        curve: "bezier" or "chain".
        align: what units were matched by, "weights" or "activations".
        steps, lr, batch: how the bend was trained.
        seed: of the order of the alignment and of the training of the bend.
        own_loss: (2,), with BatchNorm, the losses of a and b with the statistics that belong to them; NaN
            where they are not known.

    Example:
        >>> connection.barrier.tolist(), connection.removed
        ([2.0, 0.5, 0.0], 0.75)
    """

    schema: ClassVar[str] = "landscape.connection"
    axes_of: ClassVar[tuple[str, ...]] = ("t",)
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"path": PATHS, "place": PLACES}
    table: ClassVar[str] = "path t"

    t: Annotated[Array, "t+"]
    loss: Annotated[Array, "path t", "nat"]
    accuracy: Annotated[Array, "path t", "1"]
    barrier: Annotated[Array, "path", "nat"]
    weights: Annotated[Array, "place parameter"]
    distance: Annotated[float, "1"]
    aligned_distance: Annotated[float, "1"]
    groups: Annotated[tuple[str, ...], "groups"]
    sizes: Annotated[Array, "groups"]
    fixed: Annotated[tuple[str, ...], "fixed"]
    largest_change: Annotated[float, "1"]
    curve: str
    steps: int
    lr: float
    batch: int
    seed: int
    align: str = "weights"
    own_loss: Annotated[Array, "network", "nat"] = field(default_factory=no_values)

    @property
    def removed(self) -> float:
        """The share of the line's barrier that the alignment removed; NaN where there was none."""
        line, aligned, _ = self.barrier.tolist()
        return 1 - aligned / line if line > 0 else float("nan")

    def describe(self) -> list[Row]:
        step = f"largest of t in steps of {self.t[1] - self.t[0]:.3g}"
        trained = f"{self.curve}, {self.steps:,} steps"
        share = f"{self.removed:.0%} of it removed" if self.barrier[0] > 0 else "the line has none to remove"
        notes = step, f"{share}, matched by {self.align}", trained
        rows = [
            Row(f"barrier on the {name}", float(value), unit="nat", note=note)
            for name, value, note in zip(PATHS, self.barrier, notes, strict=True)
        ]
        highest = zip(PATHS, self.loss.max(1).tolist(), strict=True)
        rows += [Row(f"highest loss on the {name}", value, unit="nat") for name, value in highest]
        rows += [
            Row("distance", self.distance, note="" if self.distance else "a and b are equal"),
            Row("distance after alignment", self.aligned_distance),
            Row("permuted units", int(self.sizes.sum()), note=f"in {len(self.groups)} groups"),
            Row("change of the outputs by alignment", f"{self.largest_change:.1g}", note="relative"),
        ]
        rows += own_losses(self.own_loss, self.loss[0, [0, -1]])
        return [*rows, Row("not permuted", "; ".join(self.fixed))] if self.fixed else rows
