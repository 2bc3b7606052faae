"""The compiled packed_product over 4 and 8 bits: exact on integers, decoded to the bit, quiet.

Rows lie in memory that is NaN between them, so that a copy that reaches too far shows; the result
lies between NaN, which must stay.
"""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from .._compare import assert_same_bits, assert_same_numbers, relative_error
from ..conftest import module_fixture
from ..moe._eager import PackedLayer, PackedProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

module = module_fixture("kernels.quant.packed_product")
codebook_of_nf4 = module_fixture("reference.nf4", "NF4_TABLE")

GUARD = 4096
# Around the most rows of one and two tiles (256, 512), and around those of instructions (64, 80,
# 96, 128, 144, 160, 176, 192, 240), also by tiles of half or a third of an expert's rows
EDGES = (
    *(0, 1, 63, 64, 65, 0, 80, 81, 96, 97, 128, 129, 144, 145, 160, 161, 176, 177, 193, 240, 241),
    *(255, 256, 257, 288, 289, 300, 513, 528, 530, 0),
)

# Means of 23, 47 and 146 rows per expert (of EDGES 182), by tiles of at most 48, 80 and, where the
# format has a codebook, 160 rows: several experts have more than one tile
FEW = (0, 1, 16, 17, 47, 48, 49, 96, 97, 145, *(0,) * 12)
SOME = (0, 1, 48, 49, 64, 65, 80, 81, 160, 161, 241, *(0,) * 9)
MANY = (*EDGES, 320, 321, *(0,) * 10)


@pytest.fixture(scope="session")
def codebook(codebook_of_nf4, device):
    return torch.tensor(codebook_of_nf4, device=device)


def decoded(submodule, a: dict, dtype: torch.dtype) -> torch.Tensor:
    """(E, N, K) by the reference."""
    experts, *shape = a["stored"]
    stack = (a["packed"], a["absmax"], torch.arange(experts, device=a["packed"].device), shape)
    if a["kind"] == "4bit":
        reference = submodule("reference.nf4").nf4_dequant
        return reference(*stack, a["blocksize"], dtype, a["codebook"])
    if a["kind"] == "mxfp4":
        return submodule("reference.mxfp4").mxfp4_dequant(*stack, dtype)
    block = (a["block_rows"], a["blocksize"])
    return submodule("reference.fp8").fp8_dequant(*stack, block, dtype)


def run(module, packed, absmax, codebook, stored, blocksize, kind, block_rows=1, **others):
    stack = (packed, absmax, codebook, None, stored, blocksize, kind, block_rows)
    return module.packed_product(stack=module.PackedStack(*stack), **others)


