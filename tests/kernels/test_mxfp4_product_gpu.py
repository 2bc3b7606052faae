"""The compiled product over MXFP4 and FP8: exact on integers, decoded to the bit; and layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from .test_gated_quantized_experts import Layer
from .test_gated_quantized_experts import Problem as LayerProblem
from .test_packed_product_gpu import EDGES, ROUTINGS, Problem, check, module

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
__all__ = ["module"]  # a fixture


def stack_of(submodule, a: dict, dtype: torch.dtype) -> torch.Tensor:
    """(E, N, K) by the reference."""
    experts, *shape = a["stored"]
    stack = (a["packed"], a["absmax"], torch.arange(experts, device=a["packed"].device), shape)
    if a["kind"] == "mxfp4":
        return submodule("reference.mxfp4").mxfp4_dequant(*stack, dtype)
    block = (a["block_rows"], a["blocksize"])
    return submodule("reference.fp8").fp8_dequant(*stack, block, dtype)


@dataclasses.dataclass(frozen=True)
class Packed(Problem):
    """A problem whose reference is the package's `submodule`."""

    def product(self, a: dict, reference) -> torch.Tensor:
        weight = stack_of(reference, a, torch.float64)
        weight = weight.mT if self.along else weight
        factors = (a.get("low"), a.get("factor"), a["bias"], None)
        order = (a["slots"], a["offsets"], self.fan, False)
        return reference("reference.moe").grouped_product(a["x"].double(), weight, *factors, *order)


