"""Launches of the grouped kernels: factors whose experts are fastest, long sums."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits
from ._grouped import RANK, TOP_K, N, operands

LONG = 5000  # of K: three parts of the low-rank product, the last one shorter


@pytest.fixture(scope="session")
def launch(submodule):
    """The module kernels.experts.grouped_launch_triton of the loaded package."""
    return submodule("kernels.experts.grouped_launch_triton")


@pytest.fixture
def reordered(launch, monkeypatch):
    """Shapes of the factors that are reordered, in order."""
    shapes: list[tuple[int, ...]] = []
    real = launch.reorder

    def watch(source, target):
        shapes.append(tuple(source.shape))
        return real(source, target)

    monkeypatch.setattr(launch, "reorder", watch)
    return shapes


STRIDES = {  # (E, r, N) from memory
    "contiguous": lambda t: t.contiguous(),
    "PEFT's B": lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "rank inside the experts": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "gaps": lambda t: torch.stack((t, t), -1)[..., 1],
}


@pytest.mark.parametrize("shape", [(3, 3, 24), (5, 1, 70), (1, 4, 130), (40, 7, 1)], ids=str)
@pytest.mark.parametrize("source", STRIDES)
@pytest.mark.parametrize("target", STRIDES)
def test_reorder_between_any_strides(launch, device, shape, source, target):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    given, out = STRIDES[source](values), STRIDES[target](torch.zeros_like(values))
    assert launch.reorder(given, out) is out
    assert_same_bits(out.contiguous(), values.contiguous())


def test_reorder_converts(launch, device):
    """Float32 factors over narrow activations: rounded once, to the nearest."""
    values = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0)).to(device)
    found = launch.packed(STRIDES["PEFT's B"](values), torch.float16)
    assert found.is_contiguous()
    assert_same_bits(found, values.half())


def test_what_is_read_in_place(launch, device):
    """A copy is made only where neither the rank nor N is fastest."""
    values = torch.randn(3, 4, 24, device=device)
    for name, place in STRIDES.items():
        factor = place(values)
        kept = launch.packed(factor, torch.float32).data_ptr() == factor.data_ptr()
        assert kept == (name in ("contiguous", "rank inside the experts")), name
    stored = torch.randn(3, 24, 4, device=device).transpose(1, 2)  # (E, N, r)
    assert launch.packed(stored, torch.float32) is stored
    row = torch.randn(3, 24, device=device)[:, None]  # a bias as a factor of rank 1
    assert launch.packed(row, torch.float32) is row
    assert launch.is_scattered(torch.empty(24, 3, device=device).T[:, None])  # PEFT's B of rank 1


def test_peft_factors_are_reordered_once_per_op(submodule, device, reordered):
    """B once in forward and once in dX, its gradient once; A, whose K is fastest, never."""
    problem = operands(submodule, device)
    leaves = [problem[name].detach().requires_grad_() for name in ("x", "lora_a", "lora_b")]
    order = submodule("moe").expert_sort(problem["ids"].to(device), 3)
    linear = submodule("moe").grouped_lora_linear
    x, a, b = leaves
    y = linear(x, problem["weight"], order, a, b, backend="triton")
    assert reordered == [(3, RANK, N)]
    found = torch.autograd.grad(y.sum(), leaves)
    assert reordered == [(3, RANK, N)] * 3
    assert found[2].stride() == b.stride()
    reordered.clear()
    y = linear(x, problem["weight"], order, a, b.detach().contiguous(), backend="triton")
    torch.autograd.grad(y.sum(), leaves[:2])
    assert reordered == []


def long_product(submodule, launch, device, tokens: int, dtype=torch.float32):
    """(xa, its operands) of a sum over LONG, for the first tokens of one routing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, LONG, generator=generator).to(device, dtype)[:tokens]
    factor = torch.randn(3, RANK, LONG, generator=generator).to(device)
    ids = torch.randint(0, 3, (20, TOP_K), generator=generator)[:tokens]
    sort = submodule("kernels.experts.expert_sort").expert_sort
    order = sort(ids.to(device), 3, tile_rows=16)
    out = torch.full((tokens * TOP_K, RANK), torch.nan, device=device, dtype=dtype)
    launch.low_rank(x, factor, order, out, scaling=0.5, fan=TOP_K, scatter=True)
    return out, x, factor, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_long_sum_in_parts(submodule, launch, device, dtype):
    """K = 5000 is cut in two; a part that is lost or counted twice changes half of the result."""
    out, x, factor, ids = long_product(submodule, launch, device, 20, dtype)
    assert launch.config.span(LONG, launch.config.Tile(16, 16, 64, 4, 3)) < LONG
    token = torch.arange(20).repeat_interleave(TOP_K)
    chosen = factor.double().cpu()[ids.reshape(-1)]
    expected = 0.5 * torch.einsum("rk,rik->ri", x.double().cpu()[token], chosen)
    assert_error_at_most(out.double().cpu(), expected, 1e-6 if dtype == torch.float32 else 5e-4)


def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(submodule, launch, device):
    few, *_ = long_product(submodule, launch, device, 3)
    many, *_ = long_product(submodule, launch, device, 20)
    assert_same_bits(few, many[: 3 * TOP_K])


def test_where_a_sum_is_cut(launch):
    """Parts are whole steps, cover K once, and depend on K and the tile alone."""
    for depth in (16, 64, 128):
        tile = launch.config.Tile(16, 16, depth, 4, 3)
        for k in (1, 100, 2048, 4095, 4096, 5000, 14336, 28672):
            span = launch.config.span(k, tile)
            parts = -(-k // span)
            assert span % depth == 0 and (parts - 1) * span < k <= parts * span
            assert parts <= max(k // launch.config.SPAN, 1)
