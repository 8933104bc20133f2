"""
Rates that keep a minimum, measured
===================================

The largest learning rate at which full-batch training stays at the weights of a run,
found by bisection, beside the predicted one, without a delay and with a delay of three
steps.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
figure = landscape.minima(run, [0, 3], rate_tol=0.2).plot()
