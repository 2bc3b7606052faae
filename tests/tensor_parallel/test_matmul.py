"""The products against float64 over gloo, and what users meet: errors, autocast, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from .._compare import assert_error_at_most
from ..distributed._ranks import same_everywhere
from . import _cases

ON_CPU = "symmetric memory is CUDA's, and the tensors are not on a CUDA device"


@pytest.fixture(scope="module", params=[2, 4])
def results(request, ranks) -> list[dict]:
    """Per rank what every case gave."""
    arguments = (_cases.CPU, "cpu", torch.bfloat16, "auto")
    return ranks(request.param).run(_cases.run_all, *arguments)


@pytest.mark.parametrize("case", _cases.cases(_cases.CPU), ids=lambda case: case.name)
def test_equals_float64(case, results) -> None:
    for rank, of_rank in enumerate(results):
        assert not _cases.verdict(case, of_rank[case.name], _cases.PLAIN), f"on rank {rank}"


def test_cases_would_notice_another_path(results) -> None:
    case = _cases.cases(_cases.CPU)[0]
    assert _cases.verdict(case, results[0][case.name], _cases.FUSED)


def _several(opt) -> tuple:
    """Products of one gathered tensor with two matrices, and of each alone."""
    made = torch.Generator().manual_seed(distributed.get_rank())
    x = torch.randn(3, 8, generator=made)
    made.manual_seed(9)
    ws = [torch.randn(8, n, generator=made, requires_grad=True) for n in (4, 6)]
    xs = [x.clone().requires_grad_() for _ in range(3)]
    gather = opt.tensor_parallel.all_gather_matmul
    both = gather(xs[0], ws, 0)
    alone = [gather(xs[1], ws[:1], 0)[0], gather(xs[2], ws[1:], 0)[0]]
    sum(y.square().sum() for y in both).backward()
    together = [w.grad.clone() for w in ws]
    for w in ws:
        w.grad = None
    sum(y.square().sum() for y in alone).backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad + xs[2].grad)
    for y, z, g, w in zip(both, alone, together, ws, strict=True):
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(g, w.grad)


def test_matrices_that_share_a_gather(ranks) -> None:
    ranks(2).run(_several)


def _block(tp, x, w, v, scaling):
    """An MLP under tensor parallelism: rows of x on each rank, columns of w and rows of v."""
    (h,) = tp.all_gather_matmul(x, [w], 1, distributed.group.WORLD, scaling=scaling)
    return tp.matmul_reduce_scatter(torch.relu(h), v, "sum", 1, scaling=scaling)


def _block_inputs():
    made = torch.Generator().manual_seed(distributed.get_rank())
    sizes = (2, 4, 16), (16, 16), (16, 16)
    return [torch.randn(size, generator=made).requires_grad_() for size in sizes]


def _gradients(function, inputs) -> list[torch.Tensor]:
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]


def _checkpointed(opt, scaling: str | None) -> list:
    inputs, tp = _block_inputs(), opt.tensor_parallel
    plain = _gradients(lambda *t: _block(tp, *t, scaling), inputs)
    tp.reset_comm_report()
    recomputed = _gradients(
        lambda *t: checkpoint(_block, tp, *t, scaling, use_reentrant=False), inputs
    )
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
    return sorted((record.op, record.calls) for record in tp.comm_report())


def test_activation_checkpointing_gathers_again(ranks) -> None:
    calls = same_everywhere(ranks(2).run(_checkpointed, None))
    # Forward, forward again, and backward, where each is the other's.
    assert calls == [("all_gather_matmul", 3), ("matmul_reduce_scatter", 3)]


@pytest.mark.parametrize("scaling", [None, "rowwise_sharded", "tensorwise"])
def test_compiles_into_one_graph(ranks, scaling) -> None:
    ranks(2).run(_compiled, scaling)


def _compiled(opt, scaling: str | None) -> None:
    inputs, tp = _block_inputs(), opt.tensor_parallel
    eager = _gradients(lambda *t: _block(tp, *t, scaling), inputs)
    torch._dynamo.reset()
    graphs = torch.compile(lambda *t: _block(tp, *t, scaling), fullgraph=True, backend="aot_eager")
    tp.reset_comm_report()
    for one, other in zip(eager, _gradients(graphs, inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert sum(record.calls for record in tp.comm_report()) == 4


def _checked_ops(opt) -> None:
    """torch's own checks of the registered operations: schema, fakes, no aliases."""
    ops = opt._ops.ops
    a, b, group = torch.randn(4, 16), torch.randn(16, 8), distributed.group.WORLD.group_name
    bf16, tests = torch.bfloat16, ("test_schema", "test_faketensor")
    last = (group, "auto", False)
    for dim, keep in ((0, True), (1, False)):
        weight = b if dim == 0 else torch.randn(32, 8)
        gather = (a, [weight], None, [], "", torch.float32, False, dim, *last, keep)
        torch.library.opcheck(ops.all_gather_matmul, gather, test_utils=tests)
        scatter = (a, b, None, None, torch.float32, False, "sum", dim, *last)
        torch.library.opcheck(ops.matmul_reduce_scatter, scatter, test_utils=tests)
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.tensor(1.0)
    scaled = (a8, [b8], one, [one], "tensorwise", bf16, False, 0, *last, False)
    # torch cannot compare float8 tensors, which the check of the schema does.
    torch.library.opcheck(ops.all_gather_matmul, scaled, test_utils=tests[1:])
    torch.library.opcheck(ops.maximum_over_ranks, (a, group), test_utils=tests)
    torch.library.opcheck(ops.gather_rows, (a, group), test_utils=tests)


