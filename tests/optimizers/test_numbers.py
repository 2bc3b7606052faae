"""Options as they change, also under schedulers, and the precision and device of a step."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

from .._compare import assert_all_same_bits, assert_error_at_most, assert_same_bits
from ._steps import (
    CLASSES,
    SCHEDULERS,
    LeastSquares,
    both,
    make,
    marked,
    new_gradients,
    parameters,
    values,
)


class NoHostReads(TorchDispatchMode):
    """Raises where a tensor's value is read on the host, which on a GPU waits for the device."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.sees_defect("torch.tensor(momentum) at every step copies to the default device")
@pytest.mark.sees_defect(
    'the device "cuda" is written into the code',
    "torch.zeros(self.shape, dtype=self.dtype, device=param.device)",
    "torch.zeros(self.shape, dtype=self.dtype)",
)
@CLASSES
def test_the_device_is_the_parameters(opt, device, name) -> None:
    """A tensor made without naming a device would be a meta tensor here and lose its values."""
    runs = []
    for default in ("meta", device):
        params = parameters([(6, 4), (3, 8), (6, 4), (5,)], device=device)
        grads = [param.grad for param in params]
        with torch.device(default):
            optimizer = both(opt, name, params)
            for _ in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.clone()
                optimizer.step()
        runs.append(params)
    assert_all_same_bits(*runs)


@pytest.mark.sees_defect(
    "decay and update are rounded apart: in bfloat16 the decay never changes a weight"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@CLASSES
def test_low_precision_parameters_are_rounded_once(opt, device, name, dtype) -> None:
    params = parameters([(16, 8), (16, 8)], dtype=dtype, device=device)
    exact = [nn.Parameter(param.detach().float()) for param in params]
    for param, wide in zip(params, exact, strict=True):
        wide.grad = param.grad.float()
    both(opt, name, params, weight_decay=0.3).step()
    both(opt, name, exact, weight_decay=0.3).step()
    for param, wide in zip(params, exact, strict=True):
        assert_same_bits(param.detach(), wide.detach().to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_may_have_another_precision(opt, device, dtype) -> None:
    """Wider gradients are used in full, those in float64 without a kernel."""
    wide = torch.float32 if dtype == torch.bfloat16 else torch.float64
    params = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in ((6, 4), 5)]
    for param in params:
        param.grad_dtype = wide
        param.grad = torch.randn(param.shape, device=device, dtype=wide)
    optimizer = opt.Muon(marked(params, 1), momentum=0.5, none_grad=False)
    optimizer.step()
    matrix, vector = params
    assert_same_bits(optimizer.state[matrix]["momentum_buffer"], matrix.grad.float())
    assert_error_at_most(optimizer.state[vector]["exp_avg"], 0.1 * vector.grad, 1e-6)


@pytest.mark.parametrize("form", ["0-D", "1-D"])
@pytest.mark.parametrize("lr_is", ["number", "tensor", "function"])
@CLASSES
def test_a_tensor_weight_decay_gives_the_bits_of_the_number(
    opt, device, tmp_path, name, lr_is, form
) -> None:
    """As a Tensor lr it is never read on the host, and is followed when it changes."""
    results = []
    for tensor in (False, True):
        params = parameters([(6, 4), (4, 6), (5,)], device=device)
        decay = torch.full([1] * (form == "1-D"), 0.125, device=device) if tensor else 0.125
        lr = torch.tensor(0.25, device=device) if lr_is == "tensor" else 0.25
        rule = {"adjust_lr_fn": lambda lr, r, c: lr / 2} if lr_is == "function" else {}
        groups = [
            {"kind": "muon", "params": params[:2], "lr": lr, "weight_decay": decay, **rule},
            {"kind": "adamw", "params": params[2:], "lr": lr, "weight_decay": decay},
        ]
        optimizer = getattr(opt, name)(groups)
        for step in range(3):
            new_gradients(params, seed=step)
            for group in optimizer.param_groups if step == 2 else ():
                group["weight_decay"] = decay.fill_(0.5) if tensor else 0.5
            with NoHostReads():
                optimizer.step()
        results.append(values(params))
    assert_all_same_bits(results[1], results[0])
    opt.save_optimizer(optimizer, tmp_path)
    opt.load_optimizer(optimizer, tmp_path)
    assert optimizer.param_groups[1]["weight_decay"].item() == 0.5


STEPS = 12
RATES = (0.01, 0.02)
CYCLING = {
    "OneCycleLR": lambda o, last=-1: OneCycleLR(o, 0.02, total_steps=STEPS, last_epoch=last),
    "CyclicLR": lambda o, last=-1: CyclicLR(o, 1e-3, 1e-2, step_size_up=3, last_epoch=last),
}
by_scheduler = pytest.mark.parametrize("schedule", SCHEDULERS)


def groups_of(problem: LeastSquares) -> list[dict]:
    return [{"params": [param], "lr": lr} for param, lr in zip(problem.params, RATES, strict=True)]


def sgd_twin() -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(LeastSquares("cpu")), momentum=0.9)


