"""All benchmarks, or those named: python -m tests.benchmarks [contour] [curvature] [training] [distributed]"""

from __future__ import annotations

import sys

from tests.benchmarks import contour, curvature, distributed, training

ALL = {
    "contour": contour.main,
    "curvature": curvature.main,
    "training": training.main,
    "distributed": distributed.main,
}

for name in sys.argv[1:] or ALL:
    ALL[name]()
