"""A surface as a VTK XML structured grid (.vts), for ParaView and other programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.core.errors import InputError
from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.core.options import ends_in
from landscape.results.grids import Surface

HIDDEN_POINT = 2  # vtkDataSetAttributes::HIDDENPOINT: a point with this bit set is not drawn


def save_vts(surface: Surface, path: str | Path) -> None:
    """Write a surface as an ASCII file for ParaView: points (x, y, loss) with the data "loss" and "accuracy".

    As in VTK, x varies fastest: point k is (x[k % nx], y[k // nx]). A point whose loss is not finite is
    hidden ("vtkGhostType") and lies at the height of the lowest finite loss; its data are not changed.

    Args:
        surface: the surface.
        path: a name that ends in .vts.

    Raises:
        InputError: another suffix, or no finite loss.
        OperationError: the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> grid = np.linspace(-1, 1, 3)
        >>> loss = grid**2 + grid[:, None] ** 2
        >>> surface = Surface(
        ...     x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2),
        ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64",
        ...     bn="center", method="batched")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_vts(surface, f"{folder}/surface.vts")
        ...     pathlib.Path(f"{folder}/surface.vts").read_text().splitlines()[2]
        '  <StructuredGrid WholeExtent="0 2 0 2 0 0">'
    """
    ends_in("path", path, [".vts"])
    finite = np.isfinite(surface.loss)
    if not finite.any():
        raise InputError("loss: no value is finite, there is nothing to export")
    height = np.where(finite, surface.loss, surface.loss[finite].min())
    x, y = np.meshgrid(surface.x, surface.y)
    points = np.stack((x, y, height), -1).reshape(-1, 3)
    ny, nx = surface.loss.shape
    extent = f"0 {nx - 1} 0 {ny - 1} 0 0"
    text = f"""<?xml version="1.0"?>
<VTKFile type="StructuredGrid" version="0.1" byte_order="LittleEndian">
  <StructuredGrid WholeExtent="{extent}">
    <Piece Extent="{extent}">
      <PointData Scalars="loss">
{_array("loss", surface.loss.ravel())}
{_array("accuracy", surface.accuracy.ravel())}
{_array("vtkGhostType", np.where(finite, 0, HIDDEN_POINT).ravel().astype(np.uint8))}
      </PointData>
      <Points>
{_array("points", points)}
      </Points>
    </Piece>
  </StructuredGrid>
</VTKFile>
"""
    write_text(path, text)


def _array(name: str, values: Array) -> str:
    """One DataArray element; repr writes every digit of a float64."""
    kind = "UInt8" if values.dtype == np.uint8 else "Float64"
    size = f' NumberOfComponents="{values.shape[1]}"' if values.ndim == 2 else ""
    rows = values.reshape(len(values), -1).tolist()
    lines = "\n".join(" ".join(map(repr, row)) for row in rows)
    return (
        f'        <DataArray type="{kind}" Name="{name}"{size} format="ascii">\n{lines}\n        </DataArray>'
    )
