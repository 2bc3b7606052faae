"""The products against float64 over gloo, and what users meet: errors, autocast, graphs."""

import shutil
import sys
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from .._compare import assert_error_at_most
from ..distributed._ranks import on_ranks
from . import _cases

ON_CPU = "symmetric memory is CUDA's, and the tensors are not on a CUDA device"


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_equals_float64(opt, world) -> None:
    device = torch.device("cpu")
    wrong = _cases.wrong_products(opt, _cases.CPU, device, torch.bfloat16, "auto")
    assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_matrices_that_share_a_gather(opt) -> tuple:
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


@on_ranks(2)
def test_activation_checkpointing_gathers_again(opt) -> None:
    inputs, tp = _block_inputs(), opt.tensor_parallel
    plain = _gradients(lambda *t: _block(tp, *t, None), inputs)
    tp.reset_comm_report()
    recomputed = _gradients(
        lambda *t: checkpoint(_block, tp, *t, None, use_reentrant=False), inputs
    )
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
    calls = sorted((record.op, record.calls) for record in tp.comm_report())
    # Forward, forward again, and backward, where each is the other's.
    assert calls == [("all_gather_matmul", 3), ("matmul_reduce_scatter", 3)]


@pytest.mark.parametrize("scaling", [None, "rowwise_sharded", "tensorwise"])
@on_ranks(2)
def test_compiles_into_one_graph(opt, scaling: str | None) -> None:
    inputs, tp = _block_inputs(), opt.tensor_parallel
    eager = _gradients(lambda *t: _block(tp, *t, scaling), inputs)
    torch._dynamo.reset()
    graphs = torch.compile(lambda *t: _block(tp, *t, scaling), fullgraph=True, backend="aot_eager")
    tp.reset_comm_report()
    for one, other in zip(eager, _gradients(graphs, inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert sum(record.calls for record in tp.comm_report()) == 4


@on_ranks(2)
def test_registered_operations_have_true_fakes(opt) -> None:
    """torch's own checks of the registered operations: schema, fakes, no aliases."""
    ops = opt._ops.ops
    a, b, group = torch.randn(4, 16), torch.randn(16, 8), distributed.group.WORLD.group_name
    bf16, tests = torch.bfloat16, ("test_schema", "test_faketensor")
    last = (group, "auto", False)
    for dim, keep in ((0, True), (1, False)):
        weight = b if dim == 0 else torch.randn(32, 8)
        gather = (a, [weight], None, [], "", torch.float32, dim, *last, keep)
        torch.library.opcheck(ops.all_gather_matmul, gather, test_utils=tests)
        scatter = (a, b, None, None, torch.float32, dim, *last, "sum")
        torch.library.opcheck(ops.matmul_reduce_scatter, scatter, test_utils=tests)
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.tensor(1.0)
    scaled = (a8, [b8], one, [one], "tensorwise", bf16, 0, *last, False)
    # torch cannot compare float8 tensors, which the check of the schema does.
    torch.library.opcheck(ops.all_gather_matmul, scaled, test_utils=tests[1:])
    torch.library.opcheck(ops.maximum_over_ranks, (a, group), test_utils=tests)
    torch.library.opcheck(ops.gather_rows, (a, group), test_utils=tests)


@on_ranks(2)
def test_autocast_converts_the_operands(opt) -> None:
    x, w, v = _block_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = _block(opt.tensor_parallel, x, w, v, None)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {t.grad.dtype for t in (x, w, v)} == {torch.float32}


@on_ranks(2)
def test_strict_raises_the_reason(opt) -> object:
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
    gather, scatter, path, reason = [*raised, record.path, record.reason]
    assert gather == f"all_gather_matmul is not fused: {ON_CPU}"
    assert scatter == f"matmul_reduce_scatter is not fused: {ON_CPU}"
    assert (path, reason) == ("plain", 'fuse="never" was asked for')
    return path, reason


@on_ranks(1)
def test_one_rank_is_alone(opt) -> None:
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


@on_ranks(2)
def test_second_gradients_are_refused(opt) -> None:
    tp, (x, w, v) = opt.tensor_parallel, _block_inputs()
    for scaling in (None, "tensorwise"):
        gathered = tp.all_gather_matmul(x, [w], 1, scaling=scaling)[0]
        scattered = tp.matmul_reduce_scatter(x, v, "sum", 1, scaling=scaling)
        for y, weight in ((gathered, w), (scattered, v)):
            (grad,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()


@on_ranks(2)
def test_ranks_with_uneven_matrices_choose_one_path(opt) -> list:
    tp, asked = opt.tensor_parallel, []
    ops = sys.modules[f"{tp.__name__}.ops"]
    mine = 16 * (1 + distributed.get_rank())

    def why_not(a, **facts):
        asked.append({key: str(value) for key, value in facts.items()})
        return ON_CPU

    with mock.patch.object(ops.fused, "why_not", why_not):
        for scaling in (None, "tensorwise", "rowwise_sharded"):
            x, w = torch.randn(2, 4, 16, requires_grad=True), torch.randn(16, mine)
            v = torch.randn(mine, 16, requires_grad=True)
            for dim in (0, 1):
                (h,) = tp.all_gather_matmul(x, [w], dim, scaling=scaling)
                assert h.shape[-1] == mine
                tp.matmul_reduce_scatter(h, v, "sum", dim, scaling=scaling).sum().backward()
    assert len(asked) == 24
    return asked


@on_ranks(2)
def test_workspace_has_room_for_all_of_few_rows(opt) -> None:
    """torch gathers up to 2048 rows by multicast where it need not return them."""
    tp, asked = opt.tensor_parallel, []
    ops = sys.modules[f"{tp.__name__}.ops"]

    def why_not(a, *, workspace, **_):
        asked.append(workspace)
        return ON_CPU

    with mock.patch.object(ops.fused, "why_not", why_not):
        w = torch.randn(16, 16, requires_grad=True)
        for rows in (8, 2048):
            tp.all_gather_matmul(torch.randn(rows, 16), [w.detach()], 0)
            tp.all_gather_matmul(torch.randn(rows, 16), [w], 0)
    few, kept, many, many_kept = asked
    shard, scales = 4 * 16, 4 * 2
    assert few == 8 * (2 * shard + scales) and kept == 8 * (shard + scales)
    assert many == many_kept == 2048 * (shard + scales)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@on_ranks(1)
def test_inductor_takes_a_transposed_tensor_of_one_rank(opt) -> None:
    group = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    x, w = torch.randn(8, 4), torch.randn(8, 4, requires_grad=True)

    def function(x, w):
        return opt.tensor_parallel.all_gather_matmul(x.t(), [w], 0, group)[0]

    found = torch.compile(function, fullgraph=True)(x, w)
    found.sum().backward()
    torch.testing.assert_close(found, x.t() @ w)
    torch.testing.assert_close(w.grad, x.sum(1, keepdim=True).expand(8, 4))


@on_ranks(2)
def test_no_rows_no_depth_and_one_column(opt) -> None:
    tp = opt.tensor_parallel
    (found,) = tp.all_gather_matmul(torch.ones(3, 0), [torch.ones(0, 2)], 0)
    assert torch.equal(found, torch.zeros(6, 2))
    found = tp.matmul_reduce_scatter(torch.ones(2, 3, 0), torch.ones(0, 2), "sum", 0)
    assert torch.equal(found, torch.zeros(1, 3, 2))
    for scaling in _cases.SCALINGS:
        x = torch.randn(0, 8, requires_grad=True)
        w = torch.randn(8, 1, requires_grad=True)
        tp.all_gather_matmul(x, [w], 0, scaling=scaling)[0].sum().backward()
        assert x.grad.shape == (0, 8) and not w.grad.any()
    column, scale = _8(torch.ones(1, 8)).t(), torch.full((1, 1), 0.5)
    a, rows = _8(torch.ones(4, 8)), torch.arange(4.0).view(4, 1)
    sharded = {"scale_mode": "rowwise_sharded", "out_dtype": torch.float32}
    (found,) = tp.all_gather_scaled_matmul(a, [column], rows, [scale], 0, **sharded)
    assert torch.equal(found, (4 * rows).repeat(2, 1))
    tensorwise = {"scale_mode": "tensorwise", "out_dtype": torch.float32}
    (found,) = tp.all_gather_scaled_matmul(a, [column], ONE, [scale], 0, **tensorwise)
    assert torch.equal(found, torch.full((8, 1), 4.0))


@on_ranks(2)
def test_a_fused_product_that_fails_is_not_counted(opt) -> None:
    tp = opt.tensor_parallel
    fused = sys.modules[f"{tp.__name__}.fused"]
    tp.reset_comm_report()
    with mock.patch.object(fused, "why_not", lambda *_, **__: None):
        for call in (
            lambda: tp.all_gather_matmul(X, [W], 0),
            lambda: tp.matmul_reduce_scatter(X, W, "sum", 0),
        ):
            with pytest.raises((NotImplementedError, RuntimeError, AttributeError)):
                call()  # torch has no fused product on CPUs
    assert [*tp.comm_report()] == []


X, W = torch.zeros(4, 8), torch.zeros(8, 4)
ONE, ONES = torch.tensor(1.0), torch.ones(4, 1)
FOUR, SIX = torch.ones(1, 4), torch.ones(6, 1)
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
REFUSED = [
    (ValueError, "bs must be a sequence of matrices", GATHER, (X, W, 0), {}),
    (ValueError, "gather_dim must be in", GATHER, (X, [W], 2), {}),
    (TypeError, "gather_dim must be an int", GATHER, (X, [W], 1.0), {}),
    (ValueError, "as many rows as a", GATHER, (X, [W], 1), {}),
    (ValueError, "at least 2|2 dimensions", GATHER, (X[0], [W], 0), {}),
    (TypeError, "b must have a's dtype", GATHER, (X, [W.double()], 0), {}),
    (ValueError, "fuse must be one of", GATHER, (X, [W], 0), {"fuse": "yes"}),
    (ValueError, "scaling must be one of", GATHER, (X, [W], 0), {"scaling": "rowwise"}),
    (TypeError, "group must be a ProcessGroup", GATHER, (X, [W], 0, 3), {}),
    (TypeError, "b must be a tensor", GATHER, (X, [3], 0), {}),
    (ValueError, "reduce_op must be one of", SCATTER, (X, W, "mean", 0), {}),
    (ValueError, "which 2 ranks do not divide", SCATTER, (X[:3], W, "sum", 0), {}),
    (TypeError, "b must be a tensor", SCATTER, (X, 3, "sum", 0), {}),
]


def _8(x):
    return x.to(torch.float8_e4m3fn).contiguous()


X8, W8 = _8(X), _8(W.T).T
X8_3D = _8(torch.zeros(2, 3, 8))  # gathered along the second dimension
# Of all_gather_scaled_matmul: a, b, their scales, the dimension and the mode.
REFUSED_GATHERS = [
    (TypeError, "a must be a float8 tensor", (X, W, ONE, ONE, 0, "tensorwise")),
    (ValueError, "contiguous columns", (X8, _8(W), ONE, ONE, 0, "tensorwise")),
    (ValueError, "both are tensorwise or both", (X8, W8, ONES, ONE, 0, "tensorwise")),
    (ValueError, "scale_mode must be one of", (X8, W8, ONE, ONE, 0, "x")),
    (ValueError, "rowwise_replicated", (X8, W8, ONES, ONE, 1, "rowwise_sharded")),
    # Scales of another kind than scale_mode says, or with the right number of wrong rows.
    (ValueError, "a_scale must be one", (X8, W8, ONES, FOUR, 0, "tensorwise")),
    (ValueError, "a_scale must be", (X8_3D, W8, ONE, ONE, 1, "rowwise_sharded")),
    (ValueError, "a_scale must be", (X8_3D, W8, SIX, FOUR, 1, "rowwise_sharded")),
    (ValueError, "a_scale must be", (X8_3D, W8, SIX.view(3, 2, 1), FOUR, 1, "rowwise_sharded")),
    (
        ValueError,
        "a_scale must be",
        (X8_3D, W8, torch.ones(4, 3, 1), FOUR, 1, "rowwise_replicated"),
    ),
]


@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent(opt) -> None:
    tp = opt.tensor_parallel
    for error, text, name, arguments, options in REFUSED:
        with pytest.raises(error, match=text):
            getattr(tp, name)(*arguments, **options)
    for error, text, (a, b, a_scale, b_scale, dim, mode) in REFUSED_GATHERS:
        with pytest.raises(error, match=text):
            tp.all_gather_scaled_matmul(a, [b], a_scale, [b_scale], dim, scale_mode=mode)
    with pytest.raises(TypeError, match="b_scales must be a sequence of tensors, one per matrix"):
        tp.all_gather_scaled_matmul(X8, [W8], ONE, None, 0, scale_mode="tensorwise")
    with pytest.raises(ValueError, match="a_scale must be"):
        tp.scaled_matmul_reduce_scatter(_8(X.view(2, 2, 8)), W8, ONES, FOUR, "sum", 1)


def test_without_a_group(opt) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        opt.tensor_parallel.all_gather_matmul(X, [W], 0)


EIGHT = torch.float8_e4m3fn


def operands(lead: tuple[int, ...], *, rowwise: bool, device: torch.device):
    made = torch.Generator().manual_seed(len(lead))
    a = torch.randn(*lead, 32, generator=made).to(EIGHT)
    b = torch.randn(16, 32, generator=made).to(EIGHT).t()
    a_scale, b_scale = torch.rand(*lead, 1, generator=made), torch.rand(1, 16, generator=made)
    if not rowwise:
        a_scale, b_scale = torch.tensor(0.75), b_scale[:, :1]
    exact = (a.double() * a_scale) @ (b.double() * b_scale)
    return [x.to(device) for x in (a, b, a_scale, b_scale)], exact


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("lead", [(8,), (4, 6), (2, 3, 4), (1,), (2, 0, 3)])
def test_scaled_matmul_equals_float64(opt, device, lead, rowwise) -> None:
    arguments, exact = operands(lead, rowwise=rowwise, device=device)
    found = opt.tensor_parallel.scaled_matmul(*arguments)
    assert found.dtype == torch.bfloat16
    assert_error_at_most(found.cpu(), exact, 2 * torch.finfo(torch.bfloat16).eps)


def test_traces_into_one_graph(opt, device) -> None:
    arguments, _ = operands((4, 6), rowwise=True, device=device)
    compiled = torch.compile(opt.tensor_parallel.scaled_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), opt.tensor_parallel.scaled_matmul(*arguments))


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_one_column_on_a_cpu(opt, rows, rowwise) -> None:
    a, b = torch.ones(rows, 32).to(EIGHT), torch.ones(1, 32).to(EIGHT).t()
    a_scale = torch.arange(1.0, rows + 1).view(rows, 1) if rowwise else torch.tensor(2.0)
    b_scale = torch.full((1, 1), 0.5) if rowwise else torch.tensor(0.5)
    found = opt.tensor_parallel.scaled_matmul(a, b, a_scale, b_scale)
    assert torch.equal(found.float(), 16 * a_scale.expand(rows, 1))


A, B = torch.zeros(4, 32, dtype=EIGHT), torch.zeros(16, 32, dtype=EIGHT).t()
REFUSED_SCALED = [
    (TypeError, "a must be a float8", (A.float(), B, ONE, ONE)),
    (TypeError, "b_scale must be a float32", (A, B, ONE, ONE.double())),
    (ValueError, "b must be \\(K, N\\)", (A, B[None], ONE, ONE)),
    (ValueError, "at least 2 dimensions", (A[0], B, ONE, ONE)),
    (ValueError, "contiguous columns", (A, B.contiguous(), ONE, ONE)),
    (ValueError, "b_scale must be rowwise", (A, B, torch.ones(4, 1), torch.ones(1, 4))),
    (ValueError, "both are tensorwise or both", (A, B, torch.ones(4, 1), ONE)),
    (ValueError, "both are tensorwise or both", (A, B, ONE, torch.ones(1, 16))),
    (ValueError, "a_scale must be", (A.view(2, 2, 32), B, torch.ones(4, 1), torch.ones(1, 16))),
    (ValueError, "a_scale must be", (A, B, torch.ones(1, 4), torch.ones(1, 16))),
    (ValueError, "b_scale must be rowwise", (A, B, torch.ones(4, 1), torch.ones(4, 4))),
    (TypeError, "a_scale must be a float32", (A, B, 1.0, ONE)),
    (ValueError, "as many rows as a has columns", (A[:, :16], B, ONE, ONE)),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED_SCALED)
def test_scaled_matmul_refuses(opt, error, text, arguments) -> None:
    with pytest.raises(error, match=text):
        opt.tensor_parallel.scaled_matmul(*arguments)
