"""
How fast: the benchmarks
========================

The rows of ``make bench``: how many times as fast as the alternative, the median and the range of rounds.
"""

import json
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

rows = json.loads(Path("../../../docs/benchmarks.json").read_text())["rows"]
figure = Figure(figsize=(9, 0.42 * len(rows) + 1), layout="constrained")
ax = figure.subplots()
for place, row in enumerate(rows):
    ax.barh(place, row["ratio"] - 1, left=1, height=0.6, color="C0" if row["ratio"] >= 1 else "#999999")
    ax.plot([row["low"], row["high"]], [place, place], color="black", lw=1.2)
    ax.text(row["high"], place, f"  {row['ratio']:.3g}", va="center", fontsize=7)
ax.set_yticks(range(len(rows)), [textwrap.fill(row["what"], 90) for row in rows], fontsize=7)
ax.axvline(1, color="black", lw=0.8)
ax.set(xscale="log", xlabel="times as fast as the alternative")
ax.margins(x=0.08, y=0.01)
ax.invert_yaxis()
