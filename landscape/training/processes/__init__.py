"""The processes of a run. This file is the script that a child starts with, which watches the parent.

``python -P processes/__init__.py MODULE ARGUMENTS…`` runs ``MODULE.main()``. -P keeps the current folder off
the module path; the package is loaded by the path of its file, so that no other package of this name is
loaded.

LANDSCAPE_LINK is the descriptor of one end of a socket. The child writes a byte a second to it from the
start, and ends when the other end is closed, at the latest when the parent ends. This script imports nothing
of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

LINK = "LANDSCAPE_LINK"
BEAT = 1.0


def watch_parent(link: socket.socket) -> None:
    """Send a byte every BEAT seconds as a sign of life, and end this process when its parent ends."""
    link.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            link.send(b".")
        if select.select([link], [], [], BEAT)[0]:  # the parent never sends: the socket was closed
            os._exit(1)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        parent, set_death_signal = os.getppid(), 1  # 1: PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Run ``sys.argv[1]``'s main with the arguments after it."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the parent, too, which decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    link = socket.socket(fileno=int(os.environ.pop(LINK)))
    threading.Thread(target=watch_parent, args=(link,), daemon=True).start()
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(root.name, root / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[root.name] = package
    spec.loader.exec_module(package)
    module = sys.argv.pop(1)
    sys.argv[0] = root.name
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
