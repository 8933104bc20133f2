"""
Batch sharpness
===============

The curvature along the gradient of a minibatch, averaged over minibatches of several
sizes, times the learning rate η: gᵀHg/‖g‖², with the gradient g and the Hessian H of the
minibatch at the mean w_a of the learners' weights.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
problem = run.problem(split="train")
about = {"lr": 0.5, "limit": 2.0, "relative_error": 0.1, **run.about("train")}
results = [landscape.batch_sharpness(problem, batch, **about) for batch in (50, 100, 200, 500)]
figure = landscape.draw(results, title="Smaller minibatches have a higher batch sharpness")
