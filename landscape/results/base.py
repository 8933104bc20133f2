"""The base classes of results: arrays and attributes of a finished analysis, saved and loaded as HDF5."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import h5py
import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import LARGEST, SCHEMAS, Array, attribute, dataset, group, location, reading, writing
from landscape.core.options import checked, choose, type_hints
from landscape.core.registry import optional
from landscape.results import shown
from landscape.results.shown import Row

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

EXTRA = "'sgd-landscape[frames]'"
_NUMBER = re.compile("[0-9]+")
_NAT = re.compile(r"( ?)\bnat(²|\^2|\b)")


def with_unit(result: Any, text: str) -> str:
    """Return ``text`` with the unit of a result's loss, if any, in place of "nat"."""
    loss_unit = getattr(result, "loss_unit", "nat")
    return _NAT.sub(lambda m: f"{m[1]}{loss_unit}{m[2]}" if loss_unit else "", text)


class Provenance(typing.TypedDict, total=False):
    """The origin of a result: split of the data, label for plots, source file and its SHA-256.

    Example:
        >>> Provenance(split="test", label="run 1")
        {'split': 'test', 'label': 'run 1'}
    """

    split: str
    label: str
    source: str
    source_sha256: str


@dataclasses.dataclass(frozen=True)
class Result(shown.Shown):
    """A finished analysis: arrays and attributes that are saved, loaded, drawn and shown in notebooks.

    Subclasses are frozen dataclasses. In a file, fields that are arrays are data sets and the others are
    attributes. A field with a default may be missing from a file, and an empty array is then not written.

    A subclass describes its fields in their annotations, ``Annotated[Array, "y x", "nat"]`` or
    ``Annotated[float, "nat"]``, and in keywords of the class, ``class Curve(Result, schema="landscape.mine",
    table="step")``. Values that do not fit raise a ValueError.

    - ``schema``: the name of the file format, under which the class is registered. A subclass without a
      ``schema`` is saved as its base class; it cannot be saved if that has none.
    - ``table``: the dimensions whose points are the rows of :meth:`to_dataframe`.
    - ``axes``: coordinates that must be finite and increasing.

    Class variables (``shapes`` and ``units`` come from the annotations):

    - ``shapes``: field -> dimensions, separated by blanks, such as "y x". A dimension has one size in all
      fields; "+" after a dimension means that the size is not 0. A field named like a dimension holds the
      dimension's coordinates.
    - ``units``: field -> unit; "1" for numbers without a unit.
    - ``labels_of``: dimension of fixed size -> a label for each index.
    - ``texts``: fields that are arrays of UTF-8 bytes.

    Fields with one meaning in all results:

    Attributes:
        split: the data, "train" or "test".
        label: a name for plots.
        source: the name of the file whose weights were analyzed; "" if there is none.
        source_sha256: the SHA-256 of that file.
        samples: the number of samples of the data.
        seed: the seed of all random draws.
        dtype: the precision of the computation, "float32" or "float64".
        kind, norm: how the directions of the plane were chosen, see :class:`landscape.Plane`.
        span: half the width of the grid.
        method: how losses were computed, see :func:`landscape.contour`.
        parameters: the number P of weights.
        learners: the number n of learners.
        local_batch: samples of a learner's minibatch.
        lr: the learning rate of the run; NaN if unknown.
        residual_tol: the allowed residual of an eigenvalue, relative to the eigenvalue.
        relative_error: the allowed standard error, relative to the value.
        converged: whether ``residual_tol`` or ``relative_error`` was reached.
        products: the number of Hessian-vector products.
        search: the products with which eigenvectors were searched, "exact" or cheaper ones.
        max_products: the largest number of products that was allowed; 0 for no bound.
        randomness: the treatment of random numbers in eval mode, "refuse" or "seed".
        consensus: the consensus distance n⁻¹ Σ_j ‖w_j − w_a‖².

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Curve(Result, table="step"):
        ...     step: typing.Annotated[np.ndarray, "step+"]
        ...     loss: typing.Annotated[np.ndarray, "step", "nat"]
        ...     label: str = ""
        >>> Curve(np.arange(2), np.array([0.5, 0.25]), label="a run")
        Curve: a run
          step  0 to 1
          loss  0.25 to 0.5 nat
        >>> Curve(np.arange(2), np.zeros(3))
        Traceback (most recent call last):
        ValueError: loss has shape (3,), it must fit (2)
    """

    schema: ClassVar[str] = ""
    shapes: ClassVar[Mapping[str, str]] = {}
    axes_of: ClassVar[tuple[str, ...]] = ()
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    units: ClassVar[Mapping[str, str]] = {}
    table: ClassVar[str] = ""
    texts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, schema: str = "", table: str = "", axes: str = "") -> None:
        """Set a subclass's variables from the keywords of its class line and its annotations; register it."""
        super().__init_subclass__()
        misplaced = {"schema", "table", "axes_of"} & vars(cls).keys()
        if misplaced:
            line = f"class {cls.__name__}(…, schema=, table=, axes=)"
            raise InputError(f"{min(misplaced)}: set in the class body, it must be in the class line: {line}")
        cls.table = table or cls.table
        cls.axes_of = tuple(axes.split()) or cls.axes_of
        if "__repr__" not in vars(cls):
            # Without this line, @dataclass would add a __repr__ that prints whole arrays.
            cls.__repr__ = shown.Shown.__repr__  # type: ignore[method-assign]
        describe = vars(cls).get("describe")
        if describe:
            # describe() writes "nat" for the unit of a loss, in units and in the texts of notes. Here the
            # unit of the result's loss replaces "nat".
            def describe_in_own_unit(self: Self) -> list[Row]:
                rows = describe(self)
                return [replace(r, unit=with_unit(self, r.unit), note=with_unit(self, r.note)) for r in rows]

            wrapped: Any = functools.wraps(describe)(describe_in_own_unit)
            cls.describe = wrapped  # type: ignore[method-assign]
        annotations = vars(cls).get("__annotations__", {})
        # A class without annotations ``Annotated[…]`` keeps the shapes and units of its base class.
        if any("Annotated[" in str(text) for text in annotations.values()):
            for name, hint in typing.get_type_hints(cls, include_extras=True).items():
                # Annotated[Array or tuple, dimensions, unit] or Annotated[float or int, unit]; the unit of
                # an array or a tuple may be missing.
                metadata = list(getattr(hint, "__metadata__", ()))
                # The class gets new dicts, because its base class keeps the old ones.
                if metadata and hint.__origin__ not in (float, int):
                    cls.shapes = {**cls.shapes, name: metadata.pop(0)}
                if metadata:
                    cls.units = {**cls.units, name: metadata[0]}
        if schema:
            if not re.fullmatch(SCHEMAS, schema):
                raise InputError("schema", schema, allowed="landscape.NAME, where NAME may have dots")
            cls.schema = schema
            registry.results.add(schema)(cls)

    def __post_init__(self) -> None:
        sizes = {dimension: len(labels) for dimension, labels in self.labels_of.items()}
        for name, text in self.shapes.items():
            value = getattr(self, name)
            shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
            dimensions = [dimension.rstrip("+") for dimension in text.split()]
            fits = len(dimensions) == len(shape)
            for dimension, size, length in zip(dimensions, text.split(), shape, strict=False):
                expected = sizes.setdefault(dimension, length)
                fits = fits and length == expected and (length > 0 or not size.endswith("+"))
            if not fits:
                sizes_text = ", ".join(str(sizes.get(dimension, dimension)) for dimension in dimensions)
                raise ValueError(f"{name} has shape {shape}, it must fit ({sizes_text})")
        for name in self.axes_of:
            value = getattr(self, name)
            with np.errstate(over="ignore"):
                if not (np.abs(value) < LARGEST).all() or not (np.diff(value) > 0).all():
                    raise ValueError(f"{name} must be finite and increasing")

    def describe(self) -> list[Row]:
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and np.isfinite(value).any():
                finite = value[np.isfinite(value)]
                value = f"{finite.min():.6g} to {finite.max():.6g}"
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            unit = self.units.get(field.name, "")
            rows.append(Row(field.name, value, unit="" if unit == "1" else unit))
        return rows

    def to_xarray(self) -> xr.Dataset:
        """Return the result as a data set of xarray (the extra "frames").

        Returns:
            A Dataset with the arrays of the result as variables with named dimensions and coordinates, units
            in ``attrs["units"]`` of a variable, and all other fields in ``attrs``. Empty arrays, which stand
            for numbers that were not computed, are left out.

        Raises:
            OperationError: xarray is not installed.

        Example:
            >>> counted_labels.to_xarray().counts.sum("learner").values.tolist()
            [40, 20]
        """
        xarray = optional("xarray", "to_xarray", EXTRA)
        variables = {name: (d, value) for name, (d, value) in self._arrays().items() if value.size}
        dimensions = dict.fromkeys(d for names, _ in variables.values() for d in names)
        named = [d for d in self.labels_of if d in dimensions and d not in variables]
        coordinates: dict[str, Any] = {d: list(self.labels_of[d]) for d in named}
        coordinates |= {d: variables.pop(d) for d in dimensions if d in variables}
        dataset: xr.Dataset = xarray.Dataset(variables, coordinates, self._attributes())
        for name in self.units.keys() & dataset.variables.keys():
            dataset[name].attrs["units"] = with_unit(self, self.units[name])
        return dataset

    def to_dataframe(self, dims: str = "") -> pd.DataFrame:
        """Return the result as a table of pandas in long form: one row for each point of a grid.

        Args:
            dims: names of dimensions, separated by blanks; each point of their grid is a row, and the last
                dimension varies fastest. Default: the dimensions of the main arrays, such as "y x" for a
                surface.

        Returns:
            A DataFrame with a column for each dimension, and for each array that has no other dimensions than
            ``dims``. A dimension's column has its coordinates, else its labels, else the indices 0, 1, … If
            ``dims`` is one dimension without coordinates and labels, it has no column. Fields that are not
            arrays are in ``attrs``.

        Raises:
            InputError: a dimension that the result does not have.

        Example:
            >>> counted_labels.to_dataframe().groupby("learner").counts.sum().tolist()
            [30, 30]
        """
        import pandas as pd  # only here: reading a result needs no pandas

        arrays = self._arrays()
        sizes: dict[str, int] = {}
        for array_dimensions, value in arrays.values():
            sizes.update(zip(array_dimensions, value.shape, strict=True))
        dimensions = (dims or self.table).split()  # ``table``: the dimensions by default
        for dimension in dimensions:
            choose("dims", dimension, sizes)  # refuses an unknown dimension
        # Columns with the labels or indices of the dimensions that have no coordinates.
        index_columns: dict[str, tuple[tuple[str, ...], Array]] = {}
        for dimension in dimensions:
            # A single dimension without labels needs no column: its indices are the index of the table.
            if dimension not in arrays and (dimension in self.labels_of or len(dimensions) > 1):
                labels = self.labels_of.get(dimension, np.arange(sizes[dimension]))
                index_columns[dimension] = (dimension,), np.array(labels)
        indices = np.indices([sizes[d] for d in dimensions]).reshape(len(dimensions), -1)
        index_of = dict(zip(dimensions, indices, strict=True))  # dimension -> index in each row
        columns = {}
        for name, (array_dimensions, value) in (index_columns | arrays).items():
            if set(array_dimensions) <= set(dimensions):
                columns[name] = value[tuple(index_of[d] for d in array_dimensions)]
        frame = pd.DataFrame(columns)
        frame.attrs = self._attributes()
        return frame

    def _arrays(self) -> dict[str, tuple[tuple[str, ...], Array]]:
        """Return the fields with named dimensions: field -> (dimensions, values); texts as arrays of str."""
        named = {}
        for name, dimensions in self.shapes.items():
            value = np.asarray(getattr(self, name))
            value = np.char.decode(value, "utf-8") if name in self.texts else value
            named[name] = tuple(d.rstrip("+") for d in dimensions.split()), value
        return named

    def _attributes(self) -> dict[str, Any]:
        """Return the other fields, and the schema; lists in place of tuples and arrays."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in self.shapes]
        values = {name: getattr(self, name) for name in ("schema", *names)}
        listed = {k: np.asarray(v).tolist() for k, v in values.items() if isinstance(v, (tuple, np.ndarray))}
        return values | listed

    def save(self, path: str | Path) -> None:
        """Write the result as HDF5; a file that exists is replaced only once the new one is whole.

        Args:
            path: the file.

        Raises:
            OperationError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     counted_labels.save(f"{folder}/labels.h5")
            ...     type(counted_labels).load(f"{folder}/labels.h5").division
            'dirichlet(0.1)'
        """
        save([self], path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that holds one result of this class.

        Args:
            path: the file.

        Returns:
            The result.

        Raises:
            OperationError: the file holds something else or several results, is damaged or cannot be read.

        Example:
            >>> Result.load("missing.h5")
            Traceback (most recent call last):
            landscape.core.errors.OperationError: missing.h5: no such file; ...
        """
        results = load_results(path)
        if len(results) != 1 or not isinstance(results[0], cls):
            raise OperationError(f"{path}: holds {len(results)} {results[0].schema}, give one {cls.schema}")
        return results[0]

    def _write(self, group: h5py.Group) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                if value.size or not _optional(field):  # a missing array is read as empty
                    group.create_dataset(field.name, data=value)
            elif isinstance(value, tuple):
                group.attrs[field.name] = np.array(value, dtype=h5py.string_dtype())
            else:
                group.attrs[field.name] = value

    @classmethod
    def _read(cls, group: h5py.Group) -> Self:
        hints = type_hints(cls)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            kind, name = hints[field.name], field.name
            if _optional(field) and name not in group and name not in group.attrs:
                continue
            value: Any
            if kind in (bool, int, float, str):
                value = attribute(group, name, kind)
            elif kind == tuple[str, ...]:
                texts = group.attrs.get(name)
                if not isinstance(texts, np.ndarray) or not all(isinstance(t, str) for t in texts.flat):
                    raise ValueError(f"attribute {location(group, name)} is no list of texts")
                value = tuple(texts.ravel())
            else:
                value = np.asarray(dataset(group, name, "S" if field.name in cls.texts else "fiub"))
            values[field.name] = value
        return cls(**values)


