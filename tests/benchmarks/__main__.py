"""All benchmarks, or those named: python -m tests.benchmarks [contour] [tolerance] [curvature] [training] …"""

from __future__ import annotations

import sys

from tests.benchmarks import contour, curvature, distributed, plan, report, tolerance, training

ALL = {
    "large": curvature.large,  # first: its peak of memory is that of the process
    "bases": curvature.bases,
    "contour": contour.main,
    "tolerance": tolerance.main,
    "curvature": curvature.main,
    "training": training.main,
    "distributed": distributed.main,
    "plan": plan.main,
    "recorder": training.recorded,
    "report": report.main,
}

if __name__ == "__main__":  # processes that are spawned import this file, too
    for name in sys.argv[1:] or ALL:
        ALL[name]()
