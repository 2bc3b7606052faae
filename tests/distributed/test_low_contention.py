"""All-gather and reduce-scatter by copies: any dimension, any number of ranks, any dtype."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import distributed

from ._arenas import SharedMemory
from .test_sharing import module_of

pytestmark = pytest.mark.dist

SHAPES = [(4,), (3, 5), (2, 3, 4), (1, 1), (6, 128), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Shared:
    """Memory that ranks share on this device, for as long as it lasts."""

    def __init__(self, opt: Any) -> None:
        self.transport = module_of(opt, "distributed.transport").GroupTransport
        self.kept = module_of(opt, "distributed.symmetric.low_contention")._KEPT

    def __enter__(self) -> None:
        self.original = self.transport.memory
        if os.environ["RANKS_DEVICE"] == "cpu":
            self.transport.memory = SharedMemory

    def __exit__(self, *error: object) -> None:
        self.transport.memory = self.original
        for one in self.kept.values():
            one.close()
        self.kept.clear()


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Multiples of 1/4 that add up exactly in any of the dtypes."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    made = torch.randint(-8, 9, shape, generator=generator) / 4
    return made.to(os.environ["RANKS_DEVICE"], dtype)


def collectives(opt: Any) -> int:
    module = module_of(opt, "distributed.symmetric.low_contention")
    group, rank, ranks = (
        distributed.group.WORLD,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    compared = 0
    with Shared(opt):
        for seed, shape in enumerate(SHAPES):
            for dtype in DTYPES:
                for dim in range(-1, len(shape)):
                    parts = [part_of(r, shape, dtype, seed) for r in range(ranks)]
                    whole = torch.cat(parts, dim)
                    out = torch.full_like(whole, torch.nan)
                    module.all_gather_lc(out, parts[rank], group, dim).wait()
                    assert torch.equal(out, whole), f"all-gather {shape} {dtype} {dim}"
                    inputs = [
                        part_of(r, tuple(whole.shape), dtype, seed + 50) for r in range(ranks)
                    ]
                    total = torch.stack(inputs).float().sum(0)
                    for op in ("sum", "avg"):
                        expected = (total / (ranks if op == "avg" else 1)).to(dtype)
                        expected = expected.chunk(ranks, dim)[rank] if shape[dim] else expected
                        out = torch.full(shape, torch.nan, dtype=dtype, device=whole.device)
                        module.reduce_scatter_lc(out, inputs[rank], op, group, dim).wait()
                        assert torch.equal(out, expected), f"{op} {shape} {dtype} {dim}"
                        compared += 1
        for one in module._KEPT.values():
            one.check()
    return compared


def test_any_dimension_and_dtype(ranks, world) -> None:
    if world in (1, 3):  # a third is no binary number
        world = 2
    assert min(ranks(world).run(collectives)) > 80


def several(opt: Any) -> tuple[list[bool], str]:
    """Three under way at once, in memory that grows; a fourth has to wait."""
    module = module_of(opt, "distributed.symmetric.low_contention")
    group, rank, ranks = (
        distributed.group.WORLD,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    found, message = [], ""
    with Shared(opt):
        for size in (16, 2**20):
            for _ in range(4):
                parts = [
                    [part_of(r, (size,), torch.float32, k) for r in range(ranks)] for k in range(3)
                ]
                outs = [torch.empty(size * ranks, device=parts[0][0].device) for _ in parts]
                pending = [
                    module.all_gather_lc(out, of[rank], group)
                    for out, of in zip(outs, parts, strict=True)
                ]
                if not message:
                    with pytest.raises(ValueError) as raised:
                        module.all_gather_lc(outs[0], parts[0][rank], group)
                    message = str(raised.value)
                for one, of in zip(pending, parts, strict=True):
                    found.append(torch.equal(one.wait(), torch.cat(of)))
    return found, message


def test_several_are_under_way(ranks) -> None:
    for found, message in ranks(2).run(several):
        assert len(found) == 24 and all(found)
        assert message.startswith("3 collectives are under way")


def wrong_calls(opt: Any) -> list[str]:
    module = module_of(opt, "distributed.symmetric.low_contention")
    group, device = distributed.group.WORLD, os.environ["RANKS_DEVICE"]
    x = torch.zeros((2, 3), device=device)
    calls = [
        lambda: module.all_gather_lc(torch.zeros((3, 3), device=device), x, group),
        lambda: module.all_gather_lc(torch.zeros((4, 3), device=device).half(), x, group),
        lambda: module.all_gather_lc(torch.zeros((3, 4), device=device).t(), x, group),
        lambda: module.all_gather_lc(torch.zeros((4, 3), device=device), x, group, 2),
        lambda: module.reduce_scatter_lc(x, torch.zeros((4, 3), device=device), "max", group),
    ]
    found = []
    with Shared(opt):
        for call in calls:
            with pytest.raises((TypeError, ValueError)) as raised:
                call()
            found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_wrong_arguments_are_named(ranks) -> None:
    shape, dtype, strides, dim, op = ranks(2).run(wrong_calls)[0]
    assert shape.startswith("ValueError: of 2 ranks' parts of shape (2, 3) along dimension 0")
    assert dtype.startswith("TypeError: out and inp must be of one floating-point dtype")
    assert strides.startswith("ValueError: out and inp must be contiguous")
    assert dim == "ValueError: dim must be a dimension of (2, 3), got 2"
    assert op == "ValueError: op must be one of 'sum', 'avg', got 'max'"


def unavailable(opt: Any) -> str:
    module = module_of(opt, "distributed.symmetric.low_contention")
    x = torch.zeros(4)
    with pytest.raises(RuntimeError) as raised:
        module.all_gather_lc(torch.zeros(8), x, distributed.group.WORLD)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_without_shared_memory_it_raises(ranks, device) -> None:
    if device.type != "cpu":
        pytest.skip("GPUs share memory")
    assert set(ranks(2).run(unavailable)) == {
        "CommUnavailable: low-contention collectives cannot be had: rank 0: no CUDA peers: the "
        "parameters are on cpu"
    }
