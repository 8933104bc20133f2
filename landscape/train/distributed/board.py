"""Where the processes of a run leave short texts for each other, beside their exchanges.

On one machine, under ``--nproc``, that is a private folder: no port, and nobody is needed for it to answer.
Else it is a store of torch's on rank 0, or on torchrun's agent, at MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from landscape.core.errors import FailedError

if TYPE_CHECKING:  # torch is imported where a store is made: every command imports this module
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
#: Names the folder, for the processes that ``--nproc`` started.
FOLDER = "LANDSCAPE_BOARD"
PAUSE = 0.05  # seconds between two attempts to connect


class Board(Protocol):
    """Texts by name."""

    def set(self, name: str, text: str) -> None:
        """Leave ``text``."""

    def get(self, name: str) -> str:
        """What was left, "" where nothing was."""

    def first(self, name: str, text: str) -> bool:
        """Leave ``text`` if nothing was left before; whether that is so."""


class FolderBoard:
    """A file for each text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        path.write_text(text, encoding="utf-8")
        return path

    def set(self, name: str, text: str) -> None:
        os.replace(self._write(name, text), self.folder / name)

    def get(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def first(self, name: str, text: str) -> bool:
        path = self._write(name, text)
        try:
            os.link(path, self.folder / name)
        except FileExistsError:
            return self.get(name) == text
        finally:
            path.unlink()
        return True


class StoreBoard:
    """The keys of a store of torch's, whose errors are RuntimeErrors."""

    def __init__(self, store: PrefixStore) -> None:
        self.store = store

    def set(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str:
        return self.store.get(name).decode() if self.store.check([name]) else ""

    def first(self, name: str, text: str) -> bool:
        return bool(self.store.compare_set(name, "", text).decode() == text)


def of_launcher() -> FolderBoard | None:
    """The board of the process that started this one with ``--nproc``, if one did."""
    return FolderBoard(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


def within(seconds: float, call: Callable[[], T]) -> T:
    """``call()``; TimeoutError where it takes longer. It is then left to itself: torch's cannot be ended."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def is_loopback(host: str) -> bool:
    """Whether ``host`` says by itself that only this machine is meant."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def connect(host: str, port: int, rank: int, serve: bool, timeout: float) -> tuple[TCPStore, TCPStore]:
    """Two connections to the store at ``host``: one that waits must not keep the other from answering.

    With ``serve`` the store is kept here; on a loopback address it listens there only, else on all of this
    machine's addresses, since the name by which others reach it may not be one of them. Raises FailedError
    where the port is taken, or nobody answers as a store does within ``timeout`` seconds.
    """
    until, stores = time.monotonic() + timeout, []
    listener = _listen(host, port) if serve else None
    try:
        address = _reach(host, port, until)
        for hosts in (serve, False):
            fd = listener.detach() if hosts and listener else None
            left = max(0.1, until - time.monotonic())
            stores.append(within(left, lambda h=hosts, f=fd: _store(address, port, h, f, timeout)))  # type: ignore[misc]
    except (RuntimeError, OSError) as error:  # torch's are RuntimeErrors
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise FailedError(f"rank {rank}: rank 0 does not answer at {host}:{port} ({words[:160]})") from error
    finally:
        if listener:
            listener.close()
    return stores[0], stores[1]


def _store(address: str, port: int, hosts: bool, fd: int | None, timeout: float) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address,
        port,
        is_master=hosts,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=True,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        if is_loopback(host):
            here, family = ("::1", socket.AF_INET6) if host == "::1" else (host, socket.AF_INET)
            here = "127.0.0.1" if here == "localhost" else here
            return socket.create_server((here, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        words = os.strerror(error.errno or 0)  # without the address again, as its own words have it
        raise FailedError(f"MASTER_PORT: {port} cannot be used on {host} ({words})") from error


def _reach(host: str, port: int, until: float) -> str:
    """The address of ``host`` at which something listens; tried in silence, where torch warns each time."""
    error: OSError = TimeoutError("no answer")
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise error
        try:
            name = "127.0.0.1" if host == "localhost" else host
            with socket.create_connection((name, port), timeout=left) as reached:
                return str(reached.getpeername()[0])
        except OSError as latest:
            error = latest
            with contextlib.suppress(InterruptedError):
                time.sleep(PAUSE)
