"""Products that communicate against float64: every rank makes the tensors of all from one seed."""

import itertools
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

SCALINGS = ("tensorwise", "rowwise_sharded", "rowwise_replicated")
# Relative error of a float8_e4m3fn product of Gaussian operands: each rounds by 2^-4 at most, by
# 2.6 % in the mean.
FLOAT8_BUDGET = 0.06
FUSED, PLAIN = "fused", "plain"


@dataclass(frozen=True)
class Sizes:
    """Of the cases on a device: tests on a CPU are small, fused ones as narrow as torch lets them.

    Args:
        leading: of the tensor that is gathered, or multiplied and scattered.
        wide: its columns where the last dimension is gathered or its product scattered.
        narrow: all other columns.
    """

    leading: tuple[int, ...]
    wide: int
    narrow: int


CPU = (Sizes((8,), 32, 16), Sizes((4, 8), 32, 16))
GPU = (Sizes((64,), 4096, 64), Sizes((8, 16), 4096, 64))


@dataclass(frozen=True)
class Case:
    """One product.

    Args:
        op: "gather" or "scatter".
        dim: the dimension.
        scaling: as for the functions; None in `dtype`.
        reduce_op: of a scatter.
        given: operands and scales are given in float8, to the functions without a backward.
    """

    op: str
    sizes: Sizes
    dim: int
    scaling: str | None = None
    reduce_op: str = "sum"
    given: bool = False

    @property
    def last(self) -> bool:
        return self.dim == len(self.sizes.leading)

    @property
    def name(self) -> str:
        kind = "given" if self.given else "made"
        rank = len(self.sizes.leading) + 1
        return f"{self.op}-{rank}d-dim{self.dim}-{self.scaling}-{self.reduce_op}-{kind}"

    def expected(self, path: str) -> dict[str, int]:
        """Which operations run on which path, forward and backward, where `path` is what can be."""
        scaled = self.scaling is not None
        gather = "all_gather_scaled_matmul" if scaled else "all_gather_matmul"
        scatter = "scaled_matmul_reduce_scatter" if scaled else "matmul_reduce_scatter"
        calls = {f"{gather}/{path}": 1, f"{scatter}/{path}": 1}
        if self.given:
            calls = {key: n for key, n in calls.items() if self.op in key.replace("_", "-")}
        return calls


def cases(sizes: tuple[Sizes, ...]) -> list[Case]:
    """Every operation, dimension and kind of scales."""
    found = []
    for size, op in itertools.product(sizes, ("gather", "scatter")):
        for dim in range(len(size.leading) + 1):
            for scaling in (None, *SCALINGS):
                reductions = ("sum", "avg") if op == "scatter" and scaling is None else ("sum",)
                found += [Case(op, size, dim, scaling, reduction) for reduction in reductions]
            last = dim == len(size.leading)
            for scaling in SCALINGS:
                if not (last and op == "gather" and scaling == "rowwise_sharded"):
                    found.append(Case(op, size, dim, scaling, given=True))
    return found


def wrong_products(
    opt: Any, sizes: tuple[Sizes, ...], device: torch.device, dtype: torch.dtype, fuse: str
) -> list[str]:
    """What is wrong with each case: an error above its budget, another path, or a traceback."""
    path = FUSED if fuse == "always" else PLAIN
    return [text for case in cases(sizes) for text in _wrong(opt, case, device, dtype, fuse, path)]


def _wrong(opt: Any, case: Case, device, dtype: torch.dtype, fuse: str, path: str) -> list[str]:
    tp = opt.tensor_parallel
    tp.reset_comm_report()
    check = _check_gather if case.op == "gather" else _check_scatter
    try:
        errors = check(tp, case, device, dtype, fuse)
    except Exception:
        return [f"{case.name}: {traceback.format_exc()}"]
    wrong = [
        f"{case.name}: {name} is off by {error:.2e}, allowed are {budget:.2e}"
        for name, (error, budget) in errors.items()
        if not error <= budget
    ]
    calls: dict[str, int] = {}
    for record in tp.comm_report():
        key = f"{record.op}/{record.path}"
        calls[key] = calls.get(key, 0) + record.calls
    if calls != case.expected(path):
        wrong.append(f"{case.name}: ran {calls}, expected {case.expected(path)}")
    return wrong


def _check_gather(tp, case: Case, device, dtype, fuse: str) -> dict:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    inner = case.sizes.wide if case.last else case.sizes.narrow
    made = torch.Generator().manual_seed(case.dim)
    a = torch.randn(*case.sizes.leading, inner, generator=made, dtype=torch.float64)
    b = torch.randn(inner, case.sizes.narrow, generator=made, dtype=torch.float64)
    shard = _part(a, case.dim, rank, world).to(device, dtype)
    if case.given:
        return _gather_given(tp, case, a, b, shard, device, fuse)
    shard.requires_grad_()
    weight = b.to(device, dtype).requires_grad_()
    (y,) = tp.all_gather_matmul(shard, [weight], case.dim, scaling=case.scaling, fuse=fuse)
    grad = torch.randn(y.shape, generator=made, dtype=torch.float64)
    y.backward(grad.to(device, dtype))
    # As they were given, in the dtype of the case; every rank adds the same gradient of its shard.
    a, b, grad = (x.to(dtype).double() for x in (a, b, grad))
    da = _part(world * grad @ b.mT, case.dim, rank, world)
    rows, grads = a.reshape(-1, inner), grad.reshape(-1, b.shape[1])
    return {
        "y": _against(case, dtype, y, a @ b),
        "da": _against(case, dtype, shard.grad, da),
        "db": _against(case, dtype, weight.grad, rows.mT @ grads),
    }


