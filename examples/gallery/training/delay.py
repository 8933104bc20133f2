"""
Limits under delay
==================

The largest stable ηλ, learning rate times curvature, against the delay of the gradients.
Momentum adds a share of the last step; the shifted form, of the step before the delay.
"""

import matplotlib.pyplot as plt

from landscape.limits import max_stable_step

delays = range(33)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for form, momentum, width in (("ordinary", 0.0, 1.6), ("ordinary", 0.9, 3), ("shifted", 0.9, 1.6)):
    label = f"{form} momentum {momentum}" if momentum else "no momentum"
    ax.loglog(
        [d + 1 for d in delays],
        [max_stable_step(d, momentum, form) for d in delays],
        label=label,
        linewidth=width,
        marker="." if width < 3 else "o",
    )
ax.set(title="With a delay, momentum lowers the limit", xlabel="delay (steps)", ylabel="largest stable ηλ")
ax.set_xticks([1, 2, 4, 8, 16, 33], ["0", "1", "3", "7", "15", "32"])
ax.set_xticks([], minor=True)
ax.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
ax.legend()
