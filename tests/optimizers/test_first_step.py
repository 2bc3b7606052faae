"""Before the first step an optimizer has no state and takes no memory; then all of it at once."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from .._compare import assert_all_same_bits
from ._steps import parameters, train
from .test_state import MAKERS, SHAPES, assert_same_state, muon, muon_adamw, state_tensors

ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest", "stochastic", "residual"])
# Values that a product with 0 or a sum with 0 would change.
DELICATE = (-0.0, float("inf"), float("-inf"), 1e-40, 65504.0)


def model_of(params) -> nn.Module:
    model = nn.Module()
    for number, param in enumerate(params):
        model.register_parameter(f"p{number}", param)
    return model


def without_gradients(dtype=torch.float32, device="cpu") -> list[nn.Parameter]:
    params = parameters(SHAPES, dtype=dtype, device=device)
    with torch.no_grad():
        for param in params:
            param.grad = None
            delicate = torch.tensor(DELICATE, device=device).to(dtype)
            param.view(-1)[: len(DELICATE)] = delicate[: param.numel()]
    return params


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@MAKERS
def test_no_tensor_is_alive_before_the_first_step(opt, device, make) -> None:
    """As of torch's AdamW; also after report() and state_dict(), which look at everything."""
    params = parameters(SHAPES, device=device)
    before = tensors_alive()
    theirs = torch.optim.AdamW(params)
    of_adamw = tensors_alive() - before
    del theirs
    optimizer = make(opt, params)
    assert tensors_alive() - before <= of_adamw
    assert "0 bytes of state" in optimizer.report(verbose=True)
    optimizer.state_dict()
    assert not optimizer.state
    assert tensors_alive() - before <= of_adamw


@MAKERS
def test_an_empty_state_dict_goes_out_and_in(opt, device, make) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    train(optimizer, params, 1)
    optimizer.load_state_dict(saved)  # as torch.optim does: the state is gone
    assert not optimizer.state
    fresh = make(opt, params)
    fresh.load_state_dict(copy.deepcopy(saved))
    fresh.step()
    assert all(fresh.state[param] for param in params[1:])


def test_checkpoints_before_the_first_step(opt, device, tmp_path) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    opt.save_optimizer(optimizer, tmp_path)
    resumed = muon(opt, params, lr=0.5)
    opt.load_optimizer(resumed, tmp_path)
    assert not resumed.state
    assert resumed.param_groups[0]["lr"] == 0.05


def test_a_group_that_is_added_later_gets_its_state_with_the_next_step(opt, device) -> None:
    params = parameters([(6, 4), (4, 6)], device=device)
    optimizer = opt.Muon(params[:1])
    optimizer.step()
    held = optimizer.state[params[0]]["momentum_buffer"]
    optimizer.add_param_group({"params": params[1:], "use_muon": True})
    assert params[1] not in optimizer.state
    saved = optimizer.state_dict()  # whole, whenever it is asked for
    assert saved["state"].keys() == {0, 1}
    optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"] is held
    assert optimizer.state[params[1]]["momentum_buffer"].any()


def test_a_first_step_is_not_captured(opt, device, monkeypatch) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    saved = copy.deepcopy(optimizer.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="take one step or load a state_dict before"):
            optimizer.step()
    assert not optimizer.state
    optimizer.load_state_dict(saved)
    optimizer.step()


@MAKERS
def test_offload_before_the_first_step(opt, device, make) -> None:
    params, others = (parameters(SHAPES, device=device) for _ in range(2))
    offloaded, beside = make(opt, params), make(opt, others)
    offloaded.turn_on_cpu_offload()
    train(offloaded, params, 2)
    train(beside, others, 2)
    assert offloaded.state[params[1]]["momentum_buffer"].device.type == "cpu"
    offloaded.turn_off_cpu_offload()
    assert_same_state(offloaded, beside)


@ROUNDINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tensor_rate", [False, True], ids=["float", "tensor"])
@MAKERS
def test_the_initial_step_of_dcp_changes_nothing(
    opt, device, make, dtype, rounding, tensor_rate
) -> None:
    """Zero gradients at a zero rate: parameters keep their bits and counters are 0."""
    params = without_gradients(dtype, device)
    before = [param.detach().clone() for param in params]
    rate = torch.tensor(0.05, device=device) if tensor_rate else 0.05
    optimizer = make(opt, params, lr=rate, rounding=rounding)
    get_optimizer_state_dict(model_of(params), optimizer)
    for param, old in zip(params, before, strict=True):
        words = {2: torch.int16, 4: torch.int32}[param.dtype.itemsize]
        assert torch.equal(param.detach().view(words), old.view(words))
        assert param.grad is None
    found = state_tensors(optimizer)
    assert {"exp_avg", "momentum_buffer", "step"} <= {key for key, _ in found}
    assert not any(tensor.any() for _, tensor in found)


@MAKERS
def test_dcp_loads_into_an_optimizer_that_took_no_step(opt, device, make) -> None:
    params, others = (parameters(SHAPES, device=device) for _ in range(2))
    optimizer = make(opt, params)
    train(optimizer, params, 2)
    for param in params:
        param.grad = None
    saved = copy.deepcopy(get_optimizer_state_dict(model_of(params), optimizer))
    with torch.no_grad():
        for mine, theirs in zip(others, params, strict=True):
            mine.copy_(theirs)
            mine.grad = None
    resumed = make(opt, others)
    set_optimizer_state_dict(model_of(others), resumed, saved)
    assert_same_state(resumed, optimizer)


def test_a_first_step_at_rate_zero_with_gradients_is_a_step(opt, device) -> None:
    """As warm-up schedules begin: momentum is kept and the step is counted."""
    params = parameters(SHAPES, device=device)
    before = [param.detach().clone() for param in params]
    optimizer = muon_adamw(opt, params, lr=0.0, none_grad=True)
    optimizer.step()
    assert optimizer.state[params[1]]["momentum_buffer"].any()
    assert optimizer.state[params[5]]["step"] == 1
    assert_all_same_bits(params, before)


def test_a_second_step_of_zeros_is_counted(opt, device) -> None:
    params = parameters([(4, 6), (5,)], device=device)
    groups = [{"kind": "adamw", "params": params, "lr": 0.0}]
    optimizer = opt.MuonAdamW(groups)
    for steps in (0, 1):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == steps
    assert all(param.grad is not None for param in params)


def test_a_step_of_zeros_drops_gradients_where_steps_do(opt, device) -> None:
    (param,) = parameters([(4, 6)], device=device)
    param.grad = torch.zeros_like(param)
    opt.Muon([param], lr=0.0, none_grad=True).step()
    assert param.grad is None
