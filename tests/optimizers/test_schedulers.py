"""torch's learning-rate schedulers drive both classes exactly as they drive torch's own SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from .._compare import assert_same_bits
from ._infos import SCHEDULERS, LeastSquares, by_class, info

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


@by_scheduler
@by_class()
def test_rates_follow_the_schedule(opt, device, name, schedule) -> None:
    """Every rate of every group, as with SGD, and the loss falls."""
    problem = LeastSquares(device)
    optimizer = info(opt, name).optim_cls(groups_of(problem))
    twin = sgd_twin()
    scheduler, twin_scheduler = SCHEDULERS[schedule](optimizer), SCHEDULERS[schedule](twin)
    first, seen = problem.loss().item(), set()
    for step in range(STEPS - 1):
        assert rates(optimizer) == rates(twin)
        seen.add(tuple(rates(optimizer)))
        optimizer.step(problem.loss)
        twin.step()
        for one in (scheduler, twin_scheduler):
            advance(one, loss=float(min(step, 3)))
    assert len(seen) > 1
    assert problem.loss().item() < first


@by_scheduler
@by_class()
def test_a_tensor_rate_is_scheduled_in_place(opt, device, name, schedule) -> None:
    """The Tensor stays the same object, and the parameters move as with numbers."""
    problem, plain = LeastSquares(device), LeastSquares(device)
    groups = groups_of(problem)
    for group in groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=device)
    tensors = [group["lr"] for group in groups]
    optimizer = info(opt, name).optim_cls(groups)
    numbers = info(opt, name).optim_cls(groups_of(plain))
    scheduler, other = SCHEDULERS[schedule](optimizer), SCHEDULERS[schedule](numbers)
    for step in range(STEPS - 1):
        optimizer.step(problem.loss)
        numbers.step(plain.loss)
        for one in (scheduler, other):
            advance(one, loss=float(min(step, 3)))
        pairs = zip(optimizer.param_groups, tensors, strict=True)
        assert all(group["lr"] is tensor for group, tensor in pairs)
        assert rates(optimizer) == pytest.approx(rates(numbers), rel=1e-12)
    # The gradients depend on the parameters: a last bit of the rate may turn roundings of a
    # float16 iteration (2^-11) in each of 11 updates of at most 0.02 sqrt(2) per element.
    for one, expected in zip(problem.params, plain.params, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=11 * 0.02 * 2**0.5 * 2**-9)


@by_scheduler
@by_class()
def test_a_schedule_resumes(opt, device, name, schedule) -> None:
    """Both state_dicts at half time: the second half is that of an uninterrupted run."""
    whole = LeastSquares(device)
    optimizer = info(opt, name).optim_cls(groups_of(whole))
    scheduler = SCHEDULERS[schedule](optimizer)

    def train(optimizer, scheduler, problem) -> None:
        for step in range(5):
            optimizer.step(problem.loss)
            advance(scheduler, loss=float(min(step, 2)))

    train(optimizer, scheduler, whole)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    half = whole.copy()
    resumed = info(opt, name).optim_cls(groups_of(half))
    resumed_scheduler = SCHEDULERS[schedule](resumed)
    resumed.load_state_dict(saved[0])
    resumed_scheduler.load_state_dict(saved[1])
    train(optimizer, scheduler, whole)
    train(resumed, resumed_scheduler, half)
    assert rates(resumed) == rates(optimizer)
    for one, expected in zip(half.params, whole.params, strict=True):
        assert_same_bits(one.detach(), expected.detach())


@pytest.mark.parametrize("schedule", CYCLING)
@by_class()
def test_a_cycled_momentum_is_that_of_every_group(opt, device, name, schedule) -> None:
    """OneCycleLR and CyclicLR cycle momentum in Muon groups and beta1 in AdamW groups.

    They decide by `defaults` for all groups at once, and by default they do cycle. A step must use
    the value: the run equals one whose options are set by hand.
    """
    problem, by_hand = LeastSquares(device), LeastSquares(device)
    optimizer = info(opt, name).optim_cls(groups_of(problem))
    manual = info(opt, name).optim_cls(groups_of(by_hand))
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
    for one, expected in zip(problem.params, by_hand.params, strict=True):
        assert_same_bits(one.detach(), expected.detach())


@pytest.mark.parametrize("schedule", CYCLING)
@by_class()
def test_a_cycled_momentum_is_an_ordinary_option_after_the_cycle(
    opt, device, name, schedule
) -> None:
    """AdamW groups show it as beta1, save it, and follow whoever changes it next."""
    problem = LeastSquares(device)
    optimizer = info(opt, name).optim_cls(groups_of(problem))
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
    fresh = info(opt, name).optim_cls(groups_of(problem.copy()))
    CYCLING[schedule](fresh)  # writes its first momentum; what is loaded then must win
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step()
    assert fresh.param_groups[1][key] == (0.5, 0.6)


@pytest.mark.parametrize("schedule", CYCLING)
@by_class()
def test_groups_of_a_cycled_optimizer_make_another(opt, device, name, schedule) -> None:
    """The keys that schedulers leave in groups are no unknown options."""
    optimizer = info(opt, name).optim_cls(groups_of(LeastSquares(device)))
    CYCLING[schedule](optimizer)
    other = LeastSquares(device)
    groups = optimizer.state_dict()["param_groups"]
    groups = [{**g, "params": [p]} for g, p in zip(groups, other.params, strict=True)]
    second = getattr(opt, name)(groups)
    assert momenta(second) == momenta(optimizer)
    CYCLING[schedule](second, last=1)  # asks for what the first one left in the groups
    second.step(other.loss)


def test_momentum_in_an_adamw_group_is_no_option(opt, device) -> None:
    """Only schedulers, which leave their bounds beside it, speak of beta1 by that name."""
    problem = LeastSquares(device)
    optimizer = info(opt, "MuonAdamW").optim_cls(groups_of(problem))
    for group in optimizer.param_groups:
        group["momentum"] = 0.5
    optimizer.step(problem.loss)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    with pytest.raises(ValueError, match="unknown key 'momentum'"):
        optimizer.add_param_group({"kind": "adamw", "params": [], "lr": 0.1, "momentum": 0.9})
