"""
Limits under delay
==================

The largest stable ηλ against the delay of the gradients, without momentum and with two
forms of it.
"""

import matplotlib.pyplot as plt

from landscape.limits import max_stable_step

delays = range(33)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for form, momentum in (("ordinary", 0.0), ("ordinary", 0.9), ("shifted", 0.9)):
    label = f"{form} momentum {momentum}" if momentum else "no momentum"
    ax.loglog(
        [d + 1 for d in delays],
        [max_stable_step(d, momentum, form) for d in delays],
        label=label,
    )
ax.set(xlabel="delay + 1 (steps)", ylabel="largest stable ηλ")
ax.legend()
