"""The commands: where each is defined, and the line that ``landscape --help`` has for it.

A module is imported when its command is used. Each line is the beginning of the command's own help.
"""

from __future__ import annotations

from landscape.core import registry

SUMMARIES = {
    "contour": "Loss contours over a plane around w_a of each CKPT; all have common levels.",
    "demo": "Train SSGD and DPSGD on the bundled digits, and map the landscape around them.",
    "figures": "Make the papers' figures and tables; without a NAME, list them.",
    "hessian-grid": "Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT.",
    "import": "Weights from STATE (.pt, .pth, .bin, .ckpt or .safetensors) as a checkpoint.",
    "info": "Show what is in FILE: a checkpoint (validated) or a result.",
    "line": "Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.",
    "minima": "The largest learning rates at which training with delay stays at the minimum w_a of a CKPT.",
    "noise": "Four estimates of Δ(2) of each CKPT: definition, full batch, Eq. 4, and first order.",
    "plan": "Predict the time of a step and of a run of RECIPE on more workers than this machine has.",
    "plot": "Draw FILEs of one kind in one picture: training, sweeps, contours, lines, spectra, …",
    "recipes": "List the built-in recipes; with NAME (or a .toml file), print that recipe with all defaults.",
    "saddles": "Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.",
    "smoothing": "The loss at w_a of each CKPT, smoothed over the spread of its learners, and its sharpness.",
    "spectrum": "Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over the whole split.",
    "stability": "The largest stable ηλ_max under delay τ and momentum, and the limits at a CKPT's minimum.",
    "sweep": "Train all combinations of RECIPEs, values and seeds; a table has mean and deviation.",
    "train": "Train n learners by RECIPE, a built-in name or a .toml file; every step is decomposed.",
}

for name, summary in SUMMARIES.items():
    module = "import_state" if name == "import" else name.replace("-", "_")  # a keyword of Python
    registry.commands.declare(name, f"landscape.cli.{module}:{module}", summary)
