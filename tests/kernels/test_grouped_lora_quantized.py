"""grouped_lora_quantized_forward and _dx: products with decoded weights, decoded on the way."""

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, relative_error

EXPERTS, TOP_K = 4, 2


@dataclasses.dataclass(frozen=True)
class Stack:
    """Sizes and format of a stack (E, N, K), and how it is multiplied."""

    n: int = 96
    k: int = 128
    blocksize: int = 64
    transposed: bool = True  # seen as (E, K, N)
    nested: bool = False
    quant_type: str = "nf4"
    block: tuple[int, int] = (128, 128)  # of FP8
    rank: int | None = 3
    tokens: int = 23
    bias: bool = True

    def __str__(self) -> str:
        flags = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is True]
        return "-".join([f"{self.n}x{self.k}b{self.options()}", *flags, self.quant_type])

    def options(self) -> dict:
        """What `QuantizedExperts` takes beside the shape."""
        if self.quant_type == "mxfp4":
            return {}
        if self.quant_type == "fp8":
            return {"block_rows": self.block[0], "block_columns": self.block[1]}
        return {"blocksize": self.blocksize, "nested": self.nested}


STACKS = (
    Stack(),
    Stack(n=70, k=192, blocksize=64, nested=True),  # N ends inside a tile, K in the middle of one
    Stack(transposed=False, bias=False),
    Stack(n=40, k=64, blocksize=32, quant_type="fp4", rank=None),
    Stack(n=33, k=256, blocksize=256, rank=20, tokens=50),
    # Sides end inside of blocks and tiles, and a step of the sum holds several scales.
    Stack(n=70, k=96, quant_type="mxfp4"),
    Stack(n=33, k=160, quant_type="mxfp4", transposed=False, bias=False, rank=1),
    Stack(n=64, k=64, quant_type="mxfp4", rank=128, tokens=2),
    Stack(n=150, k=200, quant_type="fp8"),
    Stack(n=150, k=89, quant_type="fp8", block=(32, 32), transposed=False, rank=128, tokens=7),
    Stack(n=40, k=57, quant_type="fp8", block=(1, 0), bias=False, rank=1),
    Stack(n=33, k=16, quant_type="fp8", block=(0, 0), transposed=False, rank=None),
)


BUDGETS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
# Every stack in float32, two of them in the narrow dtypes: the interpreter is slow.
CASES = (
    *((stack, torch.float32) for stack in STACKS),
    *((STACKS[n], dtype) for n in (1, 5, 8) for dtype in (torch.float16, torch.bfloat16)),
    (STACKS[2], torch.bfloat16),
)
# In slices of experts each writes its rows: three experts, then one, and the sentinels are zero
# once; or the active experts in one, where the second one is missing.
BY_PATH = [(path, *case) for path in ("triton", "reference") for case in CASES]
BY_PATH += [(path, STACKS[n], torch.float32) for path in ("slices", "active") for n in (0, 2)]


def budget(path: str, device: torch.device, dtype: torch.dtype) -> float:
    """Roundings of the result and of xa; the interpreter truncates where it makes bfloat16."""
    truncates = path == "triton" and device.type == "cpu" and dtype == torch.bfloat16
    return BUDGETS[dtype] * (2 if truncates else 1)


