"""Several checkpoints, or groups of them, in one table: quantities with errors, and tests of differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import t_quantile
from landscape.results.base import Result

#: What the error of a number is: one standard error, a bound, or nothing but rounding.
ERRORS = ("standard error", "bound", "exact")
# The level of the intervals in pictures (the usual one).
INTERVAL = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Quantities (Q) of the sides (S) that are compared, and the differences (Q, K) of all K pairs of sides.

    A side is a checkpoint, or a group of checkpoints, such as the seeds of one recipe. Of a checkpoint the
    error is what ``kinds`` says: one standard error over draws, a bound (which the true eigenvalue is within
    with a probability of 99%; not the residual, within which lies some eigenvalue), or nothing ("exact": what rounding leaves). Of a group it is the standard error over
    its checkpoints, which has their own errors in it, as each has draws of its own.

    Attributes:
        quantities, titles, unit_names: (Q,), names, names in words, and units.
        flatter: (Q,), −1 where small values mean a flat minimum, 1 where large ones do, 0 where it does not
            say.
        kinds: (Q,), of the errors of the sides: "standard error", "bound" or "exact".
        own_kinds: (Q,), the same of the errors of single checkpoints.
        over: (Q,), what the errors are over, such as "64 minibatches"; "" where nothing is drawn.
        tests: (Q,), how differences were tested: "paired t", "Welch t", "McNemar", "bounds" (they do not
            overlap) or "exact".
        sides: (S,), the names of the sides.
        value, error, freedom: (Q, S), the numbers, their errors, and the degrees of freedom of standard
            errors. NaN where a quantity could not be measured; ``notes`` say why.
        labels, sources, sources_sha256: (M,), of the checkpoints: names, files, and their SHA-256.
        side_of: (M,), the place of each checkpoint's side.
        own_value, own_error: (Q, M), of the single checkpoints.
        steps, given_steps: (M,), the step that was measured, and that of the file given; −1 if unknown.
        first, second: (K,), the places of the sides of each pair.
        difference, difference_error, difference_freedom: (Q, K), that of the second side less the first.
        p, p_holm: (Q, K), two-sided p-values, and Holm's correction for all of this table together; NaN for
            bounds and exact numbers, which are not tested, and for groups of fewer than 3.
        told: (Q, K), whether the difference is larger than its error: ``p_holm`` at most ``level``, or bounds
            that do not overlap; and in any case more than rounding.
        level: the level of the tests, of all together.
        grouped: whether the sides are groups.
        equal_loss: the training loss in nats at which the sides are compared; NaN: at the files given.
        notes: what was left out and why, and what else must be known.
        batch, draws, planes, rise, rho, rho_average, top_k: of the measurements, see
            :func:`landscape.compare`; batch 0 where none was needed.
        sample_counts: (M,), samples of each one's data.
        seed, dtype, split, batchnorm: as in other results.

    Example:
        >>> two = example()
        >>> two.told[:, 0].tolist(), two.quantities
        ([True, True], ('lambda-max', 'batch-sharpness'))
    """

    schema: ClassVar[str] = "landscape.comparison"
    shapes: ClassVar[Mapping[str, str]] = {
        "quantities": "quantities+",
        "sides": "sides+",
        "labels": "labels+",
        **dict.fromkeys(
            ("titles", "unit_names", "flatter", "kinds", "own_kinds", "over", "tests"), "quantities"
        ),
        **dict.fromkeys(("value", "error", "freedom"), "quantities sides"),
        **dict.fromkeys(
            ("side_of", "sources", "sources_sha256", "steps", "given_steps", "sample_counts"), "labels"
        ),
        **dict.fromkeys(("own_value", "own_error"), "quantities labels"),
        **dict.fromkeys(("first", "second"), "pair"),
        **dict.fromkeys(
            ("difference", "difference_error", "difference_freedom", "p", "p_holm", "told"), "quantities pair"
        ),
    }
    units: ClassVar[Mapping[str, str]] = {"equal_loss": "nat", "rise": "nat"} | dict.fromkeys(
        ("p", "p_holm", "level", "freedom", "difference_freedom", "rho", "rho_average"), "1"
    )
    table: ClassVar[str] = "quantities sides"

    quantities: tuple[str, ...]
    titles: tuple[str, ...]
    unit_names: tuple[str, ...]
    flatter: Array
    kinds: tuple[str, ...]
    own_kinds: tuple[str, ...]
    over: tuple[str, ...]
    tests: tuple[str, ...]
    sides: tuple[str, ...]
    value: Array
    error: Array
    freedom: Array
    labels: tuple[str, ...]
    sources: tuple[str, ...]
    sources_sha256: tuple[str, ...]
    side_of: Array
    own_value: Array
    own_error: Array
    steps: Array
    given_steps: Array
    first: Array
    second: Array
    difference: Array
    difference_error: Array
    difference_freedom: Array
    p: Array
    p_holm: Array
    told: Array
    level: float
    grouped: bool
    equal_loss: float
    notes: tuple[str, ...]
    batch: int
    draws: int
    planes: int
    rise: float
    rho: float
    rho_average: float
    top_k: int
    seed: int
    sample_counts: Array
    dtype: str
    split: str
    batchnorm: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in (*self.kinds, *self.own_kinds):
            if kind not in ERRORS:
                raise ValueError(f"kinds holds '{kind}', it must be one of {', '.join(ERRORS)}")
        for name, count in (
            ("side_of", len(self.sides)),
            ("first", len(self.sides)),
            ("second", len(self.sides)),
        ):
            places = getattr(self, name)
            if places.dtype.kind not in "iu" or not ((places >= 0) & (places < count)).all():
                raise ValueError(f"{name} must hold the numbers of sides, 0 to {count - 1}")

    @property
    def label(self) -> str:
        """The names of the sides."""
        return " against ".join(self.sides) if len(self.sides) < 4 else f"{len(self.sides)} sides"

    @property
    def interval(self) -> Array:
        """(Q, S), half the width of the 95% interval of a standard error; a bound as it is, and 0 if exact.

        Example:
            >>> example().interval.round(2).tolist()
            [[0.1, 0.1], [1.0, 0.5]]
        """
        wide = np.where(np.isfinite(self.freedom), self.freedom, 1e9)  # the limit of the distribution
        factor = t_quantile(INTERVAL, np.maximum(wide, 1))
        drawn = np.array([kind == "standard error" for kind in self.kinds])[:, None]
        half: Array = np.where(drawn, factor * self.error, self.error)
        return half


