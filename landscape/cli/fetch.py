"""landscape fetch"""

from __future__ import annotations

from landscape.cli import common
from landscape.cli.completion import Choice
from landscape.cli.options import command
from landscape.core.errors import InputError
from landscape.data.base import data_root
from landscape.data.download import SOURCES
from landscape.data.download import fetch as download


@command(names={"argument": True, "metavar": "[NAME…]", "type": Choice(SOURCES)}, mirror={"metavar": "URL"})
def fetch(names: tuple[str, ...], data_dir: str | None, mirror: str | None, force: bool) -> None:
    """Download the data sets NAME, and verify their checksums.

    Without a NAME, lists them. Files that are there already are verified and kept. Give the other commands
    the same --data-dir, or set LANDSCAPE_DATA.

    Args:
        mirror: Address of a folder with the same files, in place of the public ones; for one NAME.
        force: Replace files of these names that are others.

    Example:
        landscape fetch mnist cifar10 --data-dir ~/data
    """
    if not names:
        known = [
            {"name": name, "megabytes": each.size, "from": each.mirrors} for name, each in SOURCES.items()
        ]
        lines = [f"{name:14} {each.size:4} MB from {each.mirrors[0]}" for name, each in SOURCES.items()]
        common.values("\n".join(lines), data_sets=known)
        return
    if mirror and len(names) > 1:
        raise InputError(f"--mirror: not allowed with {len(names)} data sets, it is the address of one")
    root = data_root(data_dir)
    common.make_folder(root)
    done = {}
    for name in dict.fromkeys(names):
        with common.progress_bar(name) as bar:
            done[name] = download(
                name, root, mirror=mirror, force=force, progress=bar, message=common.message
            )
        new = sum(done[name].values())
        common.message(f"{name}: {new} files downloaded, {len(done[name]) - new} were there; all verified")
        common.files(*done[name])
    downloaded = {name: [str(path) for path, new in files.items() if new] for name, files in done.items()}
    common.values("", downloaded=downloaded)
