"""
The learners on their plane
===========================

DPSGD's five learners around their mean, early in training, on the plane that shows most
of their spread.
"""

import landscape

run = landscape.load("runs/dpsgd-0/step-0000050.h5")
problem = run.problem(split="train")
plane = landscape.learners_plane(problem, run.weights)
surface = landscape.contour(problem, plane, grid=31, **run.about("train"))
figure = surface.plot(title="The learners surround their mean in one valley")