def test_registered_operations_have_true_fakes(ranks) -> None:
    ranks(2).run(_checked_ops)


def _autocast(opt) -> None:
    x, w, v = _block_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = _block(opt.tensor_parallel, x, w, v, None)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {t.grad.dtype for t in (x, w, v)} == {torch.float32}


def test_autocast_converts_the_operands(ranks) -> None:
    ranks(2).run(_autocast)


def _strict(opt) -> list:
    tp = opt.tensor_parallel
    x, w, v = _block_inputs()
    raised = []
    with pytest.raises(opt.CommUnavailable) as gather:
        tp.all_gather_matmul(x, [w], 0, strict=True)
    with pytest.raises(opt.CommUnavailable) as scatter:
        tp.matmul_reduce_scatter(x, v, "sum", 0, strict=True)
    raised += [gather.value.reason, scatter.value.reason]
    tp.reset_comm_report()
    tp.all_gather_matmul(x, [w], 0, fuse="never", strict=True)  # nobody asked for a fused one
    (record,) = tp.comm_report()
    return [*raised, record.path, record.reason]


def test_strict_raises_the_reason(ranks) -> None:
    gather, scatter, path, reason = same_everywhere(ranks(2).run(_strict))
    assert gather == f"all_gather_matmul is not fused: {ON_CPU}"
    assert scatter == f"matmul_reduce_scatter is not fused: {ON_CPU}"
    assert (path, reason) == ("plain", 'fuse="never" was asked for')


def _alone(opt) -> None:
    """A group of one rank has nothing to gather."""
    tp = opt.tensor_parallel
    group = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    tp.reset_comm_report()
    (y,) = tp.all_gather_matmul(x, [w], 0, group, strict=True)
    z = tp.matmul_reduce_scatter(x, w, "avg", 1, group, strict=True)
    assert torch.equal(y, x @ w) and torch.equal(z, x @ w)
    (y + z).sum().backward()
    assert_error_at_most(x.grad, (2 * torch.ones(4, 4) @ w.T).detach(), 1e-6)
    assert {record.path for record in tp.comm_report()} == {"alone"}


def test_one_rank_is_alone(ranks) -> None:
    ranks(1).run(_alone)


X, W = torch.zeros(4, 8), torch.zeros(8, 4)
ONE, ONES = torch.tensor(1.0), torch.ones(4, 1)
REFUSED = [
    (ValueError, "bs must be a sequence of matrices", lambda tp: tp.all_gather_matmul(X, W, 0)),
    (ValueError, "gather_dim must be in", lambda tp: tp.all_gather_matmul(X, [W], 2)),
    (TypeError, "gather_dim must be an int", lambda tp: tp.all_gather_matmul(X, [W], 1.0)),
    (ValueError, "as many rows as a", lambda tp: tp.all_gather_matmul(X, [W], 1)),
    (ValueError, "at least 2|2 dimensions", lambda tp: tp.all_gather_matmul(X[0], [W], 0)),
    (TypeError, "b must have a's dtype", lambda tp: tp.all_gather_matmul(X, [W.double()], 0)),
    (ValueError, "fuse must be one of", lambda tp: tp.all_gather_matmul(X, [W], 0, fuse="yes")),
    (
        ValueError,
        "scaling must be one of",
        lambda tp: tp.all_gather_matmul(X, [W], 0, scaling="rowwise"),
    ),
    (TypeError, "group must be a ProcessGroup", lambda tp: tp.all_gather_matmul(X, [W], 0, 3)),
    (
        ValueError,
        "reduce_op must be one of",
        lambda tp: tp.matmul_reduce_scatter(X, W, "mean", 0),
    ),
    (
        ValueError,
        "which 2 ranks do not divide",
        lambda tp: tp.matmul_reduce_scatter(X[:3], W, "sum", 0),
    ),
    (TypeError, "a must be a float8 tensor", lambda tp: _scaled(tp, X, W)),
    (ValueError, "contiguous columns", lambda tp: _scaled(tp, _8(X), _8(W))),
    (ValueError, "both are tensorwise or both", lambda tp: _scaled(tp, _8(X), _8(W.T).T, ONES)),
    (ValueError, "scale_mode must be one of", lambda tp: _scaled(tp, _8(X), _8(W.T).T, mode="x")),
    (
        ValueError,
        "rowwise_replicated",
        lambda tp: _scaled(tp, _8(X), _8(W.T).T, ONES, mode="rowwise_sharded", dim=1),
    ),
]


def _8(x):
    return x.to(torch.float8_e4m3fn).contiguous()


def _scaled(tp, a, b, a_scale=ONE, mode="tensorwise", dim=0):
    return tp.all_gather_scaled_matmul(a, [b], a_scale, [ONE], dim, scale_mode=mode)


def _refused(opt) -> None:
    for error, text, call in REFUSED:
        with pytest.raises(error, match=text):
            call(opt.tensor_parallel)


def test_wrong_arguments_raise_before_anything_is_sent(ranks) -> None:
    ranks(2).run(_refused)


def test_without_a_group(opt) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        opt.tensor_parallel.all_gather_matmul(X, [W], 0)
