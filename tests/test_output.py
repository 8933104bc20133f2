"""What every command prints, on stdout, stderr and with --json; its options, which are those of a function."""

from __future__ import annotations

import ast
import inspect
import io
import json
import math
import re
import shlex
import subprocess
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
import tqdm
from click.shell_completion import get_completion_class
from click.testing import CliRunner

import landscape
import landscape.cli
from landscape.analysis.planes import NORMS
from landscape.cli import details, output
from landscape.cli.commands import GROUPS
from landscape.cli.options import command as as_command
from landscape.cli.options import group, help_texts, options_of
from landscape.core import progress, registry
from landscape.core.options import fit
from landscape.core.progress import reporter
from landscape.results.noise import LabelCounts
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command
from tests.test_cli import one_line

CLI = Path(landscape.cli.__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run whose sharpness was monitored."""
    folder = tmp_path_factory.mktemp("run")
    small = ["steps=6", "checkpoint.every=3", "model.widths=[64, 6, 10]", "monitor.sharpness=3"]
    launch.launch(recipe.read("digits-dpsgd", small), folder)
    return folder


def test_one_place_prints() -> None:
    """Values that a command prints by itself would be missing from --json, and from stdout with -q."""
    for path in CLI.glob("*.py"):
        if path.name in ("output.py", "__init__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print"):
                assert "err=True" in ast.unparse(node), f"{path.name}:{node.lineno}"
        assert not re.search(r"message\((table|summary)\(", path.read_text()), path.name


def test_json_of_training_and_of_an_error(tmp_path: Path, tiny: Path, command: Command) -> None:
    for words, files in (
        (("train", tiny, "-o", tmp_path / "t"), ["last.h5"]),
        (("sweep", tiny, "--set", "steps=3", "-o", tmp_path / "s"), ["sweep.csv", "sweep.h5"]),
    ):
        code, out, _ = command(*words, "--json")
        found = json.loads(out)
        assert (code, [Path(name).name for name in found["files"]]) == (0, files)
    assert found["results"][0]["schema"] == "landscape.sweep"
    one_line(command("info", tmp_path / "none.h5", "--json"), 1, "no such file")


def test_large_arrays_are_shown_by_their_range() -> None:
    counts = np.arange(90.0).reshape(1, 90)
    counts[0, 0] = np.inf
    shown = details.of_result(LabelCounts(counts, np.arange(90), "iid"))
    assert shown["counts"] == {"shape": [1, 90], "min": 1.0, "max": 89.0}
    assert json.loads(details.text({"λ": math.inf, "n": np.int64(3)})) == {"λ": None, "n": 3}


def test_details_with_v(run: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("line", run / "last.h5", "--points", "3", "-o", tmp_path / "l.h5", "-v")
    assert (code, "barrier:" in err, "MiB of memory; landscape" in err) == (0, True, True)
    assert "barrier:" not in out
    (tmp_path / "damaged.h5").write_bytes(b"damaged")
    code, _, err = command("info", tmp_path / "damaged.h5", "-v")
    assert (code, "Traceback" in err) == (1, True)
    one_line(command("info", run, "-v", "-q"), 2, "-q and -v")


def test_a_runs_end_and_the_next_command(run: Path, tiny: Path, tmp_path: Path, command: Command) -> None:
    end = landscape.load(run / "last.h5")
    value, limit = (end.history[name][-1] for name in ("lr_lambda_max", "lr_lambda_limit"))
    code, out, _ = command("info", run)
    assert f"ηλ_max {value:.3g} of {limit:.3g} ({value / limit:.0%} of the limit), did not diverge" in out
    delayed = ("algorithm={name='async-sgd', delay=2}", "lr=0.01")
    for settings, word in ((("monitor.sharpness=10",), "contour"), (delayed, "stability")):
        place = tmp_path / word
        flags = [part for setting in settings for part in ("--set", setting)]
        code, out, err = command("train", tiny, *flags, "-o", place)
        assert code == 0
        assert "test error" in out
        assert ("ηλ_max" in out) == (word == "contour")
        (line,) = [line for line in err.splitlines() if line.startswith("next: landscape")]
        words = shlex.split(line.removeprefix("next: landscape"), comments=True)
        assert words[0] == word
        code, out, _ = command(*words)
        assert code == 0
        assert ("τ = 2, no momentum" in out) == (word == "stability")
    out = command("stability", run)[1]  # which has no delay
    assert out.count("training leaves above lr") == out.count("τ = 0, ") == 3


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.progress_bar("sweep") as outer, progress.progress_bar("training") as inner:
        outer(0.25)
        assert capsys.readouterr().err == ""  # not yet
        time.sleep(0.05)
        outer(0.5)
        inner(0.25, "loss 3")
        inner(0.26)  # so soon after the last line
    assert re.fullmatch(
        r"sweep: 50%, \d\d:\d\d left\ntraining: 25%, \d\d:\d\d left, loss 3\n", capsys.readouterr().err
    )
    with progress.progress_bar("sweep", quiet=True), progress.progress_bar("training") as inner:
        time.sleep(0.05)
        inner(0.5)
    assert capsys.readouterr().err == ""


def test_completion_offers_commands_and_values(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = get_completion_class("bash")
    assert shell is not None
    of = shell(landscape.cli.group, {}, "landscape", "_LANDSCAPE_COMPLETE")

    for (*before, last), offered in (
        (["com"], ["compare"]),
        (["contour", "--norm", ""], [*NORMS]),
        (["contour", "--nor"], ["--norm"]),
        (["train", "digits-"], ["digits-dpsgd", "digits-muloco", "digits-ssgd"]),
        (["contour", "x"], ["file"]),
        (["contour", "--data-dir", "x"], ["dir"]),
        (["fetch", "cifar1"], ["cifar10", "cifar100"]),
    ):
        found = of.get_completions(before, last)
        assert [item.value if item.type == "plain" else item.type for item in found] == offered
    for shell_name in ("bash", "zsh", "fish"):  # as in the guide to the command line
        monkeypatch.setenv("_LANDSCAPE_COMPLETE", f"{shell_name}_source")
        code, out, err = command()
        assert (code, err, f"_LANDSCAPE_COMPLETE={shell_name}_complete" in out) == (0, "", True)


HELP = """
import json, sys
import click
import landscape.cli
from click.shell_completion import get_completion_class
from click.testing import CliRunner
from landscape.core import registry

shell = get_completion_class("bash")(landscape.cli.group, {}, "landscape", "_LANDSCAPE_COMPLETE")
texts = {}
for name in registry.commands.names():
    with click.Context(landscape.cli.group, resilient_parsing=True) as context:
        command = landscape.cli.group.get_command(context, name)
        texts[name] = command.get_help(click.Context(command, info_name=name, help_option_names=["-h", "--help"]))
    assert shell.get_completions([name], "--h")
for words in (["figures", "fig2"], ["train", "mnist"], ["contour", "--norm", ""]):
    assert shell.get_completions(words[:-1], words[-1])
sys.argv = ["landscape", "contour", "--help"]
try:
    landscape.cli.main()
except SystemExit:
    pass
print(json.dumps([texts, sorted(sys.modules)]))
"""


def test_help_and_completion_say_what_the_commands_say_without_an_import_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    *_, line = done.stdout.splitlines()
    texts, modules = json.loads(line)
    assert {"torch", "numpy", "scipy", "h5py", "pandas", "landscape.cli.grids"}.isdisjoint(modules)
    for name in registry.commands.names():
        command = landscape.cli.group.get_command(click.Context(landscape.cli.group), name)
        assert command is not None
        context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
        assert texts[name] == command.get_help(context)
        flags = [flag for each in command.params for flag in each.opts if flag.startswith("-")]
        assert {"--json", "-v", "--verbose", "-q", "--quiet"} <= set(flags)
        assert len(flags) == len(set(flags))
        assert re.match(rf"Example: .*landscape {name}", str(command.epilog))


INFO = """
import sys
import landscape.cli
try:
    landscape.cli.main()
except SystemExit:
    print(sorted(sys.modules))
"""


def test_info_needs_no_torch(tmp_path: Path) -> None:
    problem = landscape.Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
    landscape.contour(problem, landscape.random_plane(problem), grid=3).save(tmp_path / "a.h5")
    landscape.train("digits-dpsgd", tmp_path / "run", steps=2)
    for name, seen in {"a.h5": "loss near the center", "run": "stable while lr·λ_max < 1 + ω_min"}.items():
        words = [sys.executable, "-c", INFO, "info", tmp_path / name]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert seen in done.stdout
        assert not re.search("'(torch|scipy|pandas|matplotlib)'", done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "words",
    [
        "recipes", "recipes cifar10/vgg*", "recipes mnist-fig2a-dpsgd", "recipes no", "train no", "train no.toml",
        "sweep no -o x", "figures", "figures no", "topologies", "topologies no", "topologies ring(2) base",
        "contour no.h5", "plot no", "report no", "info no", "import no", "noise no --k 0", "contour --no",
    ],
)  # fmt: skip
def test_lists_and_refusals_need_no_torch(words: str) -> None:
    done = subprocess.run([sys.executable, "-c", INFO, *words.split()], capture_output=True, text=True)
    assert done.stderr.count("landscape: ") == len(re.findall(r"\bno\b", words)), done.stderr
    assert not re.search("'(torch|scipy|pandas|matplotlib)'", done.stdout.splitlines()[-1])


def test_an_option_has_one_form_in_all_commands() -> None:
    """The same name means the same everywhere: a flag, a number, a text or a choice of the same values."""
    known: dict[str, tuple[str, str]] = {}
    # A number in some commands, a list of them or another quantity in others; each help says which.
    several = {"--batch", "--lr", "--noise", "--kind", "--search", "--rise", "--rho"}
    for name in registry.commands.names():
        for option in landscape.cli.as_command(registry.commands[name]).params:
            if not isinstance(option, click.Option):
                continue
            form = f"{option.type!r} {option.is_flag} {option.multiple} {option.nargs}"
            for each in option.opts:
                if each not in several:
                    assert known.setdefault(each, (form, name))[0] == form, (each, name, known[each][1])


def test_a_list_has_commas_or_is_given_piece_by_piece() -> None:
    for name, key, first, second in (
        ("compare", "quantities", "trace", "loss"),
        ("compare", "groups", "SSGD=3", "DPSGD=3"),
        ("stability", "delays", "1", "3"),
        ("basins", "rises", "0.01", "0.1"),
        ("batch-sharpness", "batch", "50", "500"),
        ("sweep", "seeds", "0-2", "5"),
    ):
        command = landscape.cli.as_command(registry.commands[name])
        (flag,) = (option.opts[-1] for option in command.params if option.name == key)
        words = ["x.h5", *(("-o", "x") if name == "sweep" else ())]
        apart = command.make_context(name, [*words, flag, first, flag, second]).params[key]
        assert apart == command.make_context(name, [*words, flag, f"{first},{second}"]).params[key]
        assert apart != command.make_context(name, [*words, flag, second]).params[key]


def test_help_has_the_commands_in_groups(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    places = [out.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for names in GROUPS.values():
        assert all(f"\n  {name} " in out for name in names)
    assert "w_a" not in out
    assert "CKPT" not in out
    for line in out.partition("\nBegin:\n")[2].splitlines():
        assert not line.startswith("  ") or line.endswith("."), line  # whole, on one line of 80 columns
        assert len(line) <= 80


def test_an_unknown_command_names_the_most_similar_one(command: Command) -> None:
    hints = {"contuor": "did you mean 'contour'?", "zzz": "landscape --help lists the commands"}
    for word, hint in hints.items():
        assert command(word) == (2, "", f"landscape: no such command '{word}'; {hint}\n")


def test_version_names_torch_and_the_devices(command: Command) -> None:
    code, out, _ = command("--version")
    assert code == 0
    assert out.splitlines()[0] == f"landscape {landscape.__version__}"
    assert f"torch {torch.__version__}\n" in out
    assert "\ncpu: " in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What stderr is from now on; no fixture, as pytest itself sets stderr between fixtures and the test."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(sys.stderr, Terminal)
    return sys.stderr


@pytest.mark.parametrize("dumb", [False, True])
def test_bars_on_a_terminal(dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    if dumb:
        monkeypatch.setenv("TERM", "dumb")
    with progress.progress_bar("contour") as bar:
        bar(0.5)
        output.message("a line")
    assert ("contour" in stderr.getvalue()) != dumb
    assert re.search(r"(^|\r)a line\n", stderr.getvalue())  # beside no bar


def test_a_bar_inside_another_shows_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    with progress.progress_bar("outer", quiet=True), progress.progress_bar("inner") as bar:
        bar(0.5)
    assert stderr.getvalue() == ""
    with progress.progress_bar("outer") as outer, progress.progress_bar("inner") as inner:
        time.sleep(0.2)
        outer(0.25)
        inner(0.5)
    shown = stderr.getvalue()
    assert shown.index("outer:  25%") < shown.index("inner:  50%")


@progress.shows_progress("a smaller n=")
def counted(n: int, progress: progress.ProgressOption = None) -> int:
    reporter(progress)(0.25)
    reporter(progress)(0.5)
    return inner() + n


@progress.shows_progress()
def inner(progress: progress.ProgressOption = None) -> int:
    reporter(progress)(0.25)
    return 1


def test_an_estimate_leaves_out_the_start(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.progress_bar("grid", hint="less") as report:
        for share, now in ((0.1, 1000.0), (0.3, 1010.0)):  # the first report comes late
            monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now)
            report(share)
    assert "grid: about 35 s more; less makes it shorter" in capsys.readouterr().err


def test_a_long_call_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not where it is short, was silenced or takes the share itself, and not what it calls; the hint once."""
    counted(1)  # nothing before DELAY
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "_hints_shown", set())
    assert counted(1) == counted(2) - 1 == 2
    line = r"counted: \d+%, (\?|\d\d:\d\d) left\n"
    hint = r"counted: about \d+ s more; a smaller n= makes it shorter; progress=False hides this\n"
    assert re.fullmatch(rf"({line})+{hint}({line})+", capsys.readouterr().err)
    shares: list[float] = []
    assert counted(1, progress=shares.append) == counted(1, progress=False) == 2
    monkeypatch.setenv("LANDSCAPE_PROGRESS", "0")
    assert counted(1) == 2
    assert (shares, capsys.readouterr().err) == ([0.25, 0.5], "")
    counted(1, progress=True)
    assert "counted: 50%" in capsys.readouterr().err


