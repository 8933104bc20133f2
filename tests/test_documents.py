"""Every block of code in docs/, README.md and CONTRIBUTING.md runs, in the order of its page, in an empty folder.

- ``python`` runs in one namespace for each page; where it begins with ``>>>`` its output is compared.
- ``console`` has commands after ``$``; where lines follow, they are the output ("..." stands for any text).
- A ``python`` or ``toml`` block whose first line is a comment with the name of a file is written to that file.
- ``text`` is not run.

A comment before a block says more, and is not seen by readers:

- ``<!-- not run: REASON -->``;
- ``<!-- slow: REASON -->``: only the slow tests run it;
- ``<!-- in tests: ARGUMENTS -->`` adds arguments to each command of the block. Its output is then compared
  only in the whole page, which the slow tests run.
- ``<!-- needs: runs/dp -->`` at any place of a page: a short run of the bundled digits is in that folder.
- ``<!-- picture: SECTION/NAME: CAPTION -->`` stands for the picture of a script of the gallery, on the site.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import h5py
import matplotlib.pyplot as plt
import pytest
import torch
from sybil import Document, Example, Region
from sybil.evaluators.doctest import DocTestEvaluator
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import landscape.cli
from landscape.cli.commands import GROUPS
from landscape.core import registry
from tests import notebooks
from tests.conftest import slow_but

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import site_messages
import site_reference

ROOT = Path(__file__).parents[1]
DOCS = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if "generated" not in path.parts and path.name != "changelog.md"
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMMENT = re.compile(r"<!-- (not run|slow|in tests): ((?:(?!-->).)+?) -->\s*\Z", re.DOTALL)
NEEDS = re.compile(r"<!-- needs: (.+?) -->")
FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
# What a block may be; others are prose that nothing checks.
LANGUAGES = {"python", "console", "toml", "text"}
DIRECTIVES = re.compile(r"\{[\w-]+\}.*")


class Blocks:
    """The parser of the blocks of a page. ``full``: as readers run them, not reduced."""

    def __init__(self, full: bool) -> None:
        self.full = full

    def __call__(self, document: Document) -> Iterable[Region]:
        for region in FencedCodeBlockLexer(r".+")(document):
            language = region.lexemes["language"]
            if DIRECTIVES.fullmatch(language):
                continue
            comment = COMMENT.search(document.text[: region.start])
            kind, text = (comment[1], comment[2]) if comment else ("", "")
            if kind == "not run" or (kind == "slow" and not self.full) or language == "text":
                continue
            assert language in LANGUAGES, (
                f"{document.path}: a block of '{language}' needs <!-- not run: … -->"
            )
            region.parsed = region.lexemes["source"]
            if file := FILE.match(region.parsed):
                region.evaluator = _written(file[1])
            elif language == "python" and region.parsed.startswith(">>>"):
                for example in DocTestStringParser(DocTestEvaluator(FLAGS))(region.parsed, document.path):
                    example.adjust(region, region.parsed)
                    yield example
                continue
            else:
                added = text.split() if kind == "in tests" and not self.full else []
                console = _console(added, compared=self.full or kind != "in tests")
                evaluators: dict[str, Callable[[Example], str | None]]
                evaluators = {"python": PythonEvaluator(), "console": console, "toml": _toml}
                region.evaluator = evaluators[language]
            yield region


def _toml(example: Example) -> None:
    tomllib.loads(example.parsed)


def _written(name: str) -> Callable[[Example], None]:
    def write(example: Example) -> None:
        if name.endswith(".toml"):
            tomllib.loads(example.parsed)
        Path(name).write_text(example.parsed)

    return write


def _console(added: list[str], compared: bool) -> Callable[[Example], str | None]:
    def run(example: Example) -> str | None:
        text = example.parsed.replace("\\\n", " ")
        for line, output in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n?)*)", text, re.MULTILINE):
            code, printed = run_command([*shlex.split(line, comments=True), *added])
            if code:
                return f"$ {line}\nexit code {code}\n{printed}"
            same = doctest.OutputChecker().check_output(output, printed, FLAGS)
            if compared and output.strip() and not same:
                return f"$ {line}\nexpected:\n{output}\nprinted:\n{printed}"
        return None

    return run


def run_command(words: list[str]) -> tuple[int, str]:
    """(exit code, what a terminal shows) of a command; of landscape and Python files in this process.

    Lines of progress are left out: how many there are depends on the machine's speed.
    """
    if words[0] not in ("landscape", "python"):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout
    shown, code = io.StringIO(), 0
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr(sys, "argv", words if words[0] == "landscape" else words[1:])
        try:
            if words[0] == "landscape":
                landscape.cli.main()
            else:
                runpy.run_path(words[1], run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, re.sub(r"^[\w ]+: \d+%, .* left\n", "", shown.getvalue(), flags=re.MULTILINE)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a short run of the bundled digits, trained once: "ss" or "dp"."""
    recipes = {"ss": "digits-ssgd", "dp": "digits-dpsgd"}
    folder = tmp_path_factory.mktemp("trained")

    def run(name: str) -> Path:
        path = folder / name
        if not path.exists():
            settings = ["steps=40", "checkpoint.every=20", "decompose.every=5", "evaluate.every=20"]
            more = [word for setting in settings for word in ("--set", setting)]
            code, printed = run_command(["landscape", "train", recipes[name], "-o", str(path), *more])
            assert code == 0, printed
        return path

    return run


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which a page runs; nothing of it is left in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    state = torch.get_rng_state()
    registries = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
    for each in registries:
        list(each)  # loads the entries of the package
    entries = [dict(each._entries) for each in registries]
    yield tmp_path
    for each, known in zip(registries, entries, strict=True):
        each._entries.clear()
        each._entries.update(known)
    torch.set_rng_state(state)
    plt.close("all")
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def _run(page: Path, folder: Path, trained: Callable[[str], Path], full: bool) -> None:
    document = Document.parse(str(page), Blocks(full))
    for need in " ".join(NEEDS.findall(document.text)).split():
        shutil.copytree(trained(Path(need).name), folder / need)
    for example in document.examples():
        example.evaluate()


