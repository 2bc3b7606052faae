"""Paths of orthogonalization that another GPU takes, or that something simpler would, on this one.

No public argument asks for them, so functions of the package are replaced while they are measured.
Compiled once, torch.compile and CUDA graphs keep what they were captured with.

"mma.sync"  what capability 8.0 gets: no wgmma, and products by halves in sm_80's instructions
            where the package takes them, else torch's
"torch"     the same with torch's dense products everywhere
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .built_package import module

MMA_SYNC, TORCH = "mma.sync", "torch"
MMA_SYNC_TILE = "128x128"  # of a side of 4096 or more, where these products are taken


@contextmanager
def forced(package: ModuleType, path: str) -> Iterator[None]:
    """A context in which `package` takes a path of this module's table.

    Raises:
        KeyError: there is no such path.
        ValueError: the package has no function of a name that the path replaces.
    """
    functions, values = _PATHS[path](package)
    undo = []
    try:
        for name, new in functions.items():
            undo += _replaced(package, name, new)
        for (owner, name), new in values.items():
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


def _replaced(package: ModuleType, name: str, new: Callable) -> list[tuple[ModuleType, str, Any]]:
    """Replaces "module.function" wherever the package has imported it; what was there before."""
    where, _, attribute = name.rpartition(".")
    old = getattr(module(package, where), attribute, None)
    if old is None:
        raise ValueError(f"{package.__name__} has no {name}; mend {__name__}")
    inside = f"{package.__name__}."
    owners = [m for key, m in list(sys.modules.items()) if m and key.startswith(inside)]
    found = [(m, attribute, old) for m in owners if vars(m).get(attribute) is old]
    for owner, *_ in found:
        setattr(owner, attribute, new)
    return found


def _no(*_: object) -> bool:
    return False


def _mma_sync(package: ModuleType) -> tuple[Mapping[str, Callable], Mapping]:
    tile = module(package, "kernels.products.symmetric_matmul").TILES.index(MMA_SYNC_TILE)
    products = module(package, "orthogonalize.products")
    return {"orthogonalize.products.batch_is_free": _no}, {(products, "AUTO"): tile}


def _torch(package: ModuleType) -> tuple[Mapping[str, Callable], Mapping]:
    names = ("batch_is_free", "runs_symmetric")
    return {f"orthogonalize.products.{name}": _no for name in names}, {}


_PATHS = {MMA_SYNC: _mma_sync, TORCH: _torch}