def draw(submodule, stack: Stack, device, dtype) -> dict:
    """Operands by name; expert 1 has no rows, some slots are sentinels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, kind=dtype, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator)).to(device, kind)

    module = submodule("moe.quantized.quantized_experts").QuantizedExperts.from_weight(
        normal(EXPERTS, stack.n, stack.k, kind=torch.float32, std=stack.k**-0.5),
        quant_type=stack.quant_type,
        **stack.options(),
    )
    record = module.transpose(1, 2) if stack.transposed else module.quantized_weight()
    _, inner, outer = record.shape
    ids = torch.tensor([0, 2, 3, 2, -1, EXPERTS])[
        torch.randint(0, 6, (stack.tokens, TOP_K), generator=generator)
    ].to(device)
    lora = (None, None)
    if stack.rank is not None:
        small = {"kind": torch.float32, "std": 0.3}
        lora = (
            normal(EXPERTS, stack.rank, inner, **small),
            normal(outer, stack.rank, EXPERTS, **small).permute(2, 0, 1),
        )
    order = submodule("moe").expert_sort(ids, EXPERTS)
    return {
        "weight": record,
        "dense": record.decode(dtype=dtype),
        "order": order,
        "x": normal(stack.tokens, inner),
        "dy": normal(stack.tokens, outer),
        "gates": normal(stack.tokens, TOP_K, kind=torch.float32),
        "lora": lora,
        "bias": normal(EXPERTS, outer) if stack.bias else None,
    }


def weights_of(submodule, problem: dict, scaling: float):
    """The projection as ops take it."""
    kind = submodule("kernels.experts.grouped_lora").ExpertWeights
    return kind.of(problem["weight"], *problem["lora"], problem["bias"], scaling)


def way(module, path: str) -> dict:
    """Options of the op: "slices" of three experts and the "active" ones are Triton's too."""
    slices = {"slices": 3, "active": module.ACTIVE}.get(path, 0)
    return {"slice_experts": slices, "path": path if path == "reference" else "triton"}


def valid(order) -> torch.Tensor:
    """Rows in expert order that are no sentinels."""
    return torch.arange(order.slots.shape[0], device=order.slots.device) < order.offsets[-1]


def forward(submodule, problem, path, *, grouped=False, fan=TOP_K, x=None):
    module = submodule("kernels.quant.grouped_lora_quantized")
    x, weights = problem["x"] if x is None else x, weights_of(submodule, problem, 2.0)
    options = {"fan": fan, "grouped_out": grouped} | way(module, path)
    return module.grouped_lora_quantized_forward(x, weights, problem["order"], **options)


def exact(submodule, problem, *, grouped=False):
    """float64, with the weights that decoding gives in the activations' dtype."""
    lora_a, lora_b = (None if t is None else t.double() for t in problem["lora"])
    bias = problem["bias"]
    order = problem["order"]
    bias = None if bias is None else bias.double()
    operands = (problem["x"].double(), problem["dense"].double(), lora_a, lora_b, bias)
    reference = submodule("reference.moe").grouped_lora_forward
    return reference(*operands, order.slots, order.offsets, 2.0, TOP_K, grouped)


@pytest.mark.parametrize(("path", "stack", "dtype"), BY_PATH, ids=str)
def test_product_with_the_decoded_weights(submodule, device, path, stack, dtype):
    problem = draw(submodule, stack, device, dtype)
    for grouped in (False, True) if dtype == torch.float32 else (True,):
        y, xa = forward(submodule, problem, path, grouped=grouped)
        expected, low = exact(submodule, problem, grouped=grouped)
        assert y.dtype == dtype and y.isfinite().all()
        assert relative_error(y, expected) <= budget(path, device, dtype)
        assert stack.rank is None or relative_error(xa, low) <= budget(path, device, dtype)


@pytest.mark.parametrize("rows", (16, 64))
@pytest.mark.parametrize("stack", (STACKS[0], STACKS[2]), ids=str)
def test_tiles_of_other_sizes_than_the_order_s(submodule, device, monkeypatch, stack, rows):
    """Two programs share a tile of 32 rows, or one takes two: an expert has up to 50 rows."""
    problem = draw(submodule, stack, device, torch.float32)
    ids = torch.tensor([[2, 0]] * 45 + [[2, 4]] * 5, device=device)
    problem["order"] = submodule("moe").expert_sort(ids, 4, tile_rows=32)
    generator = torch.Generator().manual_seed(3)
    inner = problem["x"].shape[1]
    problem["x"] = torch.randn(50, inner, generator=generator).to(device)
    launch = submodule("kernels.quant.packed_product_triton")
    monkeypatch.setattr(launch, "choose_tile", lambda *_: launch.Tile(rows, 64, 32, 4, 1))
    y, _ = forward(submodule, problem, "triton")
    expected, _ = exact(submodule, problem)
    assert relative_error(y, expected) <= budget("triton", device, torch.float32)


