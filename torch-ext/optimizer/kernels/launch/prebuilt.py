"""Machine code of Triton's kernels that came with the package: their first call compiles nothing.

`tools/prebuild.py` compiles what listed layers launch, for capability 9.0, when the package is
built, into an archive beside this module (`archive_of`). The driver loads it whatever Triton there
is: a launch plan hands it the arguments. A key holds all that a kernel is compiled for and the
digest of every source of a kernel, so an archive of other sources is as good as none.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ... import dispatch

CAPABILITY = (9, 0)
ARCHIVE = Path(__file__).with_name("prebuilt_sm90.zip")
_PACKAGE = Path(__file__).parents[2]
_DAMAGED = "%s is damaged (%s): its kernels are compiled at first calls. Download the package again"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every entry: the same code makes the same archive


class Compiled(NamedTuple):
    """Machine code, the name in it, threads of a block and bytes of dynamic shared memory."""

    code: bytes
    name: str
    threads: int
    shared: int


def key_of(kernel: Any, found: Any, options: dict[str, Any]) -> str:
    """The name of a kernel's machine code in an archive.

    Args:
        kernel: Of triton.jit.
        found: Its `Specialization`.
        options: Triton's, such as num_warps.
    """
    compiled_in = {place: str(value) for place, value in found.constants.items()}
    parts = (found.signature, compiled_in, found.attributes, options)
    described = [sorted((str(name), str(value)) for name, value in part.items()) for part in parts]
    module = kernel.fn.__module__.rpartition(".")[2]
    text = json.dumps([module, kernel.__name__, sources_digest(), described])
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Of all `sources`."""
    digest = hashlib.sha256()
    for path in sources(_PACKAGE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources(package: Path) -> list[Path]:
    """All modules that hold a kernel, what one calls, or numbers that are compiled in."""
    found = (*package.rglob("*_triton.py"), *package.joinpath("reference").rglob("*.py"))
    return sorted(found)


def prebuilt(kernel: Any, found: Any, options: dict[str, Any]) -> Compiled | None:
    """The machine code of the archive; None if there is none for this, or damage, which is said."""
    archive = _archive()
    if archive is None:
        return None
    name = key_of(kernel, found, options)
    try:
        described = json.loads(archive.read(f"{name}.json"))
        return Compiled(archive.read(f"{name}.cubin"), **described)
    except KeyError:
        return None
    except Exception as error:  # checksums, or whatever the reader stumbles over
        dispatch.say_once(_DAMAGED, str(ARCHIVE), repr(error))
        return None


@functools.cache
def _archive() -> zipfile.ZipFile | None:
    if not ARCHIVE.is_file():
        return None
    try:  # Read at once: processes that fork would share the place in an open file.
        return zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
    except Exception as error:
        dispatch.say_once(_DAMAGED, str(ARCHIVE), repr(error))
        return None


def archive_of(kernels: Iterable[tuple[str, Compiled]]) -> bytes:
    """An archive of kernels by their keys: the same bytes for the same kernels."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, compiled in sorted(kernels):
            described = compiled._asdict()
            for suffix, content in (
                ("cubin", described.pop("code")),
                ("json", json.dumps(described)),
            ):
                entry = zipfile.ZipInfo(f"{name}.{suffix}", _EPOCH)
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return file.getvalue()
