"""
What each layer does to the loss
================================

The change of the loss in every fifth step of DPSGD, stacked by layer, among the other curves.
"""

import tempfile

import landscape

end = landscape.train(
    "digits-dpsgd",
    tempfile.mkdtemp(),
    steps=200,
    evaluate={"every": 10},
    monitor={"instruments": ["batch-sharpness", "loss-change"], "every": 5, "draws": 4},
)
figure = end.plot(title="The first layer changes the loss most")
