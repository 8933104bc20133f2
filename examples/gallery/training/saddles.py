"""
Escapes from a saddle
=====================

Steps until SSGD and DPSGD leave a saddle, against its dimension, the noise and the
learning rate.
"""

import landscape

figure = landscape.draw(
    landscape.saddles(
        seeds=range(6), dimension=(2, 4), noise=(0.01, 0.1), lr=(0.2, 0.4)
    )
)
