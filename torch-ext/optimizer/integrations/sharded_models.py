"""Models whose parameters several ranks share out: what holds them, and files that one rank writes.

Whatever gathers here is called by every rank of the mesh, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..optimizers.groups.parameters import is_dtensor
from ..optimizers.state.saving import gathered

FULLY_SHARDED = ("FSDPModule", "FullyShardedDataParallel")  # of fully_shard, and of its predecessor
MESSAGE = 1024  # bytes of an error that the other ranks hear of


def fully_sharded(model: nn.Module) -> str | None:
    """Name of the first module that FSDP holds; None if there is none."""
    for name, module in model.named_modules():
        if any(kind.__name__ in FULLY_SHARDED for kind in type(module).__mro__):
            return name or type(model).__name__
    return None


def reshard(model: nn.Module) -> None:
    """Put the shards back as a model's parameters: after a forward pass FSDP2 may still hold whole
    ones, which it throws away, and with them whatever was written there."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()


def mesh_of(tensors: Iterable[Tensor]) -> Any:
    """The ranks that share out some tensors; None if each rank has all of them."""
    return next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)


def writes(mesh: Any) -> bool:
    """Whether this rank is the one of a mesh that writes files."""
    return mesh is None or not any(mesh.get_coordinate())


def gathered_on_cpu(tensors: Mapping[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """Whole tensors for the rank that writes, gathered one by one; empty on the others.

    Those of a model that no ranks share out stay where they are.
    """
    found = {}
    for name, tensor in tensors.items():
        whole = gathered(tensor.detach())
        if writes(mesh):
            found[name] = (whole if mesh is None else whole.cpu()).contiguous()
    return found


def write_once(mesh: Any, write: Callable[[], None]) -> None:
    """Call `write` on one rank; the others wait, and raise as it does.

    Raises:
        OSError: on the other ranks, with the message of the one that failed.
    """
    error = None
    if writes(mesh):
        try:
            write()
        except BaseException as raised:
            error = raised
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    said = text if mesh is None else _heard(mesh, text)
    if error is not None:
        raise error
    if said:
        raise OSError(f"the rank that writes failed: {said}")


def _heard(mesh: Any, text: str) -> str:
    """The text of the rank that has one, on every rank of a mesh."""
    from torch.distributed.tensor import DTensor, Shard

    content = text.encode()[:MESSAGE].ljust(MESSAGE, b"\0")
    row = torch.tensor([list(content)], dtype=torch.uint8)
    rows = DTensor.from_local(
        row.to(mesh.device_type), mesh, [Shard(0)] * mesh.ndim, run_check=False
    )
    heard = gathered(rows).amax(0).cpu().tolist()
    return bytes(heard).rstrip(b"\0").decode(errors="replace")