def _check_scatter(tp, case: Case, device, dtype, fuse: str) -> dict:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    columns = case.sizes.wide if case.last else case.sizes.narrow
    made = torch.Generator().manual_seed(case.dim)
    size = (world, *case.sizes.leading, case.sizes.narrow)
    a_all = torch.randn(size, generator=made, dtype=torch.float64).to(dtype)
    b_all = torch.randn(world, size[-1], columns, generator=made, dtype=torch.float64).to(dtype)
    shared = 1 / world if case.reduce_op == "avg" else 1.0
    if case.given:
        return _scatter_given(tp, case, a_all, b_all, device, fuse)
    a = a_all[rank].to(device).requires_grad_()
    b = b_all[rank].to(device).requires_grad_()
    options = {"scaling": case.scaling, "fuse": fuse}
    y = tp.matmul_reduce_scatter(a, b, case.reduce_op, case.dim, **options)
    a_all, b_all = a_all.double(), b_all.double()
    total = shared * sum(one @ other for one, other in zip(a_all, b_all, strict=True))
    grad = torch.randn(total.shape, generator=made, dtype=torch.float64).to(dtype)
    y.backward(_part(grad, case.dim, rank, world).to(device))
    grad = shared * grad.double()
    rows, grads = a_all[rank].reshape(-1, size[-1]), grad.reshape(-1, columns)
    return {
        "y": _against(case, dtype, y, _part(total, case.dim, rank, world)),
        "da": _against(case, dtype, a.grad, grad @ b_all[rank].mT),
        "db": _against(case, dtype, b.grad, rows.mT @ grads),
    }


def _gather_given(tp, case: Case, a: Tensor, b: Tensor, shard: Tensor, device, fuse: str) -> dict:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    a8, a_scale = _quantized(a, case.scaling, dim=-1)
    b8, b_scale = _quantized(b, case.scaling, dim=0)
    expected = (a8.double() * a_scale) @ (b8.double() * b_scale)
    scale = a_scale
    if case.scaling == "rowwise_sharded":
        scale = _part(a_scale, case.dim, rank, world)
    (y,) = tp.all_gather_scaled_matmul(
        _part(a8, case.dim, rank, world).to(device),
        [b8.t().contiguous().t().to(device)],
        scale.contiguous().to(device),
        [b_scale.to(device)],
        case.dim,
        scale_mode=case.scaling,
        fuse=fuse,
    )
    return {"y": _against(case, torch.bfloat16, y, expected)}


def _scatter_given(tp, case: Case, a_all: Tensor, b_all: Tensor, device, fuse: str) -> dict:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    left = [_quantized(one, case.scaling, dim=-1) for one in a_all.double()]
    right = [_quantized(one, case.scaling, dim=0) for one in b_all.double()]
    pairs = zip(left, right, strict=True)
    total = sum((a.double() * s) @ (b.double() * t) for (a, s), (b, t) in pairs)
    (a8, a_scale), (b8, b_scale) = left[rank], right[rank]
    y = tp.scaled_matmul_reduce_scatter(
        a8.to(device),
        b8.t().contiguous().t().to(device),
        a_scale.to(device),
        b_scale.to(device),
        case.reduce_op,
        case.dim,
        fuse=fuse,
    )
    return {"y": _against(case, torch.bfloat16, y, _part(total, case.dim, rank, world))}


def _quantized(x: Tensor, scaling: str | None, dim: int) -> tuple[Tensor, Tensor]:
    """x (float64) in float8, and its scales in float32: one, or those along `dim`."""
    amax = x.abs().amax() if scaling == "tensorwise" else x.abs().amax(dim, keepdim=True)
    scale = (amax / 448).float()
    return (x / scale).float().to(torch.float8_e4m3fn), scale


def _part(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    return x.chunk(world, dim)[rank].contiguous()


def _against(case: Case, dtype: torch.dtype, found: Tensor, expected: Tensor) -> tuple:
    """The relative error, and what is allowed: of float8, or a few roundings of `dtype`."""
    assert found.shape == expected.shape, f"{tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = (found.detach().cpu().double() - expected).norm() / expected.norm()
    if case.scaling is not None and not case.given:
        return error.item(), FLOAT8_BUDGET
    # Partial results are rounded once on each rank and their sum once; columns that are gathered
    # are added in the dtype of the result, rank after rank.
    return error.item(), 3 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
