"""CPU offload: an optimizer whose state waits in host memory, switched on and off at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import GroupedOptimizer
from ..groups.parameters import local
from .host_state import InHostMemory, host_zeros, travels


class OffloadingOptimizer(GroupedOptimizer):
    """Groups whose state is beside the parameters or, all of it, in host memory."""

    _host: InHostMemory | None = None

    @property
    def offloaded(self) -> bool:
        """Whether the state is in host memory."""
        return self._host is not None

    def check_offload(self) -> None:
        """Raise ValueError if this state cannot be in host memory."""

    @torch.no_grad()
    def turn_on_cpu_offload(self) -> None:
        """Move the state to host memory at once, and keep it there between the steps.

        A step brings the state of a batch to the device while the batch before it is computed, and
        takes it back while the next one is: no bit of a run changes. What is small, step counts and
        factored second moments, stays on the device. `state` then holds host tensors (pinned, for
        CUDA), which `state_dict` gives out and `load_state_dict` fills, without a way round by the
        device. Calling it again changes nothing. It waits for the device once.

        Raises:
            ValueError: the ranks keep a part of the state each; nothing has changed.
        """
        if self._host is not None:
            return
        self.check_offload()
        moved = {}
        for param, key, value in self._travelling():
            moved[param, key] = host_zeros(param, value.dtype)
            local(moved[param, key]).copy_(local(value), non_blocking=True)
        _wait_for({param.device for param, _ in moved})
        for (param, key), value in moved.items():
            self.state[param][key] = value
        self._host = InHostMemory()

    @torch.no_grad()
    def turn_off_cpu_offload(self) -> None:
        """Bring the state back beside the parameters. Calling it again changes nothing.

        It waits for the device once. If its memory does not suffice, everything stays as it was.
        """
        if self._host is None:
            return
        self._host.wait()
        moved = {}
        for param, key, value in self._travelling():
            moved[param, key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
            local(moved[param, key]).copy_(local(value), non_blocking=True)
        _wait_for({param.device for param, _ in moved})  # the host tensors go with this method
        for (param, key), value in moved.items():
            self.state[param][key] = value
        self._host = None

    def state_dict(self) -> dict[str, Any]:
        """As without offload; tensors that are offloaded are given out as they are, on the host."""
        if self._host is not None:
            self._host.wait()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        if self._host is not None:
            self._host.wait()
        return {**super().__getstate__(), "in_host_memory": self.offloaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        offloaded = state.pop("in_host_memory", None)  # absent where a state_dict is loaded
        super().__setstate__(state)
        if offloaded is not None:
            self._host = InHostMemory() if offloaded else None
        if self._host is not None:
            self._pin()

    def _travelling(self) -> list[tuple[Tensor, str, Tensor]]:
        """(parameter, key, value) of all state that offload moves."""
        return [
            (param, key, value)
            for group in self.param_groups
            for param in group["params"]
            for key, value in self.state.get(param, {}).items()
            if travels(param, key, value)
        ]

    def _pin(self) -> None:
        """Copies of an optimizer have pageable tensors, with which transfers would not overlap."""
        with torch.no_grad():
            for param, key, value in self._travelling():
                if param.device.type == "cuda" and not local(value).is_pinned():
                    self.state[param][key] = host_zeros(param, value.dtype)
                    local(self.state[param][key]).copy_(local(value))


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
