"""A board of short texts that the processes of a run share, apart from their exchanges of tensors.

On one machine, under ``--nproc``, it is a private folder, which needs no port and no process that answers.
Otherwise it is a store of torch's on rank 0, or on torchrun's agent, at MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from landscape.core.errors import FailedError

if TYPE_CHECKING:  # torch is imported where a store is made: every command imports this module
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
#: The environment variable with the folder, for the processes that ``--nproc`` started.
FOLDER = "LANDSCAPE_BOARD"
PAUSE = 0.05  # seconds between two attempts to connect


class FolderBoard:
    """Texts by name, in a file for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        path.write_text(text, encoding="utf-8")
        return path

    def set(self, name: str, text: str) -> None:
        """Write ``text``."""
        os.replace(self._write(name, text), self.folder / name)

    def get(self, name: str) -> str:
        """The text; "" if there is none."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def first(self, name: str, text: str) -> bool:
        """Write ``text`` if there is none yet; whether the text is ``text`` then."""
        path = self._write(name, text)
        try:
            os.link(path, self.folder / name)
        except FileExistsError:
            return self.get(name) == text
        finally:
            path.unlink()
        return True


class StoreBoard:
    """As :class:`FolderBoard`, in a key of a store of torch's for each text; its errors are RuntimeErrors."""

    def __init__(self, store: PrefixStore) -> None:
        self.store = store

    def set(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str:
        return self.store.get(name).decode() if self.store.check([name]) else ""

    def first(self, name: str, text: str) -> bool:
        return bool(self.store.compare_set(name, "", text).decode() == text)


Board = FolderBoard | StoreBoard


def of_launcher() -> FolderBoard | None:
    """The board of the launcher that started this process with ``--nproc``; None if there is none."""
    return FolderBoard(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


def within(seconds: float, call: Callable[[], T]) -> T:
    """``call()``; TimeoutError if it takes longer. Its thread goes on, as torch's calls cannot be ended."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's, without the place in torch's sources."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2][:160] if line.startswith("[/") else line[:160]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, which only this machine can reach."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def connect(host: str, port: int, rank: int, serve: bool, timeout: float) -> tuple[TCPStore, TCPStore]:
    """Two connections to the store at ``host``, so that a call on one does not wait for a call on the other.

    With ``serve`` this process holds the store. It listens at a loopback address only, if ``host`` is one,
    and otherwise at all addresses of this machine, as ``host`` may be none of them. Raises FailedError if the
    port is in use, or no store answers within ``timeout`` seconds.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline, listener = time.monotonic() + timeout, _listen(host, port) if serve else None

    def store(hosts: bool, fd: int | None) -> TCPStore:
        limit = timedelta(seconds=timeout)
        return TCPStore(
            address, port, None, hosts, limit, wait_for_workers=False, master_listen_fd=fd, use_libuv=True
        )

    try:
        address = _reach(host, port, deadline)
        first, second = (
            within(max(0.1, deadline - time.monotonic()), functools.partial(store, hosts, fd))
            for hosts, fd in ((serve, listener.detach() if listener else None), (False, None))
        )
    except (RuntimeError, OSError) as error:  # torch's are RuntimeErrors
        where = f"{host}:{port} ({first_line(error)})"
        raise FailedError(f"rank {rank}: rank 0 does not answer at {where}") from error
    finally:
        if listener:
            listener.close()
    return first, second


def _listen(host: str, port: int) -> socket.socket:
    try:
        if is_loopback(host):
            address, family = ("::1", socket.AF_INET6) if host == "::1" else (host, socket.AF_INET)
            address = "127.0.0.1" if address == "localhost" else address
            return socket.create_server((address, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        words = os.strerror(error.errno or 0)  # the error's own text would repeat the address
        raise FailedError(f"MASTER_PORT: {port} cannot be used on {host} ({words})") from error


def _reach(host: str, port: int, deadline: float) -> str:
    """The address of ``host`` at which a server listens; repeated here, as torch warns at each attempt."""
    error: OSError = TimeoutError("no answer")
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise error
        try:
            name = "127.0.0.1" if host == "localhost" else host
            with socket.create_connection((name, port), timeout=remaining) as reached:
                return str(reached.getpeername()[0])
        except OSError as latest:
            error = latest
            with contextlib.suppress(InterruptedError):
                time.sleep(PAUSE)
