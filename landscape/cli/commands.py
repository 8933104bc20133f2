"""The commands: where each is defined, its group, and the line that ``landscape --help`` has for it.

A module is imported when its command is used. Each line is the beginning of the command's own help.
"""

from __future__ import annotations

from landscape.core import registry

#: Title of a group -> command -> line; ``landscape --help`` has this order.
GROUPS = {
    "Begin": {
        "demo": "Train SSGD and DPSGD on the bundled digits, and say what the landscape around them is like.",
        "doctor": "Check this installation: versions, devices, data, optional packages, and a Hessian.",
        "fetch": "Download the data sets NAME, and verify their checksums.",
        "completion": "Print the script that lets SHELL complete commands, options and values.",
    },
    "Train": {
        "recipes": "List the built-in recipes; with NAME (or a .toml file), print that recipe with all "
        "defaults.",
        "train": "Train n learners by RECIPE, a built-in name or a .toml file; every step is decomposed.",
        "watch": "Show how the run in DIR goes, while it goes on in another process.",
        "sweep": "Train all combinations of RECIPEs, values and seeds; a table has mean and deviation.",
        "plan": "Predict the time of a step and of a run of RECIPE on more workers than this machine has.",
        "import": "Weights from STATE (.pt, .pth, .bin, .ckpt or .safetensors) as a checkpoint.",
    },
    "Map the landscape": {
        "contour": "Loss contours over a plane around w_a of each CKPT; all have common levels.",
        "line": "Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.",
        "basins": "Basins of the contours in FILEs: where they merge, and how wide they are at a given rise.",
        "compare": "Is this minimum flatter than that one: all instruments at CKPTs in one table, with "
        "tests.",
        "smoothing": "The loss at w_a of each CKPT, smoothed over the spread of its learners, and its "
        "sharpness.",
    },
    "Measure curvature": {
        "spectrum": "Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over the whole "
        "split.",
        "hessian-grid": "Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT.",
        "sharpness": "Worst-case or average-case sharpness at w_a of each CKPT: the rise of the loss within "
        "ρ.",
        "learning-coefficient": "The local learning coefficient at w_a of each CKPT, by SGLD chains around "
        "it.",
        "batch-sharpness": "The curvature that minibatch gradients meet, at w_a of each CKPT and its "
        "learners.",
        "stability": "The largest stable ηλ_max under delay τ and momentum, and the limits at a CKPT's "
        "minimum.",
    },
    "Measure noise and learners": {
        "noise": "Four estimates of Δ(2) of each CKPT: definition, full batch, Eq. 4, and first order.",
        "noise-scale": "The gradient noise scale tr Σ/‖g‖² at w_a of each CKPT, and from its learners.",
        "noise-alignment": "How the noise of minibatch gradients at w_a of each CKPT lies in the curvature.",
        "critical-batch": "The batch above which training from each CKPT loses, sample for sample, by "
        "training branches from it.",
        "disagreement": "Shares of the learners' spread and of the gradient in the top-K Hessian space of "
        "each CKPT.",
    },
    "Experiments and papers": {
        "minima": "The largest learning rates at which training with delay stays at the minimum w_a of a "
        "CKPT.",
        "saddles": "Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.",
        "figures": "Make the papers' figures and tables; without a NAME, list them.",
    },
    "Show": {
        "info": "Show what is in FILE: a checkpoint (validated) or a result.",
        "plot": "Draw FILEs of one kind in one picture: training, sweeps, contours, lines, spectra, …",
        "report": "Write one page about runs, checkpoints and results: words, charts, tables.",
    },
}

SUMMARIES = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}

#: Module -> its commands, where its name is not the command's.
_MODULES = {
    "grids": ("contour", "hessian-grid"),
    "curvature": ("spectrum", "sharpness", "learning-coefficient", "disagreement"),
    "noise": ("noise-scale", "noise-alignment", "batch-sharpness"),
    "experiments": ("minima", "critical-batch", "smoothing"),
    "import_state": ("import",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

for name, summary in SUMMARIES.items():
    function = "import_state" if name == "import" else name.replace("-", "_")  # a keyword of Python
    module = _MODULE_OF.get(name, function)
    registry.commands.declare(name, f"landscape.cli.{module}:{function}", summary)
