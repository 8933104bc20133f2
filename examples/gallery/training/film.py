"""
A film of the learners
======================

The learners on the landscape that moves with their mean, and a dial of η λ_max, the learning rate
times the sharpness, with the limit above which training is unstable.
"""

import subprocess
import sys

picture = "runs/film.gif"
command = "plot runs/dpsgd-0 --animate learners --frames 6 --film-grid 11 -o"
program = [sys.executable, "-m", "landscape"]
subprocess.run([*program, *command.split(), picture], check=True)
