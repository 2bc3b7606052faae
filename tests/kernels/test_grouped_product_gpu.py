"""The compiled grouped_product: exact on integers, stable in its bits, quiet beside its tensors.

Operands lie in memory that is NaN between their lines, so that a copy that reaches too far shows;
the result lies between NaN, which must stay.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from .._compare import assert_same_bits, relative_error

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TILES = ("sm90_256x128", "sm90_128x256")
GUARD = 4096
# Around the rows of tiles (128, 256) and of instructions (32, 64, 96; 64, 128, 192)
EDGES = (0, 1, 63, 64, 65, 0, 255, 256, 257, 129, 33, 97, 193, 8, 130, 0)


@pytest.fixture(scope="session", autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("machine code for compute capability 9.0")


@pytest.fixture(scope="session")
def module(submodule):
    return submodule("kernels.grouped_product")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands in {-3 .. 2}: every sum is exact in float32, so there is one right answer."""

    counts: tuple[int, ...]
    k: int
    n: int
    rank: int = 0
    fan: int = 0
    grouped_out: bool = True
    by_columns: bool = False  # weight is contiguous in N
    bias: bool = False
    gated: bool = False
    dotted: bool = False
    sentinels: int = 0
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device: torch.device) -> tuple[dict, torch.Tensor, torch.Tensor]:
        """Arguments but out and tile, the rounded result, and its rows times other's."""
        experts, top_k = len(self.counts), max(self.fan, 1)
        total = -(-(sum(self.counts) + self.sentinels) // top_k) * top_k
        generator = torch.Generator(device).manual_seed(total + self.k + self.n)

        def integers(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randint(-3, 3, shape, device=device, generator=generator).to(dtype)

        def framed(*shape: int) -> torch.Tensor:
            pitch = -(-shape[-1] // 8) * 8 + 8
            buffer = torch.full((*shape[:-1], pitch), torch.nan, dtype=self.dtype, device=device)
            buffer[..., : shape[-1]] = integers(*shape)
            return buffer[..., : shape[-1]]

        def stack(depth: int) -> torch.Tensor:
            if self.by_columns:
                return framed(experts, depth, self.n)
            return framed(experts, self.n, depth).mT

        offsets = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        offsets[1:] = torch.tensor(self.counts, device=device).cumsum(0)
        lora = {}
        if self.rank:
            lora = {"low": integers(total, self.rank), "factor": stack(self.rank)}
        gates = integers(total // top_k, top_k, dtype=torch.float32)
        arguments = {
            "x": framed(total // top_k, self.k),
            "weight": stack(self.k),
            "slots": torch.randperm(total, device=device, generator=generator),
            "offsets": offsets,
            **lora,
            "bias": integers(experts, self.n, dtype=torch.float32) if self.bias else None,
            "gates": 2.0**gates if self.gated else None,
            "other": framed(total, self.n) if self.dotted else None,
            "fan": self.fan,
            "grouped_out": self.grouped_out,
        }
        return arguments, *self.expected(arguments)

    def expected(self, a: dict) -> tuple[torch.Tensor, torch.Tensor]:
        slots = a["slots"]
        source = a["x"] if self.fan == 0 else a["x"][slots // self.fan]
        value = torch.zeros(len(slots), self.n, dtype=torch.float64, device=slots.device)
        dots = torch.zeros(len(slots), device=slots.device)
        ends = a["offsets"].tolist()
        for e, rows in enumerate(slice(*pair) for pair in itertools.pairwise(ends)):
            value[rows] = source[rows].double() @ a["weight"][e].double()
            if self.rank:
                value[rows] += a["low"][rows].double() @ a["factor"][e].double()
            if self.bias:
                value[rows] += a["bias"][e]
            if self.dotted:
                dots[slots[rows]] = (value[rows] * a["other"][rows].double()).sum(1).float()
            if self.gated:
                value[rows] *= a["gates"].view(-1)[slots[rows], None]
        assert torch.equal(value.float().double(), value)  # so that it is rounded once
        result = value.float().to(self.dtype)
        if not self.grouped_out:
            result = torch.empty_like(result).index_copy(0, slots, result)
        return result, dots


def check(module, device, problem: Problem, tile: str) -> None:
    arguments, expected, dots = problem.operands(device)
    flat = torch.full(
        (expected.numel() + 2 * GUARD,), torch.nan, dtype=expected.dtype, device=device
    )
    out = flat[GUARD : GUARD + expected.numel()].view(expected.shape)
    result = module.grouped_product(**arguments, out=out, tile=tile)
    assert result[0] is out
    assert torch.equal(out, expected), problem
    assert (result[1] is None) if not problem.dotted else torch.equal(result[1], dots), problem
    assert flat[:GUARD].isnan().all(), problem
    assert flat[GUARD + expected.numel() :].isnan().all(), problem


SIZES = ((64, 128), (8, 8), (72, 136), (200, 264), (512, 520), (456, 513), (1000, 40))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("fan", "grouped_out"), [(0, True), (1, False), (3, False), (2, True)])
@pytest.mark.parametrize("rank", (0, 8, 16, 64, 72))
@pytest.mark.parametrize("by_columns", (False, True))
@pytest.mark.parametrize("tile", TILES)
def test_is_exact(module, device, tile, by_columns, rank, fan, grouped_out, dtype):
    for index, (k, n) in enumerate(SIZES):
        # What is not contiguous may be odd
        sides = (n, k) if by_columns and n % 8 else (k, n)
        bias, gated, sentinels = index % 2 == 0, index % 3 == 0, index % 4 * 5
        dotted = index % 3 == 1 and sides[1] % 8 == 0
        place = {"fan": fan, "grouped_out": grouped_out, "by_columns": by_columns, "dtype": dtype}
        extras = {"bias": bias, "gated": gated, "dotted": dotted, "sentinels": sentinels}
        problem = Problem(EDGES, *sides, rank, **place, **extras)
        check(module, device, problem, tile)


ROUTINGS = {
    "one": (5000,),
    "one-of-many": (0, 4400, 1, 0),
    "empty": (0, 0, 0),
    "most-experts": (3,) * 512,
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tile", TILES)
def test_routings(module, device, tile, routing):
    extras = {"sentinels": 7, "gated": True, "dotted": True}
    problem = Problem(ROUTINGS[routing], 136, 264, 8, 1, False, **extras)
    check(module, device, problem, tile)


@pytest.mark.parametrize("by_columns", (False, True))
@pytest.mark.parametrize("tile", TILES)
def test_many_tiles_per_block(module, device, tile, by_columns):
    """Every block of the grid walks several tiles of unequal rows."""
    counts = tuple(index * 37 % 300 for index in range(64))
    problem = Problem(counts, 2048, 2048, 16, 2, False, by_columns, dtype=torch.float16)
    check(module, device, problem, tile)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bits_of_a_row_depend_on_that_row(module, device, dtype):
    """The same alone, among others, in every tile and in every run."""
    x = torch.randn(600, 520, device=device).to(dtype)
    weight = torch.randn(2, 384, 520, device=device).to(dtype).mT
    low = torch.randn(600, 24, device=device).to(dtype)
    factor = torch.randn(2, 24, 384, device=device)
    slots = torch.arange(600, device=device)

    def run(rows: int, tile: str) -> torch.Tensor:
        offsets = torch.tensor([0, rows // 2, rows], device=device)
        lora = {"low": low[:rows], "factor": factor}
        place = {"fan": 0, "grouped_out": True, "tile": tile}
        return module.grouped_product(x[:rows], weight, slots[:rows], offsets, **lora, **place)[0]

    first = run(600, TILES[0])
    for tile in TILES:
        for _ in range(20):
            assert_same_bits(run(600, tile), first)
        for half in (1, 17, 33, 64, 65, 97, 128, 129, 200, 257, 299):
            assert_same_bits(run(2 * half, tile)[:half], first[:half])


@pytest.mark.parametrize("tile", TILES)
def test_nan_stays_in_its_row(module, device, tile):
    arguments, expected, _ = Problem((100, 200, 70), 136, 264, 8, 1).operands(device)
    arguments["x"] = arguments["x"].contiguous()
    row = 250
    arguments["x"][arguments["slots"][row]] = torch.nan
    out, _ = module.grouped_product(**arguments, tile=tile)
    assert out[row].isnan().all()
    keep = torch.arange(len(out), device=device) != row
    assert torch.equal(out[keep], expected[keep])


@pytest.mark.parametrize("path", ("compiled", "triton"))
def test_error_is_that_of_one_rounding(module, submodule, device, path):
    x = torch.randn(900, 2048, device=device).bfloat16()
    weight = torch.randn(3, 1024, 2048, device=device).bfloat16().mT * 0.02
    ids = torch.randint(0, 3, (900, 1), device=device)
    slots, _, offsets, tiles = submodule("kernels.expert_sort").expert_sort(ids, 3, tile_rows=128)
    out = torch.empty(900, 1024, dtype=torch.bfloat16, device=device)
    options = {"direction": "forward", "tile_rows": 128, "fan": 1, "scatter": True}
    low = x.new_empty(900, 0)
    by_triton = submodule("kernels._grouped_launch_triton").grouped_product
    product = module.product_of(path, offsets) or by_triton
    assert product(x, weight, low, None, slots, tiles, out, **options) is None
    exact = torch.stack([x[t].double() @ weight[ids[t, 0]].double() for t in range(900)])
    assert relative_error(out, exact) <= 1.02 * relative_error(exact.bfloat16(), exact)


def test_graph_capture_follows_new_routings(module, device):
    """Nothing about the routing is fixed on the host."""
    arguments, *_ = Problem((100, 200, 70), 136, 264, 8, 1, False).operands(device)
    out, _ = module.grouped_product(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.grouped_product(**arguments, out=out)
    arguments["offsets"].copy_(torch.tensor((0, 3, 3, 360)))
    expected, _ = module.grouped_product(**arguments)
    out.fill_(torch.nan)
    graph.replay()
    assert_same_bits(out, expected)


def test_stacks_beyond_two_to_the_31_elements(module, device):
    weight = torch.zeros(70, 4096, 8192, dtype=torch.bfloat16, device=device)
    assert weight.numel() > 2**31
    weight[69, :, 0] = torch.arange(4096, device=device) % 64
    x = torch.zeros(40, 8192, dtype=torch.bfloat16, device=device)
    x[:, 0] = torch.arange(1, 41, device=device)
    offsets = torch.zeros(71, dtype=torch.int64, device=device)
    offsets[70:] = 40
    slots = torch.arange(40, device=device)
    for tile in TILES:
        place = {"fan": 0, "grouped_out": True, "tile": tile}
        out, _ = module.grouped_product(x, weight.mT, slots, offsets, **place)
        assert torch.equal(out, (x[:, :1].float() * weight[69, :, 0].float()).bfloat16())


def test_operands_that_do_not_fit_are_refused(module, device):
    arguments, *_ = Problem((10, 20), 64, 128, 8, 1).operands(device)
    for name, value, reason in (
        ("offsets", arguments["offsets"][1:], "must be contiguous int64"),
        ("low", arguments["low"][:, :4], "low must be"),
        ("fan", -1, "too few rows"),
        ("x", arguments["x"][:4], "too few rows"),
        ("gates", torch.ones(3, device=device), "one per slot"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            module.grouped_product(**{**arguments, name: value})
    assert module.grouped_product(**arguments)[0].isfinite().all()  # the device still works