def advance(scheduler, loss: float) -> None:
    scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


def rates(optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def momenta(optimizer) -> list[float]:
    """What a cycled momentum has become: momentum of a Muon group, beta1 of one for AdamW."""
    optimizer.state_dict()
    return [
        group["momentum"]
        if "momentum" in group
        else group.get("betas", group.get("adamw_betas"))[0]
        for group in optimizer.param_groups
    ]


def test_there_is_one_of_every_scheduler() -> None:
    assert set(SCHEDULERS) == {*lr_scheduler.__all__} - {"LRScheduler"} | {"SWALR"}


@pytest.mark.sees_defect("a Tensor lr breaks, or waits for the device")
@by_scheduler
@CLASSES
def test_rates_follow_the_schedule(opt, device, name, schedule) -> None:
    """As those of torch.optim.SGD. A Tensor stays the same object, and parameters move as with
    numbers."""
    problem, plain = LeastSquares(device), LeastSquares(device)
    groups = groups_of(problem)
    for group in groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=device)
    tensors = [group["lr"] for group in groups]
    optimizer = make(opt, name, groups)
    numbers = make(opt, name, groups_of(plain))
    twin, seen = sgd_twin(), set()
    every = [SCHEDULERS[schedule](one) for one in (optimizer, numbers, twin)]
    for step in range(STEPS - 1):
        assert rates(numbers) == rates(twin)
        seen.add(tuple(rates(twin)))
        optimizer.step(problem.loss)
        numbers.step(plain.loss)
        twin.step()
        for one in every:
            advance(one, loss=float(min(step, 3)))
        pairs = zip(optimizer.param_groups, tensors, strict=True)
        assert all(group["lr"] is tensor for group, tensor in pairs)
        assert rates(optimizer) == pytest.approx(rates(numbers), rel=1e-12)
    assert len(seen) > 1
    # The gradients depend on the parameters: a last bit of the rate may turn roundings of a
    # float16 iteration (2^-11) in each of 11 updates of at most 0.02 sqrt(2) per element.
    for one, expected in zip(problem.params, plain.params, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=11 * 0.02 * 2**0.5 * 2**-9)


@by_scheduler
@CLASSES
def test_a_schedule_resumes(opt, device, name, schedule) -> None:
    """Both state_dicts at half time: the second half is that of an uninterrupted run."""
    whole = LeastSquares(device)
    optimizer = make(opt, name, groups_of(whole))
    scheduler = SCHEDULERS[schedule](optimizer)

    def train(optimizer, scheduler, problem) -> None:
        for step in range(5):
            optimizer.step(problem.loss)
            advance(scheduler, loss=float(min(step, 2)))

    train(optimizer, scheduler, whole)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    half = copy.deepcopy(whole)
    resumed = make(opt, name, groups_of(half))
    resumed_scheduler = SCHEDULERS[schedule](resumed)
    resumed.load_state_dict(saved[0])
    resumed_scheduler.load_state_dict(saved[1])
    train(optimizer, scheduler, whole)
    train(resumed, resumed_scheduler, half)
    assert rates(resumed) == rates(optimizer)
    assert_all_same_bits(half.params, whole.params)


