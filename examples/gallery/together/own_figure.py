"""
Panels in a figure of your own
==============================

Any panel can be drawn into axes of your own, and its parts can be left out. Here u and v are random
directions, and w_a is the mean of the learners' weights.
"""

from matplotlib.figure import Figure

import landscape

figure = Figure(figsize=(9, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
landscape.load("runs/contour.h5")[5].plot(ax=left, visuals={"title": False})
landscape.draw(
    ["runs/ssgd-0", "runs/dpsgd-0"],
    axes={"train_loss": right},
    visuals={"title": False, "caption": False},
)
