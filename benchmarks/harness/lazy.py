"""torch, loaded where something of it is first used; None where it is not: pages need none."""

import importlib.util
import sys
from types import ModuleType


def _lazy(name: str) -> ModuleType | None:
    if name not in sys.modules and (spec := importlib.util.find_spec(name)):
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules.get(name)


torch = _lazy("torch")
