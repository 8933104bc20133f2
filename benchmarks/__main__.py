"""All benchmarks, or those named: python -m benchmarks [contour] [tolerance] [curvature] [training] …

``-o FILE.json`` writes the ratios with the machine; rows of the file that are not measured again stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    contour,
    curvature,
    distributed,
    earlier,
    harness,
    report,
    tolerance,
    training,
)

ALL = {
    "large": curvature.large,  # first: its peak of memory is that of the process
    "bases": curvature.bases,
    "contour": contour.main,
    "tolerance": tolerance.main,
    "curvature": curvature.main,
    "training": training.main,
    "distributed": distributed.main,
    "recorder": training.recorded,
    "earlier": earlier.main,
    "report": report.main,
}
# Half an hour: only by name.
LONG = {"sizes": curvature.sizes}

if __name__ == "__main__":  # processes that are spawned import this file, too
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if unknown := {*given.names} - {*ALL, *LONG}:
        parser.error(f"{', '.join(unknown)}: not known (allowed: {', '.join(ALL | LONG)})")
    for name in given.names or ALL:
        (ALL | LONG)[name]()
        if given.output:
            harness.write(given.output)
