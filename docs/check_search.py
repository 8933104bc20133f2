"""What a newcomer searches for is found: ``python docs/check_search.py build/docs``.

A search in the browser puts the pages first that a main entry of the index or a title names. The words below
must lead to the page that explains them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGES = {
    "α_e": "explanation/decomposition",
    "Δ(2)": "explanation/eq4",
    "ω_min": "explanation/stability",
    "AWC": "explanation/stability",
    "Hutch++": "explanation/curvature",
    "own model": "tutorials/own-model",
    "own loop": "tutorials/own-loop",
    "out of memory": "how-to/memory",
    "resume": "how-to/resume",
    "ParaView": "how-to/paraview",
    "plugin": "how-to/plugins",
    "Hugging Face": "tutorials/hugging-face",
    "edge of stability": "explanation/edge",
    "filter normalization": "explanation/batchnorm",
    "BatchNorm": "explanation/batchnorm",
    "consensus distance": "explanation/decomposition",
    "SLURM": "cluster",
    "cite": "index",
    "report": "how-to/report",
    "picture": "how-to/pictures",
    "monitor": "how-to/monitor",
    "DecentralizedDataParallel": "how-to/decentralised",
    "performance": "performance",
}


def found(index: dict[str, Any], query: str) -> list[str]:
    """The pages whose title or main entry of the index has ``query``, as Sphinx's search scores them."""
    wanted, scores = query.lower(), dict[str, float]()
    for entry, places in index["indexentries"].items():
        if wanted in entry and len(wanted) >= len(entry) / 2:
            for page, _, main in places:
                if main:
                    scores[index["docnames"][page]] = 100 * len(wanted) / len(entry)
    for title, places in index["alltitles"].items():
        if wanted in title.lower() and len(wanted) >= len(title) / 2:
            for page, _ in places:
                scores.setdefault(index["docnames"][page], 15 * len(wanted) / len(title))
    return sorted(scores, key=lambda page: -scores[page])


def main(folder: str) -> str | None:
    """The first search that fails, in a line; None if all find their page among the first three."""
    text = Path(folder, "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for query, page in PAGES.items():
        pages = found(index, query)
        if page not in pages[:3]:
            return f"{folder}: a search for '{query}' gives {pages[:5]}, it must give {page}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
