"""torch, loaded where something of it is first used: pages are drawn and checked without it."""

import importlib.util
import sys
from types import ModuleType


def _lazy(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


torch = _lazy("torch")