@dataclasses.dataclass(frozen=True)
class Mxfp4(Packed):
    """Any codes; scales of a half to 2."""

    def stack(self, integers) -> dict:
        elements = len(self.counts) * self.n * self.k
        packed = integers(elements // 2, low=0, high=256, dtype=torch.uint8)
        scales = (127 + integers(elements // 32, low=-1, high=2)).to(torch.uint8)
        own = {"packed": packed, "absmax": scales, "codebook": None, "blocksize": 32}
        return own | {"kind": "mxfp4"}


@dataclasses.dataclass(frozen=True)
class Fp8(Packed):
    """Small integers; scales of a half to 2 in blocks of several shapes."""

    block: tuple[int, int] = (128, 128)

    def stack(self, integers) -> dict:
        shape = (len(self.counts), self.n, self.k)
        rows, columns = self.block[0] or self.n, self.block[1] or self.k
        packed = integers(*shape, dtype=torch.float32).to(torch.float8_e4m3fn)
        sizes = (shape[0], -(-self.n // rows), -(-self.k // columns))
        scales = 2.0 ** integers(*sizes, low=-1, high=2, dtype=torch.float32)
        own = {"packed": packed.view(torch.uint8).view(-1), "absmax": scales.view(-1)}
        return own | {
            "codebook": None,
            "kind": "fp8",
            "blocksize": columns,
            "block_rows": rows,
        }


@pytest.fixture(scope="session")
def verify(module, submodule, device):
    """`verify(problem)`: the product is the one right answer, and writes nothing else."""
    return lambda problem: check(module, device, submodule, problem)


def kinds(**blocks):
    """Both formats, FP8 with several blocks."""
    return [
        pytest.param(lambda *a, **o: Mxfp4(*a, **o), id="mxfp4"),
        *(
            pytest.param(lambda *a, block=block, **o: Fp8(*a, block=block, **o), id=f"fp8-{name}")
            for name, block in blocks.items()
        ),
    ]


EVERY = kinds(blocks=(128, 128), rows=(1, 0), expert=(0, 0), narrow=(1, 64), tall=(64, 0))
SIZES = ((128, 64), (8, 64), (136, 192), (264, 256), (520, 512), (40, 1024), (1000, 320))


@pytest.mark.parametrize(("fan", "grouped_out"), [(0, True), (1, False), (3, False), (2, True)])
@pytest.mark.parametrize("rank", (0, 8, 72))
@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("make", EVERY)
def test_is_exact(verify, make, along, rank, fan, grouped_out):
    for index, (n, k) in enumerate(SIZES):
        extras = {"bias": index % 2 == 0, "gated": index % 3 == 0, "sentinels": index % 4 * 5}
        verify(make(EDGES, n, k, along, rank, fan, grouped_out, **extras))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("k", (16, 48, 80, 208))
def test_fp8_rows_end_inside_a_stage(verify, k, along):
    for block in ((128, 128), (1, 0), (32, 64)):
        if (block[1] or k) >= 64 or k & (k - 1):
            verify(Fp8((3, 0, 90), 72, k, along, 8, 1, False, bias=True, block=block))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("make", EVERY[:2])
def test_routings(verify, make, routing, along):
    verify(make(ROUTINGS[routing], 264, 128, along, 8, 1, False, sentinels=7, gated=True))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("make", EVERY[:3])
def test_a_layer_of_gpt_oss_s_size(verify, make, along):
    verify(make((256, 0, 300, 1, 97), 5760, 2880, along, 16, 2, False))


@pytest.mark.parametrize("along", (True, False))
@pytest.mark.parametrize("kind", ("mxfp4", "fp8"))
def test_a_weight_is_used_as_it_decodes(module, submodule, device, kind, along):
    """The rows of a unit matrix read back what dequantising gives: all codes, many scales."""
    stored, generator = (2, 256, 320), torch.Generator(device).manual_seed(0)

    def integers(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator).byte()

    if kind == "mxfp4":  # no scale under which a value is subnormal or infinite
        a = {"packed": integers(2 * 256 * 160, low=0, high=256), "codebook": None}
        a |= {"absmax": integers(2 * 256 * 10, low=3, high=251), "blocksize": 32}
    else:
        codes = (
            integers(2 * 256 * 320, low=0, high=127) | integers(2 * 256 * 320, low=0, high=2) << 7
        )
        scales = torch.rand(2 * 256 * 5, device=device, generator=generator)
        a = {"packed": codes, "codebook": None, "absmax": scales}
        a |= {"blocksize": 64, "block_rows": 1}
    a |= {"stored": stored, "kind": kind}
    dense = stack_of(submodule, a, torch.bfloat16)
    depth = stored[2] if along else stored[1]
    eye = torch.eye(depth, device=device).bfloat16().repeat(2, 1)
    offsets = torch.arange(3, device=device) * depth
    place = {"slots": torch.arange(2 * depth, device=device), "offsets": offsets}
    out = module.packed_product(eye, **a, **place, along=along, fan=0, grouped_out=True)
    expected = (dense.mT if along else dense).reshape(2 * depth, -1)
    assert_same_bits(out + 0.0, expected + 0.0)  # a sum of zeros has no sign


@pytest.mark.parametrize("scale", (0, 1, 254, 255))
@pytest.mark.parametrize("along", (True, False))
def test_ends_of_the_scales(module, device, scale, along):
    """2^-127 is subnormal, 2^127 finite, 255 NaN in its block alone."""
    stored = (1, 128, 128)
    packed = torch.full((128 * 64,), 0x22, dtype=torch.uint8, device=device)  # ones
    scales = torch.full((128, 4), 127, dtype=torch.uint8, device=device)
    scales[5, 1] = scale
    eye = torch.eye(128, device=device).bfloat16()
    place = {"slots": torch.arange(128, device=device), "along": along}
    place |= {"offsets": torch.tensor([0, 128], device=device), "fan": 0, "grouped_out": True}
    a = {"packed": packed, "absmax": scales.view(-1), "codebook": None, "stored": stored}
    out = module.packed_product(eye, **a, blocksize=32, kind="mxfp4", **place)
    out = out.mT if along else out  # (N, K)
    others = torch.ones_like(out, dtype=torch.bool)
    if scale == 255:  # zeros of the unit matrix meet it, too
        others[slice(5, 6) if along else slice(None), slice(None) if along else slice(32, 64)] = (
            False
        )
        assert out[5, 32:64].isnan().all() and (out[others] == 1).all()
    else:
        others[5, 32:64] = False
        assert (out[5, 32:64].double() == 2.0 ** (scale - 127)).all()
        assert (out[others] == 1).all()


@pytest.mark.parametrize("backend", ("compiled", "auto", "triton"))
@pytest.mark.parametrize("quant_type", ("mxfp4", "fp8"))
def test_layers_within_the_budget_of_the_dense_layer(submodule, device, quant_type, backend):
    """A layer of gpt-oss (interleaved, biased, clamped) against float64 over decoded weights."""
    problem = LayerProblem(
        *(600, 4, 8),
        hidden=192,
        intermediate=128,
        activation="gpt_oss",
        interleaved=True,
        bias=True,
        rank=16,
        rank_down=8,
        routing="no-ends",
        quant_type=quant_type,
        strategy="fused",
        dtype=torch.bfloat16,
    )
    layer = Layer(submodule("moe"), device, problem)
    found = layer.step(backend)
    layer.packed = [experts.decode() for experts in layer.packed]
    dense = layer.step("triton")
    layer.packed = [weight.double() for weight in layer.packed]
    layer.biases = {name: bias.double() for name, bias in layer.biases.items()}
    layer.grad = layer.grad.double()
    for name, leaf in layer.leaves.items():
        layer.leaves[name] = leaf.detach().double().requires_grad_()
    for name, value in layer.step("reference").items():
        allowed = 1.5 * relative_error(dense[name], value) + 1e-3
        assert relative_error(found[name], value) <= allowed, name
