"""
How fast: the benchmarks
========================

The rows of ``make bench`` against other packages and plain loops: bars are medians, lines the range of
rounds. 784-50-50-10 is a network with these widths. Ends and top are the Hessian's eigenvalues. The
last rows train in two processes; ddp is PyTorch's DistributedDataParallel.
"""

import json
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

others = ("loss-landscapes", "plain", "pass", "ARPACK", "hessian_eigenthings", "pyhessian", "a loop", "ddp")
rows = json.loads(Path("../../../docs/benchmarks.json").read_text())["rows"]
rows = [row for row in rows if any(name in row["what"].rpartition("against")[2] for name in others)]
figure = Figure(figsize=(9, 0.36 * len(rows) + 1), layout="constrained")
ax = figure.subplots()
for place, row in enumerate(rows):
    ratio = row["ratio"]
    ax.barh(place, ratio - 1, left=1, height=0.6, color="C0" if ratio >= 1 else "#999999")
    ax.plot([row["low"], row["high"]], [place, place], color="black", lw=1.2)
    ax.text(max(row["high"], 1), place, f"  {float(f'{ratio:.2g}'):g}", va="center", fontsize=8)
ax.set_yticks(
    range(len(rows)), [textwrap.fill(row["what"], 70, break_on_hyphens=False) for row in rows], fontsize=8
)
ax.axvline(1, color="black", lw=0.8)
faster = sum(row["low"] > 1 for row in rows)
ax.set_title(f"{faster} of {len(rows)} comparisons are faster in every round", loc="right")
ax.set(xscale="log", xlabel="times as fast as the alternative")
ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
ax.margins(x=0.12, y=0.01)
ax.invert_yaxis()
