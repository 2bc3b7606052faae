"""grouped_lora_forward as an op: its two results slot by slot, opcheck, and its tile choices."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from .._compare import assert_error_at_most
from ._grouped import PATHS, RANK, TOKENS, TOP_K, K, N, doubles, operands, valid_slots

NAMES = ("x", "weight", "lora_a", "lora_b", "bias")


def arguments(problem: dict, path: str, grouped_out: bool = False) -> tuple:
    operands = (*(problem[name] for name in NAMES), 0.5, *problem["order"].operands())
    return (*operands, TOP_K, grouped_out, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grouped_out", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_results(submodule, ops, device, path, grouped_out):
    """y and the scaled xa of every slot; zero where an id names no expert."""
    problem = operands(submodule, device)
    y, xa = ops.grouped_lora_forward(*arguments(problem, path, grouped_out))
    wide = doubles(problem)
    expected = torch.zeros(TOKENS * TOP_K, N, dtype=torch.float64)
    low = torch.zeros(TOKENS * TOP_K, RANK, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        x = wide["x"][token]
        low[slot] = 0.5 * wide["lora_a"][e] @ x
        expected[slot] = x @ wide["weight"][e] + wide["lora_b"][e] @ low[slot] + wide["bias"][e]
    slots = problem["slots"].cpu()
    assert_error_at_most(y.cpu(), expected[slots] if grouped_out else expected, 1e-6)
    assert_error_at_most(xa.cpu(), low[slots], 1e-6)
    invalid = torch.ones(TOKENS * TOP_K, dtype=torch.bool)
    invalid[[slot for slot, _, _ in valid_slots(problem)]] = False
    assert (y.cpu()[invalid[slots] if grouped_out else invalid] == 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_forward.default, arguments(problem, path))


@pytest.mark.parametrize("path", ["compiled", "measured"])
def test_decoded_slices_of_4_bit_experts_take_triton(submodule, ops, device, path):
    """Paths of the product over packed weights; decoded ones are weights like all others."""
    problem = operands(submodule, device)
    expected = ops.grouped_lora_forward(*arguments(problem, "triton"))
    for one, other in zip(
        ops.grouped_lora_forward(*arguments(problem, path)), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.fixture(scope="session")
def config(submodule):
    """The module kernels.experts.tiles of the loaded package."""
    return submodule("kernels.experts.tiles")


@pytest.mark.sees_defect("the plan is chosen by mutable globals, which the tests overwrite")
@pytest.mark.sees_defect("pruning leaves one tile of 32 x 32, or none")
@pytest.mark.sees_defect("shared memory is asked of a driver: no tile without a GPU")
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "hip"])
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


def test_rows_of_64_and_more_use_wide_tiles(config):
    """At 64 rows per expert and above the product runs on tiles that a wgmma takes."""
    for rows in (64, 128):
        tile = config.choose(config.Shape("sm90", rows, 2048, 1536, 2, "forward", 16))
        assert tile.rows >= 64 and tile.columns >= 128


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


@pytest.mark.parametrize(
    ("rank", "block"), [(1, 16), (12, 16), (17, 32), (48, 64), (64, 64), (128, 64)]
)
def test_rank_is_padded_to_a_block(config, rank, block):
    assert config.block_rank(rank) == block


def test_unknown_direction(config):
    with pytest.raises(ValueError, match="direction must be one of"):
        config.choose(config.Shape("sm90", 64, K, N, 2, "backward"))


@pytest.mark.sees_defect("tuned anew for each number of tokens, without the rank in the key")
def test_what_a_tile_depends_on(config):
    """No number of tokens, no routing: the rows of a tile stand for the mean rows per expert."""
    names = {field.name for field in dataclasses.fields(config.Shape)}
    assert names == {"arch", "rows", "depth", "columns", "element_bytes", "direction", "rank"}
    low = [config.choose(config.Shape("sm90", 64, 2048, 16, 2, "low_rank", r)) for r in (16, 64)]
    assert low[0] != low[1]


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
def calls(submodule, monkeypatch):
    """Names of the launches on the Triton path, in order."""
    made: list[str] = []
    module = submodule("kernels.experts.grouped_launch_triton")

    def watch(name: str) -> None:
        real = getattr(module, name)

        def launch(*arguments, **options):
            made.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, launch)

    for name in ("low_rank", "grouped_product", "expert_products"):
        watch(name)
    return made


@pytest.mark.sees_defect("x A^T is computed again for every tile of columns")
@pytest.mark.sees_defect("dY B is computed again for every tile of columns")
@pytest.mark.sees_defect("dA and dB compute x A^T and dY B again for every block")
def test_low_rank_products_are_computed_once(submodule, moe_problem, calls):
    """x A^T once in forward, dY B once in dX; the gradients of A and B read both again."""
    y, leaves = moe_problem
    assert calls == ["low_rank", "grouped_product"]
    calls.clear()
    torch.autograd.grad(y.sum(), leaves)
    assert calls == ["low_rank", "grouped_product", "expert_products"]


@pytest.fixture
def moe_problem(submodule, device, calls):
    """(y, its leaves) of one differentiable product on the Triton path."""
    problem = operands(submodule, device)
    leaves = [problem[name].detach().requires_grad_() for name in ("x", "lora_a", "lora_b")]
    order = submodule("moe").expert_sort(problem["ids"].to(device), 3)
    x, a, b = leaves
    linear = submodule("moe").grouped_lora_linear
    y = linear(x, problem["weight"], order, a, b, backend="triton")
    return y, leaves


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
def test_no_gathered_copy(launched):
    """Rows are gathered by the kernel's loads: it gets x itself, T rows, and the slots."""
    problem, seen = launched
    for name in ("low_rank", "grouped_product"):
        assert same_memory(seen[name][0], problem["x"])
        assert any(one is problem["order"] for one in seen[name])


def test_factors_are_read_in_place(launched):
    """Float32 factors under float16, B in PEFT's strides: launches get them as they are."""
    problem, seen = launched
    assert not problem["lora_b"].is_contiguous() and problem["lora_b"].dtype == torch.float32
    assert same_memory(seen["low_rank"][1], problem["lora_a"])
    assert same_memory(seen["grouped_product"][1], problem["weight"])
    assert same_memory(seen["grouped_product"][3], problem["lora_b"])
