"""``python -m tests.ordinary``: the table uses.md; with words, what became of the uses whose names contain one."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.ordinary.follow import Outcome, differs, follow
from tests.ordinary.use import Use
from tests.ordinary.uses import USES, needed_packages_are_there

HEAD = """# Ordinary first uses

Models, losses and data as the documentation of their fields writes them, after the first calls of the tutorials: a problem, a contour on a random plane, both ends of the Hessian's spectrum, its trace. All numbers are compared with dense references in float64, which use PyTorch alone; data are evaluated in parts of four samples.

- **right**: all numbers agree within rounding and their stated errors. Where the loss could be read in several ways, a `ProblemWarning` says how it was.
- **refused**: one line says why. Where it names a remedy, that was run as it stands, and its numbers were compared, too.
- **refused, second derivatives**: loss and contour are right; eigenvalues and trace are refused.

"""
KINDS = {"right": "right", "refused": "refused", "refused_hessian": "refused, second derivatives"}


def row(use: Use, outcome: Outcome) -> str:
    said = "; ".join(outcome.says) if outcome.kind == "right" else use.why
    remedy = f"; remedy: `{outcome.remedy}`" if outcome.remedy else ""
    cells = (
        use.theme,
        use.title,
        KINDS.get(outcome.kind, f"**{outcome.kind}**"),
        *([use.source] if use.source else []),
        (said + remedy).replace("|", "\\|"),
    )
    return "| " + " | ".join(cells) + " |\n"


def table(outcomes: list[tuple[Use, Outcome]], *columns: str) -> str:
    head = "| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|\n"
    return head + "".join(row(use, outcome) for use, outcome in outcomes)


def share(outcomes: list[tuple[Use, Outcome]]) -> tuple[int, int, str]:
    """How many have one answer, how many of them are right the first time, and the percentage."""
    defined = [outcome for use, outcome in outcomes if not use.undefined]
    right = sum(outcome.kind == "right" for outcome in defined)
    return len(defined), right, f"{100 * right / len(defined):.0f}%"


def page(outcomes: list[tuple[Use, Outcome]]) -> str:
    count, total = Counter(outcome.kind for _, outcome in outcomes), len(outcomes)
    remedied = sum(outcome.kind == "refused" and bool(outcome.remedy) for _, outcome in outcomes)
    of_docs = [(use, outcome) for use, outcome in outcomes if not use.source]
    of_scripts = [(use, outcome) for use, outcome in outcomes if use.source]
    defined, right, percent = share(outcomes)
    new, right_of_new, percent_of_new = share(of_scripts)
    totals = (
        f"Of {total} uses, {defined} have one answer. **{right} of these are right the first time "
        f"({percent})**, the others are refused. {total - defined} uses leave open "
        "which loss is meant (random numbers in eval mode, a sum, batches that are others in each pass), or have no "
        "second derivative (a straight-through estimator): they must be refused, and are.\n\n"
        f"{len(of_scripts)} of them follow the training scripts of public repositories, "
        f"{sum(use.small for use, _ in of_scripts)} with batches of one to three samples. They were written "
        f"down before they were tried, and about twenty were not right then. **{new} of them have one answer, and "
        f"{right_of_new} of these are right now ({percent_of_new}).**\n\n"
        f"In all, {count['right']} are right, {count['refused']} are refused, {remedied} of them with a remedy that "
        f"runs as written, and {count['refused_hessian']} are refused for second derivatives only. Silently wrong "
        f"are {count['wrong']}, and {count['crash']} end in an error of another kind.\n\n"
    )
    said = "what it says, or why it is refused"
    first = table(of_docs, "theme", "first use", "outcome", said)
    second = table(of_scripts, "theme", "first use", "outcome", "the script", said)
    return f"{HEAD}{totals}{first}\n## After public training scripts\n\n{second}"


def main() -> int:
    words = sys.argv[1:]
    if not words and not needed_packages_are_there():
        print("transformers and peft are not installed; make ordinary-uses sets them up", file=sys.stderr)
        return 2
    outcomes, failing = [], 0
    for use in USES:
        if words and not any(word in use.id for word in words):
            continue
        begun = time.monotonic()
        outcome = follow(use)
        found = differs(use, outcome)
        outcomes.append((use, outcome))
        failing += bool(found)
        if words or found:
            what = (
                f"FAIL {found}" if found else f"ok {outcome.kind} {'; '.join(outcome.says)} {outcome.remedy}"
            )
            print(f"{use.id}: {time.monotonic() - begun:.1f} s: {what}", file=sys.stderr)
    if not words:
        print(page(outcomes), end="")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
