"""landscape fetch against a server on this machine: whole and right files, or none."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from landscape import data
from landscape.data import download
from landscape.data.download import File
from landscape.data.images import BINARY, FILES, PIXELS
from tests.conftest import Command
from tests.harm.samples import idx
from tests.test_cli import one_line

Answers = dict[str, bytes | Callable[[http.server.BaseHTTPRequestHandler], None]]


@pytest.fixture
def server() -> Iterator[tuple[str, Answers, list[str]]]:
    """Its address, what it answers by path, and the paths it was asked for."""
    answers: Answers = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer = answers.get(self.path)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", answers, asked
        httpd.shutdown()


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that changes fields of a data set's source."""

    def change(name: str, **fields: Any) -> None:
        monkeypatch.setitem(download.SOURCES, name, dataclasses.replace(download.SOURCES[name], **fields))

    return change


@pytest.fixture
def mnist(server: tuple[str, Answers, list[str]], source: Callable[..., None]) -> dict[str, bytes]:
    """A small data set in MNIST's format on the server, at /mnist/; its contents by name."""
    url, answers, _ = server
    generator = np.random.default_rng(0)
    shapes = ((6, 4, 4), (6,), (3, 4, 4), (3,))
    contents = {
        name: idx(generator.integers(0, 10, s, dtype=np.uint8)) for name, s in zip(FILES, shapes, strict=True)
    }
    packed = {name: gzip.compress(raw) for name, raw in contents.items()}
    files = tuple(File(f"{n}.gz", sha(packed[n]), hashlib.md5(contents[n]).hexdigest()) for n in FILES)
    answers.update({f"/mnist/{name}.gz": raw for name, raw in packed.items()})
    source("mnist", mirrors=(f"{url}/gone/", f"{url}/mnist/"), files=files)
    return contents


def test_files_are_downloaded_once_and_loaded(
    server: tuple[str, Answers, list[str]], mnist: dict[str, bytes], tmp_path: Path, command: Command
) -> None:
    wanted = ("fetch", "mnist", "--data-dir", tmp_path)
    code, out, err = command(*wanted)
    assert code == 0
    assert out.split() == [f"{tmp_path}/mnist/{name}.gz" for name in FILES]
    assert "404" in err  # the first mirror has none
    assert "4 files downloaded, 0 were there" in err
    x, y = data.load("mnist", data_dir=tmp_path).train
    assert (tuple(x.shape), len(y)) == ((6, 16), 6)
    before, asked = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}, len(server[2])
    code, again, err = command(*wanted)
    assert (code, again, "0 files downloaded, 4 were there" in err) == (0, out, True)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert len(server[2]) == asked


def test_a_file_with_the_same_content_is_kept_and_another_is_not_replaced(
    mnist: dict[str, bytes], tmp_path: Path, command: Command
) -> None:
    wanted = ("fetch", "mnist", "--data-dir", tmp_path)
    (tmp_path / FILES[0]).write_bytes(mnist[FILES[0]])  # unpacked, in the folder above
    (tmp_path / f"{FILES[1]}.gz").write_bytes(gzip.compress(mnist[FILES[1]], 1))
    code, out, err = command(*wanted, "-q")
    assert (code, err) == (0, "")
    assert out.split()[:3] == [
        str(tmp_path / FILES[0]), str(tmp_path / f"{FILES[1]}.gz"), str(tmp_path / "mnist" / f"{FILES[2]}.gz")
    ]  # fmt: skip
    other = tmp_path / "mnist" / f"{FILES[2]}.gz"
    other.write_bytes(b"another")
    one_line(command(*wanted), 1, str(other), "checksum", "--force")
    assert other.read_bytes() == b"another"
    assert command(*wanted, "--force", "-q")[0] == 0
    assert gzip.decompress(other.read_bytes()) == mnist[FILES[2]]


