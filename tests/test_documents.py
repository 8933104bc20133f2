"""Every block of code in docs/ runs, in the order of its page, in an empty folder.

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
"""

from __future__ import annotations

import contextlib
import doctest
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

import matplotlib.pyplot as plt
import pytest
import torch
from sybil import Document, Example, Region
from sybil.evaluators.doctest import DocTestEvaluator
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import landscape.cli
from landscape.core import registry

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if "generated" not in path.parts and path.name != "changelog.md"
)
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
            if (
                compared
                and output.strip()
                and not doctest.OutputChecker().check_output(output, printed, FLAGS)
            ):
                return f"$ {line}\nexpected:\n{output}\nprinted:\n{printed}"
        return None

    return run


def run_command(words: list[str]) -> tuple[int, str]:
    """(exit code, what a terminal shows) of a command; of landscape and Python files in this process."""
    if words[0] not in ("landscape", "python"):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout
    shown = io.StringIO()
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
            return int(stop.code or 0), shown.getvalue()
    return 0, shown.getvalue()


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
