"""
A sweep of learning rates
=========================

Test error after 60 steps against the learning rate, for the recipes of SSGD
(synchronous SGD) and DPSGD (decentralized SGD) on the digits, with three seeds each.
"""

import landscape

recipes = ["digits-ssgd", "digits-dpsgd"]
table = landscape.sweep(recipes, "runs/sweep", seeds=(0, 1, 2), lr=(0.1, 0.3, 1.0), steps=60)
figure = table.plot()
