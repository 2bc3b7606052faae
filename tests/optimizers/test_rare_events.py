"""What long random runs found: events that each step survives, and a resumed run survives alike."""

from __future__ import annotations

import copy

import pytest
import torch

from ._steps import new_gradients


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(values.to(dtype))


def test_residuals_beside_parameters_that_need_none(opt) -> None:
    """A group of two dtypes; the float32 parameter has no residual to mark as written."""
    params = [parameter(6, dtype=torch.bfloat16), parameter(6, dtype=torch.float32, seed=1)]
    optimizer = opt.MuonAdamW(
        [{"kind": "adamw", "params": params, "lr": 0.1, "rounding": "residual"}]
    )
    new_gradients(params, seed=0)
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [1.0, 1.0]


def test_host_memory_that_is_filled_in_inference_mode(opt) -> None:
    params = [parameter(8, 8)]
    optimizer = opt.Muon(params, lr=0.01)
    optimizer.turn_on_cpu_offload()
    new_gradients(params, seed=0)
    with torch.inference_mode():
        optimizer.step()
    before = params[0].detach().clone()
    new_gradients(params, seed=1)
    optimizer.step()
    assert not torch.equal(before, params[0])


def test_second_moments_that_were_switched_off_begin_anew(opt) -> None:
    """In the run that goes on as in the one that is resumed from its checkpoint."""
    runs = []
    for resumed in (False, True):
        params = [parameter(8, 6)]
        optimizer = opt.Muon(params, lr=0.01, beta2=0.9)
        for number, beta2 in enumerate((0.9, None, 0.9)):
            optimizer.param_groups[0]["beta2"] = beta2
            new_gradients(params, seed=number)
            optimizer.step()
            if beta2 is None and resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = opt.Muon(params, lr=0.01, beta2=0.9)
                optimizer.load_state_dict(saved)
        runs.append((params[0].detach(), optimizer.state[params[0]]["second_momentum_buffer"]))
    for going_on, resumed in zip(*runs, strict=True):
        assert torch.equal(going_on, resumed)


def test_none_grad_of_a_parameter_without_elements(opt) -> None:
    params = [parameter(0, 4), parameter(4, 4)]
    optimizer = opt.Muon(params, lr=0.01, none_grad=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [param.grad for param in params] == [None, None]


def test_betas_of_nothing_after_a_cycle(opt) -> None:
    params = [parameter(4)]
    optimizer = opt.MuonAdamW([{"kind": "adamw", "params": params, "lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    new_gradients(params, seed=0)
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(ValueError, match="betas must be two numbers"):
        optimizer.step()


def test_random_bits_that_were_switched_off_begin_anew(opt) -> None:
    """Stochastic rounding on, off and on again, in a run that goes on and in a resumed one."""
    runs = []
    for resumed in (False, True):
        params = [parameter(8, 6, dtype=torch.bfloat16)]
        optimizer = opt.Muon(params, lr=0.01, rounding="stochastic")
        for number, rounding in enumerate(("stochastic", "nearest", "stochastic")):
            optimizer.param_groups[0]["rounding"] = rounding
            new_gradients(params, seed=number)
            optimizer.step()
            if rounding == "nearest" and resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = opt.Muon(params, lr=0.01, rounding="stochastic")
                optimizer.load_state_dict(saved)
        runs.append(params[0].detach())
    assert torch.equal(*runs)


def test_a_saved_group_without_parameters_is_named(opt) -> None:
    optimizer = opt.Muon([parameter(4, 4)], lr=0.01)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["params"]
    with pytest.raises(ValueError, match="saved group 0 has no 'params'"):
        optimizer.load_state_dict(saved)


def test_one_beta_is_refused(opt) -> None:
    x = [torch.ones(2)]
    with pytest.raises(ValueError, match="betas must be two"):
        opt.kernels.adamw(
            x,
            x,
            [torch.zeros(2)],
            [torch.zeros(2)],
            [torch.zeros(())],
            lr=0.1,
            betas=(0.9,),
            eps=1e-8,
            weight_decay=0.0,
        )
