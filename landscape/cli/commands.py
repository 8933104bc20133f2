"""The commands: where each is defined, and the line that ``landscape --help`` has for it.

A module is imported when its command is used. Each line is the beginning of the command's own help.
"""

from __future__ import annotations

from landscape.core import registry

SUMMARIES = {
    "contour": "Loss contours around w_a of each CKPT, over a plane; several CKPTs share levels and colours.",
    "demo": "The whole job on the bundled digits: three seeds of SSGD and DPSGD, and the landscape around them.",
    "figures": "The papers' figures and tables; without a NAME, which there are.",
    "hessian-grid": "Both ends of the Hessian's spectrum, and |λ_min|/|λ_max|, on a grid around w_a of each CKPT.",
    "import": "Weights from STATE (.pt, .pth, .bin, .ckpt or .safetensors) as a checkpoint that the analyses take.",
    "info": "What is in FILE: a checkpoint (validated) or a result.",
    "line": "Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.",
    "minima": "The largest rates at which training with delay stays at the minimum w_a of a CKPT, found by trying.",
    "noise": "Δ(2) of each CKPT four ways: by definition, on the full batch, by Eq. 4, and to first order.",
    "plan": "Predict time a step and a run of RECIPE on more workers than there are here.",
    "plot": "Draw FILEs of one kind in one picture: training, sweeps, contours, lines, Hessian ratios, spectra….",
    "recipes": "List the built-in recipes; with NAME (or a .toml file), print that one whole, defaults included.",
    "saddles": "Steps that SSGD, SSGD* and DPSGD take to leave a saddle, against dimension, noise and learning rate.",
    "smoothing": "The loss at w_a of each CKPT averaged over the spread of its learners, and how sharp that is.",
    "spectrum": "Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over all samples of the split.",
    "stability": "The largest stable ηλ_max under delay τ and momentum, and where a CKPT's minimum stands.",
    "sweep": "Train every combination of RECIPEs, values and seeds; one table with mean and spread over the seeds.",
    "train": "Train n learners by RECIPE, a built-in name or a .toml file, every step decomposed.",
}

for name, summary in SUMMARIES.items():
    module = "import_state" if name == "import" else name.replace("-", "_")  # a keyword of Python
    registry.commands.declare(name, f"landscape.cli.{module}:{module}", summary)
