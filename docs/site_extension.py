"""The extension of Sphinx for this site: it makes the reference, and prepares docstrings and pages."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from site_reference import write_pages
from sphinx.application import Sphinx

LITERAL = re.compile(r"(``.*?``|:[\w:]+:`.*?`|`.*?`_*)")
EMPHASIS = re.compile(r"(?<!\w)\*\w[^*]*\*(?!\w)|\*\*.*?\*\*")


def escaped(line: str) -> str:
    """``line`` of reStructuredText, where ``|λ|`` and ``SSGD*`` are text and no markup."""
    parts = LITERAL.split(line)
    for i in range(0, len(parts), 2):
        emphasized = [match.span() for match in EMPHASIS.finditer(parts[i])]
        parts[i] = "".join(
            "\\" + c if c == "|" or (c == "*" and not any(a <= k < b for a, b in emphasized)) else c
            for k, c in enumerate(parts[i])
        )
    return "".join(parts)


def escape_docstring(lines: list[str]) -> None:
    """Escape the text of a docstring in place; examples and literal blocks stay as they are."""
    example = literal = False
    indent = 0
    for i, line in enumerate(lines):
        here = len(line) - len(line.lstrip())
        if line.strip():
            literal = literal and here > indent
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example and not literal:
            if line.rstrip().endswith("::"):
                literal, indent = True, here
            lines[i] = escaped(line)


def generate(app: Sphinx, config: Any) -> None:
    """Write the pages that are made from the package."""
    write_pages(Path(app.srcdir, "reference", "generated"))


def escape_click(lines: list[str]) -> None:
    """Escape the help of a command in place; directives and their fields stay as they are."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((".. ", ":", "landscape ")):
            lines[i] = escaped(line)


def show_example(lines: list[str]) -> None:
    """The example at the end of a command's help as a block of code."""
    text = " ".join(line for line in lines if line)
    if text.startswith("Example: "):
        lines[:] = [".. code-block:: shell", "", f"   {text.removeprefix('Example: ')}", ""]
    else:
        escape_click(lines)


#: Stands for a colon in attributes and results, where napoleon takes what is before it for a type.
COLON = "\ue000"


def process_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring, in place, for napoleon."""
    escape_docstring(lines)
    hidden = what in ("attribute", "data", "property")
    for i, line in enumerate(lines):
        if what not in ("attribute", "data", "property") and re.fullmatch(r"\w+:", line):
            hidden = line == "Returns:"
        elif hidden:
            lines[i] = line.replace(":", COLON)


def restore_colons(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Undo, after napoleon, what :func:`process_docstring` did to colons."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


ARRAY = re.compile(r"~?(?:numpy|typing)\.Annotated\[~?numpy\.ndarray\[[^\]]*\](?:, '[^']*')+\]")


def shorten_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A signature that Sphinx can parse, with arrays as ``ndarray``; their shapes are in its text."""
    if not signature:
        return None
    return ARRAY.sub("~numpy.ndarray", signature.replace("<factory>", "...")), returns


OPTION = re.compile(r"(?<=[\s>])(--?[a-z][\w-]*)")