def test_a_notebook_has_the_bar_that_tqdm_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    kind = SimpleNamespace(tqdm=lambda **options: made.append(options) or tqdm.tqdm(disable=True))
    monkeypatch.setitem(sys.modules, "tqdm.auto", kind)
    with progress.progress_bar("contour", delay=2.0) as bar:
        bar(0.5)
    assert (made[0]["desc"], made[0]["delay"], "file" in made[0]) == ("contour", 2.0, False)


def test_every_public_function_with_progress_shows_it() -> None:
    named = {name: getattr(landscape, name) for name in landscape.__all__}
    functions = {n: f for n, f in named.items() if inspect.isfunction(f)}
    with_progress = [n for n, f in functions.items() if "progress" in inspect.signature(f).parameters]
    assert len(with_progress) > 20
    for name in with_progress:
        hint = typing.get_type_hints(inspect.unwrap(functions[name]), include_extras=True)["progress"]
        with pytest.raises(landscape.InputError, match="progress: 'yes' is not allowed"):
            fit("progress", "yes", hint)


def measure(
    batch: int, tol: float = 0.1, draws: int | None = None, exact: bool = False, on: bool = True
) -> None:
    """Something.

    Args:
        batch: samples of a minibatch, as :func:`landscape.noise` takes them. A second sentence.
        tol, draws: the ``tol`` of Lau et al. 2023; default:
            a tenth.
        exact: λ is exact

    Returns:
        Nothing.
    """


