"""QuantizedExperts: quantised expert by expert, moved, saved and loaded without a 16-bit stack."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits

SHAPE = (5, 24, 40)
ODD = (5, 7, 9)  # 63 elements per expert
FORMATS = (
    {},
    {"nested": True},
    {"quant_type": "fp4"},
    {"blocksize": 256},  # more than an odd expert has
)


def draw(shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def tensors(module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def assert_equal(left, right) -> None:
    assert left.quantized_weight().shape == right.quantized_weight().shape
    assert tensors(left).keys() == tensors(right).keys()
    for name, value in tensors(left).items():
        assert_same_bits(tensors(right)[name], value)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("shape", (SHAPE, ODD, (1, 1, 1)), ids=str)
def test_expert_by_expert_equals_the_whole_stack(opt, shape, options):
    """Blocks that straddle experts are those of the flattened stack."""
    module = opt.moe.QuantizedExperts.from_weight(draw(shape), **options)
    blocksize, quant_type = options.get("blocksize", 64), options.get("quant_type", "nf4")
    packed, absmax = opt.nf4_quantize(draw(shape), blocksize, quant_type=quant_type)
    assert_same_bits(module.packed, packed)
    if not options.get("nested"):
        assert_same_bits(module.absmax, absmax)
    decoded = module.decode(dtype=torch.float32)
    scale = absmax.max()
    assert (decoded - draw(shape).float()).abs().max() <= 0.2 * scale
    assert module.decode().dtype == torch.bfloat16


def test_nested_absmax_is_close_and_smaller(opt):
    shape = (4, 64, 128)
    plain = opt.moe.QuantizedExperts.from_weight(draw(shape))
    nested = opt.moe.QuantizedExperts.from_weight(draw(shape), nested=True)
    assert nested.absmax.dtype == torch.uint8
    assert nested.quantized_weight().nbytes < plain.quantized_weight().nbytes
    ours, exact = nested.decode(dtype=torch.float32), plain.decode(dtype=torch.float32)
    assert (ours - exact).norm() <= 0.02 * exact.norm()


def test_counts_and_shapes_of_experts_are_checked(opt):
    make = opt.moe.QuantizedExperts.from_experts
    stack = draw(SHAPE).unbind(0)
    with pytest.raises(ValueError, match="holds 4 of 5"):
        make(stack[:4], SHAPE)
    with pytest.raises(ValueError, match="expected 5 experts"):
        make([*stack, stack[0]], SHAPE)
    with pytest.raises(ValueError, match=r"expert 0 has shape \(24, 39\)"):
        make([stack[0][:, 1:]], SHAPE)
    with pytest.raises(ValueError, match="experts is empty"):
        make([], SHAPE)
    with pytest.raises(ValueError, match="blocksize must be one of"):
        opt.moe.QuantizedExperts(SHAPE, blocksize=48)
    with pytest.raises(ValueError, match="quant_type must be one of"):
        opt.moe.QuantizedExperts(SHAPE, quant_type="int4")
    with pytest.raises(ValueError, match=r"shape \(E, N, K\)"):
        opt.moe.QuantizedExperts((5, 0, 4))


def test_each_expert_is_released_before_the_next_is_read(opt):
    """At most two experts are alive: the one being quantised and the one being read."""
    import weakref

    alive, most = [], 0

    def experts():
        nonlocal most
        for expert in range(8):
            tensor = torch.full((64, 64), float(expert + 1))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(entry() is not None for entry in alive))
            yield tensor
            del tensor

    opt.moe.QuantizedExperts.from_experts(experts(), (8, 64, 64))
    assert most <= 2


@pytest.mark.parametrize("change", ("half", "bfloat16", "double"))
@pytest.mark.parametrize("options", FORMATS[:2], ids=str)
def test_dtypes_of_the_model_leave_the_format_alone(opt, change, options):
    """A model cast to bfloat16 must not round absmax."""
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), **options)
    before = copy.deepcopy(module)
    getattr(nn.Sequential(module), change)()
    assert_equal(module, before)
    module.to(torch.float16)
    assert_equal(module, before)


def test_devices_are_followed(opt):
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), nested=True)
    moved = copy.deepcopy(module).to("meta")
    assert {parameter.device.type for parameter in moved.parameters()} == {"meta"}
    assert moved.quantized_weight().device.type == "meta"
    back = module.quantized_weight().to("cpu")
    assert_same_bits(back.decode(), module.decode())
    assert back.to(torch.float16) is back


@pytest.mark.gpu
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_moved_to_the_gpu_and_decoded_there(opt, device, options):
    module = opt.moe.QuantizedExperts.from_weight(draw(ODD), **options)
    expected = module.decode(dtype=torch.float32)
    actual = module.to(device).decode(dtype=torch.float32)
    assert actual.device.type == "cuda"
    assert torch.equal(actual.cpu(), expected)


def test_nothing_trains_and_nothing_is_a_buffer(opt):
    """DistributedDataParallel broadcasts buffers in every step."""
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), nested=True)
    assert not list(module.buffers())
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("shape", (SHAPE, ODD), ids=str)
def test_state_dict_round_trip(opt, shape, options):
    module = opt.moe.QuantizedExperts.from_weight(draw(shape), **options)
    fresh = opt.moe.QuantizedExperts(shape, **options)
    fresh.load_state_dict(module.state_dict())
    assert_equal(fresh, module)
    assigned = opt.moe.QuantizedExperts(shape, **options, device="meta")
    assigned.load_state_dict(module.state_dict(), assign=True)
    assert_equal(assigned, module)


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_safetensors_round_trip_from_the_file_alone(opt, tmp_path, options):
    safetensors = pytest.importorskip("safetensors.torch")
    module = opt.moe.QuantizedExperts.from_weight(draw(ODD), **options)
    file = tmp_path / "experts.safetensors"
    safetensors.save_file(nn.ModuleDict({"down_proj": module}).state_dict(), file)
    state = safetensors.load_file(file)
    loaded = opt.moe.QuantizedExperts.from_state_dict(state, "down_proj.")
    assert_equal(loaded, module)
    assert_same_bits(loaded.decode(), module.decode())


def test_a_state_of_another_format_is_refused_before_anything_is_written(opt):
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE))
    before = copy.deepcopy(module)
    other = opt.moe.QuantizedExperts.from_weight(-draw(SHAPE), quant_type="fp4")
    with pytest.raises(ValueError, match="the state describes experts"):
        module.load_state_dict(other.state_dict())
    assert_equal(module, before)
    with pytest.raises(ValueError, match="no description of 4-bit experts"):
        opt.moe.QuantizedExperts.from_state_dict({"packed": module.packed})


def test_from_a_record_without_a_copy(opt):
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), nested=True, strategy="selective")
    again = opt.moe.QuantizedExperts.from_quantized(module.transpose(1, 2))
    assert again.packed.data_ptr() == module.packed.data_ptr()
    assert again.strategy == "selective"
    assert_equal(again, module)


@pytest.mark.parametrize("packed", [("down_proj",), ("gate_up_proj", "down_proj")])
def test_merging_an_adapter_is_refused_before_anything_is_written(opt, packed):
    """With down in 4 bits alone, too: gate_up comes first."""
    experts = opt.moe.Experts(4, 64, 32)
    experts.add_adapter(r=2, alpha=4)
    for entry in experts.expert_lora.values():
        torch.nn.init.normal_(entry.lora_B["default"].weight)
    for name in packed:
        stack = opt.moe.QuantizedExperts.from_weight(experts._parameters.pop(name))
        experts.add_module(name, stack)
    before = {key: value.clone() for key, value in experts.state_dict().items()}
    for merge in (experts.merge, experts.merge_and_unload):
        with pytest.raises(ValueError, match="the weight is 4-bit: an adapter cannot be merged"):
            merge()
    assert not experts.expert_lora.merged
    for key, value in experts.state_dict().items():
        assert_same_bits(value, before[key])
