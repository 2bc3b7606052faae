"""What torch's generic tests ask of every optimizer: construction, steps, hooks, errors.

Driven by the optimizer infos of torch.testing, see _infos.py.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._compare import assert_same_bits
from ._infos import (
    ACCEPTED,
    TORCH,
    TORCH_ONLY,
    LeastSquares,
    by_class,
    by_input,
    info,
    refused_inputs,
    torch_error_inputs,
)
from ._steps import new_gradients, parameters, train, values

SHAPES = [(10, 5), (5,), (4, 6), (3, 2, 2, 2), (1, 7), (9, 1), (1,)]


def make(opt, name, params, **options):
    return info(opt, name).optim_cls(params, **options)


def assert_same(params, others) -> None:
    for one, other in zip(params, others, strict=True):
        assert_same_bits(one.detach(), other.detach())


@by_class()
def test_errors(opt, device, name) -> None:
    """torch's error inputs and sparse and complex tensors, each with its error and message."""
    described = info(opt, name)
    for entry in described.optim_error_inputs_func(device, torch.float32):
        given = entry.optimizer_error_input
        params = LeastSquares(device).params if given.params is None else given.params

        def construct(given=given, params=params):
            return described.optim_cls(params, **given.kwargs)

        if entry.error_on is TORCH.OptimizerErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(entry.error_type, match=entry.error_regex):
                construct()
        else:
            optimizer, before = construct(), values(params)
            with pytest.raises(entry.error_type, match=entry.error_regex):
                optimizer.step()
            assert_same(params, before)


@by_class()
def test_what_torch_refuses_and_this_package_accepts(opt, name) -> None:
    inputs = [entry.optimizer_error_input for entry in torch_error_inputs()]
    accepted = {given.desc: given for given in inputs if given.desc in ACCEPTED}
    assert set(accepted) == ACCEPTED
    for given in accepted.values():
        optimizer = make(opt, name, given.params, **given.kwargs)
        assert [optimizer.parameter_names(i) for i in range(2)] == [[None], ["weight"]]


@by_class()
def test_options_of_torchs_implementations_are_refused_not_ignored(opt, device, name) -> None:
    refused = refused_inputs(device)
    flags = {flag for entry in refused for flag in TORCH_ONLY & set(entry.kwargs)}
    assert flags == {"capturable", "maximize", "amsgrad", "ns_coefficients"}
    for flag in TORCH_ONLY:
        unknown = f"unexpected keyword argument '{flag}'|group 0: unknown key '{flag}'"
        with pytest.raises((TypeError, ValueError), match=unknown):
            make(opt, name, LeastSquares(device).params, **{flag: True})


@pytest.mark.parametrize("contiguous", [True, False])
@by_input()
def test_goes_in_the_right_direction(opt, device, name, entry, contiguous) -> None:
    problem = LeastSquares(device, contiguous=contiguous)
    optimizer = make(opt, name, problem.params, **entry.kwargs)
    first = problem.loss().item()
    assert str(optimizer).startswith(f"{name} (\nParameter Group 0\n")
    for _ in range(10):
        loss = optimizer.step(problem.loss)
    assert problem.loss().item() < loss.item() < first


@by_input()
def test_a_loop_and_a_batch_agree(opt, device, name, entry) -> None:
    """The same bits in one group, in a group per parameter, and in another run."""

    def run(separate: bool) -> list[nn.Parameter]:
        params = parameters([(10, 5), (10, 5), (10, 7), (3,), (4,)], device=device)
        groups = [{"params": [param]} for param in params] if separate else params
        optimizer = make(opt, name, groups, **entry.kwargs)
        train(optimizer, params, 3)
        return params

    batched = run(separate=False)
    assert_same(batched, run(separate=True))
    assert_same(batched, run(separate=False))


