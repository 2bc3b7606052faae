"""`assert_async_tp_fused` on graphs that torch's own pass has been over: what is left, and why.

The pass runs on a CPU, on traces of fake tensors, if torch is told that it has NCCL and that the
group has symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory as symmetric_memory


@pytest.fixture
def group():
    """A group of two ranks of which only this one is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def gathered(x, dim, group):
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return gather(x, dim, group)


def scattered(x, dim, group):
    scatter = getattr(functional, "reduce_scatter_single", None)
    return (scatter or functional.reduce_scatter_tensor)(x, "sum", dim, group)


def after_the_pass(function: Callable, *sizes, nccl: bool = True, enabled: bool = True):
    """The graph of `function` behind the pass, and what holds while it is looked at."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        inputs = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
        gm = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        remove_noop_ops(gm.graph)
        view_to_reshape(gm)
        with mock.patch("torch.distributed.is_nccl_available", lambda: nccl):
            names = None if enabled else {"another"}
            with symmetric_memory._test_mode(names):
                micro_pipeline_tp_pass(gm.graph)
    return gm


@pytest.fixture
def check(opt, group):
    """`check(function, *sizes)`: what `assert_async_tp_fused` returns of it behind the pass."""

    def on(function, *sizes, of=None, nccl=True, enabled=True):
        gm = after_the_pass(function, *sizes, nccl=nccl, enabled=enabled)
        names = None if enabled else {"another"}
        with (
            mock.patch("torch.distributed.is_nccl_available", lambda: nccl),
            symmetric_memory._test_mode(names),
        ):
            return opt.tensor_parallel.assert_async_tp_fused(gm, of)

    return on


# The last dimension of three; that of two is not fused by the pass of torch 2.13.
@pytest.mark.parametrize(
    ("size", "dim", "inner"),
    [((8, 64), 0, 64), ((4, 8, 64), 0, 64), ((4, 8, 64), 1, 64), ((4, 8, 1024), 2, 2048)],
)
def test_fused_gathers_pass(check, group, size, dim, inner) -> None:
    assert check(lambda a, b: gathered(a, dim, group) @ b, size, (inner, 32)) == 1


@pytest.mark.parametrize("size", [(8, 64), (4, 8, 64)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fused_scatters_pass(check, group, size, dim) -> None:
    if dim < len(size):
        assert check(lambda a, b: scattered(a @ b, dim, group), size, (64, 32)) == 1


def test_both_in_one_graph(check, group) -> None:
    def block(a, b, c):
        return scattered((gathered(a, 0, group) @ b).relu() @ c, 0, group)

    assert check(block, (8, 64), (64, 32), (32, 64)) == 2


def product_with_two_readers(group):
    def function(a, b):
        c = a @ b
        return scattered(c, 0, group), c.relu()

    return function


LEFT = {
    "below the 1024": lambda g: lambda a, b: gathered(a, 1, g) @ torch.cat([b, b]),
    "from the right": lambda g: lambda a, b: b.t() @ gathered(a, 0, g).t(),
    "has another reader, relu": product_with_two_readers,
    "is of addmm": lambda g: lambda a, b: torch.addmm(b[0], gathered(a, 0, g), b),
    "match no pattern": lambda g: lambda a, b: gathered(a, 0, g).float().bfloat16() @ b,
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_has_its_reason(check, group, reason) -> None:
    with pytest.raises(AssertionError, match=rf"1 collectives of products.*\n.*{reason}"):
        check(LEFT[reason](group), (8, 64), (64, 64))


def gather_and_multiply(group):
    return lambda a, b: gathered(a, 0, group) @ b


def test_a_group_without_symmetric_memory_is_named(check, group) -> None:
    with pytest.raises(AssertionError, match="not enabled for the group '0'"):
        check(gather_and_multiply(group), (8, 64), (64, 32), enabled=False)


def test_torch_without_nccl_is_named(check, group) -> None:
    with pytest.raises(AssertionError, match="built without NCCL"):
        check(gather_and_multiply(group), (8, 64), (64, 32), nccl=False)


def test_collectives_of_other_groups_do_not_count(check, group) -> None:
    def narrow(a, b):
        return gathered(a, 1, group) @ b

    with pytest.raises(AssertionError, match="no all-gather before a product"):
        check(narrow, (8, 64), (128, 32), of="another")
    with pytest.raises(AssertionError, match="below the 1024"):
        check(narrow, (8, 64), (128, 32), of=group)


def test_a_graph_without_either_is_no_success(check, group) -> None:
    with pytest.raises(AssertionError, match="no all-gather before a product"):
        check(lambda a, b: a @ b, (8, 64), (64, 32))
    # Gathered parameters, as FSDP has them, are multiplied by nothing here.
    with pytest.raises(AssertionError, match="no all-gather before a product"):
        check(lambda a: gathered(a, 0, group).relu(), (8, 64))


def test_paths_that_part_and_meet_are_walked_once(graph) -> None:
    """Each residual addition doubles the paths, not the nodes."""
    made = torch.fx.Graph()
    first = x = made.placeholder("x")
    for _ in range(60):
        x = made.call_function(torch.add, (x, made.call_function(torch.relu, (x,))))
    last = made.output(x)
    aside = made.placeholder("y")
    assert graph._leads_to(first, last) and not graph._leads_to(first, aside)
