"""
The learning coefficient
========================

Chains of Langevin dynamics around the weights estimate how fast the volume of low loss
shrinks (Lau et al. 2023). It is the mean of nβ (L(w) − L(w*)) along the chains: L is the loss over n
samples, w* the weights of the run, 1/β the temperature. The chains agree where R̂ is near 1.
"""

import landscape

run = landscape.load("runs/dpsgd-0/last.h5")
problem = run.problem(split="train")
result = landscape.learning_coefficient(problem, relative_error=0.5, **run.about("train"))
figure = result.plot()
