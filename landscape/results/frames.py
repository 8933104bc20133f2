"""Results as data sets of xarray and tables of pandas, which are optional packages (the extra "frames")."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from landscape.core.extras import optional
from landscape.core.hdf5 import Array
from landscape.core.options import choose

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

EXTRA = "'sgd-landscape[frames]'"


def arrays(result: Any) -> dict[str, tuple[tuple[str, ...], Array]]:
    """The arrays of a result whose class names their dimensions: field -> (dimensions, values).

    Texts are arrays of str.
    """
    named: dict[str, tuple[tuple[str, ...], Array]] = {}
    for field in dataclasses.fields(result):
        if field.name in result.shapes:
            value = np.asarray(getattr(result, field.name))
            if field.name in result.texts:
                value = np.char.decode(value, "utf-8")
            named[field.name] = tuple(d.rstrip("+") for d in result.shapes[field.name].split()), value
    return named


def attributes(result: Any) -> dict[str, Any]:
    """The other fields of a result, and its schema; lists in place of tuples and arrays."""
    values: dict[str, Any] = {"schema": result.schema}
    for field in dataclasses.fields(result):
        if field.name not in result.shapes:
            value = getattr(result, field.name)
            values[field.name] = (
                np.asarray(value).tolist() if isinstance(value, (tuple, np.ndarray)) else value
            )
    return values


def to_dataset(result: Any) -> xr.Dataset:
    """A result as a data set of xarray; see :meth:`landscape.results.base.Result.to_xarray`."""
    xarray = optional("xarray", "to_xarray", EXTRA)
    variables = {name: (d, value) for name, (d, value) in arrays(result).items() if value.size}
    dimensions = dict.fromkeys(d for names, _ in variables.values() for d in names)
    coordinates: dict[str, Any] = {
        d: list(labels) for d, labels in result.labels_of.items() if d in dimensions and d not in variables
    }
    coordinates |= {d: variables.pop(d) for d in dimensions if d in variables}
    dataset: xr.Dataset = xarray.Dataset(variables, coordinates, attributes(result))
    for name, unit in result.units.items():
        if name in dataset.variables:
            dataset[name].attrs["units"] = unit
    return dataset


def to_frame(result: Any, dims: str = "") -> pd.DataFrame:
    """A result as a table of pandas; see :meth:`landscape.results.base.Result.to_dataframe`."""
    pandas = optional("pandas", "to_dataframe", EXTRA)
    named = arrays(result)
    sizes = {d: n for names, value in named.values() for d, n in zip(names, value.shape, strict=True)}
    wanted = (dims or result.table).split()
    for dimension in wanted:
        choose("dims", dimension, sizes)
    shape = tuple(sizes[d] for d in wanted)
    columns: dict[str, Array] = {}
    for axis, dimension in enumerate(wanted):
        labels = result.labels_of.get(dimension)
        if dimension not in named and (labels or len(wanted) > 1):  # the index of the table counts rows
            places = np.array(labels) if labels else np.arange(shape[axis])
            columns[dimension] = np.broadcast_to(np.expand_dims(places, _others(axis, shape)), shape).ravel()
    for name, (names, value) in named.items():
        if names and set(names) <= set(wanted):
            ordered = value.transpose(sorted(range(len(names)), key=lambda i: wanted.index(names[i])))
            spread = ordered.reshape([sizes[d] if d in names else 1 for d in wanted])
            columns[name] = np.broadcast_to(spread, shape).ravel()
    frame: pd.DataFrame = pandas.DataFrame(columns)
    frame.attrs = attributes(result)
    return frame


def _others(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """All axes of ``shape`` but ``axis``."""
    return tuple(i for i in range(len(shape)) if i != axis)