def example() -> Comparison:
    """Two checkpoints, of which the second is flatter, for examples.

    Example:
        >>> example().sides
        ('SSGD', 'DPSGD')
    """
    two, k = ("lambda-max", "batch-sharpness"), np.array([[0]])
    return Comparison(
        quantities=two,
        titles=("λ_max", "batch sharpness"),
        unit_names=("nat", "nat"),
        flatter=np.array([-1, -1]),
        kinds=("bound", "standard error"),
        own_kinds=("bound", "standard error"),
        over=("", "64 minibatches"),
        tests=("bounds", "paired t"),
        sides=("SSGD", "DPSGD"),
        value=np.array([[20.0, 10.0], [12.0, 6.0]]),
        error=np.array([[0.1, 0.1], [0.5, 0.25]]),
        freedom=np.array([[np.nan, np.nan], [63.0, 63.0]]),
        labels=("ssgd, seed 0, step 1,000", "dpsgd, seed 0, step 1,000"),
        sources=("last.h5", "last.h5"),
        sources_sha256=("0" * 64, "1" * 64),
        side_of=np.array([0, 1]),
        own_value=np.array([[20.0, 10.0], [12.0, 6.0]]),
        own_error=np.array([[0.1, 0.1], [0.5, 0.25]]),
        steps=np.array([1000, 1000]),
        given_steps=np.array([1000, 1000]),
        first=k[0],
        second=k[0] + 1,
        difference=np.array([[-10.0], [-6.0]]),
        difference_error=np.array([[0.2], [0.5]]),
        difference_freedom=np.array([[np.nan], [63.0]]),
        p=np.array([[np.nan], [1e-17]]),
        p_holm=np.array([[np.nan], [1e-17]]),
        told=np.array([[True], [True]]),
        level=0.05,
        grouped=False,
        equal_loss=np.nan,
        notes=(),
        batch=500,
        draws=64,
        planes=8,
        rise=0.1,
        rho=0.5,
        rho_average=0.05,
        top_k=10,
        seed=0,
        sample_counts=np.array([1437, 1437]),
        dtype="float32",
        split="train",
        batchnorm=False,
    )
