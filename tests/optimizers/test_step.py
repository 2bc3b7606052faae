"""What a step reads, writes and leaves alone, also of a model that was moved or cast; and one that
fails: all is as it was where it had not begun to write, else refused until state is loaded.
"""

import copy
import logging

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_same_bits, assert_same_tensors, fail_at
from ._steps import (
    CLASSES,
    both,
    every_cut,
    new_gradients,
    nothing_written,
    of_every_shape,
    parameters,
    train,
    values,
)
from .test_state import SHAPES, muon, state_tensors


@pytest.mark.sees_defect("Nesterov writes into p.grad; without it p.grad is the momentum buffer")
@pytest.mark.sees_defect("zero_grad(set_to_none=False) zeroes the momentum")
@pytest.mark.sees_defect(
    "none_grad is ignored on some paths and forced for experts",
    '                for param in group["params"]:\n                    param.grad = None\n',
    '                for param in group["params"][:1]:\n                    param.grad = None\n',
)
@CLASSES
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("none_grad", [True, False])
def test_gradients_are_never_written(opt, device, name, none_grad, nesterov) -> None:
    """And kept or dropped on every path alike."""
    params = of_every_shape(torch.float32, device)
    optimizer = every_cut(opt, name, params, none_grad=none_grad, nesterov=nesterov)
    for seed in range(3):
        new_gradients(params, seed=seed)
        grads = [param.grad for param in params]
        before = [grad.clone() for grad in grads]
        optimizer.step()
        assert_all_same_bits(grads, before)
        for param, grad in zip(params, grads, strict=True):
            assert param.grad is (None if none_grad else grad)


@pytest.mark.sees_defect("an expert tensor without a gradient stops training")
@pytest.mark.sees_defect("a missing gradient is a TypeError")
@CLASSES
def test_parameters_without_gradient_are_left_alone(opt, device, name) -> None:
    """No decay, no momentum, no step count; and the others move as if alone."""
    params = parameters([(6, 4), (6, 4), (5,), (5,)], device=device)
    twins = parameters([(6, 4), (6, 4), (5,), (5,)], device=device)
    optimizer, full = both(opt, name, params), both(opt, name, twins)
    params[0].grad = params[3].grad = None
    before = values(params)
    optimizer.fit_state()
    state = copy.deepcopy({i: optimizer.state[params[i]] for i in (0, 3)})
    assert all(state.values())
    assert optimizer.step() is None
    full.step()
    for i in (0, 3):
        assert_same_bits(params[i].detach(), before[i])
        assert_same_tensors(optimizer.state[params[i]], state[i])
    for i in (1, 2):
        assert_same_bits(params[i].detach(), twins[i].detach())


@pytest.mark.sees_defect("step() takes no closure")
@CLASSES
def test_closure(opt, device, name) -> None:
    params = parameters([(6, 4), (6, 4)], device=device)
    optimizer = both(opt, name, params, none_grad=False)
    optimizer.zero_grad()
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() > sum((param**2).sum() for param in params).item()
    assert optimizer.step(closure=closure) is not loss
    assert optimizer.step(lambda: None) is None


