"""What results that are numbers of one problem, rather than of a plane or a grid, have in common."""

from __future__ import annotations

from dataclasses import dataclass

from landscape.results.base import Result


@dataclass(frozen=True, kw_only=True)
class Measurement(Result):
    """A number measured at the weights of a problem, with the data and the precision that it was measured on.

    Subclasses have ``value`` and ``standard_error``.

    Attributes:
        samples: the number of samples of the problem.
        seed: of the random draws.
        dtype: of the weights, such as "float32".
        split, label, source, source_sha256: the part of the data, a name for pictures, the checkpoint's file
            and its SHA-256; "" where unknown.
        batchnorm: whether the model has BatchNorm.
        bn, bn_samples: whose statistics it used, and from how many samples, as in
            :class:`landscape.Surface`; "train" means those of each minibatch.

    Example:
        >>> Measurement(samples=100, seed=0, dtype="float64").bn
        'center'
    """

    samples: int
    seed: int
    dtype: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0
