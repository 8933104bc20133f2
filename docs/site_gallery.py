"""The gallery of the site: the runs that the scripts in examples/gallery read, and their pictures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "gallery"
#: The sections of the gallery, in the order of the page.
SECTIONS = ("maps", "planes", "curvature", "noise", "training", "together")


def make_runs(app: Sphinx, config: Any) -> None:
    """Make the runs of ``landscape demo`` once, and a link ``runs`` to them beside the scripts.

    A script runs in its own folder. Results that a script writes are among the runs, outside of examples/.
    """
    runs = ROOT / "build" / "gallery" / "runs"
    if not (runs / "report.html").exists():  # the last file that the demo writes
        runs.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "landscape", "demo", "-q", "-o", str(runs)], check=True)
    for section in SECTIONS:
        link = SCRIPTS / section / "runs"
        if not link.is_symlink():
            link.symlink_to(runs, target_is_directory=True)


def panels(figure: Figure) -> Image.Image:
    """What of a figure its thumbnail shows: the large panels, without the texts around them."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [ax.get_window_extent() for ax in figure.axes]
    largest = max(box.width * box.height for box in boxes)
    shown = Bbox.union([box for box in boxes if box.width * box.height > largest / 2])
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    return picture.crop((shown.x0, picture.height - shown.y1, shown.x1, picture.height - shown.y0))


def scraper(block: tuple[Any, ...], variables: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the picture of a script: the figure named ``figure``, or the file that ``picture`` names.

    It is the second file. The first one is what the thumbnail is made from.
    """
    names, images = variables["example_globals"], variables["image_path_iterator"]
    thumbnail, path = Path(next(images)), Path(next(images))
    if isinstance(names.get("figure"), Figure):
        names["figure"].savefig(path)
        panels(names["figure"]).save(thumbnail)
        pyplot.close("all")
    elif "picture" in names:
        source = Path(variables["src_file"]).parent / names["picture"]
        path = path.with_suffix(source.suffix)
        for copy in (path, thumbnail.with_suffix(source.suffix)):
            shutil.copyfile(source, copy)
    else:
        raise ValueError(f"{variables['src_file']}: neither figure nor picture is set at its end")
    return figure_rst([str(path)], gallery_conf["src_dir"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", make_runs)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
