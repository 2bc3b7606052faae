"""All-gather and reduce-scatter by copies: any dimension, any number of ranks, any dtype."""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from ._arenas import SharedMemory
from ._ranks import on_ranks
from .test_partition import message_of, module_of

pytestmark = pytest.mark.dist

SHAPES = [(4,), (3, 5), (2, 3, 4), (1, 1), (6, 128), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextlib.contextmanager
def shared(opt: Any) -> Iterator[Any]:
    """The module, where memory is shared between ranks on this device meanwhile."""
    module = module_of(opt, "distributed.low_contention")
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANKS_DEVICE"] == "cpu":
            transport = module_of(opt, "distributed.transport").GroupTransport
            patch.setattr(transport, "memory", SharedMemory)
        yield module
    for of_group in module._KEPT.values():
        for one in of_group.values():
            one.close()
    module._KEPT.clear()
    module._CALLS.clear()


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Multiples of 1/4 that add up exactly in any of the dtypes."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    made = torch.randint(-8, 9, shape, generator=generator) / 4
    return made.to(os.environ["RANKS_DEVICE"], dtype)


def collectives(opt: Any) -> None:
    """Of every shape, dtype, dimension and operation."""
    group = distributed.group.WORLD
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    with shared(opt) as module:
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
        for one in module._KEPT[group].values():
            one.check()


@pytest.mark.parametrize("world", [2, 4])  # a third is no binary number
@on_ranks()
def test_any_dimension_and_dtype(opt, world) -> None:
    collectives(opt)


@on_ranks(2)
def test_several_are_under_way(opt: Any) -> None:
    group = distributed.group.WORLD
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    with shared(opt) as module:
        for size in (16, 2**20):
            for number in range(4):
                parts = [
                    [part_of(r, (size,), torch.float32, k) for r in range(ranks)] for k in range(3)
                ]
                outs = [torch.empty(size * ranks, device=parts[0][0].device) for _ in parts]
                pending = [
                    module.all_gather_lc(out, of[rank], group)
                    for out, of in zip(outs, parts, strict=True)
                ]
                if number == 0 and size == 16:
                    with pytest.raises(ValueError, match="3 collectives are under way"):
                        module.all_gather_lc(outs[0], parts[0][rank], group)
                for one, of in zip(pending, parts, strict=True):
                    assert torch.equal(one.wait(), torch.cat(of))


@on_ranks(2)
def test_wrong_arguments_and_memory_that_is_not_shared_are_named(opt: Any) -> None:
    group, device = distributed.group.WORLD, os.environ["RANKS_DEVICE"]
    x, four = torch.zeros((2, 3), device=device), torch.zeros((4, 3), device=device)
    turned = torch.zeros((3, 4), device=device).t()
    shape = "ValueError: of 2 ranks' parts of shape (2, 3) along dimension 0"
    with shared(opt) as module:
        gather, scatter = module.all_gather_lc, module.reduce_scatter_lc
        for said, call in (
            (shape, lambda: gather(four[:3], x, group)),
            (shape, lambda: gather(four[:3], x, None)),  # the group of all ranks
            ("TypeError: out and inp must be of one float", lambda: gather(four.half(), x, group)),
            ("ValueError: out and inp must be cont", lambda: gather(turned, x, group)),
            ("ValueError: dim must be a dimension of (2, 3)", lambda: gather(four, x, group, 2)),
            ("ValueError: op must be one of 'sum', 'avg'", lambda: scatter(x, four, "max", group)),
            ("TypeError: out must be a tensor, got list", lambda: gather([x, x], x, group)),
        ):
            assert message_of(call).startswith(said), said
    if device == "cpu":  # GPUs share memory
        message = message_of(lambda: gather(torch.zeros(8), torch.zeros(4), group))
        assert message == (
            "CommUnavailable: low-contention collectives cannot be had: rank 0: no CUDA peers: the "
            "parameters are on cpu"
        )


def gathered(module: Any, size: int, group: Any = None) -> Any:
    """Begin an all-gather of numbers that say their rank; what is under way, and what it gives."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    out = torch.empty(size * ranks, device=os.environ["RANKS_DEVICE"])
    inp = torch.full((size,), 1.0 + rank, device=out.device)
    expected = torch.cat([torch.full_like(inp, 1.0 + r) for r in range(ranks)])
    return module.all_gather_lc(out, inp, group), expected


@pytest.mark.sees_defect("after a late rank collectives return zeros for ever and raise nothing")
@on_ranks(2)
def test_a_late_rank_is_an_error_of_the_next_call(opt) -> None:
    """Rank 1 comes late to one; what gives zeros till then is counted."""
    late = f"rank {1 - distributed.get_rank()} of the group did not come to a collective"
    with shared(opt) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TIMEOUT_MS", 300)
        gathered(module, 4)[0].wait()
        if distributed.get_rank() == 1:
            time.sleep(1)
        zeros = 0
        with pytest.raises(RuntimeError, match=late):
            for _ in range(4):
                pending, expected = gathered(module, 4)
                found = pending.wait()
                assert torch.equal(found, expected) or not found.any()
                zeros += not found.any()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        distributed.barrier()
        pending, expected = gathered(module, 4)  # in new memory
        assert torch.equal(pending.wait(), expected)
    assert zeros == 1


@pytest.mark.sees_defect("a rank that goes on behind a late one is given the rows of another call")
@on_ranks(2)
def test_ranks_at_different_calls_raise(opt: Any) -> Any:
    """The host of rank 1 learns of a late rank one call behind rank 0, and both go on."""
    module = module_of(opt, "distributed.low_contention")
    check, passed = module.LowContention.check, []

    def late(one: Any, *, wait: bool = True) -> None:
        passed.append(one)
        if distributed.get_rank() == 0 or len(passed) > 2:
            check(one, wait=wait)

    with shared(opt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TIMEOUT_MS", 1000)  # on a loaded machine ranks come apart
        patch.setattr(module.LowContention, "check", late)
        gathered(module, 4)[0].wait()
        time.sleep(2 * distributed.get_rank())
        with pytest.raises(RuntimeError, match="did not come to a collective"):
            for _ in range(9):
                gathered(module, 4)[0].wait()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        message = message_of(lambda: gathered(module, 4)[0].wait())
        pending, expected = gathered(module, 4, distributed.new_group())
        assert torch.equal(pending.wait(), expected)
    assert message.startswith("RuntimeError: the ranks are at calls [4, 5] of this group's")
    return message


@pytest.mark.sees_defect("a rank that gave up writes over what a late one still reads")
@on_ranks(2)
def test_what_a_rank_that_gave_up_writes_is_not_taken(opt) -> None:
    """By rank 1 for call 2, which rank 0 gave up on before it wrote calls 3 to 5."""
    rank = distributed.get_rank()
    with shared(opt) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TIMEOUT_MS", 300)
        patch.setattr(module.LowContention, "check", lambda *_, wait=True: None)
        gathered(module, 4)[0].wait()
        if rank == 0:
            for _ in range(4):
                pending, _ = gathered(module, 4)
                pending._inp.fill_(7)
                pending.wait()
            distributed.barrier()
            return
        distributed.barrier()
        pending, expected = gathered(module, 4)
        found = pending.wait()
        patch.undo()
        with pytest.raises(RuntimeError, match="or had given up itself"):
            gathered(module, 4)
        assert torch.equal(found, expected) or not found.any()


@pytest.mark.sees_defect("what a collective reads is given to others before it was read")
@on_ranks(2)
def test_what_is_read_stays_until_the_wait(opt: Any) -> None:
    group, ranks = distributed.group.WORLD, distributed.get_world_size()
    device = os.environ["RANKS_DEVICE"]
    with shared(opt) as module:
        for call in ("gather", "scatter"):
            inp, out = torch.zeros(4, device=device), torch.zeros(4 * ranks, device=device)
            if call == "gather":
                pending = module.all_gather_lc(out, inp, group)
            else:
                inp, out = out, inp
                pending = module.reduce_scatter_lc(out, inp, "sum", group)
            seen = weakref.ref(inp)
            del inp
            assert seen() is not None
            pending.wait()
            assert seen() is None and not out.any()


@pytest.mark.sees_defect("a result is taken out of memory that a larger call has let go of")
@on_ranks(2)
def test_memory_grows_under_calls_that_are_under_way(opt: Any) -> None:
    """Results of calls that a larger one finds under way; memory that is let go is overwritten."""
    arena = module_of(opt, "distributed.arena").Arena
    original = arena.close

    def close(self: Any) -> None:
        if self._memories:
            self._memories[self.rank].fill_(255)
        original(self)

    with shared(opt) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "close", close)
        begun = [gathered(module, 16) for _ in range(3)]
        begun.append(gathered(module, 2**20))
        for pending, expected in begun:
            assert torch.equal(pending.wait(), expected)


@on_ranks(2)
def test_a_call_that_finds_no_room_leaves_nothing_closed(opt: Any) -> None:
    transport = module_of(opt, "distributed.transport").GroupTransport
    with shared(opt) as module:
        gathered(module, 4)[0].wait()

        class Full(transport.memory):
            @staticmethod
            def allocate(size: int, device: torch.device) -> torch.Tensor:
                raise torch.OutOfMemoryError("no room for an arena")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "memory", Full)
            message = message_of(lambda: gathered(module, 2**20))
        pending, expected = gathered(module, 4)
        assert torch.equal(pending.wait(), expected)
    assert message.startswith("CommUnavailable: ") and "no room for an arena" in message


def test_groups_of_one_name_share_nothing(opt, monkeypatch) -> None:
    """A group may get the name of one that is gone, whose memory nobody else maps any more."""
    module, made = module_of(opt, "distributed.low_contention"), []

    class Memory:
        slot_bytes = 2**20

        def __init__(self, group: Any, *arguments: Any) -> None:
            made.append(group)

        def check(self, *, wait: bool) -> None: ...

    class Group:
        group_name = "0"

    monkeypatch.setattr(module, "LowContention", Memory)
    first, second = Group(), Group()
    for group in (first, first, second):
        module._of(group, "out", torch.zeros(4))
    assert made == [first, second]
    made.clear()
    gone = weakref.ref(first)
    del first, group
    assert gone() is None