def read_back(
    module, submodule, a: dict, along: bool, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the product makes of unit rows, `rows` per expert at a time, and what it must.

    (E, depth, columns) each. The weights are given back, but where another one of the column is no
    finite number: zero times that is NaN. `packed_product` is the compiled op or raises.
    """
    experts = a["stored"][0]
    dense = decoded(submodule, a, torch.bfloat16)
    dense = dense.mT if along else dense
    lost = ~dense.isfinite()
    expected = dense.masked_fill(lost.sum(1, keepdim=True) > lost.int(), torch.nan)
    depth, device = dense.shape[1], dense.device
    rows = rows or depth
    place = {"offsets": torch.arange(experts + 1, device=device) * rows, "along": along}
    place |= {"slots": torch.arange(experts * rows, device=device), "fan": 0, "grouped_out": True}
    units = F.pad(torch.eye(depth, device=device).bfloat16(), (0, 0, 0, -depth % rows))
    found = [run(module, x=part.repeat(experts, 1), **a, **place) for part in units.split(rows)]
    return torch.cat([part.view(experts, rows, -1) for part in found], 1)[:, :depth], expected


@dataclasses.dataclass(frozen=True)
class Problem:
    """Integer operands: every sum is exact in float32, so there is one right answer."""

    counts: tuple[int, ...]
    n: int
    k: int
    along: bool = True
    rank: int = 0
    fan: int = 0
    grouped_out: bool = True
    blocksize: int = 64  # of NF4
    bias: bool = False
    gated: bool = False
    sentinels: int = 0

    def operands(self, device, submodule) -> tuple[dict, torch.Tensor]:
        """Arguments but out, and the rounded result."""
        experts, top_k = len(self.counts), max(self.fan, 1)
        total = -(-(sum(self.counts) + self.sentinels) // top_k) * top_k
        generator = torch.Generator(device).manual_seed(total + self.k + self.n)
        depth, columns = (self.k, self.n) if self.along else (self.n, self.k)

        def integers(*shape: int, low=-3, high=3, dtype=torch.bfloat16) -> torch.Tensor:
            return torch.randint(low, high, shape, device=device, generator=generator).to(dtype)

        def framed(*shape: int) -> torch.Tensor:
            pitch = -(-shape[-1] // 8) * 8 + 8
            buffer = torch.full((*shape[:-1], pitch), torch.nan, device=device).bfloat16()
            buffer[..., : shape[-1]] = integers(*shape)
            return buffer[..., : shape[-1]]

        offsets = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        offsets[1:] = torch.tensor(self.counts, device=device).cumsum(0)
        lora = {}
        if self.rank:
            factor = integers(experts, columns, self.rank).mT
            lora = {"low": integers(total, self.rank), "factor": factor}
        gates = integers(total // top_k, top_k, dtype=torch.float32)
        arguments = {
            "x": framed(total // top_k, depth),
            **self.stack(integers),
            "stored": (experts, self.n, self.k),
            "slots": torch.randperm(total, device=device, generator=generator),
            "offsets": offsets,
            "along": self.along,
            **lora,
            "bias": integers(experts, columns, dtype=torch.float32) if self.bias else None,
            "gates": 2.0**gates if self.gated else None,
            "fan": self.fan,
            "grouped_out": self.grouped_out,
        }
        return arguments, self.expected(arguments, submodule)

    def product(self, a: dict, submodule) -> torch.Tensor:
        """In float64, before the gates, in slot order."""
        weight = decoded(submodule, a, torch.float64)
        weight = weight.mT if self.along else weight
        factors = (a.get("low"), a.get("factor"), a["bias"], None)
        order = (a["slots"], a["offsets"], self.fan, False)
        return submodule("reference.moe").grouped_product(a["x"].double(), weight, *factors, *order)

    def expected(self, a: dict, submodule) -> torch.Tensor:
        value = self.product(a, submodule)
        if self.gated:
            value *= a["gates"].view(-1, 1)
        assert torch.equal(value.float().double(), value)  # so that it is rounded once
        result = value.float().bfloat16()
        return result[a["slots"]] if self.grouped_out else result


@dataclasses.dataclass(frozen=True)
class Nf4(Problem):
    """Any codes of an even codebook; scales of a half to 2."""

    def stack(self, integers) -> dict:
        elements = len(self.counts) * self.n * self.k
        packed = integers(elements // 2, low=0, high=256, dtype=torch.uint8)
        absmax = 2.0 ** integers(elements // self.blocksize, low=-1, high=2).float()
        codebook = torch.arange(-8.0, 8.0, device=packed.device)
        own = {"packed": packed, "absmax": absmax, "codebook": codebook}
        return own | {"blocksize": self.blocksize, "kind": "4bit"}

    def product(self, a: dict, submodule) -> torch.Tensor:
        names = ("packed", "absmax", "codebook", "stored", "blocksize", "slots", "offsets")
        extras = {name: a.get(name) for name in ("along", "low", "factor", "bias", "fan")}
        operands = (a["x"].double(), *(a[name] for name in names))
        return submodule("reference.nf4").nf4_product(*operands, **extras, grouped_out=False)


@dataclasses.dataclass(frozen=True)
class Mxfp4(Problem):
    """Any codes; scales of a half to 2."""

    def stack(self, integers) -> dict:
        elements = len(self.counts) * self.n * self.k
        packed = integers(elements // 2, low=0, high=256, dtype=torch.uint8)
        scales = (127 + integers(elements // 32, low=-1, high=2)).to(torch.uint8)
        own = {"packed": packed, "absmax": scales, "codebook": None, "blocksize": 32}
        return own | {"kind": "mxfp4"}


@dataclasses.dataclass(frozen=True)
class Fp8(Problem):
    """Small integers; scales of a half to 2 in blocks of several shapes."""

    block: tuple[int, int] = (128, 128)

    def stack(self, integers) -> dict:
        shape = (len(self.counts), self.n, self.k)
        rows, columns = self.block[0] or self.n, self.block[1] or self.k
        packed = integers(*shape, dtype=torch.float32).to(torch.float8_e4m3fn)
        sizes = (shape[0], -(-self.n // rows), -(-self.k // columns))
        scales = 2.0 ** integers(*sizes, low=-1, high=2, dtype=torch.float32)
        own = {"packed": packed.view(torch.uint8).view(-1), "absmax": scales.view(-1)}
        own |= {"codebook": None, "kind": "fp8"}
        return own | {"blocksize": columns, "block_rows": rows}


def check(module, device, submodule, problem: Problem) -> None:
    """The product is the one right answer, and writes nothing else."""
    arguments, expected = problem.operands(device, submodule)
    flat = torch.full((expected.numel() + 2 * GUARD,), torch.nan, device=device).bfloat16()
    out = flat[GUARD : GUARD + expected.numel()].view(expected.shape)
    assert run(module, **arguments, out=out) is out
    assert torch.equal(out, expected), problem
    assert flat[:GUARD].isnan().all(), problem
    assert flat[GUARD + expected.numel() :].isnan().all(), problem


@pytest.fixture(scope="session")
def verify(module, submodule, device):
    return functools.partial(check, module, device, submodule)


BLOCKS = {
    "blocks": (128, 128),
    "rows": (1, 0),
    "expert": (0, 0),
    "narrow": (1, 64),
    "tall": (64, 0),
}
KINDS = {"nf4": Nf4, "mxfp4": Mxfp4}
KINDS |= {f"fp8-{name}": functools.partial(Fp8, block=block) for name, block in BLOCKS.items()}
RANKS = [(kind, rank) for kind in KINDS for rank in (0, 8, 72)] + [("nf4", 16), ("nf4", 64)]
# N, K and the blocks of NF4
SIZES = (
    *((128, 64, 64), (8, 64, 64), (136, 192, 64), (264, 256, 64), (520, 512, 128)),
    *((40, 1024, 256), (1000, 64, 64), (1000, 320, 64)),
)


@pytest.mark.parametrize(("fan", "grouped_out"), [(0, True), (1, False), (3, False), (2, True)])
@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize(("kind", "rank"), RANKS)
def test_is_exact(verify, kind, rank, along, fan, grouped_out):
    """Stages that end behind the last stored row, and columns that end inside a tile."""
    for index, (n, k, blocksize) in enumerate(SIZES):
        extras = {"bias": index % 2 == 0, "gated": index % 3 == 0, "sentinels": index % 4 * 5}
        extras |= {"blocksize": blocksize}
        verify(KINDS[kind](EDGES, n, k, along, rank, fan, grouped_out, **extras))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("rank", (0, 16, 72))
@pytest.mark.parametrize("rows", (FEW, SOME, MANY), ids=("few", "some", "many"))
@pytest.mark.parametrize("kind", ("nf4", "mxfp4"))
def test_tiles_of_other_heights_are_exact(verify, kind, rows, rank, along):
    for index, (n, k, blocksize) in enumerate(SIZES):
        place = {"fan": index % 4, "grouped_out": index % 2 == 0, "blocksize": blocksize}
        extras = {"bias": index % 3 == 0, "gated": index % 2 == 1, "sentinels": index % 4 * 5}
        verify(KINDS[kind](rows, n, k, along, rank, **place, **extras))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("rank", (0, 64, 72))
@pytest.mark.parametrize("rows", (FEW, SOME, MANY, EDGES), ids=("few", "some", "many", "most"))
@pytest.mark.parametrize("kind", ("nf4", "mxfp4"))
def test_blocks_take_several_tiles(verify, kind, rows, rank, along):
    """700 tiles and more for the 132 or 264 blocks of an H200: one begins beside the one before."""
    n, k, blocksize = (5128, 320, 64) if along else (136, 5120, 256)
    verify(KINDS[kind](rows, n, k, along, rank, 1, False, blocksize=blocksize))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("k", (16, 48, 80, 208))
def test_fp8_rows_end_inside_a_stage(verify, k, along):
    for block in ((128, 128), (1, 0), (32, 64)):
        if (block[1] or k) >= 64 or k & (k - 1):
            verify(Fp8((3, 0, 90), 72, k, along, 8, 1, False, bias=True, block=block))


ROUTINGS = {
    "one": (5000,),
    "one-of-many": (0, 4400, 1, 0),
    "empty": (0, 0, 0),
    "most-experts": (3,) * 512,
}


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ("nf4", "mxfp4", "fp8-blocks"))
def test_routings(verify, kind, routing, along):
    verify(KINDS[kind](ROUTINGS[routing], 264, 128, along, 8, 1, False, sentinels=7, gated=True))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("kind", ("mxfp4", "fp8-blocks", "fp8-rows"))
def test_a_layer_of_gpt_oss_s_size(verify, kind, along):
    verify(KINDS[kind]((256, 0, 300, 1, 97), 5760, 2880, along, 16, 2, False))


@pytest.mark.parametrize("keeps", (True, False))
@pytest.mark.parametrize("n", (264, 1536))
@pytest.mark.parametrize("rank", (0, 16, 72))
def test_an_activation_in_the_product_has_the_bits_of_its_own_launch(
    module, submodule, device, rank, n, keeps
):
    """By both instructions, where gate and up end inside of a box or with it; zero of sentinels."""
    bias = {"bias": rank == 72, "sentinels": 5}
    problem = Fp8((0, 80, 81, 144, 145, 300, 1), n, 192, True, rank, 1, **bias)
    arguments, _ = problem.operands(device, submodule)
    arguments["x"] = arguments["x"] / 64  # where silu bends
    wide = run(module, **arguments)
    expected = submodule("kernels.experts.rows_triton").glu_triton(wide, "silu", False)
    for early in (False, True):
        out = torch.full((len(wide) if keeps else 0, n), torch.nan, device=device).bfloat16()
        h = torch.full_like(expected, torch.nan)
        run(module, **arguments, out=out, activated=h, early=early)
        assert_same_bits(h, expected)
        if keeps:
            assert_same_bits(out, wide)


def test_an_activation_goes_with_fp8_in_expert_order_alone(module, submodule, device):
    for kind, extras in (
        (Nf4, {}),
        (Fp8, {"along": False}),
        (Fp8, {"grouped_out": False}),
        (Fp8, {"gated": True}),
    ):
        problem = kind((10, 20), 128, 128, fan=1, **extras)
        arguments, _ = problem.operands(device, submodule)
        h = torch.empty(30, 64, dtype=torch.bfloat16, device=device)
        with pytest.raises(RuntimeError, match="the activation goes with FP8 along stored rows"):
            run(module, **arguments, activated=h)
    with pytest.raises(RuntimeError, match=r"activated must be \(R, columns / 2\)"):
        run(module, **{**arguments, "gates": None}, activated=h[:, 1:])


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("kind", ("nf4-64", "nf4-256", "mxfp4", "fp8"))
def test_a_weight_is_used_as_it_decodes(module, submodule, device, codebook, kind, along):
    """The rows of a unit matrix read back what decoding gives: all codes, many scales."""
    experts, n, k = stored = (3, 256, 512) if kind.startswith("nf4") else (2, 256, 320)
    elements, generator = experts * n * k, torch.Generator(device).manual_seed(0)

    def integers(count: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), device=device, generator=generator).byte()

    if kind == "mxfp4":  # no scale under which a value is subnormal or infinite
        a = {"packed": integers(elements // 2, 0, 256), "absmax": integers(elements // 32, 3, 251)}
        a |= {"blocksize": 32, "kind": "mxfp4", "codebook": None}
    elif kind == "fp8":
        codes = integers(elements, 0, 127) | integers(elements, 0, 2) << 7
        a = {"packed": codes, "absmax": torch.rand(elements // 64, device=device)}
        a |= {"blocksize": 64, "block_rows": 1, "kind": "fp8", "codebook": None}
    else:
        blocksize = int(kind.removeprefix("nf4-"))
        a = {"packed": integers(elements // 2, 0, 256), "codebook": codebook, "kind": "4bit"}
        a |= {"absmax": torch.rand(elements // blocksize, device=device), "blocksize": blocksize}
    found, expected = read_back(module, submodule, a | {"stored": stored}, along)
    assert_same_bits(found + 0.0, expected + 0.0)  # a sum of zeros has no sign


@dataclasses.dataclass(frozen=True)
class Ends:
    """All codes of a format under the ends of its scales."""

    codes: int
    block: int
    scales: tuple[float, ...]  # under which a weight is finite; under the last, but for `large`
    large: tuple[int, ...]  # codes
    no_numbers: tuple[float, ...]  # scales
    nans: tuple[int, ...] = ()  # codes

    def operands(self, kind: str, device, submodule) -> dict:
        """Two experts whose weights are finite but in a few places.

        In the first one there is an infinity at most in a row and a column, which is read back; in
        the second one there is what makes the others of its column NaN.
        """
        mx, fp8 = kind == "mxfp4", kind == "fp8"
        stored = (2, 256, 320 if mx or fp8 else 512)
        generator = torch.Generator().manual_seed(0)
        finite = torch.tensor([code for code in range(self.codes) if code not in self.nans])
        codes = finite[torch.randint(len(finite), stored, generator=generator)]
        blocks = (*stored[:2], stored[2] // self.block)
        which = torch.randint(len(self.scales), blocks, generator=generator)
        places = [(0, 8 + i, 3 + 37 * i) for i in range(len(self.large))]
        for expert, row, column in places:
            which[expert, row, column // self.block] = len(self.scales) - 1
        highest = which.repeat_interleave(self.block, -1) == len(self.scales) - 1
        codes[highest & torch.isin(codes, torch.tensor(self.large))] = 1
        for code, place in zip(self.large, places, strict=True):
            codes[place] = code
        scales = torch.tensor(self.scales)[which]
        spread = torch.arange(self.block) * 5 % self.codes  # all there are of 4 bits
        for i, scale in enumerate(self.no_numbers):
            scales[1, 5 + i, 1 + i] = scale
            codes[1, 5 + i, self.block * (1 + i) : self.block * (2 + i)] = spread
        for i, code in enumerate(self.nans):
            codes[1, 20 + i, 200 + i] = code
        even, odd = codes.to(torch.uint8).view(*stored[:2], -1, 2).unbind(-1)
        low, high = (even, odd) if mx else (odd, even)
        packed = codes.to(torch.uint8) if fp8 else low | high << 4
        table = None if mx or fp8 else getattr(submodule("reference.nf4"), f"{kind.upper()}_TABLE")
        return {
            "packed": packed.view(-1).to(device),
            "absmax": scales.to(torch.uint8 if mx else torch.float32).view(-1).to(device),
            "codebook": None if table is None else torch.tensor(table, device=device),
            "stored": stored,
            "blocksize": self.block,
            "kind": "4bit" if table else kind,
            "block_rows": 1,
        }


# 1e-40 and less are subnormal; what is below 2^-134 is rounded to zero.
FEW_BITS = (1.0, 0.37, 1e-38, 1e-40, 2.0**-149, 0.0, 3.4e38)
EIGHT_BITS = (1.0, 0.37, -2.5, 1e-38, 1e-40, 2.0**-149, 0.0, 8e35)
ENDS = {
    "nf4": Ends(16, 64, FEW_BITS, (0, 15), (torch.nan, torch.inf)),
    "fp4": Ends(16, 64, FEW_BITS, (3, 11), (torch.nan, torch.inf)),
    "mxfp4": Ends(16, 32, (127, 0, 1, 2, 252, 254), (4, 5, 6, 7, 12, 13, 14, 15), (255,)),
    "fp8": Ends(256, 64, EIGHT_BITS, (126, 254), (torch.nan, torch.inf), (127, 255)),
}


@pytest.mark.parametrize("rows", (32, 64, 128, None))  # per expert: few, some, many and most
@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("kind", ENDS)
def test_the_ends_of_codes_and_scales(module, submodule, device, kind, along, rows):
    """Subnormal, infinite or no number: what decoding gives, and no other column is harmed."""
    a = ENDS[kind].operands(kind, device, submodule)
    found, expected = read_back(module, submodule, a, along, rows)
    assert expected.isinf().sum() >= len(ENDS[kind].large)
    assert expected.isfinite().double().mean() > 0.7
    assert_same_numbers(found + 0.0, expected + 0.0)  # a sum of zeros has no sign


@pytest.mark.parametrize("along", (True, False))
def test_bits_of_a_row_depend_on_that_row(module, submodule, device, along):
    """The same alone, among others, with every instruction and in every run."""
    problem = Nf4((400, 400), 384, 512, along, 24)
    arguments, _ = problem.operands(device, submodule)
    for name in ("x", "low"):
        arguments[name] = torch.randn_like(arguments[name].contiguous())
    arguments["codebook"] = torch.randn(16, device=device)
    arguments["absmax"] = torch.rand_like(arguments["absmax"])
    arguments["slots"] = torch.arange(800, device=device)
    first = run(module, **arguments)
    for _ in range(20):
        assert_same_bits(run(module, **arguments), first)
    low, tall = (1, 16, 17, 33, 49, 64), (65, 81, 97, 128, 129, 145, 161, 177, 200, 241, 257, 300)
    for half in (*low, *tall, 301, 399):
        part = {**arguments, "offsets": torch.tensor([0, half, 2 * half], device=device)}
        for name in ("x", "low", "slots"):
            part[name] = arguments[name][: 2 * half]
        assert_same_bits(run(module, **part)[:half], first[:half])


@pytest.mark.parametrize("along", (True, False))
def test_scales_behind_a_stack_are_not_used(module, submodule, device, along):
    """An expert's neighbour has an infinite absmax, which no zero would cancel."""
    problem = Nf4((70, 0), 136, 64, along)
    arguments, expected = problem.operands(device, submodule)
    arguments["absmax"][136:] = torch.inf
    out = run(module, **arguments)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("along", (True, False))
def test_error_is_that_of_one_rounding(module, opt, device, codebook, along):
    stored = (3, 1024, 2048)
    packed, absmax = opt.nf4_quantize(torch.randn(stored, device=device) * 0.02, 64)
    ids = torch.arange(3, device=device)
    dense = opt.nf4_dequant(packed, absmax, ids, stored[1:], 64, torch.bfloat16).double()
    dense = dense.mT if along else dense
    offsets = torch.tensor((0, 250, 610, 900), device=device)
    slots = torch.arange(900, device=device)
    x = torch.randn(900, dense.shape[1], device=device).bfloat16()
    stack = module.PackedStack(packed, absmax, codebook, None, stored, 64)
    place = {"along": along, "fan": 0, "grouped_out": True}
    out = module.packed_product(x, stack, slots, offsets, **place)
    parts = x.double().split((250, 360, 290))
    exact = torch.cat([part @ weight for part, weight in zip(parts, dense, strict=True)])
    assert relative_error(out, exact) <= 1.02 * relative_error(exact.bfloat16(), exact)


def test_stacks_beyond_two_to_the_31_elements(module, device):
    stored = (70, 4096, 8192)
    elements = 70 * 4096 * 8192
    assert elements > 2**31
    packed = torch.zeros(elements // 2, dtype=torch.uint8, device=device)
    rows = packed.view(70, 4096, 4096)
    rows[69, :, 0] = torch.arange(4096, device=device) % 16 << 4
    absmax = torch.ones(elements // 64, device=device)
    x = torch.zeros(40, 8192, device=device).bfloat16()
    x[:, 0] = torch.arange(1, 41, device=device)
    offsets = torch.zeros(71, dtype=torch.int64, device=device)
    offsets[70:] = 40
    slots = torch.arange(40, device=device)
    stack = module.PackedStack(packed, absmax, torch.arange(16.0, device=device), None, stored, 64)
    place = {"fan": 0, "grouped_out": True}
    out = module.packed_product(x, stack, slots, offsets, along=True, **place)
    values = (rows[69, :, 0] >> 4).float()
    assert torch.equal(out, (x[:, :1].float() * values).bfloat16())
    back = torch.zeros(40, 4096, device=device).bfloat16()
    back[:, 5] = x[:, 0]
    out = module.packed_product(back, stack, slots, offsets, along=False, **place)
    assert torch.equal(out[:, 0], (x[:, 0].float() * values[5]).bfloat16())
    assert not out[:, 1:].any()


def test_operands_that_do_not_fit_are_refused(module, submodule, device):
    arguments, _ = Nf4((10, 20), 128, 64, True, 8, 1).operands(device, submodule)
    for name, value, reason in (
        ("offsets", arguments["offsets"][1:], "must be contiguous int64"),
        ("low", arguments["low"][:, :4], "low must be"),
        ("packed", arguments["packed"][:-16], "the stack's contiguous bytes"),
        ("absmax", arguments["absmax"][:-1], "one contiguous float32 .MXFP4: byte. per block"),
        ("codebook", arguments["codebook"].double(), "codebook must be"),
        ("x", arguments["x"][:, :56], "x must be bfloat16 rows"),
        ("fan", -1, "x must be bfloat16 rows"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            run(module, **{**arguments, name: value})


@pytest.mark.parametrize("scatter", (True, False))
@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("rank", (16, 12, 1))  # padded to 16 and 8
def test_the_dispatch_equals_triton(module, submodule, device, rank, nested, scatter):
    """As the ops call it; rows that meet others are rounded once more, before their gates."""
    arguments, _ = Nf4((100, 60), 136, 256, True, 16, 1, False).operands(device, submodule)
    order = submodule("kernels.experts.expert_sort")
    ids = torch.repeat_interleave(
        torch.arange(3, device=device), torch.tensor([100, 60, 4], device=device)
    )
    order = order.expert_sort(ids[:, None], 2, tile_rows=64)
    packed, absmax, codebook = (arguments[name] for name in ("packed", "absmax", "codebook"))
    inner = None
    if nested:
        absmax = torch.randint(0, 256, absmax.shape, device=device, dtype=torch.uint8)
        values = 2.0 ** torch.randint(-1, 2, (256,), device=device)
        scales = 2.0 ** torch.randint(0, 2, (-(-absmax.numel() // 256),), device=device)
        inner = (values, scales, torch.zeros(1, device=device))
    stack = (packed, absmax, codebook, inner, arguments["stored"], 64, "4bit", 1)
    x, low = (
        torch.cat((rows, rows[:4])) for rows in (arguments["x"].contiguous(), arguments["low"])
    )
    operands = (x, stack, True, low[:, :rank].contiguous(), arguments["factor"][:, :rank])
    options = {"fan": 1, "scatter": scatter}
    by_triton = submodule("kernels.quant.packed_product_triton").packed_product
    out, expected = torch.full((2, 164, 136), torch.nan, device=device).bfloat16()
    assert module.prefer_compiled(*operands, order, out, **options) is None
    by_triton(*operands, order, expected, **options)
    assert torch.equal(out, expected)  # integers
    other = torch.randn(164, 136, device=device).bfloat16()
    options |= {"gates": torch.rand(164, 1, device=device), "other": other, "other_fan": 1}
    dots = module.prefer_compiled(*operands, order, out, **options)
    right = by_triton(*operands, order, expected, **options)
    assert relative_error(out, expected) <= 5e-3
    assert relative_error(dots, right) <= 5e-3
    assert not dots[160:].any() and dots[:160].all()  # by slot; the last four are sentinels


@pytest.mark.parametrize("backend", ("compiled", "auto", "triton"))
@pytest.mark.parametrize("quant_type", ("mxfp4", "fp8"))
def test_layers_within_the_budget_of_the_dense_layer(submodule, device, quant_type, backend):
    """A layer of gpt-oss (interleaved, biased, clamped) against float64 over decoded weights."""
    form = {"activation": "gpt_oss", "interleaved": True, "bias": True, "routing": "no-ends"}
    sizes = {"hidden": 192, "intermediate": 128, "rank": 16, "rank_down": 8}
    problem = PackedProblem(
        *(600, 4, 8), **form, **sizes, quant_type=quant_type, dtype=torch.bfloat16
    )
    layer = PackedLayer(submodule("moe"), device, problem)
    found = layer.step(backend)
    for name in ("gate_up_proj", "down_proj"):
        weight = layer.module._modules.pop(name).decode()
        layer.module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    dense = layer.step("triton")
    layer.module.double()  # and the factors among the leaves
    layer.grad = layer.grad.double()
    for name in ("x", "gates"):
        layer.leaves[name] = layer.leaves[name].detach().double().requires_grad_()
    for name, value in layer.step("reference").items():
        allowed = 1.5 * relative_error(dense[name], value) + 1e-3
        assert relative_error(found[name], value) <= allowed, name
