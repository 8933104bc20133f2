"""Draws the logo, docs/_static/logo.svg: contour lines of a valley with two minima."""

from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

x, y = np.meshgrid(np.linspace(-2, 2, 41), np.linspace(-2, 2, 41))
height = (x**2 - 0.8) ** 2 + 1.6 * (y - 0.35 * x) ** 2
rcParams["svg.hashsalt"] = "landscape"  # names in the file stay the same
figure = Figure(figsize=(1, 1))
axes = figure.add_axes((0, 0, 1, 1), frameon=False, xticks=[], yticks=[])
colors = ["#117733", "#44AA99", "#3B8BC2", "#4A5AA8", "#6A4C93"]
axes.contour(x, y, height, levels=[0.08, 0.35, 0.8, 1.5, 2.5], colors=colors, linewidths=2.2)
axes.set_aspect("equal")
figure.savefig(Path(__file__).parent / "_static" / "logo.svg", transparent=True, metadata={"Date": None})
