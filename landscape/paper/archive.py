"""Records of runs, or analyses, of a figure: in one packed file, and beside it while they are new."""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from landscape.core.errors import OperationError
from landscape.core.files import make_folder, read_regular, replacing

_NAME = re.compile(r"[0-9a-f]{24}\.(json|h5|seconds)")
# The largest archive that is read, in bytes, packed and unpacked (ours).
MAX_PACKED, MAX_BYTES = 1 << 26, 1 << 30


@dataclass
class Store:
    """Small files by name: those of an archive, and of a folder what is not packed yet.

    Attributes:
        archive: the file, which need not exist.
        folder: where a new file is written at once, so that nothing is lost.
    """

    archive: Path
    folder: Path
    _packed: dict[str, bytes] | None = field(default=None, repr=False)

    @property
    def packed(self) -> dict[str, bytes]:
        """The files of the archive, which is read once. OperationError: it is damaged."""
        if self._packed is None:
            self._packed = _unpacked(self.archive) if self.archive.exists() else {}
        return self._packed

    def read(self, name: str) -> bytes | None:
        """The file ``name``; None if there is none."""
        loose = self.folder / name
        if name in self.packed:
            return self.packed[name]
        return read_regular(loose, MAX_PACKED) if loose.exists() else None

    def add(self, name: str, content: bytes) -> None:
        """Write a new file into the folder."""
        make_folder(self.folder)
        with replacing(self.folder / name) as file:
            file.write(content)

    def pack(self, names: Iterable[str]) -> None:
        """Make the archive one of the files ``names`` alone; where it is one, it is left as it is.

        Nothing in it depends on when and where it is packed.
        """
        files = {name: content for name in sorted(names) if (content := self.read(name)) is not None}
        if files == self.packed:
            return
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        make_folder(self.archive.parent)
        with replacing(self.archive) as file:
            file.write(lzma.compress(plain.getvalue()))
        self._packed = files


def _unpacked(path: Path) -> dict[str, bytes]:
    """The files in an archive. OperationError: it is damaged."""
    try:
        unpacking = lzma.LZMADecompressor()
        plain = unpacking.decompress(read_regular(path, MAX_PACKED), MAX_BYTES)
        if not unpacking.eof:
            raise ValueError("it is cut off, or too large")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            entries = tar.getmembers()
            if strange := [entry.name for entry in entries if not _NAME.fullmatch(entry.name)]:
                raise ValueError(f"it holds {strange[0]!r}")
            files = {entry.name: tar.extractfile(entry) for entry in entries}
            return {name: file.read() for name, file in files.items() if file}
    except (EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        words = " ".join(str(error).split())[:120]
        raise OperationError(f"{path}: damaged ({words}); delete it to make its runs again") from error
