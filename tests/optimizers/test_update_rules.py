"""Whole steps against the predecessors' rules, torch.optim.AdamW and torch.optim.Muon."""

import math

import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most
from ._steps import NANOCHAT, PlainMuon, new_gradients, parameters, train

SHAPES = [(24, 10), (10, 24), (16, 16), (1, 7), (7, 1)]
# Both sides compute in float64; five polynomials of slope up to 8.2 amplify its rounding by less
# than 8.2^5 = 4e4, ten steps add up.
FLOAT64 = 1e-10
# The same in float32 (eps 1.2e-7): only well-conditioned Gaussians are used, whose singular values
# reach the flat part of the schedule, where errors are no longer amplified.
FLOAT32 = 2e-5


RULES = {
    "Muon": ("Muon", {}),
    "without nesterov": ("Muon", {"nesterov": False}),
    "moving average": ("Muon", {"momentum_form": "ema", "nesterov": False}),
    "cautious": ("Muon", {"cautious": True, "beta2": 0.9}),
    "shaped decay": ("Muon", {"shaped_decay": True}),
    "MuonAdamW": ("MuonAdamW", {}),
    "without beta2": ("MuonAdamW", {"beta2": None}),
    "raw decay": ("MuonAdamW", {"shaped_decay": False, "cautious": False}),
    "rows of norm 1": ("MuonAdamW", {"row_equilibration": True, "beta2": None}),
    "a polar factor's norm": ("MuonAdamW", {"renormalize": True, "beta2": None}),
    "both": ("Muon", {"row_equilibration": True, "renormalize": True, "beta2": 0.9}),
    "heavy ball": ("MuonAdamW", {"momentum_form": "heavy_ball", "momentum": 0.9}),
}


@pytest.mark.sees_defect("beta2=None is instant normalization instead of none")
@pytest.mark.sees_defect("beta2 is rounded to bfloat16")
@pytest.mark.sees_defect("lr and weight decay are rounded to bfloat16")
@pytest.mark.sees_defect("the decay depends on the shape factor, without a choice")
@pytest.mark.kernels_ci
@pytest.mark.parametrize(("name", "options"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ten_steps_follow_the_rule(opt, device, shape, name, options) -> None:
    (param,) = parameters([shape], dtype=torch.float64, device=device)
    options = {"lr": 0.02, "weight_decay": 0.3, **options}
    own = NANOCHAT if name == "MuonAdamW" else {}
    expected = PlainMuon(param.detach().clone(), **{**own, **options})
    optimizer = getattr(opt, name)([{"kind": "muon", "params": [param], **options}])
    for step in range(10):
        new_gradients([param], seed=step)
        expected.step(opt, param.grad)
        optimizer.step()
    assert_error_at_most(param.detach(), expected.param, FLOAT64)


@pytest.mark.sees_defect("the norm is taken in bfloat16")
@pytest.mark.parametrize("shape", [(48, 96), (96, 48)], ids=str)
def test_float32_step_is_close_to_float64(opt, device, shape) -> None:
    (param,) = parameters([shape], device=device)
    (exact,) = parameters([shape], dtype=torch.float64, device=device)
    for p in (param, exact):
        optimizer = opt.MuonAdamW(
            [{"kind": "muon", "params": [p], "lr": 0.02, "dtype": p.dtype, "weight_decay": 0.1}]
        )
        train(optimizer, [p], 5)
    assert_error_at_most(param.detach(), exact.detach(), FLOAT32)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("lr", [3e-3, "tensor"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_half_equals_torch(opt, device, weight_decay, lr) -> None:
    """With torch's own tolerances (rtol 1e-5, atol 1e-6) over 50 steps."""
    lr = torch.tensor(3e-3, device=device) if lr == "tensor" else lr
    shapes = [(33,), (4, 5), (), (2, 3, 4)]
    ours, theirs = parameters(shapes, device=device), parameters(shapes, device=device)
    optimizer = opt.MuonAdamW(
        [{"kind": "adamw", "params": ours, "lr": lr, "weight_decay": weight_decay}]
    )
    torch_optimizer = torch.optim.AdamW(
        theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay
    )
    train(optimizer, ours, 50)
    train(torch_optimizer, theirs, 50)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_adamw_half_of_muon_uses_its_own_betas_and_shares_lr_and_decay(opt, device) -> None:
    ours, theirs = parameters([(9,)], device=device), parameters([(9,)], device=device)
    group = {"params": ours, "use_muon": False}
    optimizer = opt.Muon([group], lr=0.02, weight_decay=0.3, adamw_betas=(0.8, 0.9), adamw_eps=1e-3)
    torch_optimizer = torch.optim.AdamW(
        theirs, lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3
    )
    train(optimizer, ours, 10)
    train(torch_optimizer, theirs, 10)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.9999])
def test_bias_correction_keeps_its_digits_in_float32(submodule, device, beta) -> None:
    """1 - 0.9999 in float32 is off by 5e-4 of its value; -expm1(t log beta) by a few eps."""
    update = submodule("reference.update")
    param = torch.zeros(1, device=device)
    grad, step = torch.full((1,), 0.25, device=device), torch.zeros((), device=device)
    averages = torch.zeros(1, device=device), torch.zeros(1, device=device)
    options = {"lr": 1.0, "betas": (beta, beta), "eps": 0.0, "weight_decay": 0.0}
    update.adamw(param, grad, *averages, step, **options)
    # The first corrected step is exactly -lr sign(g); 8 roundings of 1.2e-7 / 2 each.
    assert abs(param.item() + 1.0) <= 8 * 6e-8


@pytest.mark.sees_defect(
    "torch.optim.Muon, bfloat16, nesterov=False: the division overwrites the momentum"
)
@pytest.mark.sees_defect("gram-newton-schulz divides the caller's float32 tensor in place")
def test_bfloat16_without_nesterov_keeps_its_momentum(opt, device) -> None:
    """torch.optim.Muon 2.13 normalizes its momentum in place there: 0.158 instead of 0.1."""
    param = nn.Parameter(torch.eye(4, device=device, dtype=torch.bfloat16))
    param.grad = torch.eye(4, device=device, dtype=torch.bfloat16)
    optimizer = opt.Muon([param], nesterov=False, momentum=0.9, momentum_form="ema")
    optimizer.step()
    expected = torch.eye(4, device=device) * (1 - 0.9)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], expected)


