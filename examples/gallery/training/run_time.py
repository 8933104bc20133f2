"""
Run time of many workers
========================

Predicted seconds of a step on many machines, by algorithm and topology, from a
measurement of the compute here.
"""

import landscape

figure = landscape.plan("digits-dpsgd", workers=(8, 16, 32, 64), straggler=0.2).plot()
