"""IEEE float32 products whatever the process allows, without a trace in its settings.

torch's precision of float32 products is one switch per (backend, operation) for the whole process.
A switch left at "none" takes the value of its backend, and that one the value of all backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}
_REDUCED = ("tf32", "bf16")
_EVERYTHING = ("generic", "all")

Switch = tuple[str, str]


@contextmanager
def ieee_float32(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Keeps TF32 and bfloat16 out of float32 iterates, whatever the process allows elsewhere.

    Whoever asks for float32 iterates asks for their accuracy; TF32 has float16's mantissa at half
    its speed. A switch that allows neither is not touched. Otherwise it is held at "ieee" around
    the launches, and with it the products that other threads launch meanwhile.
    """
    if device.type not in _BACKENDS or dtype != torch.float32:
        yield
        return
    hold = _HOLDS[device.type]
    hold.acquire()
    try:
        yield
    finally:
        hold.release()


class _Hold:
    """One switch at "ieee" while any thread asks for it; the last one puts back what was there."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.lock = Lock()
        self.holders = 0
        self.before: str | None = None  # what the switch said, while it is held

    def acquire(self) -> None:
        with self.lock:
            self.holders += 1
            if _read(self.switch) in _REDUCED:
                self.before = _own(self.switch)
                _write(self.switch, "ieee")

    def release(self) -> None:
        with self.lock:
            self.holders -= 1
            if self.holders == 0 and self.before is not None:
                if _read(self.switch) == "ieee":  # else someone set it anew, which stands
                    _write(self.switch, self.before)
                self.before = None


_HOLDS = {device: _Hold((backend, "matmul")) for device, backend in _BACKENDS.items()}


def _own(switch: Switch) -> str:
    """What a switch with a reduced value itself says: that value, or "none" if it is inherited.

    torch reads the value with inheritance only. Where the parent has the same one, the parent goes
    to "ieee" for a moment, which makes nobody's products less accurate, and the switch either
    follows or does not.
    """
    value = _read(switch)
    if switch == _EVERYTHING:
        return value
    parent = _EVERYTHING if switch[1] == "all" else (switch[0], "all")
    if _read(parent) != value:
        return value
    before = _own(parent)
    _write(parent, "ieee")
    follows = _read(switch) != value
    _write(parent, before)
    return "none" if follows else value


def _read(switch: Switch) -> str:
    return torch._C._get_fp32_precision_getter(*switch)


def _write(switch: Switch, value: str) -> None:
    torch._C._set_fp32_precision_setter(*switch, value)
