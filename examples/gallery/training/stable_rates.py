"""
Which rates keep a minimum
==========================

The largest learning rate at which training stays at the weights of a run, against the
delay.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
figure = landscape.stability(run, delays=[0, 1, 3, 7, 31]).plot()
