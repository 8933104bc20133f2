"""Synthetic data: a Gaussian mixture, and samples of an exact quadratic loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import AtLeastOne, Count, Several
from landscape.data.base import Dataset, classification, fingerprint


@registry.data_sets.add("synthetic")
def synthetic(
    data_dir: str | Path | None = None,
    samples: Several = 2000,
    dimension: Several = 20,
    classes: Several = 4,
    separation: float = 2.0,
    imbalance: AtLeastOne = 1.0,
    seed: int = 0,
) -> Dataset:
    """Gaussian mixture: class c has mean ``separation``·m_c, m_c ~ N(0, I/dimension), and covariance I.

    There are half as many test samples as training samples.

    Args:
        samples: Size of the training set. Unit: samples. Source: ours; trains in seconds.
        dimension: Number of inputs. Source: ours.
        classes: Number of classes. Source: ours.
        separation: Factor of the classes' means. Source: ours.
        imbalance: How many times the commonest class is as frequent as the rarest; frequencies fall
            geometrically. Source: ours.
        seed: Draws means, labels and inputs. Source: ours.
    """
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(classes, dimension)) * separation / np.sqrt(dimension)
    weights = imbalance ** -(np.arange(classes) / (classes - 1))
    labels = rng.choice(classes, size=samples + samples // 2, p=weights / weights.sum())
    x = means[labels] + rng.normal(size=(len(labels), dimension))
    return classification((x[:samples], labels[:samples]), (x[samples:], labels[samples:]), 1.0, classes)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of outputs that are losses themselves; ``targets`` are ignored."""
    return outputs.mean()


@registry.data_sets.add("quadratic")
def quadratic(
    data_dir: str | Path | None = None,
    dimension: Count = 4,
    samples: Several = 1000,
    curvature_std: float = 0.0,
    gradient_std: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Samples x_i = (s_i, b_i) for :class:`landscape.models.small.Quadratic`; train and test are equal.

    The means, s at 1 and b at 0, and the standard deviations hold exactly (population moments), so that
    closed forms hold exactly.

    Args:
        dimension: Number P of weights. Source: ours.
        samples: Size of the set. Unit: samples. Source: ours.
        curvature_std: Standard deviation of s_i. Source: ours.
        gradient_std: Standard deviation of b_i in each coordinate. Source: ours.
        seed: Draws the samples. Source: ours.
    """
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(samples, 1 + dimension))
    unit = (raw - raw.mean(0)) / raw.std(0)
    array = unit * ([curvature_std] + [gradient_std] * dimension) + ([1.0] + [0.0] * dimension)
    x, y = torch.from_numpy(array), torch.zeros(samples)
    return Dataset((x, y), (x, y), mean_output, fingerprint((array,)))
