"""A page about something that goes on: a browser on this machine asks for its numbers again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from landscape.core.errors import LandscapeError
from landscape.reports.page import data_of, render
from landscape.reports.parts import Page, script_json

HOST = "127.0.0.1"  # no other machine is answered


def server(make: Callable[[], Page], title: str, every: float) -> ThreadingHTTPServer:
    """A server of the page that ``make`` gives, on a free port of this machine.

    It answers two paths, "/" and "/data", and reads no file by the name in a request.

    Args:
        make: the page as it is now, for each request; an error of it is shown on the page.
        title: of the page in place of that with an error.
        every: seconds between two requests of a page for its data.

    Returns:
        The server, which listens and does not serve yet.
    """
    turn = threading.Lock()  # what reads the files is not made for several threads

    def now() -> Page:
        with turn:
            try:
                page = make()
            except (LandscapeError, OSError) as error:
                page = Page(title, (), (), ran=str(error))
        told = {"every": every, "ran": page.ran, "findings": list(page.findings)}
        return Page(page.title, page.findings, page.sections, page.data | told, page.ran)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A site that resolves its own name to this machine could read the page; its name gives it away.
            if self.headers["Host"] not in (f"{HOST}:{made.server_port}", f"localhost:{made.server_port}"):
                self.send_error(403)
            elif self.path == "/":
                self.answer("text/html", render(now()))
            elif self.path == "/data":
                self.answer("application/json", script_json(data_of(now())))
            else:
                self.send_error(404)

        def answer(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a page that was closed
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """No line for each request."""

    made = ThreadingHTTPServer((HOST, 0), Handler)
    return made
