"""
Disagreement of the learners
============================

How much of the learners' spread lies along the sharpest directions, and the loss that
it costs.
"""

import landscape

run = landscape.load("runs/dpsgd-0/step-0000050.h5")
figure = landscape.disagreement(run, k=10).plot()
