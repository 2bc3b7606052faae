"""A safetensors file that is there whole or not at all, and every bit of which is checked.

8 bytes: length of the header | the header: JSON, padded with spaces | tensors, wide dtypes first

`save_file` of safetensors is not used: it writes to a temporary file of its own, which a killed
process leaves behind for ever, and what it raises where the disk is full is no OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

CHECKSUMS = "crc32"  # key in the metadata of a JSON table: name of a tensor or text -> hex digits
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
AT_ONCE = 2**20  # bytes that are summed up while they are in the cache


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts, the metadata, with checksums, and put the file in place of `path`.

    No text may have a tensor's name. Besides what is given, one tensor of a device needs memory at
    a time. After an OSError the file that was there still is.
    """
    places, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor, start = tensors[name], end
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be saved")
        end += tensor.numel() * tensor.element_size()
        place = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        places[name] = {**place, "data_offsets": [start, end]}

    def header() -> bytes:
        """As long with any checksums."""
        metadata = {**texts, CHECKSUMS: json.dumps(sums)}
        text = json.dumps({"__metadata__": metadata, **places}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    sums = {name: f"{zlib.crc32(text.encode()):08x}" for name, text in texts.items()}
    sums |= dict.fromkeys(places, "0" * 8)
    with replacing(path) as file:
        file.seek(len(header()))
        for name in places:
            sums[name] = _checksum(tensors[name], file)
        file.seek(0)
        file.write(header())


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts of a file, whose checksums are compared if it has some.

    A ValueError says that a bit is another than was written, or that it is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    if CHECKSUMS in texts:
        _check(path, tensors, texts)
    return tensors, texts


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all of it is on the disk.

    It is locked while it is written. The lock ends with the process, by which the next one that
    writes to `path` tells what was left behind, and removes it.
    """
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        _remove_if_left(left)
    temporary, file = _locked_beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename must reach the disk too
    finally:
        os.close(folder)


def _locked_beside(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        opened = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _lock(opened, fcntl.LOCK_EX)
        if os.fstat(opened).st_nlink:  # else another process took it for left behind
            return temporary, os.fdopen(opened, "wb")
        os.close(opened)


def _remove_if_left(temporary: Path) -> None:
    """Remove a file that no living process writes."""
    try:
        opened = os.open(temporary, os.O_RDWR)
    except OSError:  # it has its place now, or is of another user
        return
    try:
        if _lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB):
            temporary.unlink(missing_ok=True)
    finally:
        os.close(opened)


def _lock(opened: int, how: int) -> bool:
    """Whether a file is locked now; it is not where another has it, or where there are no locks."""
    try:
        fcntl.flock(opened, how)
    except OSError:
        return False
    return True


def _check(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Raise ValueError naming what is not as it was written."""
    found = {name: f"{zlib.crc32(text.encode()):08x}" for name, text in texts.items()}
    del found[CHECKSUMS]
    found |= {name: _checksum(tensor) for name, tensor in tensors.items()}
    try:
        sums = json.loads(texts[CHECKSUMS])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its checksums cannot be read: {error}") from error
    if sums == found:
        return
    named = sums if isinstance(sums, dict) else {}
    wrong = [name for name in found | named if found.get(name) != named.get(name)]
    raise ValueError(
        f"{path} is damaged: the checksums of {', '.join(map(repr, sorted(wrong)[:3]))}"
        f"{' and more' if len(wrong) > 3 else ''} are not those it was written with; use another "
        "checkpoint"
    )


def _checksum(tensor: Tensor, file: BinaryIO | None = None) -> str:
    """CRC-32 of a tensor's dtype, shape and bytes, which are written to the file on the way."""
    here = tensor.detach().cpu().contiguous()
    size = here.numel() * here.element_size()
    found = zlib.crc32(f"{DTYPES.get(here.dtype)} {list(here.shape)}".encode())
    for start in range(0, size, AT_ONCE):
        part = (ctypes.c_char * min(AT_ONCE, size - start)).from_address(here.data_ptr() + start)
        found = zlib.crc32(part, found)
        if file is not None:
            file.write(part)
    return f"{found:08x}"