@CLASSES
def test_a_zero_gradient_only_decays(opt, device, name) -> None:
    params = parameters([(6, 4), (6, 4)], device=device)
    for param in params:
        param.grad.zero_()
    before = values(params)
    optimizer = both(opt, name, params, weight_decay=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    torch.testing.assert_close(params[1].detach(), before[1] * 0.95)
    shaped = 0.1 * 1.5**0.5 if name == "MuonAdamW" else 0.1
    torch.testing.assert_close(params[0].detach(), before[0] * (1 - shaped * 0.5))


@CLASSES
@pytest.mark.parametrize("culprit", [0, 2], ids=["muon", "adamw"])
def test_a_sparse_gradient_changes_nothing(opt, device, name, culprit) -> None:
    """All gradients are checked before the first parameter or buffer is written."""
    params = parameters([(6, 4), (6, 4), (5, 5), (5,)], device=device)
    optimizer = both(opt, name, params)
    params[culprit].grad = torch.ones_like(params[culprit]).detach().to_sparse()
    message = f"group {culprit // 2}, parameter 0: gradient: must be dense"
    with nothing_written(optimizer), pytest.raises(ValueError, match=message):
        optimizer.step()


def test_a_gradient_from_before_a_swap_is_refused(opt, device) -> None:
    """torch checks a gradient when it is assigned, not when the parameter changes under it."""
    first, second = parameters([(6, 4), (6, 4)], device=device)
    second.data = torch.ones(4, 6, device=device)
    optimizer = opt.Muon([("v", first), ("w", second)])
    message = r"'w': the gradient has shape \(6, 4\) on .*, the parameter \(4, 6\) on"
    with nothing_written(optimizer), pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.sees_defect(
    "views are cached by id, so that updates go to dead memory after a .data swap"
)
def test_a_swapped_storage_is_followed(opt, device) -> None:
    (param,) = parameters([(3, 4, 5)], device=device)
    (twin,) = parameters([(3, 4, 5)], device=device)
    options = {"expert_keys": ["experts"], "lr": 0.1}
    optimizer, other = (opt.Muon([("experts.w", p)], **options) for p in (param, twin))
    train(optimizer, [param], 2)
    train(other, [twin], 2)
    old = param.data
    kept = old.clone()
    param.data = old.clone()
    train(optimizer, [param], 2)
    train(other, [twin], 2)
    assert_same_bits(param.detach(), twin.detach())
    assert_same_bits(old, kept)


@pytest.mark.sees_defect("state is lost if params[0] is replaced")
@pytest.mark.parametrize("stepped", [True, False])
def test_a_replaced_parameter_gets_state(opt, device, stepped) -> None:
    """Trainers that shard a model put new parameters into param_groups."""
    first, second = parameters([(6, 4), (4, 6)], device=device)
    optimizer = opt.Muon([("w", first)])
    if stepped:
        optimizer.step()
    optimizer.param_groups[0]["params"] = [second]
    assert stepped or optimizer.state_dict()["state"] == {}
    before = values([second])
    optimizer.step()
    assert not torch.equal(second.detach(), before[0])
    assert optimizer.state[second]["momentum_buffer"].shape == (4, 6)
    assert list(optimizer.state_dict()["state"]) == [0]


def test_debug_logs_the_report_once_per_plan(opt, device, caplog) -> None:
    params = parameters([(64, 96)], device=device)
    optimizer = opt.Muon(params, debug=True, lr=0.0)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(optimizer, params, 2)
    assert [record.getMessage() for record in caplog.records] == [optimizer.report()]


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def model_of(dtype=torch.float32, device="cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).to(device, dtype)


def optimizer_of(opt, model: nn.Module, **options):
    return opt.Muon(opt.get_default_muon_param_groups(model), lr=5e-3, **options)


FOLLOWED = [(before, after, {"beta2": 0.9}) for before in DTYPES for after in DTYPES]
# What rounding dropped goes with its dtype: in float16 the same 16 bits are another number.
FOLLOWED += [(torch.bfloat16, torch.float16, {"rounding": "residual"})]


@pytest.mark.parametrize(("before", "after", "options"), FOLLOWED, ids=str)
def test_state_follows_to_another_dtype(opt, device, before, after, options) -> None:
    """model.double() casts what is not a count, as loading does, from another device too."""
    model = model_of(before, device)
    optimizer = optimizer_of(opt, model, **options)
    train(optimizer, [*model.parameters()], 3)
    saved = copy.deepcopy(optimizer.state_dict())
    model.to(after)
    twin = copy.deepcopy(model)
    other = optimizer_of(opt, twin, **options)
    for state in saved["state"].values():
        for key, value in state.items():
            if key == "rounding_residual":
                assert value.any() or value.ndim == 1
                value = torch.zeros_like(value)
            state[key] = value.cpu()
    other.load_state_dict(saved)
    wide = torch.promote_types(after, torch.float32)
    for number, param in enumerate(p for group in other.param_groups for p in group["params"]):
        for key, value in saved["state"][number].items():
            as_saved = key in ("step", "rounding_residual")
            assert_same_bits(other.state[param][key].cpu(), value if as_saved else value.to(wide))
    train(optimizer, [*model.parameters()], 2, seed=50)
    train(other, [*twin.parameters()], 2, seed=50)
    assert_all_same_bits(model.parameters(), twin.parameters())


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


def reshaped(model, optimizer) -> None:
    model[0].weight.data = torch.ones(4, 6, device=model[0].weight.device)


def cast_beside_host_memory(model, optimizer) -> None:
    optimizer.turn_on_cpu_offload()
    model.double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reshaped, r"'0.weight': momentum_buffer is .*\(8, 6\).*reshape"),
        (cast_beside_host_memory, r"call turn_off_cpu_offload\(\) before the model is mo"),
    ],
)
def test_what_state_cannot_follow_is_refused(opt, device, change, message) -> None:
    model = model_of(device=device)
    optimizer = optimizer_of(opt, model)
    train(optimizer, [*model.parameters()], 2)
    change(model, optimizer)
    new_gradients([*model.parameters()], seed=50)
    before = values(model.parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_all_same_bits(before, model.parameters())


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


MIDWAY = "an earlier step failed midway"


def kept(optimizer) -> list[torch.Tensor]:
    if optimizer._host is not None:
        optimizer._host.wait()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return values(params) + [tensor.clone() for _, tensor in state_tensors(optimizer)]


def test_a_failed_clip_is_remembered(opt, submodule, device, monkeypatch, tmp_path) -> None:
    """An update without its clip is no whole step."""
    config = {"q_indices": [0], "k_indices": [0], "head_dim": 4, "threshold": 1.0}
    params = parameters([(4, 6), (4, 6)], device=device)
    names = ("layers.0.a.wq.weight", "layers.0.a.wk.weight")
    optimizer = opt.Muon([*zip(names, params, strict=True)], clip_config=config)
    with monkeypatch.context() as patch:
        fail_at(patch, submodule("optimizers.qk_clip"), "scale_rows", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(qk_logits={0: torch.tensor([4.0], device=device)})
    with pytest.raises(RuntimeError, match=MIDWAY):
        optimizer.step()
    with pytest.raises(RuntimeError, match=MIDWAY):
        opt.save_optimizer(optimizer, tmp_path)


def test_memory_that_runs_out_before_a_write_changes_nothing(
    opt, submodule, device, monkeypatch
) -> None:
    params, twins = parameters(SHAPES, device=device), parameters(SHAPES, device=device)
    optimizer, twin = muon(opt, params), muon(opt, twins)
    optimizer.turn_on_cpu_offload()
    optimizer.fit_state()
    before = kept(optimizer)
    lane, error = submodule("optimizers.state.in_host_memory").Lane, MemoryError("planted")
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="planted"):
        fail_at(patch, lane, "allocate", 1, error)
        optimizer.step()
    assert_all_same_bits(kept(optimizer), before)
    train(optimizer, params, 2)
    train(twin, twins, 2)
    assert_all_same_bits(kept(optimizer), kept(twin))


@pytest.mark.parametrize(
    ("option", "on", "off", "dtype"),
    [
        ("beta2", 0.9, None, torch.float32),
        ("rounding", "stochastic", "nearest", torch.bfloat16),
        ("rounding", "residual", "nearest", torch.bfloat16),
    ],
)
def test_what_was_switched_off_begins_anew(opt, option, on, off, dtype) -> None:
    """In the run that goes on as in the one that is resumed from its checkpoint: what a residual
    belongs to is gone.
    """
    runs = []
    for resumed in (False, True):
        params = parameters([(8, 6)], dtype=dtype)
        optimizer = opt.Muon(params, lr=0.01, **{option: on})
        for number, value in enumerate((on, off, on)):
            optimizer.param_groups[0][option] = value
            new_gradients(params, seed=number)
            optimizer.step()
            assert len(optimizer.state[params[0]]) == 1 + (value == on)
            if value == off and resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = opt.Muon(params, lr=0.01, **{option: on})
                optimizer.load_state_dict(saved)
        state = optimizer.state[params[0]]
        runs.append([params[0].detach(), *(state[key] for key in sorted(state))])
    assert_all_same_bits(*runs)


@pytest.mark.parametrize("option", [{"beta2": 0.9}, {"rounding": "residual"}], ids=str)
def test_what_was_switched_on_loads_before_its_first_step(opt, option) -> None:
    """A checkpoint between the switch and the step: both runs go on from zeros."""
    params, twins = (parameters([(8, 6)], dtype=torch.bfloat16) for _ in range(2))
    optimizer, fresh = (opt.Muon(of_run, lr=0.01) for of_run in (params, twins))
    train(optimizer, params, 2)
    optimizer.param_groups[0] |= option
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins[0].data.copy_(params[0].data)
    for one, of_run in ((optimizer, params), (fresh, twins)):
        train(one, of_run, 2)
    assert_all_same_bits(kept(fresh), kept(optimizer))


def test_betas_of_nothing_after_a_cycle(opt) -> None:
    params = parameters([(4,)])
    optimizer = opt.MuonAdamW([{"kind": "adamw", "params": params, "lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    new_gradients(params, seed=0)
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(ValueError, match="betas must be two numbers"):
        optimizer.step()


def test_a_step_of_the_benchmark_passes_its_gate(harness, opt) -> None:
    """On the device that CI has, so that no option which `Muon` refuses is found on a GPU."""
    step = harness.one_gpu
    built = harness.built_package.Built(opt, "0" * 40, clean=True)
    case = step.StepCase(step.Model("tiny"), built, "cpu")
    case.call(case.ours)(0)
    passed, error, baseline = case.compare()
    assert passed and 0 < error < baseline