def whole_options(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mark the options in blocks of code, within which the style sheet allows no new line."""
    if "body" in context:
        context["body"] = re.sub(
            r"<pre>.*?</pre>",
            lambda block: OPTION.sub(r'<span class="option">\1</span>', block[0]),
            context["body"],
            flags=re.DOTALL,
        )


INDEX = re.compile(r"<!-- index: (.+?) -->")


def index_entries(app: Sphinx, page: str, content: list[str]) -> None:
    """Replace ``<!-- index: A, B -->``, which readers do not see, by main entries of the index."""

    def directive(match: re.Match[str]) -> str:
        entries = (f"   !single: {entry.strip()}" for entry in match[1].split(","))
        return "\n".join(("```{eval-rst}", ".. index::", *entries, "```"))

    content[0] = INDEX.sub(directive, content[0])


def outside(app: Sphinx, page: str, content: list[str]) -> None:
    """Make links to Markdown files outside of docs/ links to the files; MyST would take them for pages."""
    content[0] = re.sub(r"\]\((?=[./]+/tests/[\w/]+\.md\))", "](path:", content[0])


PICTURE = re.compile(r"<!-- picture: ([\w/]+)/(\w+): (.+?) -->")


def pictures(app: Sphinx, page: str, content: list[str]) -> None:
    """Replace ``<!-- picture: SECTION/NAME: CAPTION -->`` by the picture of a script of the gallery."""
    up = "../" * page.count("/")

    def figure(match: re.Match[str]) -> str:
        section, name, caption = match.groups()
        image, lines = f"{up}gallery/{section}/images/sphx_glr_{name}_002.png", f"/gallery/{section}/{name}"
        text = f"{caption} {{doc}}`The lines that make it <{lines}>`."
        return "\n".join((f"```{{figure}} {image}", f":alt: {caption}", "", text, "```"))

    content[0] = PICTURE.sub(figure, content[0])


LIST = re.compile(r"```\{toctree\}\n:maxdepth: 1\n\n(.+?)\n```", re.DOTALL)
#: The sections of the site that are lists of pages.
SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "explanation": "Explanation",
}


def about(path: Path) -> tuple[str, str]:
    """The title of a page, and its first sentence."""
    text = re.sub(r"<!--.*?-->|```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, *paragraphs = filter(None, (part.strip() for part in text.split("\n\n")))
    prose = next((p for p in paragraphs if not p.startswith(("#", "|", "!", "-", "(", "{.", ":"))), "")
    sentence = re.split(r"(?<=[.:?])(?<!et al\.) ", " ".join(prose.split()))[0]
    return title.removeprefix("# "), re.sub(":$", ".", sentence)


def pages_of(section: Path) -> list[tuple[str, str, str]]:
    """(name, title, first sentence) of each page that the index of a section lists."""
    listed = LIST.search((section / "index.md").read_text(encoding="utf-8"))
    assert listed, section
    return [(name, *about(section / f"{name}.md")) for name in listed[1].split()]


def cards(app: Sphinx, page: str, content: list[str]) -> None:
    """Replace the list of the pages of a section by cards, each with the first sentence of its page."""
    section, _, name = page.partition("/")
    if section in SECTIONS and name == "index":
        rows = [f"- **[{t}]({n}.md)** {text}" for n, t, text in pages_of(Path(app.srcdir, section))]
        shown, tree = "\n".join(["{.cards}", *rows]), r"```{toctree}\n:hidden:\n\n\1\n```"
        content[0] = LIST.sub(lambda found: f"{shown}\n\n{found.expand(tree)}", content[0])


def llms(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): the pages with their first sentences, for programs that read them."""
    if error is None and app.builder.format == "html":
        root = Path(app.srcdir)
        parts = [f"# {app.config.project}", f"> {about(root / 'index.md')[1]}"]
        for section, title in SECTIONS.items():
            rows = [f"- [{t}]({section}/{n}.html): {text}" for n, t, text in pages_of(root / section)]
            parts += [f"## {title}", "\n".join(rows)]
        Path(app.outdir, "llms.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


MARKUP = re.compile(r"\{[\w:]+\}(?=`)|[`*]|\[(?=[^\]]*\]\()|\]\([^)]*\)")


def open_graph(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add what programs show of a link to the page (ogp.me); address and picture need ``html_baseurl``."""
    path = Path(app.srcdir, f"{page}.md")
    if path.exists():
        title, text = (html.escape(MARKUP.sub("", part)) for part in about(path))
        tags = {"site_name": app.config.project, "type": "article", "title": title, "description": text}
        if base := app.config.html_baseurl:
            tags |= {"url": f"{base}{page}.html", "image": f"{base}_images/demo-contour.png"}
        context["metatags"] += "".join(f'<meta property="og:{k}" content="{v}" />\n' for k, v in tags.items())


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect(
        "config-inited", generate
    )  # before Sphinx lists the pages, from which autosummary makes others
    app.connect("source-read", index_entries)
    app.connect("source-read", outside)
    app.connect("source-read", pictures)
    app.connect("source-read", cards)
    app.connect("build-finished", llms)
    app.connect("html-page-context", whole_options)
    app.connect("html-page-context", open_graph)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", process_docstring, priority=100)
    app.connect("autodoc-process-docstring", restore_colons, priority=900)
    for part in ("description", "options", "arguments"):
        app.connect(f"sphinx-click-process-{part}", lambda *args: escape_click(args[-1]))
    app.connect("sphinx-click-process-epilog", lambda *args: show_example(args[-1]))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
