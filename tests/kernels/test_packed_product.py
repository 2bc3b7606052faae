"""packed_product without a GPU: what it refuses, where that goes, and what it hands on."""

import dataclasses
import types

import pytest
import torch

from ..conftest import ROOT, module_fixture

module = module_fixture("kernels.quant.packed_product")

SOURCES = ROOT / "kernels-src" / "quant"
STORED = (3, 32, 128)  # (E, N, K)


def stack(
    stored: tuple[int, ...] = STORED,
    blocksize: int = 64,
    nested: tuple | None = None,
    packed: torch.Tensor | None = None,
    kind: str = "4bit",
) -> tuple:
    """What `PackedStack` takes."""
    e, n, k = stored
    packed = torch.zeros(e * n * k // 2, dtype=torch.uint8) if packed is None else packed
    absmax, table = torch.ones(e * n * k // blocksize), torch.arange(16.0)
    return packed, absmax, table, nested, stored, blocksize, kind, 1


def as_operand(submodule, opened: tuple):
    """The same stack as ops open it."""
    packed, absmax, table, _, stored, blocksize, *_ = opened
    formats = submodule("kernels.quant.formats")
    kind = formats.format_of("nf4", blocksize=blocksize)
    return formats.Stack(kind, (packed, absmax, table), stored, True)


def order_of_five(submodule):
    """Five rows of the first expert."""
    slots, tiles = torch.arange(5), torch.zeros(1, 3)
    kind = submodule("kernels.experts.expert_sort").ExpertOrder
    return kind.of(slots, torch.tensor((0, 5, 5, 5)), slots, tiles, 64, 1)


def rows(width: int = STORED[2], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(5, width, dtype=dtype)


REFUSED = {
    "bfloat16, got torch.float16": {"x": rows(dtype=torch.float16)},
    "64 or more and divide K, got 32": {"stack": stack(blocksize=32)},
    "64 or more and divide K, got 256": {"stack": stack(blocksize=256)},
    "multiple of 64 and scales start on 4 bytes, got K = 96": {
        "stack": stack((3, 32, 96), 32, kind="mxfp4")
    },
    "multiple of 16 and blocks have 64 columns or more, got K = 24": {
        "stack": stack((3, 32, 24), 128, kind="fp8")
    },
    "or more, got K = 128 and 32 columns": {"stack": stack(blocksize=32, kind="fp8")},
    "at most 512 experts": {"stack": stack((513, 8, 64))},
    "N must be a multiple of 8": {"stack": stack((3, 36, 128))},
    "packed must start": {"stack": stack(packed=torch.zeros(6145, dtype=torch.uint8)[1:])},
    "rows of x": {"x": rows(STORED[2] + 1)[:, 1:]},
    "rows of x may take 64 GiB": {
        "x": torch.empty_strided((5, 128), (2**33, 1), dtype=torch.bfloat16, device="meta")
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_take_is_said_in_words(module, reason):
    arguments = {"x": rows(), "stack": stack(), **REFUSED[reason]}
    assert reason in module.refusal(**arguments)
    assert module.refusal(rows(), stack()) is None
    assert module.refusal(rows(), stack(blocksize=128)) is None
    assert module.refusal(rows(), stack(blocksize=32, kind="mxfp4")) is None
    assert module.refusal(rows(), stack((3, 32, 48), 48, kind="fp8")) is None


def test_refused_operands_raise_before_the_op(module):
    place = {"along": True, "fan": 0, "grouped_out": True}
    order = (torch.arange(5), torch.tensor((0, 5, 5, 5)))
    with pytest.raises(ValueError, match="cannot take this product: the blocksize must be 64"):
        module.packed_product(rows(), stack(blocksize=32), *order, **place)


def test_python_repeats_the_limits_of_the_source(module):
    tile = (SOURCES / "nf4_tile_sm90.cuh").read_text()
    assert module.KINDS == ("4bit", "mxfp4", "fp8")
    named = "enum class Format : int { kFourBit, kMxfp4, kFp8 };"
    assert named in (SOURCES / "nf4_product.h").read_text()
    assert f"kMaxExperts = {module.MAX_EXPERTS};" in tile
    assert f"kMinBlock = {module.MIN_BLOCK};" in (SOURCES / "nf4_product.h").read_text()


@pytest.fixture
def asked(module, submodule, dispatch, monkeypatch):
    """Name, operands and options of every product that is asked for, here of Hopper's two."""
    calls, launch = [], submodule("kernels.quant.packed_product_triton")
    monkeypatch.setattr(launch, "packed_product", lambda *a, **o: calls.append(("triton", a, o)))
    compiled = types.SimpleNamespace(nf4_product=lambda *a: calls.append(("compiled", a, {})))
    monkeypatch.setattr(module, "ops", compiled)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    return calls


@pytest.fixture
def on_device(device):
    """New tensors lie on the device, whose kernels some operands are converted by."""
    with torch.device(device):
        yield


@pytest.mark.parametrize("path", ("measured", "compiled", "triton"))
def test_it_activates_where_it_is_taken_and_a_tile_has_two_boxes(
    module, dispatch, submodule, monkeypatch, path
):
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    paid = []
    monkeypatch.setattr(module, "pays", lambda *a: paid.append(a) or len(paid) == 1)
    submodule("kernels.quant.formats.fp8")
    formats = submodule("kernels.quant.formats")
    packed, absmax, table, _, stored, *_ = stack()
    fp8 = formats.format_of("fp8")
    of_fp8 = formats.Stack(fp8, (packed.repeat(2), torch.ones(3)), stored, True)

    def asked(one=of_fp8, x=None, activation="silu", interleaved=False) -> bool:
        x = rows() if x is None else x
        return one.format.activates(path, x, one, 300, activation, interleaved)

    assert asked() is (path != "triton")
    assert asked() is (path == "compiled")  # it does not pay any more
    assert paid == ([(100.0, 128, module.LEAST_ROWS)] * 2 if path == "measured" else [])
    paid.clear()
    four_bit = formats.Stack(formats.format_of("nf4"), (packed, absmax, table), stored, True)
    across = formats.Stack(fp8, of_fp8.tensors, stored, False)
    half = rows(dtype=torch.float16)
    assert not any((asked(four_bit), asked(across), asked(x=half), asked(interleaved=True)))
    assert not asked(activation="gelu")
    assert paid == []


# Format, mean rows per expert, depth of the sum; whether CUDA was faster
# (2026-11-22-nf4-products.md, 2026-11-28-tiles-of-few-rows.md).
MEASURED = {
    "Qwen3.5 gate_up": ({}, 64, 2048, True),
    "Qwen3.5 down": ({}, 64, 512, True),
    "more rows of that": ({}, 65, 512, False),
    "nested, of that": ({"nested": True}, 64, 512, False),
    "no stage's depth": ({}, 64, 448, False),
    "Qwen3 down, backward": ({}, 128, 2048, True),
    "Mixtral down, backward": ({}, 512, 4096, True),
    "more rows than measured": ({}, 513, 2048, False),
    "OLMoE, 128 tokens": ({}, 16, 2048, True),
    "Qwen3, 128 tokens": ({}, 8, 2048, True),
    "nested, 128 tokens": ({"nested": True}, 16, 2048, False),
    "nested": ({"nested": True}, 64, 2048, True),
    "gpt-oss, 128 tokens": ({"quant_type": "mxfp4"}, 16, 2880, True),
    "gpt-oss, 16 tokens": ({"quant_type": "mxfp4"}, 2, 2880, True),
    "FP8, 512 tokens": ({"quant_type": "fp8"}, 32, 2048, False),
    "FP8": ({"quant_type": "fp8"}, 128, 2048, True),
}


@pytest.mark.parametrize("case", MEASURED)
def test_it_pays_where_it_was_measured_faster(submodule, case):
    options, *arguments, faster = MEASURED[case]
    formats = submodule("kernels.quant.formats")
    kind = formats.format_of(options.get("quant_type", "nf4"))
    kind = dataclasses.replace(kind, nested=True) if "nested" in options else kind
    assert kind.compiled_pays(*arguments) is faster


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("path", ("measured", "compiled", "triton"))
@pytest.mark.parametrize("pays", (True, False))
@pytest.mark.parametrize("refused", (None, "half", "out", "device"))
def test_the_ops_take_what_path_and_times_say(
    module, dispatch, submodule, monkeypatch, caplog, asked, path, pays, refused
):
    """By name what it can take; measured also what pays, and without a word where it cannot."""
    forward = submodule("kernels.quant.grouped_lora_quantized")
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: refused != "device")
    seen = []
    monkeypatch.setattr(module, "pays", lambda *a: seen.append(a) or pays)
    _, n, k = STORED
    order = order_of_five(submodule)
    out = None if refused == "out" else rows(n)
    opened = as_operand(submodule, stack())
    x = rows(k, torch.float16 if refused == "half" else torch.bfloat16)
    operands = (x, opened, rows(8), torch.ones(3, 8, n), order, out)
    options = {"slice_experts": 0, "path": path, "fan": 1, "scatter": True}
    dispatch.say_once.cache_clear()
    forward.product_of_stack(*operands, direction="forward", **options)
    accepts = refused is None or (refused == "device" and path == "compiled")
    wanted = path == "compiled" or (path == "measured" and pays)
    assert [name for name, *_ in asked] == ["compiled" if wanted and accepts else "triton"]
    assert bool(caplog.records) == (path == "compiled" and refused in ("half", "out"))
    if seen:
        assert seen == [(5 / 3, k, module.LEAST_ROWS_OF_FEW)]


@pytest.mark.usefixtures("on_device")
def test_an_activation_is_not_dropped_where_the_op_cannot_take_the_product(module, submodule):
    _, n, k = STORED
    order = order_of_five(submodule)
    x, opened = rows(k, torch.float16), stack()
    with pytest.raises(ValueError, match="applies an activation: it needs bfloat16"):
        module.prefer_compiled(
            x, opened, True, rows(8), None, order, rows(n), activated=rows(n // 2)
        )


@pytest.mark.parametrize("path", ("measured", "compiled"))
@pytest.mark.parametrize("rank", (12, 3))
def test_nested_scales_and_other_ranks_are_made_plain(
    module, submodule, monkeypatch, device, asked, rank, path
):
    """By launches ahead of the op, which reads what Triton's product would."""
    monkeypatch.setattr(module, "LEAST_DEPTH", 128)
    _, n, k = STORED
    forward = submodule("kernels.quant.grouped_lora_quantized")
    kind = submodule("moe.quantized.quantized_experts").QuantizedExperts
    record = kind.from_weight(torch.randn(STORED, device=device), nested=True).quantized_weight()
    formats = submodule("kernels.quant.formats")
    stack = formats.Stack.of(list(record.tensors.values()), record.format.text, STORED, True)
    low = torch.randn(400, rank, device=device).bfloat16()
    factor = torch.randint(-8, 8, (3, n, rank), device=device).float().mT
    offsets = torch.tensor((0, 200, 300, 400), device=device)
    slots, tiles = torch.arange(400, device=device), torch.zeros(9, 3, device=device)
    kind = submodule("kernels.experts.expert_sort").ExpertOrder
    order = kind.of(slots, offsets, slots, tiles, 64, 1)
    x, out = (torch.ones(400, size, device=device).bfloat16() for size in (k, n))
    options = {"slice_experts": 0, "path": path, "fan": 0, "scatter": False}
    operands = (x, stack, low, factor, order, out)
    forward.product_of_stack(*operands, direction="forward", **options)
    ((_, (_, _, scales, _, _, _, _, given, wide, *_), _),) = asked
    tensors = record.tensors
    code, scale, offset = (tensors[name] for name in record.format.NESTED)
    expected = code[tensors["absmax"].long()] * scale.repeat_interleave(256)[: scales.numel()]
    assert torch.equal(scales, expected + offset) and scales.dtype == torch.float32
    pad = -rank % 8
    assert torch.equal(given, torch.nn.functional.pad(low, (0, pad))) and given.is_contiguous()
    assert torch.equal(wide, torch.nn.functional.pad(factor.bfloat16(), (0, 0, 0, pad)))


@pytest.mark.parametrize("fan", (0, 2))
@pytest.mark.parametrize("scatter", (True, False))
@pytest.mark.parametrize("gated", (True, False))
def test_rows_meet_others_before_their_gates(submodule, device, fan, scatter, gated):
    """Sums over more than a block of columns; what lies behind the experts' rows is nobody's."""
    generator = torch.Generator().manual_seed(1)
    total, known, width = 12, 9, 1100
    out, other = (torch.randn(total, width, generator=generator).to(device) for _ in range(2))
    slots = torch.randperm(total, generator=generator).to(device)
    gates = torch.rand(6, 2, generator=generator).to(device)
    offsets = torch.tensor((0, 4, known), device=device)
    other = other.mT.contiguous().mT
    at = slots if scatter else torch.arange(total, device=device)
    source = slots // fan if fan else torch.arange(total, device=device)
    expected = torch.zeros(total, device=device)
    expected[slots[:known]] = (out[at] * other[source]).sum(1)[:known]
    product = out.clone()
    if gated:
        product[at[:known]] *= gates.view(-1, 1)[slots[:known]]
    other[source[known:]] = other[source[known:]] if fan else torch.nan
    launch = submodule("kernels.quant.packed_product_triton").gate_and_dot
    dots = launch(out, other, gates if gated else None, slots, offsets, fan, scatter)
    assert torch.allclose(dots, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(out, product)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("last", (True, False))
@pytest.mark.parametrize("refused", ("nothing", "half", "out"))
def test_what_is_refused_goes_to_triton_with_all_its_arguments(
    module, submodule, monkeypatch, asked, refused, last
):
    """And what is not refused goes to the op, with the other kernel's names for its arguments."""
    launch = submodule("kernels.quant.packed_product_triton")
    monkeypatch.setattr(launch, "gate_and_dot", lambda *a: a)
    _, n, k = STORED
    depth, columns = (k, n) if last else (n, k)
    low, factor = rows(8), torch.ones(3, 8, columns)
    out = None if refused == "out" else rows(columns)
    order = order_of_five(submodule)
    options = {"fan": 2, "scatter": False}
    met = {"other": rows(columns), "other_fan": 1, "gates": torch.rand(5, 1)}
    x = rows(depth, torch.float16 if refused == "half" else torch.bfloat16)
    operands = (x, stack(), last, low, factor, order, out)
    options |= met
    dots = module.prefer_compiled(*operands, **options)
    ((name, given, kept),) = asked
    assert name == ("compiled" if refused == "nothing" else "triton")
    if refused != "nothing":
        assert all(a is b for a, b in zip(given, operands, strict=True)) and kept == options
        return
    assert given[0] is operands[0] and given[1] is operands[1][0]
    assert given[3] is operands[1][2]
    assert given[4:7] == (STORED, 64, last)
    assert given[7] is low and given[8].dtype == torch.bfloat16
    assert given[9] is None and given[10] is None
    assert given[13] is out and given[14:] == (2, False, 0, 1, None, False)
    # The gates wait for the rows that the product's meet.
    assert dots[:3] == (out, met["other"], met["gates"]) and dots[5:] == (1, False)
    for name in met:
        del options[name]
    assert module.prefer_compiled(*operands, **options, gates=met["gates"]) is None
    assert torch.equal(asked[-1][1][10], met["gates"])
