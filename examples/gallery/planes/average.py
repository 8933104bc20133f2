"""
Should these checkpoints be averaged?
=====================================

The loss of their average, predicted from the checkpoints alone, beside the exact loss. The
members of the chosen average are chosen by prediction, too.
"""

import torch

import landscape

digits = landscape.data.load("digits")
torch.manual_seed(0)
model = landscape.models.build("mlp", widths=[64, 32, 10])
optimizer, (x, y), checkpoints = torch.optim.SGD(model.parameters(), lr=0.3), digits.train, []
for step in range(600):
    rows = torch.randint(len(y), (8,))
    optimizer.zero_grad()
    digits.loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    if step % 100 == 99:
        checkpoints.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
problem = landscape.Problem(model, digits.loss, digits.train)
labels = [f"step {100 * k}" for k in range(1, 7)]
average = landscape.average(problem, checkpoints, labels=labels, split="train")
figure = average.plot()