def _id(page: Path) -> str:
    return os.fspath(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_the_blocks_of_a_page_run(page: Path, in_folder: Path, trained: Callable[[str], Path]) -> None:
    _run(page, in_folder, trained, full=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if re.search("<!-- (in tests|slow):", p.read_text())], ids=_id
)
def test_a_page_runs_as_printed(page: Path, in_folder: Path, trained: Callable[[str], Path]) -> None:
    _run(page, in_folder, trained, full=True)


# What a message says itself: what is allowed, or what to do.
REMEDY = re.compile(
    r"\b(must|close|needs?|needed|allowed|give|use|try|leave|choose|delete|move|save|install|download|draw|raise|register|"
    r"declare|missing|remove|run|call|put|switch|add|freeze|wait|start|pad|write|unless|set|make|take|train|allow|"
    r"let|compute|update|repack|rename|widen|lists|fewest|at most|at least|would be)\b"
)


def _described() -> dict[str, re.Pattern[str]]:
    """Message of Troubleshooting -> the pattern that a message of the source must have; "…" stands for anything."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    named = [message for cell in cells for message in re.findall(r"`(.+?)`", cell)]
    return {message: re.compile(".*".join(map(re.escape, message.split("…")))) for message in named}


def test_every_message_says_what_to_do_or_is_described() -> None:
    raised = {text for _, text in site_messages.messages()}
    assert len(raised) > 450
    described = _described().values()
    passed_on = {"test: …", "rank …: …", "checkpoint: …", "… (rank …)"}  # before the words of another message
    bare = [text for text in raised - passed_on if not REMEDY.search(text.partition(":")[2] or text)]
    assert len(bare) > 80
    assert [text for text in bare if not any(pattern.search(text) for pattern in described)] == []


def test_every_message_of_the_page_is_printed_somewhere() -> None:
    nodes = [node for nodes in site_messages.trees().values() for node in nodes]
    expressions = [node for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))]
    strings = {text for node in expressions for text in site_messages.texts(node, {})}
    strings |= {text for _, text in site_messages.messages()}
    printed = "\n".join(text.replace("\n", " ") for text in strings)
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    described = _described()
    assert len(described) > 80
    unknown = {message for message, pattern in described.items() if not pattern.search(printed)}
    assert unknown <= classes


def lost(page: Path) -> list[str]:
    """The links of a page that have no text or lead to no file."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    elsewhere = ["https?:", "mailto:", "#", ".*generated/"]
    if not (ROOT / "figures").exists():  # the sdist is without the figures
        elsewhere.append(r".*figures/[\w.-]+\.(png|gif|md)$")
    found = []
    for shown, target in LINK.findall(text):
        known = re.match("|".join(elsewhere), target) or (page.parent / target.partition("#")[0]).exists()
        if not (shown.strip() and known):
            found.append(target)
    return found


