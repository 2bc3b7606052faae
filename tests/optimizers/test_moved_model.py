"""A model that is moved, cast or given other memory after its optimizer was constructed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits
from ._steps import new_gradients, train, values

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def model_of(dtype=torch.float32, device="cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).to(device, dtype)


def optimizer_of(opt, model: nn.Module, **options):
    return opt.Muon(opt.get_default_muon_param_groups(model), lr=5e-3, **options)


def assert_goes_on_as_loaded(opt, model, optimizer, after, change, **options) -> None:
    """As if state were saved, changed entry by entry, and loaded beside the model as it is now."""
    saved = copy.deepcopy(optimizer.state_dict())
    model.to(after)
    twin = copy.deepcopy(model)
    other = optimizer_of(opt, twin, **options)
    for state in saved["state"].values():
        state |= {key: change(key, value) for key, value in state.items()}
    other.load_state_dict(saved)
    train(optimizer, [*model.parameters()], 2, seed=50)
    train(other, [*twin.parameters()], 2, seed=50)
    assert_all_same_bits(model.parameters(), twin.parameters())


@pytest.mark.parametrize("after", DTYPES, ids=str)
@pytest.mark.parametrize("before", DTYPES, ids=str)
def test_state_follows_to_another_dtype(opt, device, before, after) -> None:
    """model.double() casts what is not a count."""
    model = model_of(before, device)
    optimizer = optimizer_of(opt, model, beta2=0.9)
    train(optimizer, [*model.parameters()], 2)
    wide = torch.promote_types(after, torch.float32)
    cast = lambda key, value: value if key == "step" else value.to(wide)  # noqa: E731
    assert_goes_on_as_loaded(opt, model, optimizer, after, cast, beta2=0.9)


def test_what_rounding_dropped_goes_with_its_dtype(opt, device) -> None:
    """Of a bfloat16 parameter; in one of float16 the same 16 bits would be another number."""
    model = model_of(torch.bfloat16, device)
    optimizer = optimizer_of(opt, model, rounding="residual")
    train(optimizer, [*model.parameters()], 3)
    assert optimizer.state[model[0].weight]["rounding_residual"].any()
    kept = lambda key, value: value * (key != "rounding_residual")  # noqa: E731
    half = torch.float16
    assert_goes_on_as_loaded(opt, model, optimizer, half, kept, rounding="residual")


@pytest.mark.gpu
def test_state_follows_to_the_gpu(opt, device) -> None:
    """model.cuda() between two steps."""
    model = model_of()
    optimizer = optimizer_of(opt, model)
    train(optimizer, [*model.parameters()], 2)
    kept = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    model.to(device)
    optimizer.param_groups[0]["momentum"] = 0.0
    train(optimizer, [*model.parameters()], 1)
    for state in optimizer.state.values():
        assert all(value.device.type == device.type for value in state.values())
    assert not torch.equal(optimizer.state[model[0].weight]["momentum_buffer"].cpu(), kept)


def test_other_memory_of_the_same_shape(opt, device) -> None:
    """`.data` of another tensor, as trainers with flat buffers give: the next step writes to it."""
    model, twin = model_of(device=device), model_of(device=device)
    ours, theirs = optimizer_of(opt, model), optimizer_of(opt, twin)
    train(ours, [*model.parameters()], 2)
    train(theirs, [*twin.parameters()], 2)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = flat.split([p.numel() for p in model.parameters()])
    for param, part in zip(model.parameters(), parts, strict=True):
        param.data = part.view(param.shape)
    before = flat.clone()
    train(ours, [*model.parameters()], 2, seed=50)
    train(theirs, [*twin.parameters()], 2, seed=50)
    assert_all_same_bits(model.parameters(), twin.parameters())
    assert (flat != before).any()


def test_other_memory_of_another_shape(opt, device) -> None:
    model = model_of(device=device)
    optimizer = optimizer_of(opt, model)
    train(optimizer, [*model.parameters()], 2)
    model[0].weight.data = torch.ones(4, 6, device=device)
    new_gradients([*model.parameters()], seed=50)
    before = values(model.parameters())
    with pytest.raises(ValueError, match=r"'0.weight': momentum_buffer is .*\(8, 6\).*reshape"):
        optimizer.step()
    assert_all_same_bits(before, model.parameters())


def test_state_in_host_memory_says_what_to_call(opt, device) -> None:
    model = model_of(device=device)
    optimizer = optimizer_of(opt, model)
    train(optimizer, [*model.parameters()], 1)
    optimizer.turn_on_cpu_offload()
    model.double()
    new_gradients([*model.parameters()], seed=50)
    with pytest.raises(ValueError, match=r"call turn_off_cpu_offload\(\) before the model is mo"):
        optimizer.step()


def test_a_model_on_meta(opt, device) -> None:
    """to_empty makes new parameters: the optimizer would step those that nobody trains any more."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    optimizer = optimizer_of(opt, model)
    assert "0.weight" in optimizer.report(verbose=True)
    model.to_empty(device=device)
    new_gradients([*model.parameters()], seed=0)
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device.*to_empty"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]
