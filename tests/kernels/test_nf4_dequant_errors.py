"""What nf4_dequant refuses: every message names the argument."""

from __future__ import annotations

import pytest
import torch

from .test_nf4_dequant import Stack

BAD = {
    "packed must be contiguous": {"packed": lambda a: a["packed"].reshape(-1, 2).T},
    "packed holds 95 bytes": {"packed": lambda a: a["packed"][:-1]},
    "blocksize must be one of": {"blocksize": lambda a: 48},
    "expert_shape must hold positive sizes": {"expert_shape": lambda a: (8, 0)},
    "expert_shape must hold positive sizes, got ()": {"expert_shape": lambda a: ()},
    "dtype must be one of": {"dtype": lambda a: torch.float64},
    "active_experts must be a vector of int32 or int64 ids, got torch.float32": {
        "active_experts": lambda a: torch.zeros(2)
    },
    "active_experts must be a vector of int32 or int64 ids, got torch.int64 of shape (1, 1)": {
        "active_experts": lambda a: torch.zeros(1, 1, dtype=torch.long)
    },
    "active_experts must be contiguous": {
        "active_experts": lambda a: torch.zeros(4, dtype=torch.long, device=a["packed"].device)[::2]
    },
    "absmax must be contiguous torch.float32": {"absmax": lambda a: a["absmax"].double()},
    "absmax must have 3 elements": {"absmax": lambda a: a["absmax"][:-1]},
    "codebook must have 16 elements": {"codebook": lambda a: a["absmax"]},
    "codebook must be contiguous torch.float32": {
        "codebook": lambda a: torch.zeros(16, dtype=torch.float16, device=a["packed"].device)
    },
    "give all three or none": {"absmax_scale": lambda a: a["absmax"]},
    "absmax must be contiguous torch.uint8": {
        "absmax_code": lambda a: a["absmax"],
        "absmax_scale": lambda a: a["absmax"],
        "absmax_offset": lambda a: 0.0,
    },
    "absmax_code must have 256 elements": {
        "absmax": lambda a: a["absmax"].to(torch.uint8),
        "absmax_code": lambda a: a["absmax"],
        "absmax_scale": lambda a: a["absmax"],
        "absmax_offset": lambda a: 0.0,
    },
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(opt, device, message):
    arguments = Stack(1, (8, 24)).arguments(device)
    arguments["active_experts"] = torch.zeros(1, dtype=torch.long, device=device)
    changed = {name: change(arguments) for name, change in BAD[message].items()}
    with pytest.raises(ValueError) as caught:
        opt.nf4_dequant(**{**arguments, **changed})
    assert message in str(caught.value)


WRONG_TYPES = {
    "packed must be torch.Tensor, got NoneType": {"packed": None},
    "absmax must be torch.Tensor, got NoneType": {"absmax": None},
    "active_experts must be torch.Tensor, got list": {"active_experts": [1]},
    "codebook must be torch.Tensor or NoneType, got list": {"codebook": [0.0] * 16},
    "absmax_code must be torch.Tensor or NoneType, got tuple": {"absmax_code": ()},
    "absmax_scale must be torch.Tensor or NoneType, got float": {"absmax_scale": 1.0},
    "absmax_offset must be torch.Tensor or Real or NoneType, got str": {"absmax_offset": "0"},
    "blocksize must be an integer, got 64.0": {"blocksize": 64.0},
    "expert_shape must be a sequence of integers, got (8.0, 24)": {"expert_shape": (8.0, 24)},
    "expert_shape must be a sequence of integers, got 192": {"expert_shape": 192},
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_wrong_types_are_named(opt, device, message):
    arguments = Stack(1, (8, 24)).arguments(device)
    arguments["active_experts"] = torch.zeros(1, dtype=torch.long, device=device)
    with pytest.raises(TypeError) as caught:
        opt.nf4_dequant(**{**arguments, **WRONG_TYPES[message]})
    assert message in str(caught.value)


TENSORS = ("absmax", "codebook", "absmax_code", "absmax_scale", "absmax_offset", "packed")


@pytest.mark.parametrize("name", TENSORS)
def test_gradients_are_refused(opt, device, name):
    """They would be zero, hence silently wrong. Without grad mode nobody asks for them."""
    nested = name.startswith("absmax_")
    arguments = Stack(2, (8, 24), nested=nested, custom_codebook=True).arguments(device)
    arguments["active_experts"] = torch.ones(1, dtype=torch.long, device=device)
    arguments["packed"] = arguments["packed"].view(torch.bfloat16)
    expected = opt.nf4_dequant(**arguments)
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name} requires a gradient"):
        opt.nf4_dequant(**arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = opt.nf4_dequant(**arguments)
        assert not actual.requires_grad
        assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))
    assert not expected.requires_grad


def test_checks_while_a_graph_is_traced(opt, device):
    """The shape may be symbolic and a size may come from a tensor; the checks stay silent."""
    arguments = Stack(5, (16, 24), nested=True).arguments(device)
    arguments["absmax_offset"] = 0.25
    del arguments["expert_shape"]

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def decode(like: torch.Tensor, ids: torch.Tensor, blocksize: int) -> torch.Tensor:
        return opt.nf4_dequant(
            active_experts=ids, expert_shape=like.shape, **{**arguments, "blocksize": blocksize}
        )

    like, ids = torch.empty(16, 24, device=device), torch.tensor([4, 1], device=device)
    eager = opt.nf4_dequant(active_experts=ids, expert_shape=(16, 24), **arguments)
    assert torch.equal(decode(like, ids, 64), eager)