def test_links_have_a_text_and_lead_to_a_file(tmp_path: Path) -> None:
    """Sphinx finds links within docs/, and would give them a text; readers of the repository see the pages too."""
    pages = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "figures").glob("*.md"))]
    assert {_id(page): links for page in pages if (links := lost(page))} == {}
    (tmp_path / "page.md").write_text(
        "[](page.md), [there](page.md#here), [gone](none.md), `[code](none.md)`"
    )
    assert lost(tmp_path / "page.md") == ["page.md", "none.md"]


def test_every_page_is_in_a_table_of_contents() -> None:
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    for page in DOCS:
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            names = [line for line in entries.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert set(DOCS) <= listed


def test_the_readme_has_all_commands_and_no_number_of_its_own() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) < 150
    assert all(len(line) <= 110 for line in lines if not line.startswith(("|", "![")))
    rows = re.findall(r"^\| ([\w ]+) \| (`[\w-]+`(?:, `[\w-]+`)*) \|", text, re.MULTILINE)
    shown = {group: re.findall(r"`([\w-]+)`", names) for group, names in rows}
    assert list(shown) == list(GROUPS)
    assert {group: set(names) for group, names in shown.items()} == {g: set(c) for g, c in GROUPS.items()}
    measured = (ROOT / "docs" / "performance.md").read_text()
    table = text.partition("## Against other tools")[2].partition("\n## ")[0]
    ratios = re.findall(r"\| (\d[^|]*) \|$", table, re.MULTILINE)
    assert len(ratios) > 5
    assert set(ratios) <= {*re.findall(r"(?<=\| )[^|]+(?= \|)", measured)}


def test_the_page_of_the_checkpoint_has_what_is_in_its_file(trained: Callable[[str], Path]) -> None:
    page = (ROOT / "docs" / "reference" / "checkpoint.md").read_text()
    described = set(re.findall(r"`/?([\w/]+)`", page))
    with h5py.File(trained("dp") / "last.h5") as file:
        groups = {name: f"{name}/NAME" for name in file if isinstance(file[name], h5py.Group)}
        groups |= {"history": "history/COLUMN", "rng": "rng/seed"}
        assert {groups.get(name, name) for name in file} <= described
        assert set(file.attrs) - {"checksum"} <= described


def test_the_reference_describes_everything(tmp_path: Path) -> None:
    site_reference.write_pages(tmp_path)
    assert "algorithm.mixing" in (tmp_path / "recipes.md").read_text()


@pytest.mark.parametrize("section", ["tutorials", "how-to", "explanation"])
def test_a_card_of_each_page_has_its_first_sentence(section: str) -> None:
    pytest.importorskip("sphinx")
    pages = importlib.import_module("site_extension").pages_of(ROOT / "docs" / section)
    assert {name for name, *_ in pages} >= {p.stem for p in (ROOT / "docs" / section).glob("*.md")} - {
        "index"
    }
    assert all(title and re.match(r"\S.+[.?]$", text) for _, title, text in pages)


SCRIPTS = ROOT / "examples" / "gallery"
#: Pages and commands about what has no picture: settings, installation, refusals, lists of data sets and files.
WITHOUT_PICTURE = {
    "how-to/data", "how-to/devices", "how-to/memory", "how-to/plugins", "how-to/resume", "how-to/sharded",
    "how-to/weights", "explanation/checks",
    "doctor", "fetch", "figures", "import", "info", "recipes",
}  # fmt: skip