@pytest.mark.parametrize("schedule", CYCLING)
@CLASSES
def test_a_cycled_momentum_is_that_of_every_group(opt, device, name, schedule) -> None:
    """By default OneCycleLR and CyclicLR cycle momentum in Muon groups, beta1 in AdamW's."""
    problem, by_hand = LeastSquares(device), LeastSquares(device)
    optimizer = make(opt, name, groups_of(problem))
    manual = make(opt, name, groups_of(by_hand))
    twin = sgd_twin()
    scheduler, twin_scheduler = CYCLING[schedule](optimizer), CYCLING[schedule](twin)
    seen = set()
    for _ in range(STEPS - 1):
        cycled = [group["momentum"] for group in twin.param_groups]
        for group, lr, value in zip(manual.param_groups, rates(twin), cycled, strict=True):
            betas = next((key for key in ("betas", "adamw_betas") if key in group), None)
            group |= {"momentum": value} if betas is None else {betas: (value, group[betas][1])}
            group["lr"] = lr
        optimizer.step(problem.loss)
        manual.step(by_hand.loss)
        twin.step()
        assert momenta(optimizer) == cycled == momenta(manual)
        seen.add(tuple(cycled))
        scheduler.step()
        twin_scheduler.step()
    assert len(seen) > 3
    assert_all_same_bits(problem.params, by_hand.params)


@pytest.mark.parametrize("schedule", CYCLING)
@CLASSES
def test_a_cycled_momentum_is_an_ordinary_option_after_the_cycle(
    opt, device, name, schedule
) -> None:
    """AdamW groups show it as beta1, save it, and follow whoever changes it next.

    The keys that schedulers leave in groups are no unknown options of the next optimizer.
    """
    problem = LeastSquares(device)
    optimizer = make(opt, name, groups_of(problem))
    key = "betas" if name == "MuonAdamW" else "adamw_betas"
    second = optimizer.param_groups[1][key][1]
    CYCLING[schedule](optimizer)
    cycled = momenta(optimizer)[1]
    saved = optimizer.state_dict()["param_groups"][1]
    assert saved[key] == (cycled, second)
    assert "momentum" not in saved
    optimizer.param_groups[1][key] = (0.5, 0.6)
    optimizer.step(problem.loss)
    assert optimizer.param_groups[1][key] == (0.5, 0.6)
    fresh = make(opt, name, groups_of(copy.deepcopy(problem)))
    CYCLING[schedule](fresh)  # writes its first momentum; what is loaded then must win
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step()
    assert fresh.param_groups[1][key] == (0.5, 0.6)
    other = LeastSquares(device)
    groups = fresh.state_dict()["param_groups"]
    groups = [{**g, "params": [p]} for g, p in zip(groups, other.params, strict=True)]
    second = getattr(opt, name)(groups)
    assert momenta(second) == momenta(fresh)
    CYCLING[schedule](second, last=1)  # asks for what the first one left in the groups
    second.step(other.loss)


def test_momentum_in_an_adamw_group_is_no_option(opt, device) -> None:
    """Only schedulers, which leave their bounds beside it, speak of beta1 by that name."""
    problem = LeastSquares(device)
    optimizer = make(opt, "MuonAdamW", groups_of(problem))
    for group in optimizer.param_groups:
        group["momentum"] = 0.5
    optimizer.step(problem.loss)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    with pytest.raises(ValueError, match="unknown key 'momentum'"):
        optimizer.add_param_group({"kind": "adamw", "params": [], "lr": 0.1, "momentum": 0.9})
