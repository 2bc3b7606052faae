"""Formats: a made-up one is packed, saved, offloaded and multiplied, since FORMATS has it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits, relative_error


@pytest.fixture
def formats(submodule, monkeypatch):
    """The module, which knows 8-bit rows beside its own formats."""
    module = submodule("kernels.quant.formats")

    @dataclasses.dataclass(frozen=True)
    class Rows8(module.Format):
        """Signed bytes, and a scale for every row of an expert."""

        quant_type: str = "rows8"
        levels: int = 127

        def layout(self, stored):
            rows = stored[0] * stored[1]
            return {
                "packed": (math.prod(stored), torch.uint8),
                "scales": (rows, torch.float32),
            }

        def unit(self, stored):
            return stored[2]

        def pack(self, flat, stored):
            rows = flat.float().view(-1, stored[2])
            scales = rows.abs().amax(1) / self.levels
            return (rows / scales[:, None]).round().to(torch.int8), scales

        def decode(self, tensors, ids, shape, dtype):
            packed, scales = tensors
            codes = packed.view(torch.int8).view(-1, *shape)[ids.long()].float()
            return (codes * scales.view(-1, shape[0], 1)[ids.long()]).to(dtype)

    monkeypatch.setitem(module.FORMATS, "rows8", Rows8)
    yield module
    module.format_of.cache_clear()
    module.format_of_text.cache_clear()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("strategy", ("auto", "chunked", "selective"))
@pytest.mark.parametrize("backend", ("triton", "reference"))
def test_a_format_is_multiplied_without_being_known(opt, formats, device, backend, strategy):
    experts = opt.moe.QuantizedExperts.from_weight(
        draw(4, 24, 40).to(device), quant_type="rows8", strategy=strategy
    )
    dense = experts.decode(dtype=torch.float32)
    assert relative_error(dense, draw(4, 24, 40).to(device)) < 0.01
    order = opt.moe.expert_sort(torch.tensor([[3, 0], [0, 3], [-1, 2]], device=device), 4)
    x = draw(3, 40).to(device).requires_grad_()
    found, expected = (
        opt.moe.grouped_lora_linear(x, one.transpose(1, 2), order, backend=backend)
        for one in (experts, dense)
    )
    assert relative_error(found, expected) <= 1e-6
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    assert relative_error(*gradients) <= 1e-6
    with pytest.raises(ValueError, match=r"strategy=.fused. needs a format whose product"):
        opt.moe.choose_strategy(
            6, 4, "fused", fusable=experts.quantized_weight().registers_refusal is None
        )


def test_a_format_is_saved_moved_and_offloaded_without_being_known(opt, formats):
    experts = opt.moe.QuantizedExperts.from_weight(draw(4, 24, 40), quant_type="rows8", levels=100)
    assert set(experts.state_dict()) == {"packed", "scales", "_extra_state"}
    again = opt.moe.QuantizedExperts.from_state_dict(experts.state_dict())
    assert again.format == experts.format and again.format.levels == 100
    assert_same_bits(again.half().decode(), experts.decode())
    offload = opt.moe.ExpertOffload(nn.ModuleDict({"down_proj": experts}), device="cpu")
    assert_same_bits(experts.decode(), again.decode())
    offload.turn_off()
    said = opt.moe.explain_quantized(experts, 64)
    assert "no product decodes rows8 in registers" in said


def test_names_and_options(formats):
    nf4 = formats.format_of("nf4", blocksize=128, nested=True)
    assert formats.format_of_text(nf4.text) == nf4
    assert nf4.options() == {"quant_type": "nf4", "blocksize": 128, "nested": True}
    assert formats.format_of() == formats.format_of("nf4") != formats.format_of("fp4")
    with pytest.raises(ValueError, match=r"quant_type must be one of .*, got 'int4'"):
        formats.format_of("int4")
    with pytest.raises(ValueError, match=r"nf4 has the options .*blocksize.*, got levels"):
        formats.format_of("nf4", levels=3)
    with pytest.raises(ValueError, match="blocksize must be one of"):
        formats.format_of("fp4", blocksize=48)
