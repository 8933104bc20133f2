"""Which files are one model's weights, and which of the dicts in them is its state."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from landscape.checkpoint import tensor_files
from landscape.checkpoint.tensor_files import METADATA, MOST, Key, Stored, entries_of, is_plain, readable
from landscape.core.errors import OperationError
from landscape.core.files import read_regular
from landscape.core.options import ends_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
COMPILED = "_orig_mod."  # torch.compile adds it to the name of each compiled module
# How save_pretrained and others name the parts of a model and their index.
INDEX, PART = ".index.json", re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\.\w+)")
NEEDED = f"model.safetensors, pytorch_model.bin, an index such as model.safetensors{INDEX}, or {METADATA}"

Message = Callable[[str], None]


class State(Mapping[str, Any]):
    """Name -> tensor of one model; what lies in a file is read when it is asked for."""

    def __init__(self, where: str | Path, entries: Mapping[str, Any]) -> None:
        self.where, self.entries = where, entries

    def __getitem__(self, name: str) -> Any:
        entry = self.entries[name]
        with readable(self.where):
            return entry.read() if isinstance(entry, Stored) else entry

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def renamed(self, names: Mapping[str, str]) -> State:
        """The entries under other names: new name -> name here."""
        return State(self.where, {new: self.entries[old] for new, old in names.items()})


@dataclass(frozen=True)
class StateFile:
    """The weights of one model, opened: what a user names, its files, and what lies in them by keys."""

    path: Path
    files: tuple[Path, ...]
    entries: Mapping[Key, Any]

    @property
    def place(self) -> Path:
        """Its path, with a name beside which results can lie: "." has none."""
        return self.path if self.path.name.strip(".") else self.path.resolve()

    def state(self, message: Message = lambda line: None, names: Collection[str] = ()) -> State:
        """The state dict in it, as :func:`read_state` gives it."""
        folder = self.files[0].name == METADATA
        file = "FILE.pt" if folder else str(self.files[0])
        remedy = f"save one alone, as by torch.save(torch.load({file!r})[…], 'one.pt')"
        remedy += f" after {tensor_files.CONVERSION} {self.path} FILE.pt" if folder else ""
        return _chosen(self.path, self.entries, remedy, message, names)


def read_state(path: str | Path, message: Message = lambda line: None, names: Collection[str] = ()) -> State:
    """Name -> tensor of a file, or folder, of weights; a tensor is read when it is asked for.

    ``message`` is told what was unwrapped; ``names`` of the model's tensors tell which state is meant, should
    there be several. Raises OperationError for what is missing, damaged or a part only, holds no state or
    several, or could only be read by running code from it; InputError for another suffix.
    """
    return open_states([path])[0].state(message, names)


def state_in(where: str | Path, loaded: Any, message: Message = lambda line: None) -> State:
    """The state dict in what a training script saved, as of :func:`read_state`."""
    return _chosen(where, entries_of(loaded), "give one of them, […]", message, ())


def open_states(paths: Sequence[str | Path | StateFile]) -> list[StateFile]:
    """Open files and folders of weights; parts of one model, of which all must be there, are one."""
    opened = [path for path in paths if isinstance(path, StateFile)]
    given = [Path(path) for path in paths if not isinstance(path, StateFile)]
    for path in given:
        if path.suffix and not path.is_dir() and not names_state(path):
            ends_in("STATE", path, SUFFIXES)
        if not path.exists():
            raise OperationError(f"{path}: no such file or folder of weights")
        parts = _parts_of(path)
        if absent := [part for part in parts if part not in given]:
            what = f"one part of {len(parts)} of a model, without {absent[0].name}"
            raise OperationError(f"{path}: {what}; give its folder, {path.parent}, with all of them in it")
        if path not in parts[1:]:
            opened.append(_open(path, parts))
    return opened


def names_state(path: Path) -> bool:
    """Return whether weights of another program go by the name of this file, or lie in this folder."""
    if path.is_dir():
        return not (path / "last.h5").exists() and bool(_models_in(path))
    return path.suffix in (*SUFFIXES, ".distcp") or path.name.endswith((INDEX, METADATA))


def _parts_of(path: Path) -> list[Path]:
    """All parts of the model of which ``path`` is one by its name; else none."""
    if not (match := PART.fullmatch(path.name)) or path.is_dir():
        return []
    stem, number, total, suffix = match.groups()
    numbers = [f"{k:0{len(number)}}" for k in range(1, int(total) + 1)]
    return [path.with_name(f"{stem}-{k}-of-{total}{suffix}") for k in numbers]


def _models_in(folder: Path) -> list[Path]:
    """The models in a folder, each by its index, file or first part; .bin where nothing else is."""
    with readable(folder):
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    for suffix, word in (".safetensors", ""), (".bin", "model"):  # not training_args.bin
        own = [name for name in names if name.removesuffix(INDEX).endswith(suffix) and word in name]
        parts = {name: match for name in own if (match := PART.fullmatch(name))}
        first = [n for n, m in parts.items() if int(m[2]) == 1 and f"{m[1]}{m[4]}{INDEX}" not in own]
        if models := [name for name in own if name not in parts] + first:
            return [folder / name for name in models]
    return []


def _open(path: Path, parts: list[Path]) -> StateFile:
    """One model: a folder, an index, all its ``parts``, or a file."""
    source = path
    if path.is_dir():
        models = _models_in(path)
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise OperationError(f"{path}: holds several models, {names}; give one of these files")
        if not models:
            inside = sorted(p for p in path.iterdir() if p.is_dir() or p.suffix in SUFFIXES)
            other = f"; give {inside[0]} or another in it" if inside else ""
            raise OperationError(f"{path}: a folder without weights; it must have {NEEDED}{other}")
        (source,) = models
        parts = _parts_of(source)
    if source.name == METADATA:
        return StateFile(path, *tensor_files.read_folder(source))
    if source.suffix == ".distcp":
        raise OperationError(f"{path}: one part of a model; give its folder, {path.parent}")
    if source.name.endswith(INDEX):
        wanted = _indexed(source)
        return StateFile(path, (source, *wanted), _joined(source, wanted))
    if len(parts) > 1:
        return StateFile(path, tuple(parts), _joined(path, dict.fromkeys(parts)))
    return StateFile(path, (source,), tensor_files.read_entries(source))


def _indexed(path: Path) -> dict[Path, set[str]]:
    """The files that an index names, each with the names of its tensors."""
    wanted: dict[Path, set[str]] = {}
    with readable(path):
        for name, file in json.loads(read_regular(path, MOST))["weight_map"].items():
            if not is_plain(file) or Path(file).suffix not in SUFFIXES:
                raise OperationError(f"{path}: names {file!r}, which is no file of weights in its own folder")
            wanted.setdefault(path.with_name(file), set()).add(name)
    if absent := [file.name for file in wanted if not file.exists()]:
        raise OperationError(f"{path}: {', '.join(absent[:3])} of its {len(wanted)} files missing beside it")
    return wanted


def _joined(where: Path, files: Mapping[Path, set[str] | None]) -> dict[Key, Any]:
    """The entries of all parts; OperationError for a tensor that is in none or several of them."""
    joined: dict[Key, Any] = {}
    for file, wanted in files.items():
        entries = tensor_files.read_entries(file)
        names = {".".join(key) for key in entries}
        twice = {".".join(key) for key in entries.keys() & joined.keys()}
        if odd := twice | (set() if wanted is None else names ^ wanted):
            raise OperationError(f"{where}: {min(odd)!r} of {file.name} is missing, or not only there")
        joined |= entries
    return joined


def _chosen(
    where: str | Path, entries: Mapping[Key, Any], remedy: str, message: Message, names: Collection[str]
) -> State:
    """The one dict among nested ones that holds weights, and is no optimizer's."""
    dicts: dict[Key, dict[str, Any]] = {}
    optimizers: set[Key] = set()
    for key, entry in entries.items():
        if key:
            dicts.setdefault(key[:-1], {})[key[-1]] = entry
        optimizers |= {key[:k] for k, part in enumerate(key) if f"{part}.".startswith("param_groups.")}
    others = [key for key in dicts if not optimizers & {key[:k] for k in range(len(key) + 1)}]
    kept = [key for key in others if any(_is_tensor(entry, True) for entry in dicts[key].values())]
    kept = kept or [key for key in others if any(map(_is_tensor, dicts[key].values()))]
    if not kept:
        raise OperationError(f"{where}: holds no tensors by name, a model's state_dict() is needed")
    if len(kept) > 1 and names:  # such as a discriminator beside a generator
        kept = [key for key in kept if any(_ends(name) & {*names} for name in dicts[key])] or kept
    if len(kept) > 1:
        titles = ", ".join(repr(".".join(key)) if key else "its own" for key in kept)
        one = "".join(f"[{part!r}]" for part in max(kept, key=bool))
        raise OperationError(f"{where}: holds several states, {titles}; {remedy.replace('[…]', one)}")
    (key,) = kept
    if key:
        message(f"{where}: took the state under '{'.'.join(key)}'")
    return State(where, dicts[key])


def _is_tensor(entry: Any, weights: bool = False) -> bool:
    """Return whether it is a tensor; ``weights``: with a dimension and floating-point numbers."""
    if isinstance(entry, Stored):
        return entry.weights or not weights
    floats = isinstance(entry, Tensor) and (entry.is_floating_point() or entry.is_complex())
    return floats and entry.dim() > 0 if weights else isinstance(entry, Tensor)


def _ends(name: str) -> set[str]:
    """The name without one or more of the prefixes that wrappers may have added."""
    parts = name.replace(COMPILED, "").split(".")
    return {".".join(parts[k:]) for k in range(len(parts))}