@by_class()
def test_rates_and_decays_of_groups(opt, device, name) -> None:
    """Each group has its own; what a group leaves out is that of the constructor."""
    params = parameters([(10, 5), (10, 5), (5,), (5,)], device=device)
    twins = parameters([(10, 5), (10, 5), (5,), (5,)], device=device)
    own = [{}, {"lr": 0.03, "weight_decay": 0.2}, {}, {"lr": 0.04, "weight_decay": 0.3}]
    shared = {"lr": 0.01, "weight_decay": 0.05}
    groups = [{"params": [param], **options} for param, options in zip(params, own, strict=True)]
    optimizer = make(opt, name, groups, **shared)
    train(optimizer, params, 3)
    for index, (twin, options) in enumerate(zip(twins, own, strict=True)):
        assert {key: optimizer.param_groups[index][key] for key in shared} == {**shared, **options}
        alone = make(opt, name, [{"params": [twin]}], **{**shared, **options})
        for step in range(3):
            new_gradients(twins, seed=100 + step)
            alone.step()
    assert_same(params, twins)


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@by_class()
def test_a_tensor_rate_is_a_rate(opt, device, name, dtype, dims) -> None:
    """0-D or with one element, on the parameters' device or on the CPU."""
    for place in {device, torch.device("cpu")}:
        problem, plain = LeastSquares(device), LeastSquares(device)
        # 2^-6 and 2^-3 are exact in float32, as are their product and its complement
        lr = torch.full((1,) * dims, 2**-6, dtype=dtype, device=place)
        optimizer = make(opt, name, problem.params, lr=lr, weight_decay=2**-3)
        other = make(opt, name, plain.params, lr=2**-6, weight_decay=2**-3)
        optimizer.step(problem.loss)
        other.step(plain.loss)
        for one, expected in zip(problem.params, plain.params, strict=True):
            torch.testing.assert_close(one, expected, rtol=2**-22, atol=2**-26)
        assert all(group["lr"] is lr for group in optimizer.param_groups)
        assert lr.shape == (1,) * dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_class()
def test_a_rate_of_one_element_is_a_0_d_rate(opt, device, name, dtype) -> None:
    """A dimension must not make a float64 rate widen the arithmetic of the parameters."""
    runs = []
    for dims in (0, 1):
        params = parameters(SHAPES, dtype=dtype, device=device)
        lr = torch.full((1,) * dims, 0.013, dtype=torch.float64, device=device)
        train(make(opt, name, params, lr=lr, weight_decay=0.1), params, 3)
        runs.append(params)
    assert_same(*runs)


