"""
Labels by learner
=================

The training set divided among the learners: each label in shares drawn from a Dirichlet
distribution, or two labels a learner.
"""

import tempfile

import landscape

counts = []
for split in ("dirichlet(0.3)", "labels(2)"):
    run = landscape.train("digits-dpsgd", tempfile.mkdtemp(), steps=0, **{"data.split": split})
    counts.append(landscape.label_counts(run))
figure = landscape.draw(counts, title="Dirichlet shares leave more labels to a learner")
