"""landscape two-moons"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from landscape.plugins import files
from landscape_example import data


@click.command("two-moons", epilog="Example: landscape two-moons moons.csv --samples 200")
@click.argument("path", metavar="F.csv")
@click.option("--samples", default=1000, show_default=True, help="Points.")
def two_moons(path: str, samples: int) -> None:
    """Write the data set two-moons as a CSV file."""
    x, y = data.two_moons(samples=samples).train
    rows = np.column_stack([x.numpy(), y.numpy()])
    np.savetxt(path, rows, fmt="%.6g", delimiter=",", header="x,y,class", comments="")
    files(Path(path))
