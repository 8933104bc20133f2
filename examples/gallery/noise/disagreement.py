"""
Disagreement of the learners
============================

How much of the learners' spread lies along the sharpest directions, and the loss that
it costs: ½ tr(HC) to second order, with the Hessian H at the learners' mean w_a and the
covariance C of the learners.
"""

import landscape

run = landscape.load("runs/dpsgd-0/step-0000050.h5")
figure = landscape.disagreement(run, k=10).plot(title="Most of the spread is along ten sharp directions")
