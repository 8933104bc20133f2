"""Averages of weights: predicted losses beside the exact ones and those of the members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Measured
from landscape.results.shown import Row

MANY = 8  # averages that a description lists (ours)


@dataclass(frozen=True, kw_only=True)
class WeightAverage(Measured):
    """The losses of averages w = Σ_j a_j w_j of n members w_j, predicted from measurements at the members.

    The last average is the one that was chosen by prediction (greedy soup, Wortsman et al. 2022); the others
    were asked for.

    Attributes:
        members_loss: (n,) in nats, the exact losses of the members.
        coefficients: (K, n), the coefficients a_j; each row sums to 1.
        loss, low, high: (K,) in nats, the predicted losses and the ends of their intervals; infinite where
            ``ratio`` is at least 1.
        level: the probability of an interval.
        exact: (K,) in nats, the exact losses; NaN where not computed.
        ratio: (K,), the part of the predicted change that is beyond the second order, in units of the second
            order's correction ½ Σ_j a_j |⟨∇L(w_j), w − w_j⟩|.
        chosen: (n,), the members of the last average.
        labels: the names of the members.
        parameters: P.
        products: the number of Hessian-vector products, one a member.

    Example:
        >>> result = WeightAverage(
        ...     members_loss=np.array([0.25, 0.27]), coefficients=np.full((2, 2), 0.5), level=0.9,
        ...     loss=np.full(2, 0.21), low=np.full(2, 0.2), high=np.full(2, 0.22), exact=np.full(2, 0.213),
        ...     ratio=np.full(2, 0.1), chosen=np.array([True, True]), labels=("a", "b"), parameters=9,
        ...     products=2, samples=100, dtype="float32")
        >>> result.change.round(3).tolist(), result.inside.tolist()
        ([-0.05, -0.05], [True, True])
    """

    schema: ClassVar[str] = "landscape.weight_average"
    table: ClassVar[str] = "average"

    members_loss: Annotated[Array, "member+", "nat"]
    coefficients: Annotated[Array, "average+ member", "1"]
    loss: Annotated[Array, "average", "nat"]
    low: Annotated[Array, "average", "nat"]
    high: Annotated[Array, "average", "nat"]
    exact: Annotated[Array, "average", "nat"]
    ratio: Annotated[Array, "average", "1"]
    chosen: Annotated[Array, "member"]
    labels: Annotated[tuple[str, ...], "member"]
    level: Annotated[float, "1"]
    parameters: int
    products: int

    @property
    def change(self) -> Array:
        """(K,), the predicted loss minus the mean loss of the members with the same coefficients."""
        change: Array = self.loss - self.coefficients @ self.members_loss
        return change

    @property
    def inside(self) -> Array:
        """(K,), whether the exact loss is inside the interval."""
        return (self.low <= self.exact) & (self.exact <= self.high)

    def describe(self) -> list[Row]:
        asked = len(self.loss) - 1
        names = ["average"] if asked == 1 else [f"average {k}" for k in range(min(asked, MANY))]
        rows = [row for k, name in enumerate(names) for row in self._rows(k, name)]
        chosen, left = (
            [label for label, taken in zip(self.labels, self.chosen, strict=True) if taken == wanted]
            for wanted in (True, False)
        )
        several = len(chosen) > 1
        note = f"without {', '.join(left)}" if left else "all"
        note = note if several else "no average is predicted to be better with certainty"
        rows.append(Row("members chosen by prediction", ", ".join(chosen), note=note))
        rows += self._rows(asked, "chosen average") if several else []
        low, high = self.members_loss.min(), self.members_loss.max()
        rows.append(Row("losses of the members", f"{low:.6g} to {high:.6g}", unit="nat"))
        if self.batchnorm:
            own = f"from {self.bn_samples:,} samples" if self.bn == "recalibrate" else "those of each batch"
            rows.append(Row("BatchNorm statistics", "estimated again at each average", note=own))
        products = Row("Hessian products", self.products, note="one a member")
        return [*rows, products, Row("samples", self.samples)]

    def _rows(self, k: int, name: str) -> list[Row]:
        """The predicted loss of an average, its change, and its exact loss where that is known."""
        title = f"predicted loss of the {name}"
        if self.ratio[k] < 1:
            half = max(self.high[k] - self.loss[k], self.loss[k] - self.low[k])
            mean = f"each order corrects {self.ratio[k]:.2g} times the one before"
            rows = [
                Row(title, float(self.loss[k]), float(half), "nat", f"±: {self.level:.0%} interval"),
                Row(f"{name} minus the members' mean", float(self.change[k]), float(half), "nat", mean),
            ]
        else:
            far = "the members are too far apart, each order corrects"
            rows = [Row(title, "none", note=f"{far} {self.ratio[k]:.2g} times the one before")]
        if np.isfinite(self.exact[k]):
            rows.append(Row(f"exact loss of the {name}", float(self.exact[k]), 0.0, "nat"))
        return rows
