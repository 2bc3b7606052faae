"""`rounding`: 16-bit parameters lose neither decay nor small updates, and bits repeat."""

import copy

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_same_bits
from ._steps import (
    CLASSES,
    every_cut,
    new_gradients,
    of_every_shape,
    parameters,
    train,
    values,
)

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def build(opt, name, params, **options):
    return every_cut(opt, name, params, **{"beta2": None, **options})


def float32_twins(params):
    twins = [nn.Parameter(param.detach().float()) for param in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad.float()
    return twins


def train_together(optimizers, params, steps: int, **options) -> None:
    """`steps` steps of every optimizer, on the gradients of the first list of parameters."""
    for step in range(steps):
        new_gradients(params[0], seed=step)
        for others in params[1:]:
            for param, other in zip(params[0], others, strict=True):
                other.grad = param.grad.to(other.dtype)
        for optimizer in optimizers:
            optimizer.step(**options)


@pytest.mark.kernels_ci
@CLASSES
@NARROW
@pytest.mark.parametrize("beta2", [None, 0.9])
def test_with_its_residual_a_parameter_is_a_float32_one(
    opt, submodule, device, name, dtype, beta2
) -> None:
    """Bit for bit in bfloat16; in float16 a residual counts 2^-40 where the parameter is tiny."""
    params = of_every_shape(dtype, device)
    twins = float32_twins(params)
    optimizer = build(opt, name, params, rounding="residual", beta2=beta2)
    other = build(opt, name, twins, beta2=beta2)
    train_together([optimizer, other], [params, twins], 5)
    join = submodule("reference.rounding").join
    for param, twin in zip(params, twins, strict=True):
        joined = join(param.detach(), optimizer.state[param]["rounding_residual"])
        if dtype == torch.bfloat16:
            assert_same_bits(joined, twin.detach())
        else:
            difference = (joined - twin.detach()).abs()
            assert not (difference > 5 * 2.0**-40 + 5 * 2.0**-24 * twin.detach().abs()).any()


@CLASSES
@NARROW
def test_stochastic_bits_are_those_of_the_whole_parameter(
    opt, submodule, device, name, dtype
) -> None:
    """However a parameter is cut: Philox of (seed, step, number, row-major element)."""
    params = of_every_shape(dtype, device)
    twins = float32_twins(params)
    seed = (1 << 63) + 5
    optimizer = build(opt, name, params, rounding="stochastic", rounding_seed=seed)
    other = build(opt, name, twins)
    rounding = submodule("reference.rounding")
    place = {"offset": 0, "device": device}
    one = torch.Size([1])
    first = [rounding.random_bits(one, seed=1, step=torch.tensor(1), parameter=0, **place)]
    for step in (1, 2):
        for param, twin in zip(params, twins, strict=True):
            twin.data.copy_(param.data)
        train_together([optimizer, other], [params, twins], 1)
        for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
            which = {"seed": seed, "step": torch.tensor(step), "parameter": number}
            random = rounding.random_bits(param.shape, **which, **place)
            expected = rounding.stochastic_round(twin.detach(), dtype, random)
            assert_same_bits(param.detach(), expected)
            first.append(random.view(-1)[:1])
    first = torch.cat(first)
    assert len(first.unique()) == len(first) > 2, "seed, step and number all count"


# The run that says what is right, the one that loses what is small, and those that keep it.
RUNS = [("nearest", torch.float32)] + [
    (rounding, torch.bfloat16) for rounding in ("nearest", "stochastic", "residual")
]


def after_1000_steps(opt, device, start, grad, kind, **options) -> dict:
    """(rounding, dtype) -> (32, 32) in float64, of every run with the same gradient throughout."""
    params = [nn.Parameter(start.to(device, dtype, copy=True)) for _, dtype in RUNS]
    options |= {"kind": kind} | ({"beta2": None} if kind == "muon" else {})
    groups = [
        {"params": [param], "rounding": how, **options}
        for param, (how, _) in zip(params, RUNS, strict=True)
    ]
    optimizer = opt.MuonAdamW(groups)
    for _ in range(1000):
        for param in params:
            param.grad = grad.to(device, param.dtype)
        optimizer.step()
    return {run: param.detach().double() for run, param in zip(RUNS, params, strict=True)}


@pytest.mark.sees_defect("no master copy and no stochastic rounding")
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_decay_is_not_lost_over_1000_steps(opt, device, kind) -> None:
    """lr wd = 5e-4 alone, without gradients' help, against a float32 run.

    To nearest, a decay below 2^-9 never moves a bfloat16 weight. Stochastic rounding is unbiased:
    a step adds a variance of at most (2^-8 p)^2 / 4, so over 1,000 steps the mean of n = 1024
    weights is off by less than 6 sqrt(1000 / n) 2^-9 = 1.2% in 6 standard deviations. A residual
    makes the parameter the float32 one, rounded: at most 2^-9 off.
    """
    start = torch.rand(32, 32, generator=torch.Generator().manual_seed(1)) + 1
    options = {"lr": 5e-4, "weight_decay": 1.0}
    if kind == "muon":
        options |= {"ns_steps": 1, "cautious": False, "shaped_decay": False}
    runs = after_1000_steps(opt, device, start, torch.zeros(32, 32), kind, **options)
    results = {run: value.mean().item() for run, value in runs.items()}
    exact = results["nearest", torch.float32]
    assert exact == pytest.approx(start.mean().item() * (1 - 5e-4) ** 1000, rel=1e-3)
    assert results["nearest", torch.bfloat16] == start.bfloat16().double().mean().item()
    budget = 6 * (1000 / start.numel()) ** 0.5 * 2**-9
    assert results["stochastic", torch.bfloat16] == pytest.approx(exact, rel=budget)
    assert results["residual", torch.bfloat16] == pytest.approx(exact, rel=2**-9)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_small_updates_are_not_lost_over_1000_steps(opt, device, kind) -> None:
    """Updates of a 20th of a unit in the last place, always in one direction, against float32."""
    generator = torch.Generator().manual_seed(2)
    start = torch.rand(32, 32, generator=generator) + 1
    grad = torch.randn(32, 32, generator=generator)
    options = {"lr": 2.0**-8 / 20}  # AdamW moves by lr; Muon's update has a root mean square of it
    if kind == "muon":
        options |= {"adjust_lr_fn": lambda lr, rows, columns: 32**0.5 * lr}
    runs = after_1000_steps(opt, device, start, grad, kind, **options)
    moved = {(how, dtype): x - start.to(device, dtype).double() for (how, dtype), x in runs.items()}
    exact = moved["nearest", torch.float32]

    def share(change):
        """How far along the float32 run's way: 1 is all of it."""
        return ((change * exact).sum() / exact.square().sum()).item()

    assert share(moved["nearest", torch.bfloat16]) < 0.7
    assert share(moved["stochastic", torch.bfloat16]) == pytest.approx(1, abs=0.02)
    assert share(moved["residual", torch.bfloat16]) == pytest.approx(1, abs=0.02)


@CLASSES
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "residual"])
def test_no_bit_depends_on_the_batches(opt, submodule, device, monkeypatch, name, rounding) -> None:
    chunks = submodule("optimizers.plan")
    results = []
    for bound in (chunks.BATCH_BYTES, 2 * 6 * 4 * 4):
        monkeypatch.setattr(chunks, "BATCH_BYTES", bound)
        params = of_every_shape(device=device)
        train(build(opt, name, params, rounding=rounding), params, 3)
        results.append(values(params))
    assert_all_same_bits(*results)


