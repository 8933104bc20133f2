"""
What a step did to the loss
===========================

Gradient, and curvature within and between layers, of one step d of AdamW: ⟨g, d⟩ and ½ dᵀHd,
with the gradient g and the Hessian H of the training loss. The layers 1, 3 and 5 have their places in
the network as names.
"""

import torch

import landscape

digits = landscape.data.load("digits")
torch.manual_seed(0)
model = landscape.models.build("mlp", widths=[64, 32, 32, 10])
optimizer, parameters = torch.optim.AdamW(model.parameters(), lr=3e-3), [*model.parameters()]
x, y = digits.train
for _ in range(300):
    before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    rows = torch.randint(len(y), (64,))
    optimizer.zero_grad()
    digits.loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
problem = landscape.Problem(model, digits.loss, digits.train)
change = landscape.loss_change(problem, before, problem.weights, lr=3e-3, split="train")
figure = change.plot(title="Curvature undoes most of the gradient's gain")
