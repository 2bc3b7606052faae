"""Plain collectives along the first dimension, and what is known of a group.

gloo takes neither float8 nor, for some of these, CUDA tensors: bytes travel, through host memory
where the group has no other way. NCCL gets what it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

REDUCTIONS = ("sum", "avg")


def name_of(group: Any) -> str:
    """The name of a process group, which an op can take: of a ProcessGroup, its name, or None.

    None is the default group.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(group, str):
        return group
    if group is None:
        group = distributed.group.WORLD
        if group is None:
            raise ValueError(
                "group is None, which means the default process group, and there is none; call "
                "torch.distributed.init_process_group first"
            )
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup, its name or None, got {type(group).__name__}; of a "
            "DeviceMesh of one dimension pass mesh.get_group()"
        )
    return group.group_name


def resolved(group: str) -> Any:
    """The process group of a name."""
    return distributed_c10d._resolve_process_group(group)


@torch.compiler.assume_constant_result
def size_of(group: str) -> int:
    """The number of ranks of a group, by its name; a constant of a compiled graph."""
    return resolved(group).size()


def gather_rows(x: Tensor, group: str) -> Tensor:
    """Every rank's x (r, ...), one below the other: (W r, ...)."""
    process_group = resolved(group)
    out = x.new_empty((process_group.size() * x.shape[0], *x.shape[1:]))
    # The older of two names: torch 2.11 has no other, and newer ones warn of it.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    with _Staged(process_group, out, x.contiguous()) as (there, here):
        gather(_bytes(there), _bytes(here), group=process_group)
    return out


def reduce_scatter_rows(x: Tensor, op: str, group: str) -> Tensor:
    """This rank's rows (r, ...) of the sum or mean of every rank's x (W r, ...).

    Over gloo the parts are exchanged and added in float32, or float64 for float64.
    """
    process_group = resolved(group)
    world, x = process_group.size(), x.contiguous()
    if _backend(process_group, x.device) == "nccl":
        out = x.new_empty((x.shape[0] // world, *x.shape[1:]))
        reduction = distributed.ReduceOp.AVG if op == "avg" else distributed.ReduceOp.SUM
        scatter = getattr(distributed, "reduce_scatter_single", None)
        scatter = scatter or distributed.reduce_scatter_tensor
        scatter(out, x, op=reduction, group=process_group)
        return out
    return summed(exchange_rows(x, group), op)


def exchange_rows(x: Tensor, group: str) -> Tensor:
    """Block j of x (W r, ...) goes to rank j: what came from every rank, (W, r, ...)."""
    process_group = resolved(group)
    x = x.contiguous()
    out = torch.empty_like(x)
    with _Staged(process_group, out, x) as (there, here):
        distributed.all_to_all_single(_bytes(there), _bytes(here), group=process_group)
    return out.view(process_group.size(), -1, *x.shape[1:])


def summed(parts: Tensor, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
    """The sum or mean over parts (W, ...) in float32 or wider, rounded once to their dtype."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts.sum(0, dtype=wide)
    if op == "avg":
        total /= len(parts)
    return total.to(dtype or parts.dtype)


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """The sum or maximum of every rank's x, element by element, in a tensor of its own."""
    process_group = resolved(group)
    reductions = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
    out = x.clone()
    with _Staged(process_group, out, out) as (there, _):
        if there is not out:
            there.copy_(out)
        distributed.all_reduce(there, reductions[op], group=process_group)
    return out


class _Staged:
    """(out, x) as a collective of the group can take them: copies on the host for gloo and CUDA."""

    def __init__(self, group: Any, out: Tensor, x: Tensor) -> None:
        self.out, self.x = out, x
        self.staged = out.is_cuda and _backend(group, out.device) == "gloo"

    def __enter__(self) -> tuple[Tensor, Tensor]:
        if not self.staged:
            return self.out, self.x
        self.there = torch.empty_like(self.out, device="cpu")
        return self.there, self.x.cpu()

    def __exit__(self, kind: Any, *_: object) -> None:
        if self.staged and kind is None:
            self.out.copy_(self.there)


def _backend(group: Any, device: torch.device) -> str:
    """The name of the backend that a group has for a device."""
    return group._get_backend(device).name().lower()


def _bytes(x: Tensor) -> Tensor:
    """A contiguous x as bytes, which every backend moves, whatever its dtype."""
    return x.view(-1).view(torch.uint8)


def exchange_uneven(x: Tensor, going: list[int], coming: list[int], group: str) -> Tensor:
    """Parts of a flat x, so many elements to each rank; what came from each, in their order."""
    process_group = resolved(group)
    out = x.new_empty(sum(coming))
    with _Staged(process_group, out, x) as (there, here):
        distributed.all_to_all_single(there, here, coming, going, group=process_group)
    return out