@pytest.mark.parametrize("sizes", ((32, 64, 128), (16, 128, 128), (16, 64, 256)), ids=str)
def test_steps_over_several_blocks(submodule, device, monkeypatch, sizes):
    """A step of 128 or 256 holds several absmax per row, and the last one ends behind the row."""
    problem = draw(submodule, Stack(n=40, k=320, nested=True), device, torch.float32)
    launch = submodule("kernels.quant.packed_product_triton")
    monkeypatch.setattr(launch, "choose_tile", lambda *_: launch.Tile(*sizes, 4, 1))
    y, _ = forward(submodule, problem, "triton")
    expected, _ = exact(submodule, problem)
    assert relative_error(y, expected) <= budget("triton", device, torch.float32)


def test_few_rows_take_the_tile_that_was_timed_and_others_keep_theirs(submodule):
    """(columns, depth, warps, stages, registers) by mean rows per expert and depth of the sum."""
    choose = submodule("kernels.quant.packed_product_triton").choose_tile
    before, short = (64, 128, 4, 4, None), (128, 64, 4, 4, None)
    for mean, depth, expected in (
        (0.5, 2048, before),  # Qwen3.5-35B-A3B, 16 tokens
        (1, 2048, (128, 128, 4, 3, None)),  # Qwen3-30B-A3B
        (1, 768, short),
        (2, 2048, (64, 128, 4, 4, 128)),  # OLMoE-1B-7B
        (2, 1024, (64, 128, 4, 4, 128)),
        (4, 4096, (64, 256, 4, 3, None)),  # Mixtral-8x7B
        (4, 14336, (64, 256, 4, 3, None)),
        (4, 2048, before),  # Qwen3.5-35B-A3B, 128 tokens
        (4, 512, short),
        (8, 4096, before),
    ):
        tile = choose(mean, True, depth, False, 2)
        assert tile.rows == 16
        found = (tile.columns, tile.depth, tile.warps, tile.stages, tile.registers)
        assert found == expected, (mean, depth)
        across = choose(mean, False, depth, False, 2)
        assert (across.rows, across.columns, across.depth) == (16, 128, 64)


