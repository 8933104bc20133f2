"""The settings of the Sphinx site. ``make docs`` builds it; warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the extension below

import torch
from site_gallery import SECTIONS
from site_reference import used_as

from landscape._version import __version__
from landscape.results import grids

# The types of signatures are looked up in their module, which has this one for type checkers only.
grids.Tensor = torch.Tensor  # type: ignore[attr-defined]

project = "landscape"
author = "the landscape authors"
copyright = "the landscape authors, Apache-2.0"  # Sphinx gives the name
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "site_extension",
    "site_gallery",
]
exclude_patterns = ["_build", "_templates", "gallery/**/*.py", "gallery/**/*.ipynb"]
templates_path = ["_templates"]
nitpicky = True
# Types of other packages, and types of this one that are named in signatures only. Every other reference must
# be found.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(os|torch|numpy|np|nn|pd|xr|h5py|click|matplotlib|collections|contextlib|pathlib|abc|dist)\..*",
    ),
    (r"py:(class|exc)", r"(Path|Figure|Axes|Picture|Compared|Judge|OutOfTimeError|Sizes|Tensor|tuple\[str)"),
    (r"py:class", r"(types\.Annotated|[0-9.e+-]+)"),
    (r"py:obj", r"typing\.(Literal|Annotated)\[.*"),
    (
        r"py:class",
        r"landscape\..*\.(T|F|R|Run|Point|Cell|UserData|Spec|Workers|Group|Record|MeanLoss|StepState|"
        r"MeasuredRun|OptimizerMemory|Shown|SymmetricOperator|SymmetricMatrix|Eigenvalues|MatrixResult|Piece|"
        r"Schedule|Decompose|Evaluate|Save|Monitor|Diverge|Init|Division|Exchanges|Properties|Within|OneOf|Evaluated)",
    ),
]
smartquotes = False  # which makes one dash of the two of an option

myst_enable_extensions = [
    "attrs_block",
    "colon_fence",
    "deflist",
    "dollarmath",
    "fieldlist",
    "html_image",
    "substitution",
]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https", "mailto")

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80  # of a longer one, a parameter a line
autosummary_generate = True
autosummary_context = {"used_as": used_as()}
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Attributes and arguments may be described together, "x, y: …", which these two forms allow.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .go"

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "backreferences_dir": "gallery/uses",
    "doc_module": ("landscape",),
    "filename_pattern": "",
    "subsection_order": [f"../examples/gallery/{section}" for section in SECTIONS],
    "image_scrapers": ("site_gallery.scraper",),
    "capture_repr": ("_repr_html_",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "thumbnail_size": (400, 280),
}

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
# Pages with no others below them: a list of these would be empty.
html_sidebars = {p: [] for p in ("performance", "comparison", "glossary", "troubleshooting", "changelog")}
html_title = f"landscape {release}"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