@by_class()
def test_mixed_devices_and_dtypes(opt, device, name) -> None:
    """Every parameter moves as if it were alone."""
    places = sorted({device.type, "cpu"})
    kinds = itertools.product(places, [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    params, twins = [], []
    for place, dtype in kinds:
        for made in (params, twins):
            made.extend(parameters(SHAPES, dtype=dtype, device=place))
    together = make(opt, name, params, lr=0.02, none_grad=False)
    together.step()
    for twin in twins:
        make(opt, name, [twin], lr=0.02, none_grad=False).step()
    assert_same(params, twins)


@by_input()
def test_a_step_without_gradients_is_none(opt, device, name, entry) -> None:
    params = parameters([(10, 5), (10,)], device=device)
    optimizer = make(opt, name, params, **entry.kwargs)
    train(optimizer, params, 1)
    before, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    assert optimizer.step() is None
    assert_same(params, before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("still", ["zero gradients", "zero rate"])
@by_input()
def test_a_step_that_moves_nothing(opt, device, name, entry, still) -> None:
    """Zero gradients without decay, or a zero rate with it, leave every bit of the parameters."""
    options = dict(entry.kwargs)
    options |= {"weight_decay": 0.0} if still == "zero gradients" else {"lr": 0.0}
    params = parameters([(10, 5), (10,)], device=device)
    optimizer = make(opt, name, params, **options)
    before = values(params)
    for seed in range(2):
        new_gradients(params, seed=seed)
        if still == "zero gradients":
            for param in params:
                param.grad.zero_()
        optimizer.step()
    assert_same(params, before)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
@by_class()
def test_gradients_of_any_strides(opt, device, name, layout) -> None:
    """Also with stride 0, as from sum().backward(); they are read, not written."""
    params, twins = (parameters([(10, 5), (6, 6), (5,)], device=device) for _ in range(2))
    for param, twin in zip(params, twins, strict=True):
        given = twin.grad
        if layout == "transposed" and given.dim() == 2:
            grad = given.t().contiguous().t()
        elif layout == "expanded":
            grad = given.reshape(-1)[:1].reshape((1,) * given.dim()).expand(given.shape)
            twin.grad = grad.contiguous()
        elif layout == "offset":
            grad = torch.zeros(given.numel() + 1, device=device)[1:].view(given.shape)
            grad.copy_(given)
        else:
            grad = torch.stack([given, -given], dim=-1)[..., 0]
        param.grad = grad
        assert param.grad.stride() == grad.stride()
    kept = [param.grad.clone() for param in params]
    make(opt, name, params, lr=0.1, none_grad=False).step()
    make(opt, name, twins, lr=0.1, none_grad=False).step()
    assert_same(params, twins)
    assert_same([param.grad for param in params], kept)


@by_class()
def test_the_default_dtype_does_not_matter(opt, device, name) -> None:
    runs = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            params = parameters(SHAPES, device=device)
            train(make(opt, name, params, weight_decay=0.1, beta2=0.9), params, 2)
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append(params)
    assert_same(*runs)


@by_class()
def test_a_closure_may_return_nothing(opt, device, name) -> None:
    problem = LeastSquares(device)
    optimizer, before = make(opt, name, problem.params), values(problem.params)
    assert optimizer.step(lambda: problem.loss() and None) is None
    assert not any(torch.equal(p, b) for p, b in zip(problem.params, before, strict=True))


@by_class()
def test_all_hooks(opt, device, name) -> None:
    """In torch's order, global ones outside; the first argument is the optimizer itself."""
    problem = LeastSquares(device)
    optimizer, calls = make(opt, name, problem.params), []

    def closure():
        calls.append("closure")
        return problem.loss()

    def hook(word):
        return lambda o, args, kwargs: calls.append((word, o is optimizer, len(args)))

    def replace(o, args, kwargs):
        return (o, closure), kwargs

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_pre_hook(replace),
        optimizer.register_step_post_hook(hook("post")),
    ]
    try:
        assert optimizer.step() is not None
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [
        ("global pre", True, 1),
        ("pre", True, 1),
        "closure",
        ("post", True, 2),
        ("global post", True, 2),
    ]
    calls.clear()
    optimizer.step()
    assert calls == []


@by_class()
def test_options_and_defaults_changed_later(opt, device, name) -> None:
    """A changed group is what the next step uses, a changed default what the next group gets."""
    params, twins = (parameters([(10, 5), (6, 4), (5,)], device=device) for _ in range(2))
    changed = {"lr": 0.07, "weight_decay": 0.3}
    optimizer = make(opt, name, params, lr=0.01)
    fresh = make(opt, name, twins, **changed)
    for group in optimizer.param_groups:
        group |= changed
    optimizer.defaults |= {"weight_decay": 0.4, "none_grad": False}
    train(optimizer, params, 2)
    train(fresh, twins, 2)
    assert_same(params, twins)
    (late,) = parameters([(3, 4)], device=device)
    optimizer.add_param_group({"params": [late], "kind": "muon", "lr": 0.05})
    assert optimizer.param_groups[-1]["weight_decay"] == 0.4
    before = values([late])
    train(optimizer, [*params, late], 1)
    assert late.grad is not None
    assert not torch.equal(late, before[0])


@by_class()
def test_zeroing_gradients(opt, device, name) -> None:
    problem = LeastSquares(device)
    optimizer = make(opt, name, problem.params, none_grad=False)
    problem.loss()
    grads = [param.grad for param in problem.params]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(problem.params, grads, strict=True):
        assert param.grad is grad
        assert not grad.any()
    optimizer.zero_grad()
    assert all(param.grad is None for param in problem.params)


@by_class()
def test_a_grad_scaler_scales_and_skips(opt, device, name) -> None:
    """A power of two changes no bit of the gradients; an inf makes it skip the step."""
    problem, plain = LeastSquares(device), LeastSquares(device)
    optimizer, other = (make(opt, name, p.params, none_grad=False) for p in (problem, plain))
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    for step in range(3):
        problem.loss(scale=scaler.scale)
        if step == 1:
            problem.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            other.step(plain.loss)
    assert scaler.get_scale() == 2.0**9
    assert_same(problem.params, plain.params)


@by_class()
def test_a_compiled_function_may_step(opt, device, name) -> None:
    """With the eager backend: the same bits as uncompiled."""
    runs = []
    for compiled in (False, True):
        problem = LeastSquares(device)
        optimizer = make(opt, name, problem.params)

        def train_step(problem=problem, optimizer=optimizer):
            problem.loss()
            optimizer.step()

        run = torch.compile(train_step, backend="eager") if compiled else train_step
        for _ in range(3):
            run()
        runs.append(problem.params)
    assert_same(*runs)
