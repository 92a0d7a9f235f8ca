"""The tensors of a Hugging Face folder, read one by one from safetensors files."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from affinage.data.foreign_json import read_object
from affinage.errors import UserError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_READ = ("F16", "BF16", "F32", "F64")  # others are parts of a quantized weight, or no weights
_UNREADABLE = (SafetensorError, TypeError, ValueError, AttributeError, OverflowError)  # all but the first are NumPy's
# Buffers that old files hold and that follow from the configuration: GPT-2's masks, Llama's frequencies.
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


class HubWeights(Mapping[str, NDArray[Any]]):
    """Name -> tensor, in the dtype of the file. Remembers what was read, so that nothing is left behind unseen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files_by_tensor(folder)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._read.add(name)
        path = self._folder / self._files[name]
        with _opened(path) as file:
            try:
                kind = file.get_slice(name).get_dtype()
                tensor: NDArray[Any] | None = file.get_tensor(name) if kind in _READ else None
            except _UNREADABLE as error:  # such as an index that names another file, or a shape of 65 axes
                raise UserError(f"the tensor {name!r} cannot be read: {error}", where=str(path)) from error
        if tensor is None:
            fix = "What is read is float16, bfloat16, float32 and float64: take a version of the model in one of them."
            raise UserError(f"the numbers of the tensor {name!r} are {kind}", where=str(path), fix=fix)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def left(self) -> list[str]:
        """Names of tensors that nobody has read, buffers aside."""
        return [name for name in self._files if name not in self._read and not _BUFFERS.fullmatch(name)]

    def digest(self) -> str:
        """SHA-256 of the files, hexadecimal."""
        digest = hashlib.sha256()
        for name in sorted(set(self._files.values())):
            with open(self._folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _files_by_tensor(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        listed = read_object(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise UserError("it does not say in which file each tensor is", where=str(folder / INDEX))
        for file in sorted(set(listed.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise UserError(f"the index names `{file}`, which is not there", where=str(folder / INDEX))
        return listed
    if not (folder / WHOLE).is_file():
        fix = "Only safetensors are read: other files of weights can run code when they are loaded."
        raise UserError(f"there is neither {WHOLE} nor {INDEX}", where=str(folder), fix=fix)
    with _opened(folder / WHOLE) as file:
        return dict.fromkeys(file.keys(), WHOLE)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"this is not a whole safetensors file: {error}", where=str(path)) from error
