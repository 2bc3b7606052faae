"""Fused products on GPUs against float64, each with the number of fused calls: `make test-symm`."""

import time
from typing import Any

import pytest
import torch
from torch import distributed

from .._compare import relative_error
from ..distributed._ranks import on_ranks, same_everywhere
from . import _cases

pytestmark = [pytest.mark.gpu, pytest.mark.part("products"), pytest.mark.usefixtures("gpu_ranks")]

# (ranks, whether each has a GPU of its own); the others share one.
SETS = [(2, False), (4, False)]
SETS += [pytest.param((n, True), marks=pytest.mark.part("several GPUs")) for n in (2, 4)]
# Distance from the owner's result; both are float16 iterates, in another order of sums.
NEWTON_SCHULZ = 2e-2
SCALED = pytest.mark.parametrize("scaling", [None, "rowwise_sharded"])


@pytest.fixture(params=SETS, ids=lambda each: f"{each[0]}-{'own' if each[1] else 'shared'}")
def world(request) -> int:
    count, own = request.param
    if own and torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs")
    return count


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@on_ranks()
def test_fused_products_equal_float64(opt, world) -> None:
    wrong = _cases.wrong_products(opt, _cases.GPU, here(), torch.bfloat16, "always")
    assert not wrong, "\n".join(wrong)


def _block(tp: Any, x: Any, w: Any, v: Any, scaling: str | None) -> Any:
    (h,) = tp.all_gather_matmul(x, [w], 0, scaling=scaling, fuse="always", strict=True)
    h = h.relu()
    return tp.matmul_reduce_scatter(h, v, "sum", 0, scaling=scaling, fuse="always", strict=True)


def _inputs(seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator(here()).manual_seed(100 * seed + distributed.get_rank())
    sizes = (64, 128), (128, 96), (96, 128)
    options = {"generator": made, "device": here(), "dtype": torch.bfloat16}
    return [torch.randn(size, **options).mul_(0.1).requires_grad_() for size in sizes]


def assert_fused(tp: Any, scaling: str | None, each: int) -> None:
    """Both products of a block ran so often, fused, since the report was reset."""
    names = ("all_gather_matmul", "matmul_reduce_scatter")
    if scaling is not None:
        names = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")
    calls = {(record.op, record.path): record.calls for record in tp.comm_report()}
    assert calls == {(name, "fused"): each for name in names}


@SCALED
@on_ranks()
def test_a_compiled_block_fuses(opt, world, scaling) -> None:
    """In one graph, forward and backward."""
    tp, inputs = opt.tensor_parallel, _inputs()

    def block(*tensors: Any) -> Any:
        return _block(tp, *tensors, scaling)

    eager = block(*inputs)
    wanted = [eager, *torch.autograd.grad(eager.float().square().sum(), inputs)]
    torch._dynamo.reset()
    tp.reset_comm_report()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)
    found = [compiled, *torch.autograd.grad(compiled.float().square().sum(), inputs)]
    assert_fused(tp, scaling, each=2)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= 0.02  # a rounding of bfloat16 here and there


@SCALED
@on_ranks()
@torch.no_grad()
def test_a_captured_block_replays_fused_products(opt, world, scaling) -> None:
    """On other numbers, the last time behind a call for which the workspace had to grow."""
    tp, inputs = opt.tensor_parallel, [x.detach() for x in _inputs()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _block(tp, *inputs, scaling)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    tp.reset_comm_report()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = _block(tp, *inputs, scaling)
    assert_fused(tp, scaling, each=1)
    for seed in (1, 2, 3):
        if seed == 3:  # 8 MiB of workspace, then 16
            larger = torch.cat([inputs[0]] * 2 ** (8 if scaling is None else 9))
            _block(tp, larger, *inputs[1:], scaling)
        for x, other in zip(inputs, _inputs(seed), strict=True):
            x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        again = out.clone()
        assert torch.equal(again, _block(tp, *inputs, scaling)), seed


@on_ranks()
def test_small_products_are_not_fused_by_themselves(opt, world) -> None:
    x, w, _ = _inputs()
    with pytest.raises(opt.CommUnavailable, match="too small to be hidden"):
        opt.tensor_parallel.all_gather_matmul(x, [w], 0, strict=True)


@pytest.mark.parametrize("spectrum", ["gaussian", "decaying"])
@pytest.mark.parametrize("size", [(512, 512), (1000, 328), (256, 640), (2048, 2048)], ids=str)
@on_ranks()
def test_sharded_newton_schulz_is_as_good_as_the_owners(opt, world, size, spectrum) -> None:
    rank, (m, n) = distributed.get_rank(), size
    made = torch.Generator(here()).manual_seed(m)
    x = torch.randn(m, n, generator=made, device=here())
    if spectrum == "decaying":
        x = x / torch.arange(1, n + 1, device=here())
    sizes = [len(part) for part in torch.arange(m).tensor_split(world)]
    for method in ("auto", "polar_express"):
        owners = opt.orthogonalize(x, method).split(sizes)[rank]
        exact_method = "gram_polynomial" if method == "auto" else method
        exact = opt.orthogonalize(x.double(), exact_method).split(sizes)[rank]
        for schedule in ("rs_ag", "gram_ar"):
            found = opt.tensor_parallel.sharded_newton_schulz(
                x.split(sizes)[rank], None, schedule, method=method, rows=sizes
            )
            # Both are as far from float64 as their iterates' rounding takes them, and apart by
            # both together; of spectra that reach below that rounding no bound of it is known.
            error, owners_error = relative_error(found, exact), relative_error(owners, exact)
            assert error <= 1.25 * owners_error + 1e-3, (method, schedule, error, owners_error)
            if spectrum == "gaussian":
                assert relative_error(found, owners) <= NEWTON_SCHULZ, (method, schedule)


def _pipelined(opt: Any) -> tuple[list[int], int, str]:
    """Which products are not exact, how many there were, and what the last rank's absence gives."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    rows, inner, columns, half, device = 200, 512, 328, torch.bfloat16, here()
    product = opt.tensor_parallel.PipelinedAllGatherMatmul(
        None, rows, inner, half, device, timeout_ms=3000, blocks=24
    )

    def part(call: int, of: int) -> torch.Tensor:
        made = torch.Generator(device).manual_seed(1000 * call + of)
        return torch.randint(-3, 4, (rows, inner), generator=made, device=device).to(half)

    b = torch.randint(-3, 4, (columns, inner), device=device).to(half).T
    outs, exact = [], []
    for call in range(12):
        whole = torch.cat([part(call, of) for of in range(world)]).double()
        exact.append((whole @ b.double()).to(half))
    torch.cuda.synchronize()
    distributed.barrier()
    for call in range(12):
        outs.append(product(part(call, rank), b))
        if (call + rank) % 5 == 0:
            time.sleep(0.02)
    product.check(wait=True)
    wrong = [call for call in range(12) if not torch.equal(outs[call], exact[call])]
    distributed.barrier()
    late = "none"
    if rank < world - 1:
        product(part(12, rank), b)
        try:
            product.check(wait=True)
        except RuntimeError as error:
            late = str(error)
    distributed.barrier()
    product.close()
    return wrong, product.calls, late


def test_a_pipelined_product_is_exact_and_names_who_is_late(ranks, world) -> None:
    *came, last = ranks(world).run(_pipelined)
    wrong, calls, late = same_everywhere(came)
    assert wrong == [] and calls == 13
    assert f"rank {len(came)} of the group sent no rows within 3000 ms" in late
    assert last == ([], 12, "none")