def test_the_help_is_the_first_sentence_of_the_args() -> None:
    assert help_texts(measure) == {
        "batch": "Samples of a minibatch, as landscape.noise takes them.",
        "tol": "The tol of Lau et al. 2023; default: a tenth.",
        "draws": "The tol of Lau et al. 2023; default: a tenth.",
        "exact": "λ is exact.",
    }


def test_options_have_the_defaults_and_types_of_the_signature() -> None:
    own = {"draws": {"flag": "--min-draws"}, "on": {"flag": "--on/--off"}}
    options = options_of(measure, "batch", "tol", "draws", "exact", **own)
    shown = click.Command("command", params=options, callback=lambda **values: print(sorted(values.items())))
    run = CliRunner().invoke
    assert "Missing option '--batch'" in run(shown, []).output
    given = run(shown, ["--batch", "3", "--min-draws", "-1", "--exact", "--off"])
    assert given.output == "[('batch', 3), ('draws', -1), ('exact', True), ('on', False), ('tol', 0.1)]\n"
    assert "[('batch', 1), ('draws', None), ('exact', False), ('on', True), ('tol', 2.0)]" in (
        run(shown, ["--batch", "1", "--tol", "2"]).output
    )
    assert isinstance(run(shown, ["--batch", "x"]).exception, landscape.InputError)


@dataclass
class Place:
    """Where.

    Args:
        floor: A number. All of the text is the help.
    """

    floor: int = 0


@as_command(place=group(Place), names={"argument": True, "metavar": "NAME…"}, hidden=None)
def visit(names: tuple[str, ...], place: Place, times: tuple[float, ...], hidden: int = 1) -> None:
    """Visit places.

    Args:
        times: When.

    Example:
        landscape visit
        roof
    """
    print(names, place, times, hidden)


def test_the_parameters_of_a_function_are_the_options_of_its_command() -> None:
    run = CliRunner().invoke
    assert run(visit, ["a", "b", "--floor", "2", "--times", "1", "--times", "2"]).output == (
        "('a', 'b') Place(floor=2) (1.0, 2.0) 1\n"
    )
    text = run(visit, ["--help"]).output
    for words in ("Visit places.\n", "A number. All of the text is the help.  [default: 0]", "When.", "NAME"):
        assert words in text
    assert text.endswith("Example: landscape visit roof\n")
    assert "hidden" not in text
    assert "Args" not in text
