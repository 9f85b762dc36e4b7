"""Named tensors of a safetensors checkpoint, read one at a time, and the strict check of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.json_file import read_object

READABLE_DTYPES = ("F32", "BF16", "F16")
# The safetensors package does not hand these to numpy.
_RAW_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class TensorSource(Protocol):
    """Tensors by name: shapes known at once, values read when asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype (bfloat16 is ml_dtypes')."""
        ...


class SafetensorsSource:
    """One safetensors file, or the shards of a Hugging Face folder, read lazily."""

    def __init__(self, path: Path | str, dtypes: Sequence[str] = READABLE_DTYPES) -> None:
        """Open ``path``: a ``.safetensors`` file or a folder holding one or an index of shards.

        Raises:
            FileNotFoundError: no safetensors file there, or a shard of the index is missing.
            ValueError: a file that is not safetensors, or tensors in other than ``dtypes``
                (safetensors' names; by default float32, bfloat16 and float16).
        """
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        self._stored_name: dict[str, str] = {}
        self._headers: dict[Path, tuple[int, dict]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        unreadable: list[str] = []
        for file in _files(self.path):
            try:
                with safe_open(file, framework="np") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        view = tensors.get_slice(name)
                        self._file_of[name] = file
                        self._stored_name[name] = name
                        self.shapes[name] = tuple(view.get_shape())
                        self.dtypes[name] = view.get_dtype()
                        if self.dtypes[name] not in dtypes:
                            unreadable.append(f"{name} is {self.dtypes[name]}")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
        if unreadable:
            raise ValueError(
                f"{self.path} holds tensors of other dtypes than {', '.join(dtypes)}: "
                + ", ".join(unreadable)
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype."""
        file, stored = self._file_of[name], self._stored_name[name]
        if self.dtypes[name] in _RAW_DTYPES:
            return self._read_raw(file, stored)
        with safe_open(file, framework="np") as tensors:
            return tensors.get_tensor(stored)

    def renamed(self, names: Mapping[str, str]) -> SafetensorsSource:
        """The same tensors under other names: ``names[new]`` is the present one."""
        other = copy.copy(self)
        for field in ("_file_of", "_stored_name", "shapes", "dtypes"):
            values = getattr(self, field)
            setattr(other, field, {new: values[name] for new, name in names.items()})
        return other

    def _read_raw(self, file: Path, stored: str) -> np.ndarray:
        """A tensor from where the file's header says it lies."""
        if file not in self._headers:
            with file.open("rb") as bytes_of:
                size = int.from_bytes(bytes_of.read(8), "little")
                self._headers[file] = (8 + size, json.loads(bytes_of.read(size)))
        start, header = self._headers[file]
        entry = header[stored]
        count = int(np.prod(entry["shape"], dtype=np.int64))
        numbers = np.fromfile(file, np.uint8, count=count, offset=start + entry["data_offsets"][0])
        return numbers.view(_RAW_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    where: Path | str,
) -> None:
    """Compare names and shapes.

    Raises:
        ValueError: one message that names every missing, unknown and misshapen tensor.
    """
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(set(found) - set(wanted))
    misshapen = [
        f"{name} is {list(found[name])}, wanted {list(wanted[name])}"
        for name in sorted(set(wanted) & set(found))
        if tuple(found[name]) != tuple(wanted[name])
    ]
    faults = [
        f"{title}: {', '.join(names)}"
        for title, names in (
            ("missing tensors", missing),
            ("unknown tensors", unknown),
            ("misshapen tensors", misshapen),
        )
        if names
    ]
    if faults:
        raise ValueError(f"{where} does not fit its config. " + "; ".join(faults))


def _files(path: Path) -> list[Path]:
    """The safetensors files of ``path``, shards in the order of their index."""
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        files = [path / shard for shard in shards]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(absent)}")
        return files
    if single.is_file():
        return [single]
    raise FileNotFoundError(f"no model.safetensors and no model.safetensors.index.json in {path}")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor, as the index of a sharded checkpoint names it."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to files")
    return found
