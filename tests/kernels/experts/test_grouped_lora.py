"""The grouped LoRA ops and their gradients, slot by slot: results, strides, tiles, launches."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from ..._compare import assert_all_same_bits, assert_error_at_most, assert_same_bits
from ...conftest import module_fixture

launch = module_fixture("kernels.experts.grouped_launch_triton")
config = module_fixture("kernels.experts.tile_tables")

EXPERTS, TOP_K, RANK = 3, 2, 3
K, N, TOKENS = 16, 24, 9
PATHS = ("reference", "triton")


def operands(submodule, device, dtype=torch.float32, seed=0) -> dict:
    """Named tensors; expert 1 has no rows, and two slots are sentinels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    ids = torch.randint(0, 2, (TOKENS, TOP_K), generator=generator) * 2
    ids[3, 1], ids[7, 0] = -1, EXPERTS
    sort = submodule("kernels.experts.expert_sort").expert_sort
    order = sort(ids.to(device), EXPERTS, tile_rows=16)
    return {
        "ids": ids,
        "x": normal(TOKENS, K),
        "dy": normal(TOKENS * TOP_K, N),
        "weight": normal(EXPERTS, N, K).transpose(1, 2),
        "lora_a": normal(EXPERTS, RANK, K, dtype=torch.float32),
        "lora_b": normal(N, RANK * EXPERTS, dtype=torch.float32)
        .view(N, RANK, EXPERTS)
        .permute(2, 0, 1),
        "bias": normal(EXPERTS, N),
        "gates": normal(TOKENS, TOP_K, dtype=torch.float32),
        "order": order,
    }


ROWS = TOKENS * TOP_K
WEIGHTS = ("weight", "lora_a", "lora_b", "bias")


def named(problem: dict, *names: str) -> tuple:
    return tuple(problem[name] for name in names)


NAMES = ("forward", "dx", "dab", "dw", "linear")


def arguments(name: str, problem: dict, path: str, gated: bool = True) -> tuple:
    """Of an op by its last word."""
    x, dy, gates = named(problem, "x", "dy", "gates")
    weight, *lora, bias = named(problem, *WEIGHTS)
    projection, order = (weight, *lora, bias, 0.5), problem["order"].operands()
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(2, ROWS, RANK, generator=generator).to(x.device, x.dtype).unbind()
    return {
        "forward": (x, *projection, *order, TOP_K, False, path),
        "dx": (dy, *projection, *order, gates, x, 1, TOP_K, False, True, path),
        "dab": (x, dy, *low, *lora, *order, gates, TOP_K, 1, True, True, path),
        "dw": (x, dy, weight, bias, *order, gates, TOP_K, 1, True, True, path),
        "linear": (x, *projection, *order, gates if gated else None, False, False, path),
    }[name]


@pytest.mark.sees_defect("a flat list of fifteen arguments, no registered op")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(submodule, ops, device, name, path):
    problem = operands(submodule, device, torch.float32 if name == "linear" else torch.bfloat16)
    for leaf in ("x", *WEIGHTS, "gates") if name == "linear" else ():
        problem[leaf] = problem[leaf].detach().requires_grad_()
    op = getattr(ops, f"grouped_lora_{name}")
    torch.library.opcheck(op.default, arguments(name, problem, path))


@pytest.mark.parametrize("path", ["compiled", "measured"])
def test_decoded_slices_of_4_bit_experts_take_triton(submodule, ops, device, path):
    """Paths of the product over packed weights; decoded ones are weights like all others."""
    problem = operands(submodule, device)
    expected = ops.grouped_lora_forward(*arguments("forward", problem, "triton"))
    assert_all_same_bits(ops.grouped_lora_forward(*arguments("forward", problem, path)), expected)


@pytest.mark.sees_defect(
    "gradients are added by atomics in the parameter's dtype: rounded often, never the same"
)
def test_no_kernel_uses_atomics(submodule):
    """Two additions in an order that differs from run to run would differ in their last bits."""
    folder = Path(submodule("kernels").__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    assert sum("@triton.jit" in source for source in sources) >= 5
    assert not any(re.search(r"\btl\.atomic", source) for source in sources)


@pytest.fixture
def calls(submodule, begun):
    module = submodule("kernels.experts.grouped_launch_triton")
    return begun(module, "low_rank", "grouped_product", "expert_products")


@pytest.mark.sees_defect("x A^T is computed again for every tile of columns")
@pytest.mark.sees_defect("dY B is computed again for every tile of columns")
@pytest.mark.sees_defect("dA and dB compute x A^T and dY B again for every block")
def test_low_rank_products_are_computed_once(submodule, device, calls):
    """x A^T once in forward, dY B once in dX; the gradients of A and B read both again."""
    y, leaves = product(submodule, device)
    assert calls == ["low_rank", "grouped_product"]
    calls.clear()
    torch.autograd.grad(y.sum(), leaves)
    assert calls == ["low_rank", "grouped_product", "expert_products"]


def product(submodule, device, change_b=lambda b: b):
    """(y, its leaves) of one differentiable product on the Triton path."""
    problem = operands(submodule, device)
    problem["lora_b"] = change_b(problem["lora_b"])
    x, a, b = leaves = [t.detach().requires_grad_() for t in named(problem, "x", *WEIGHTS[1:3])]
    order = submodule("moe").expert_sort(problem["ids"].to(device), 3)
    linear = submodule("moe").grouped_lora_linear
    return linear(x, problem["weight"], order, a, b, backend="triton"), leaves


@pytest.fixture
def launched(submodule, monkeypatch, device):
    """{launch: its tensors} of forward on the Triton path; nothing runs. And the operands."""
    module = submodule("kernels.experts.grouped_launch_triton")
    seen: dict[str, list] = {}
    for name in ("low_rank", "grouped_product"):
        monkeypatch.setattr(
            module, name, lambda *operands, name=name, **_: seen.update({name: operands})
        )
    problem = operands(submodule, device, torch.float16)
    records = submodule("kernels.experts.grouped_lora")
    lora = records.LoraFactors(problem["lora_a"], problem["lora_b"], 0.5)
    weights = records.ExpertWeights(problem["weight"], lora, problem["bias"])
    module.grouped_lora_forward_triton(problem["x"], weights, problem["order"], TOP_K, True)
    return problem, seen


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.dtype) == (other.data_ptr(), other.dtype)


