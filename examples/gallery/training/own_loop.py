"""
A loop of your own
==================

The recorder measures a training loop of PyTorch, here with Adam; its curves are drawn
like those of a run.
"""

import tempfile

import torch

import landscape

torch.manual_seed(0)
x, y = landscape.data.load("digits").train
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
loss, adam = torch.nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
folder = tempfile.mkdtemp()
options = {"batch": 64, "monitor": {"instruments": ["noise-scale"], "every": 5}}
with landscape.Recorder(folder, model, loss, (x, y), optimizer=adam, every=5, **options) as recorder:
    for step in range(100):
        rows = torch.arange(64 * step, 64 * (step + 1)) % len(y)
        adam.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        with recorder.step():
            adam.step()
figure = landscape.draw(folder)