def no_values() -> Array:
    """Return the default of an array (n,) that a result may lack."""
    return np.zeros(0)


def no_rows() -> Array:
    """Return the default of an array (n, m) that a result may lack."""
    return np.zeros((0, 0))


def _optional(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


@checked(unchecked=("results",))
def save(results: Sequence[Result], path: str | Path) -> None:
    """Write results of one kind to a file: one at its root, several in the groups /0, /1 and so on.

    Args:
        results: one or more.
        path: the file, which is replaced.

    Raises:
        InputError: anything else than a list of results of one kind, or a class without ``schema``.
        OperationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save([counted_labels, counted_labels], f"{folder}/two.h5")  # a result, twice
        ...     len(load_results(f"{folder}/two.h5"))
        2
    """
    is_list = isinstance(results, (list, tuple))
    classes: list[Any] = [type(result) for result in (results if is_list else [results])]
    names = ", ".join(dict.fromkeys(kind.__name__ for kind in classes)) or "an empty list"
    # The schema is "" for a subclass of Result without a schema, and None for any other class.
    schemas = {kind.schema if issubclass(kind, Result) else None for kind in classes}
    if "" in schemas:
        raise InputError(f"results: {names} cannot be saved, give the class a schema= in its class line")
    if not is_list or None in schemas or len(schemas) != 1:
        words = f"results: {names} is not allowed, it must be a list of results of one kind"
        raise InputError(words, remedy="" if is_list else "result.save(path)")
    write(results, path, settings={})


def write(results: Sequence[Result], path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write results of one kind to a file, and the settings of what computed them."""
    with writing(path, results[0].schema) as file:
        if settings:
            file.attrs["settings"] = json.dumps(settings)
        for i, result in enumerate(results):
            result._write(file if len(results) == 1 else file.create_group(str(i)))


def settings_in(path: str | Path) -> dict[str, Any]:
    """Return the settings that :func:`write` has written to a file; empty if there are none."""
    with reading(path, warn=False) as file:
        settings: dict[str, Any] = dict(json.loads(file.attrs.get("settings", "{}")))
    return settings


def load_results(path: str | Path) -> list[Result]:
    """Read all results in ``path``, in order.

    Raises:
        OperationError: the file holds no results, is damaged, or cannot be read (see
            :func:`landscape.core.hdf5.reading`).

    Example:
        >>> load_results("missing.h5")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    with reading(path) as file:
        schema = str(file.attrs["schema"])
        if schema not in registry.results:
            allowed = ", ".join(registry.results.names())
            raise OperationError(f"{path}: holds a {schema}, not a result (allowed: {allowed})")
        kind: type[Result] = registry.results[schema]
        numbers = {name for name in file if _NUMBER.fullmatch(name)}
        if numbers != {str(i) for i in range(len(numbers))}:
            raise ValueError(f"its groups are {', '.join(sorted(numbers))}, they must be 0, 1, …")
        numbered = [group(file, str(i)) for i in range(len(numbers))]
        return [kind._read(part) for part in numbered or [file]]


@dataclass(frozen=True, kw_only=True)
class Sourced(Result):
    """A result about the weights of a file, or of a network in memory.

    Attributes:
        split, label, source, source_sha256: the part of the data, a name for pictures, the checkpoint's file
            and its SHA-256; "" where unknown.
        loss_name, loss_unit: the loss's name and unit: "nat" of a negative log-likelihood, "" of any other.
    """

    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    loss_name: str = "loss"
    loss_unit: str = "nat"


@dataclass(frozen=True, kw_only=True)
class Measured(Sourced):
    """A result with the data, the precision and the statistics of BatchNorm that it was measured with.

    Attributes:
        samples: the number of samples of the problem.
        dtype: of the weights, such as "float32".
        batchnorm: whether the model has BatchNorm.
        bn, bn_samples: whose statistics it used, and from how many samples, as in
            :class:`landscape.Surface`; "train" means those of each minibatch.
    """

    samples: int
    dtype: str
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Measurement(Measured):
    """A number measured at the weights of a problem; subclasses have ``value`` and ``standard_error``.

    Attributes:
        seed: of the random draws.

    Example:
        >>> Measurement(samples=100, seed=0, dtype="float64").bn
        'center'
    """

    seed: int


@dataclass(frozen=True, kw_only=True)
class Evaluated(Measured):
    """Losses, and a problem's metrics beside them; subclasses have the fields ``loss`` and ``metrics``.

    Attributes:
        metric_names: (metrics,), their names. :meth:`column`, :meth:`to_dataframe` and :meth:`to_xarray` give
            the values by name.
    """

    metric_names: Annotated[tuple[str, ...], "metric"] = ()

    def __post_init__(self) -> None:
        if not self.metric_names:
            object.__setattr__(self, "metrics", np.zeros((0, *vars(self)["loss"].shape)))
        super().__post_init__()

    def column(self, name: str) -> Array:
        """Return the values of a column, or of a metric.

        Args:
            name: such as "loss", "accuracy", or the name of a metric.

        Returns:
            An array of the loss's shape.

        Raises:
            InputError: another name.

        Example:
            >>> import torch, landscape
            >>> x, y, loss = torch.eye(2), torch.zeros(2, 1), torch.nn.MSELoss()
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1), loss, (x, y), metrics=["mae"])
            >>> landscape.line(problem, torch.ones(3), points=3).column("mae").shape
            (3,)
        """
        if name in self.metric_names:
            values: Array = vars(self)["metrics"][self.metric_names.index(name)]
            return values
        columns = [key for key, dims in self.shapes.items() if dims == self.shapes["loss"] and key != "done"]
        choose("column", name, [*columns, *self.metric_names])
        return np.asarray(getattr(self, name))

    def _arrays(self) -> dict[str, tuple[tuple[str, ...], Array]]:
        named = super()._arrays()
        named.pop("metric_names")
        dims, values = named.pop("metrics")
        return named | dict(zip(self.metric_names, ((dims[1:], value) for value in values), strict=True))

    def _metric_rows(self) -> list[Row]:
        """Return a row for each metric with its smallest and largest value, or why it may have none."""
        why = "no numbers: of a metric that has a name, some targets are no classes of the outputs, or NaN"
        rows = []
        for name in self.metric_names:
            low, high = (ends.reduce(self.column(name), None) for ends in (np.fmin, np.fmax))
            rows.append(Row(name, f"{low:.4g} to {high:.4g}", note=why if np.isnan(low) else ""))
        return rows