@CLASSES
def test_a_step_that_a_parameter_misses_is_counted(opt, device, name) -> None:
    """So its noise is new when its gradient is back, whichever parameter keeps the counter."""
    params = of_every_shape(device=device)
    optimizer = build(opt, name, params, rounding="stochastic")
    for step in range(4):
        new_gradients(params, seed=step)
        params[0].grad = None if step % 2 else params[0].grad
        params[-1].grad = None
        optimizer.step()
    assert {optimizer.state[param]["rounding_step"].item() for param in params} == {4}
    for param in params:
        param.grad = None
    optimizer.step()
    assert {optimizer.state[param]["rounding_step"].item() for param in params} == {4}


@CLASSES
@pytest.mark.parametrize("rounding", ["stochastic", "residual"])
def test_state_dicts_without_rounding_state_load(opt, device, name, rounding) -> None:
    """Of runs that rounded to nearest: what a new option needs begins with zeros."""
    params = of_every_shape(device=device)
    plain = build(opt, name, params)
    train(plain, params, 2)
    older = copy.deepcopy(plain.state_dict())
    for group in older["param_groups"]:
        del group["rounding"], group["rounding_seed"]
    optimizer = build(opt, name, params, rounding=rounding)
    train(optimizer, params, 1)
    optimizer.load_state_dict(older)
    key = "rounding_step" if rounding == "stochastic" else "rounding_residual"
    assert not any(optimizer.state[param][key].any() for param in params)
    train(optimizer, params, 1)


