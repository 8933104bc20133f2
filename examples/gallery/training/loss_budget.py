"""
What each layer does to the loss
================================

The change of the loss in every fifth step of DPSGD, stacked by layer, among the other curves.
"""

import tempfile

import landscape

end = landscape.train(
    "digits-dpsgd", tempfile.mkdtemp(), steps=200, monitor={"instruments": ["loss-change"], "every": 5}
)
figure = end.plot()
