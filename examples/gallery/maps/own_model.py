"""
The weights of your own model
=============================

The loss around the weights of a small convolutional network, trained for 60 steps in a
loop of PyTorch.
"""

import torch
from torch import nn

import landscape

torch.manual_seed(0)
x, y = landscape.data.load("digits", form="image").train
x, y = x[:256, :, ::4, ::4], y[:256]
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()

problem = landscape.Problem(model, loss, (x, y))
plane = landscape.random_plane(problem, norm="filter", seed=0)
figure = landscape.contour(problem, plane, grid=31, span=1.0).plot()