def test_each_page_of_a_drawing_or_a_command_has_a_picture() -> None:
    without = set()
    for section in ("tutorials", "how-to", "explanation"):
        for page in {*(ROOT / "docs" / section).glob("*.md")} - {ROOT / "docs" / section / "index.md"}:
            text = page.read_text(encoding="utf-8")
            made = re.findall(
                r"<!-- picture: ([\w/]+): .+ -->|^   \.\./examples/gallery/([\w/]+)\.py$", text, re.M
            )
            assert [name for one in made if not (SCRIPTS / f"{(name := max(one))}.py").exists()] == [], page
            if not made and "![" not in text:
                without.add(f"{section}/{page.stem}")
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS.rglob("*.py"))
    drawn = site_reference.COMMAND_PICTURES
    assert all((SCRIPTS / f"{script}.py").exists() for script in drawn.values())
    for names in GROUPS.values():
        called = {name for name in names if re.search(rf"\.{name.replace('-', '_')}\(", scripts)}
        without |= {*names} - called - {*drawn}
    assert without == WITHOUT_PICTURE


def test_every_public_name_is_in_the_reference_by_task() -> None:
    page = "\n".join(site_reference.api_page())
    listed = re.findall(r"^   (landscape\.[\w.]+)$", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    packages = [name for name in landscape.__all__ if inspect.ismodule(getattr(landscape, name))]
    expected = {f"landscape.{name}" for name in {*landscape.__all__} - {*packages, "__version__"}}
    for package in (*(f"landscape.{name}" for name in packages), "landscape.testing"):
        inner = importlib.import_module(package).__all__
        expected |= {f"{package}.{name}" for name in inner}
    expected -= {f"landscape.{name}" for name in (*site_reference.SHOWN_ELSEWHERE, "testing.CHECKS")}
    assert expected <= {*listed}
    for name in listed:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


#: Modules whose names are public; of the package itself, those in ``__all__`` are.
PUBLIC_MODULES = {
    *(f"landscape.{name}" for name in ("data", "models", "limits", "limits.rules", "plugins", "testing")),
    "landscape.integrations.lightning", "landscape.integrations.huggingface",
}  # fmt: skip
IMPORT = re.compile(
    r"^[ >.]*(?:from (landscape(?:\.[\w.]+)?) import ([\w, ]+|\()|import (landscape\.[\w.]+))", re.MULTILINE
)


def private(text: str) -> list[str]:
    """The imports of ``text``, a page or a script, that bring other than public names."""
    found = []
    for module, names, whole in IMPORT.findall(text):
        brought = {part.split()[0] for part in names.split(",") if part}
        own = module == "landscape" and brought <= {*landscape.__all__, "testing"}
        if not own and (module or whole) not in PUBLIC_MODULES:
            found.append(module or whole)
    return found


def test_documents_and_examples_import_public_names_only() -> None:
    paths = [*PAGES, *(p for p in (ROOT / "examples").rglob("*") if p.suffix in (".py", ".md"))]
    assert {_id(path): names for path in paths if (names := private(path.read_text()))} == {}


@pytest.mark.parametrize("name", slow_but(["own_cnn"], ["own_cnn", "paper_figure", "decentralized_sgd"]))
def test_a_notebook_runs(name: str, in_folder: Path) -> None:
    path = notebooks.NOTEBOOKS / f"{name}.ipynb"
    assert private("\n".join(notebooks.code(path))) == []
    assert len(list(notebooks.run(path))) >= 2


def test_the_test_of_imports_sees_private_ones() -> None:
    text = "from landscape.core import files\n>>> import landscape.cli\n  from landscape import plots\nimport landscape\n"
    assert private(text) == ["landscape.core", "landscape.cli", "landscape"]
    assert private("from landscape import contour\nfrom landscape.plugins import (\n    Rule,\n)\n") == []


def test_a_block_that_fails_is_seen(tmp_path: Path, in_folder: Path, trained: Callable[[str], Path]) -> None:
    page = tmp_path / "page.md"
    for block in (
        "```python\nassert 1 == 2\n```",
        "```python\n>>> 1 + 1\n3\n```",
        "```console\n$ landscape recipes no-such-recipe\n```",
        "```console\n$ landscape --version\nsomething else\n```",
        "```sh\nls\n```",
        "<!-- in tests: --no-such-option -->\n```console\n$ landscape recipes\n```",
    ):
        page.write_text(f"# Page\n\n{block}\n")
        with pytest.raises(AssertionError):
            _run(page, in_folder, trained, full=False)
    page.write_text(
        "<!-- not run: it is long -->\n```sh\nls\n```\n\n```console\n$ landscape recipes\ndigits-dpsgd...\n```\n"
    )
    _run(page, in_folder, trained, full=False)