def broken_off(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"half")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "404"), (b"another file", "checksum is wrong"), (broken_off, "")],
    ids=["missing", "wrong", "broken off"],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(
    answer: bytes | None, words: str, server: tuple[str, Answers, list[str]], mnist: dict[str, bytes],
    tmp_path: Path, command: Command,
) -> None:  # fmt: skip
    url, answers, _ = server
    if answer is None:
        del answers[f"/mnist/{FILES[3]}.gz"]
    else:
        answers[f"/mnist/{FILES[3]}.gz"] = answer
    result = command("fetch", "mnist", "--data-dir", tmp_path, "-q")
    one_line(result, 1, f"{url}/mnist/{FILES[3]}.gz", words, "try again")
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(
        f"{n}.gz" for n in FILES[:3]
    )


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(bytes(1 << 16))


def slow(place: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"\r\n" if place == "body" else b""))
            for _ in range(100):
                handler.wfile.write(b"x")
                time.sleep(0.05)

    return answer


@pytest.mark.parametrize(("answer", "words"), [
    (bytes(5000), "has 5,000 bytes"),
    (endless, "has more than the"),
    (slow("headers"), "no answer within 1 s"),
    (slow("body"), "incomplete after 1 s"),
])  # fmt: skip
def test_a_mirror_decides_neither_how_much_nor_how_long(
    answer: Any, words: str, server: tuple[str, Answers, list[str]], mnist: dict[str, bytes],
    source: Callable[..., None], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    url, answers, _ = server
    sizes = {name: len(raw) for name, raw in answers.items() if isinstance(raw, bytes)}
    files = download.SOURCES["mnist"].files
    known = tuple(dataclasses.replace(file, size=sizes[f"/mnist/{file.name}"]) for file in files)
    source("mnist", mirrors=(f"{url}/mnist/",), files=known)
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    answers[f"/mnist/{FILES[0]}.gz"] = answer
    begun = time.monotonic()
    one_line(command("fetch", "mnist", "--data-dir", tmp_path, "-q"), 1, f"{FILES[0]}.gz", words)
    assert time.monotonic() - begun < 4
    assert not list((tmp_path / "mnist").iterdir())


def test_no_network_and_the_names(mnist: dict[str, bytes], tmp_path: Path, command: Command) -> None:
    at = ("--data-dir", tmp_path)
    one_line(command("fetch", "mnist", "--mirror", "http://127.0.0.1:9/", *at), 1, "cannot be downloaded (")
    code, out, _ = command("fetch")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, list(download.SOURCES))


def archive(contents: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def test_an_archive_is_unpacked_and_deleted(
    server: tuple[str, Answers, list[str]], source: Callable[..., None], tmp_path: Path, command: Command
) -> None:
    url, answers, asked = server
    folder, test = download.SOURCES["cifar100"].folder, "test.bin"
    contents = {name: bytes(2 * (BINARY["cifar100"][0] + PIXELS)) for name in ("train.bin", test)}
    contents[test] = contents[test][:-1] + b"\x07"
    inside = {f"{folder}/{name}": raw for name, raw in contents.items()}
    packed = archive({"../outside": b"x", f"{folder}/readme.txt": b"x", **inside})
    answers["/cifar-100-binary.tar.gz"] = packed
    files = tuple(File(name, sha(raw)) for name, raw in contents.items())
    source("cifar100", mirrors=(url,), files=files, archive=File("cifar-100-binary.tar.gz", sha(packed)))
    root = tmp_path / "data"
    wanted = ("fetch", "cifar100", "--data-dir", root, "-q")
    code, out, _ = command(*wanted)
    assert (code, out.split()) == (0, [f"{root}/{folder}/{name}" for name in contents])
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == sorted(contents)
    assert len(data.load("cifar100", data_dir=root).train[1]) == 2
    (root / folder / test).unlink()
    assert command(*wanted)[0] == 0
    assert (root / folder / test).read_bytes() == contents[test]
    assert command(*wanted)[0] == 0
    assert len(asked) == 2
    (root / folder / test).unlink()
    other = archive({f"{folder}/{test}": b"other", f"{folder}/train.bin": b""})
    answers["/cifar-100-binary.tar.gz"] = other
    source("cifar100", archive=File("cifar-100-binary.tar.gz", sha(other)))
    one_line(command(*wanted), 1, "cifar-100-binary.tar.gz", "checksum")
    assert not (root / folder / test).exists()
