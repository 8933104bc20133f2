"""The values of options that a shell can complete. No torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from landscape.core.options import choose

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Choice(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A few allowed values, which completion offers; for another one the error names the most similar."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = "value" if param is None else param.opts[-1]
        return choose(name if name.startswith("-") else name.upper(), str(value), self.choices)


def paths(kind: str) -> Completion:
    """Completion by names of files ("file") or folders ("dir"), which the shell itself finds."""
    return lambda context, parameter, incomplete: [CompletionItem(incomplete, type=kind)]


def names(known: Callable[[], Iterable[str]]) -> Completion:
    """Completion by the ``known`` names that begin so; where none does, by files."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in known() if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete
