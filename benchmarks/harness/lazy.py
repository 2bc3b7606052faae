"""torch, imported where something of it is first used: pages are drawn without it."""

import importlib
from typing import Any


class _Torch:
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch"), name)


torch = _Torch()
