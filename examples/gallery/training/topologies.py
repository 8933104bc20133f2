"""
Topologies as graphs
====================

Who takes whose weights: on a ring the same neighbors at every step, in a Base-2 graph other
pairs from step to step, with which six learners have the exact average after four.
"""

import landscape

picture = "runs/topologies.png"
landscape.topologies(["ring(1)", "one-peer-exponential", "base"], learners=6, picture=picture)