def test_loaded_state_of_another_kind_is_refused(opt, device) -> None:
    (param,) = parameters([(6, 4)], dtype=torch.bfloat16, device=device)
    optimizer = opt.Muon([param], rounding="residual")
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["rounding_residual"] = torch.zeros(6, 4)
    with pytest.raises(ValueError, match=r"rounding_residual must be torch\.int16, got torch\.fl"):
        optimizer.load_state_dict(saved)


@CLASSES
def test_wide_parameters_have_no_state_of_rounding(opt, device, name) -> None:
    for dtype in (torch.float32, torch.float64):
        for rounding in ("stochastic", "residual"):
            params = of_every_shape(dtype, device)
            plain = [nn.Parameter(param.detach().clone()) for param in params]
            optimizer = build(opt, name, params, rounding=rounding)
            train(optimizer, params, 2)
            train(build(opt, name, plain), plain, 2)
            assert_all_same_bits(params, plain)
            for param in params:
                assert not {"rounding_step", "rounding_residual"} & optimizer.state[param].keys()


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("rounding", ["stochastic", "residual"])
def test_dtypes_side_by_side_in_a_group(opt, device, rounding, kind) -> None:
    """In one batch, since directions are float32: each rounds as if it were alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]

    def stepped(*those: int) -> list[nn.Parameter]:
        """All four after a step, of which those have a gradient."""
        params = [
            parameters([(6, 4)], dtype=dtype, device=device, seed=k)[0]
            for k, dtype in enumerate(dtypes)
        ]
        for k, param in enumerate(params):
            param.grad = param.grad if k in those else None
        group = {"kind": kind, "params": params, "lr": 0.02, "rounding": rounding}
        opt.MuonAdamW([{**group, "none_grad": False}]).step()
        return params

    together = stepped(0, 1, 2, 3)
    for k, param in enumerate(together):
        alone = stepped(k)[k]
        assert_same_bits(alone.detach(), param.detach())
        assert_same_bits(alone.grad, param.grad)


def test_qk_clip_scales_the_value_before_rounding(opt, submodule, device) -> None:
    """With a residual the clipped parameter is that of a float32 run too."""
    shapes = {"layers.0.attn.q_proj.weight": (8, 6), "layers.0.attn.k_proj.weight": (8, 6)}
    config = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 10.0}
    params = parameters(shapes.values(), dtype=torch.bfloat16, device=device)
    twins = float32_twins(params)
    runs = [(params, "residual"), (twins, "nearest")]
    optimizers = [
        opt.Muon(zip(shapes, run, strict=True), rounding=how, clip_config=config)
        for run, how in runs
    ]
    logits = {0: torch.tensor([30.0, 5.0], device=device)}
    train_together(optimizers, [params, twins], 3, qk_logits=logits)
    join = submodule("reference.rounding").join
    for param, twin in zip(params, twins, strict=True):
        joined = join(param.detach(), optimizers[0].state[param]["rounding_residual"])
        assert_same_bits(joined, twin.detach())
