"""All benchmarks, or those named: python -m tests.benchmarks [contour] [curvature] [training]"""

from __future__ import annotations

import sys

from tests.benchmarks import contour, curvature, training

ALL = {"contour": contour.main, "curvature": curvature.main, "training": training.main}

for name in sys.argv[1:] or ALL:
    ALL[name]()