@pytest.mark.parametrize("path", ("triton", "reference"))
def test_rows_in_expert_order_and_strided(submodule, device, path):
    problem = draw(submodule, Stack(), device, torch.float32)
    order = problem["order"]
    x = problem["x"][order.slots // TOP_K]
    wide = torch.stack((x, torch.zeros_like(x)), -1).flatten(1)[:, ::2]
    assert not wide.is_contiguous()
    expected, _ = forward(submodule, problem, path)
    actual, _ = forward(submodule, problem, path, fan=0, x=wide)
    assert relative_error(actual, expected) <= 1e-6


def test_a_weight_is_used_as_it_decodes(submodule, device):
    """The rows of a unit matrix read the decoded weights back, to the bit."""
    stack = Stack(rank=None, bias=False, tokens=128, nested=True)
    problem = draw(submodule, stack, device, torch.float16)
    ids = torch.full((128, 1), 2, device=device)
    problem["order"] = submodule("moe").expert_sort(ids, 4)
    eye = torch.eye(128, dtype=torch.float16, device=device)
    y, _ = forward(submodule, problem, "triton", fan=1, x=eye)
    assert_same_bits(y + 0.0, problem["dense"][2] + 0.0)


def test_empty_batch(submodule, device):
    problem = draw(submodule, Stack(tokens=0), device, torch.float32)
    for path in ("triton", "reference"):
        y, xa = forward(submodule, problem, path)
        assert y.shape == (0, 96) and xa.shape == (0, 3)


def test_opcheck(submodule, ops, device):
    problem = draw(submodule, Stack(), device, torch.float32)
    module = submodule("kernels.quant.grouped_lora_quantized")
    weights = module.quantized_operands(weights_of(submodule, problem, 1.0))
    order = problem["order"].operands()
    arguments = (problem["x"], *weights, *order, TOP_K, False, 0, "reference")
    torch.library.opcheck(ops.grouped_lora_quantized_forward.default, arguments)
    rows = (*order, problem["gates"], problem["x"])
    arguments = (problem["dy"], *weights, *rows, TOP_K, TOP_K, True, True, 0, "reference")
    torch.library.opcheck(ops.grouped_lora_quantized_dx.default, arguments)


@pytest.mark.parametrize("count", (1, 2, 3, 4, 7, 8))
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_belongs_to_one_slice(submodule, device, count, seed):
    """With its expert counted from the slice's first; sentinels follow the last one's experts."""
    experts = 7
    module = submodule("kernels.quant.sliced_product_triton")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts + 1, (90, 2), generator=generator)
    ids[ids == seed] = 3  # an expert without rows
    tiles = submodule("moe").expert_sort(ids.to(device), experts, tile_rows=16).tiles
    parts = module.tiles_of_slices(tiles, experts, count)
    assert parts.shape == (-(-experts // count), *tiles.shape)
    found = []
    for number, part in enumerate(parts.tolist()):
        used = [tile for tile in part if tile[0] >= 0]
        size = min(count, experts - number * count)
        last = number == parts.shape[0] - 1
        assert all(expert < size or (last and expert == size) for expert, *_ in used)
        found += [[expert + number * count, *rows] for expert, *rows in used]
    assert found == [tile for tile in tiles.tolist() if tile[0] >= 0]


def backward(submodule, problem, path, *, wants_dx=True, wants_gates=True):
    """dx in expert order, yb and dgates, of gated and combined rows."""
    module = submodule("kernels.quant.grouped_lora_quantized")
    weights, x = weights_of(submodule, problem, 2.0), problem["x"] if wants_gates else None
    operands = (problem["dy"], weights, problem["order"], problem["gates"], x)
    options = {"dy_fan": TOP_K, "x_fan": TOP_K, "grouped_out": True, "wants_dx": wants_dx}
    return module.grouped_lora_quantized_dx(*operands, **options, **way(module, path))


def exact_backward(submodule, problem):
    lora_a, lora_b = (None if t is None else t.double() for t in problem["lora"])
    bias, order = problem["bias"], problem["order"]
    bias = None if bias is None else bias.double()
    operands = (problem["dy"].double(), problem["dense"].double(), lora_a, lora_b, bias)
    operands += (problem["gates"].double(), problem["x"].double(), order.slots, order.offsets)
    return submodule("reference.moe").grouped_lora_dx(*operands, 2.0, TOP_K, TOP_K, True, True)


@pytest.mark.parametrize(("path", "stack", "dtype"), BY_PATH, ids=str)
def test_gradients_of_the_decoded_weights(submodule, device, path, stack, dtype):
    problem = draw(submodule, stack, device, dtype)
    dx, yb, dgates = backward(submodule, problem, path)
    expected_dx, expected_yb, expected_dgates = exact_backward(submodule, problem)
    rows = valid(problem["order"])
    assert relative_error(dx[rows], expected_dx[rows]) <= budget(path, device, dtype)
    assert (dx[~rows] == 0).all()
    if stack.rank is not None:
        assert relative_error(yb, expected_yb) <= budget(path, device, dtype)
    assert relative_error(dgates, expected_dgates) <= budget(path, device, dtype)
    assert dgates.isfinite().all()


def test_only_what_is_wanted(submodule, device):
    problem = draw(submodule, Stack(), device, torch.float32)
    dx, yb, dgates = backward(submodule, problem, "triton")
    none, low, same = backward(submodule, problem, "triton", wants_dx=False)
    assert none.shape == (0, 128)
    assert_same_bits(same, dgates)
    assert_same_bits(low, yb)
    again, _, none = backward(submodule, problem, "triton", wants_gates=False)
    assert_same_bits(again, dx)
    assert none.shape == (0,)