@pytest.mark.sees_defect(
    "ns_steps above 5 equals 5, below 5 it cuts a table made for 5",
    '"steps": options.ns_steps, ',
    '"steps": min(options.ns_steps, 5), ',
)
@pytest.mark.parametrize("steps", [1, 2, 4, 6, 9])
def test_every_step_count_is_honoured(opt, device, steps) -> None:
    """Nanochat truncates below 5 and ignores above 5; ours derives a schedule for each."""
    (param,) = parameters([(12, 20)], dtype=torch.float64, device=device)
    expected = PlainMuon(param.detach().clone(), 0.1, ns_steps=steps, **NANOCHAT)
    group = {"kind": "muon", "params": [param], "lr": 0.1, "ns_steps": steps}
    optimizer = opt.MuonAdamW([group])
    expected.step(opt, param.grad)
    optimizer.step()
    assert_error_at_most(param.detach(), expected.param, FLOAT64)


@pytest.mark.sees_defect(
    "the documentation claims an update of spectral norm lr, and 0.02 as a good default"
)
@pytest.mark.sees_defect("one learning-rate rule only")
@pytest.mark.parametrize(
    ("rule", "tall", "wide"),
    [
        ("match_rms_adamw", 0.2 * math.sqrt(24), 0.2 * math.sqrt(24)),
        ("original", 2.0, 1.0),
        ("spectral", 2.0, 0.5),
        (None, 2.0, 1.0),  # as in torch
        ("none", 1.0, 1.0),
        (lambda lr, rows, columns: lr * (rows + 2 * columns), 36.0, 54.0),
    ],
    ids=["match_rms_adamw", "original", "spectral", "None", "none", "callable"],
)
def test_learning_rate_rules(opt, device, rule, tall, wide) -> None:
    for shape, factor in (((24, 6), tall), ((6, 24), wide)):
        updates = []
        for adjust in (rule, "none"):
            (param,) = parameters([shape], dtype=torch.float64, device=device)
            before = param.detach().clone()
            opt.Muon([param], lr=0.01, weight_decay=0.0, adjust_lr_fn=adjust).step()
            updates.append(before - param.detach())
        assert_error_at_most(updates[0], factor * updates[1], FLOAT64)


@pytest.mark.sees_defect("the portable update evens rows out by other arithmetic than the kernel")
@pytest.mark.parametrize("shape", [(1, 6), (7, 1), (5, 13), (33, 4)], ids=str)
def test_a_rate_that_is_a_tensor_evens_out_with_the_same_bits(opt, device, shape) -> None:
    """From zero parameters a decay takes nothing, so that both paths write the same update."""
    rule = lambda lr, rows, columns: torch.tensor(lr * 0.5)  # noqa: E731
    group = {"kind": "muon", "lr": 0.02, "beta2": 0.95, "adjust_lr_fn": rule, "shaped_decay": False}
    params = [nn.Parameter(torch.empty(shape, device=device)) for _ in range(2)]
    optimizers = [
        opt.MuonAdamW([{**group, "params": [param], "weight_decay": weight_decay}])
        for param, weight_decay in zip(params, (0.0, 0.3), strict=True)
    ]
    for step in range(30):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.detach().zero_()
            new_gradients([param], seed=step)
            optimizer.step()
        assert params[0].any()
        assert torch.equal(*params)