@pytest.mark.sees_defect("rows are gathered by a pass of their own")
def test_operands_are_read_in_place(launched):
    """Rows are gathered by the kernel's loads: launches get x itself, T rows, and the slots.

    And float32 factors under float16, B in PEFT's strides, as they are.
    """
    problem, seen = launched
    for name in ("low_rank", "grouped_product"):
        assert same_memory(seen[name][0], problem["x"])
        assert any(one is problem["order"] for one in seen[name])
    assert not problem["lora_b"].is_contiguous() and problem["lora_b"].dtype == torch.float32
    assert same_memory(seen["low_rank"][1], problem["lora_a"])
    assert same_memory(seen["grouped_product"][1], problem["weight"])
    assert same_memory(seen["grouped_product"][3], problem["lora_b"])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_equals_the_shipped_reference(submodule, ops, device, path, gated):
    problem = operands(submodule, device)
    y, _ = ops.grouped_lora_linear(*arguments("linear", problem, path, gated))
    wide = [problem[name].double().cpu() for name in ("x", *WEIGHTS, "gates")]
    wide[5] = wide[5] if gated else None
    reference = submodule("reference.moe").grouped_lora_linear
    assert_error_at_most(y.cpu(), reference(*wide, problem["ids"], 0.5), 1e-6)


LONG = 5000  # of K: three parts of the low-rank product, the last one shorter


@pytest.fixture
def reordered(launch, watch):
    return watch(launch, "reorder", lambda _, source, target: tuple(source.shape))


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
    y, leaves = product(submodule, device)
    assert reordered == [(3, RANK, N)]
    found = torch.autograd.grad(y.sum(), leaves)
    assert reordered == [(3, RANK, N)] * 3
    assert found[2].stride() == leaves[2].stride()
    reordered.clear()
    y, leaves = product(submodule, device, torch.Tensor.contiguous)
    torch.autograd.grad(y.sum(), leaves)
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


@pytest.mark.sees_defect("the plan is chosen by mutable globals, which the tests overwrite")
@pytest.mark.sees_defect("pruning leaves one tile of 32 x 32, or none")
@pytest.mark.sees_defect("shared memory is asked of a driver: no tile without a GPU")
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "sm75"])
@pytest.mark.parametrize("direction", ["forward", "dx", "dots", "low_rank", "product"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_shape_has_a_tile_that_fits(config, arch, direction, element_bytes):
    """The predecessor's pruning left one tile of 32 x 32 or none; a tile is a pure function."""
    for rows in (16, 32, 64, 128, 256):
        for rank in (1, 16, 40, 256):
            for columns in (16, 768, 4096):
                shape = config.Shape(arch, rows, 2048, columns, element_bytes, direction, rank)
                tile = config.choose(shape)
                assert config.fits(tile, shape), (shape, tile)
                assert tile == config.choose(shape)
                assert min(tile.rows, tile.columns, tile.depth) >= 16 and tile.stages >= 1
                if direction in ("forward", "dx", "dots"):
                    assert tile.rows == rows


@pytest.mark.parametrize("direction", ["forward", "dx", "dots"])
def test_tiles_that_were_the_fastest(config, direction):
    """128 x 256 where experts fill 128 rows and few columns are padding; the cases timed."""

    def choose(columns: int, arch: str = "sm90", rows: int = 128):
        return config.choose(config.Shape(arch, rows, 2048, columns, 2, direction, 16))

    for columns in (512, 768, 1024, 1536, 2048, 4096, 14336, 28672):
        assert choose(columns) == config.Tile(128, 256, 64, 8, 4), columns
    for columns in (64, 384, 640, 2880):
        assert choose(columns) == config.Tile(128, 128, 64, 4, 3), columns
    assert choose(2048, rows=64) == config.Tile(64, 128, 64, 4, 4)
    assert choose(2048, arch="sm80").columns == 64


def test_low_rank_sums_fit_with_factors_in_float32(config):
    """Float32 LoRA over bfloat16 rows: the factor's tiles take twice the bytes of the rows'."""
    shape = config.Shape("sm86", 32, 2048, 64, 2, "low_rank", 64)
    tile = config.choose(shape)
    taken = tile.stages * tile.depth * (tile.rows * 2 + tile.columns * 4)
    assert taken <= config.SMALLEST_SHARED_MEMORY


@pytest.mark.sees_defect("tuned anew for each number of tokens, without the rank in the key")
def test_what_a_tile_depends_on(config):
    """No number of tokens, no routing: the rows of a tile stand for the mean rows per expert."""
    names = {field.name for field in dataclasses.fields(config.Shape)}
    assert names == {"arch", "rows", "depth", "columns", "element_bytes", "direction", "rank"}
    low = [config.choose(config.Shape("sm90", 64, 2048, 16, 2, "low_rank", r)) for r in (16, 64)]
    assert low[0] != low[1]
