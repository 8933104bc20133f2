"""What results whose values are interpolated between exact points have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True, kw_only=True)
class Interpolated(Result):
    """A result with values at points, of which ``done`` are exact and the others, if any, interpolated.

    Subclasses have the field ``done``.

    Attributes:
        tolerance: the error that was asked for, such as "1%" (of the range shown) or "0.005"; "" where all
            points are exact or the computation is not finished.
        columns: the names of the arrays that were interpolated; the tolerance is that of the first, and
            of all eigenvalues.
        stated_error: (columns,), a bound on the error at any point: a share of the range of the values as
            they are here if the tolerance is one, else in the unit of the values. It is twice the estimate
            that rests on the measured errors, but no more than the tolerance, which is stated after a long
            refinement. It held on at least 99% of 200 surfaces (tests/surfaces.py); it is no guarantee.
        largest_error: (columns,), the largest measured error, at the last ``checks`` points, which were drawn
            at random, most in the widest holes between exact points, and unknown to the interpolation. In
            the end it passes through them as well.
        checks: the number of these points.
        log_columns: of ``columns``, those with an error that is one of logarithms: values that differ by more
            than a factor of 100, which pictures show on a logarithmic scale.

    Example:
        >>> from landscape.results.line import Line
        >>> t = np.linspace(0, 1, 3)
        >>> line = Line(
        ...     t=t, loss=t, accuracy=t, done=t != 0.5, start=t, direction=t, kind="direction", barrier=0.0,
        ...     samples=1, dtype="float64", bn="center", batchnorm=False, bn_samples=0, path="batched",
        ...     tolerance="1%", columns=("loss",), stated_error=np.array([0.002]),
        ...     largest_error=np.array([0.001]), checks=12)
        >>> line.interpolation()
        'interpolated from 2 of 3 points, error of loss below 0.2% of the range shown'
    """

    shapes: ClassVar[Mapping[str, str]] = {
        "columns": "column",
        "stated_error": "column",
        "largest_error": "column",
        "log_columns": "log_column",
    }

    #: What a command may ask for otherwise and still go on with an earlier result. All other options that are
    #: fields must be equal.
    may_differ: ClassVar[frozenset[str]] = frozenset(
        ("span", "tolerance", "max_products", "path", "bn", "bn_samples")
    )

    tolerance: str = ""
    columns: tuple[str, ...] = ()
    stated_error: Array = field(default_factory=lambda: np.zeros(0))
    largest_error: Array = field(default_factory=lambda: np.zeros(0))
    checks: int = 0
    log_columns: tuple[str, ...] = ()

    @property
    def exact(self) -> Array:
        """``done`` of the subclass, where it has its place among the fields."""
        done: Array = vars(self)["done"]
        return done

    @property
    def evaluations(self) -> int:
        """The number of exact points."""
        return int(self.exact.sum())

    def interpolation(self) -> str:
        """The number of exact points and the stated errors in words.

        Returns:
            A phrase for captions; "" where all points are exact.

        Example:
            >>> from landscape.results.line import Line
            >>> t = np.array([0.0, 0.5, 1.0])
            >>> line = Line(
            ...     t=t, loss=t, accuracy=t, done=t < 2, start=t, direction=t, kind="direction", barrier=0.0,
            ...     samples=1, dtype="float64", bn="center", batchnorm=False, bn_samples=0, path="batched")
            >>> line.interpolation()
            ''
        """
        if not self.columns:
            return ""
        relative = self.tolerance.endswith("%")
        errors = [
            f"{name.replace('_', ' ')} below " + (f"{100 * error:.2g}%" if relative else f"{error:.2g}")
            for name, error in zip(self.columns, self.stated_error, strict=True)
        ]
        unit = " of the range shown" if relative else ""
        return (
            f"interpolated from {self.evaluations:,} of {self.exact.size:,} points, error of "
            f"{', '.join(errors)}{unit}"
        )
