"""A step that fails: all as it was where it had not begun to write, else refused until loading."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from .._compare import assert_all_same_bits, fail_at
from ._steps import new_gradients, parameters, train, values
from .test_state import SHAPES, assert_same_state, muon, muon_adamw, state_tensors

MIDWAY = "an earlier step failed midway"


def adamw_alone(opt, params):
    return opt.MuonAdamW([{"kind": "adamw", "params": params, "lr": 0.05}])


def stochastic(opt, params):
    for param in params:
        param.data = param.data.bfloat16()
        param.grad = param.grad.bfloat16()
    return muon(opt, params, rounding="stochastic")


@dataclass(frozen=True)
class Failure:
    """Which call of which function of a step raises what, and what the step has changed by then."""

    make: Callable
    function: str
    call: int
    error: BaseException
    state_only: bool = False


FAILURES = {
    "memory": Failure(muon, "orthogonalize", 2, torch.OutOfMemoryError("planted")),
    "interrupt": Failure(muon_adamw, "orthogonalize", 2, KeyboardInterrupt()),
    "update": Failure(muon, "update", 2, RuntimeError("planted")),
    "adamw": Failure(muon, "adamw", 1, SystemExit(1), state_only=True),
    "a batch of AdamW": Failure(adamw_alone, "adamw", 2, torch.OutOfMemoryError("planted")),
    "counters": Failure(stochastic, "orthogonalize", 1, MemoryError("planted"), state_only=True),
}


def changed(optimizer, before) -> bool:
    """Whether a bit of parameters or state is another than in `before`, the copy made by `kept`."""
    now = kept(optimizer)
    return any(not torch.equal(mine, old) for mine, old in zip(now, before, strict=True))


def kept(optimizer) -> list[torch.Tensor]:
    if optimizer._host is not None:
        optimizer._host.wait()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return values(params) + [tensor.clone() for _, tensor in state_tensors(optimizer)]


def ways_to_save(opt, optimizer, folder) -> dict[str, Callable[[], object]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    model = nn.ParameterList(params)
    return {
        "state_dict": optimizer.state_dict,
        "save_optimizer": lambda: opt.save_optimizer(optimizer, folder),
        "save_optimizer_async": lambda: opt.save_optimizer_async(optimizer, folder).wait(),
        "torch.distributed.checkpoint": lambda: get_optimizer_state_dict(model, optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
        "deepcopy": lambda: copy.deepcopy(optimizer),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offloaded"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_step_is_remembered(
    opt, submodule, device, name, offload, monkeypatch, tmp_path
) -> None:
    failure = FAILURES[name]
    for module in ("optimizers.plan", "optimizers.state.in_host_memory"):
        monkeypatch.setattr(submodule(module), "BATCH_BYTES", 64)
    params = parameters(SHAPES, device=device)
    optimizer = failure.make(opt, params)
    twins = parameters(SHAPES, device=device)
    twin = failure.make(opt, twins)
    if offload:
        optimizer.turn_on_cpu_offload()
    elif name == "a batch of AdamW":
        params[-1].data, params[-1].grad = params[-1].data.double(), params[-1].grad.double()
        optimizer = failure.make(opt, params)  # in a call of its own
        twins[-1].data, twins[-1].grad = twins[-1].data.double(), twins[-1].grad.double()
        twin = failure.make(opt, twins)
    for one in (optimizer, twin):
        train(one, [p for g in one.param_groups for p in g["params"]], 2)
    opt.save_optimizer(optimizer, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    old, before = values(params), kept(optimizer)
    new_gradients(params, seed=5)
    with monkeypatch.context() as patch:
        fail_at(patch, submodule("optimizers.step"), failure.function, failure.call, failure.error)
        with pytest.raises(type(failure.error)):
            optimizer.step()
    assert changed(optimizer, before)

    halfway = kept(optimizer)
    asked = []
    with pytest.raises(RuntimeError, match=MIDWAY):
        optimizer.step(lambda: asked.append(1))
    for way, save in ways_to_save(opt, optimizer, tmp_path).items():
        with pytest.raises(RuntimeError, match=MIDWAY):
            save()
            pytest.fail(f"{way} saved half a step")
    assert not asked and not changed(optimizer, halfway)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files

    with torch.no_grad():
        for param, value in zip(params, old, strict=True):
            param.copy_(value)
    opt.load_optimizer(optimizer, tmp_path)
    optimizer.state_dict()
    for one in (optimizer, twin):
        train(one, [p for g in one.param_groups for p in g["params"]], 2, seed=9)
    assert_all_same_bits(kept(optimizer), kept(twin))


def test_loading_that_is_refused_mends_nothing(opt, submodule, device, monkeypatch) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    optimizer.fit_state()
    saved = copy.deepcopy(optimizer.state_dict())
    with monkeypatch.context() as patch:
        fail_at(patch, submodule("optimizers.step"), "update", 2, RuntimeError("planted"))
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.step()
    wrong = copy.deepcopy(saved)
    del wrong["state"][0]["momentum_buffer"]
    with pytest.raises(ValueError, match="has no momentum_buffer"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match=MIDWAY):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


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


def bad_closure(optimizer, patch) -> None:
    def closure():
        raise ArithmeticError("planted")

    optimizer.step(closure)


def bad_pre_hook(optimizer, patch) -> None:
    def hook(*_):
        raise ArithmeticError("planted")

    with_hook = optimizer.register_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        with_hook.remove()


def bad_rule(optimizer, patch) -> None:
    def rule(lr, rows, columns):
        if rows == 4:
            raise ArithmeticError("planted")
        return lr

    patch.setitem(optimizer.param_groups[0], "adjust_lr_fn", rule)
    optimizer.step()


def no_memory_for_slots(optimizer, patch) -> None:
    def allocate(self, sizes):
        raise ArithmeticError("planted")

    host_state = import_module(type(optimizer._host).__module__)
    patch.setattr(host_state.Lane, "allocate", allocate)
    optimizer.step()


@pytest.mark.parametrize("fail", [bad_closure, bad_pre_hook, bad_rule, no_memory_for_slots])
def test_what_fails_before_a_write_changes_nothing(opt, device, fail, monkeypatch) -> None:
    params, twins = parameters(SHAPES, device=device), parameters(SHAPES, device=device)
    optimizer, twin = muon(opt, params), muon(opt, twins)
    optimizer.turn_on_cpu_offload()
    optimizer.fit_state()
    before = kept(optimizer)
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError, match="planted"):
        fail(optimizer, patch)
    assert not changed(optimizer, before)
    optimizer.state_dict()
    train(optimizer, params, 2)
    train(twin, twins, 2)
    assert_all_same_bits(kept(optimizer), kept(twin))


def test_a_post_hook_that_raises_comes_after_a_whole_step(opt, device) -> None:
    params, twins = parameters(SHAPES, device=device), parameters(SHAPES, device=device)
    optimizer, twin = muon(opt, params), muon(opt, twins)

    def hook(*_):
        raise KeyboardInterrupt

    raising = optimizer.register_step_post_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    raising.remove()
    twin.step()
    assert_same_state(optimizer, twin)
    train(optimizer, params, 1)
    train(twin, twins, 1)
    assert_same_state(optimizer, twin)


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


@pytest.mark.parametrize(
    ("option", "on", "off", "dtype"),
    [("beta2", 0.9, None, torch.float32), ("rounding", "stochastic", "nearest", torch.bfloat16)],
)
def test_what_was_switched_off_begins_anew(opt, option, on, off, dtype) -> None:
    """In the run that goes on as in the one that is resumed from its checkpoint."""
    runs = []
    for resumed in (False, True):
        params = [parameter(8, 6, dtype=dtype)]
        optimizer = opt.Muon(params, lr=0.01, **{option: on})
        for number, value in enumerate((on, off, on)):
            optimizer.param_groups[0][option] = value
            new_gradients(params, seed=number)
            optimizer.step()
            if value == off and resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = opt.Muon(params, lr=0.01, **{option: on})
                optimizer.load_state_dict(saved)
        state = optimizer.state[params[0]]
        runs.append([params[0].detach(), *(state[key] for key in sorted(state))])
    assert_all_same_bits(*runs)


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


def test_a_saved_group_without_parameters_is_named(opt) -> None:
    optimizer = opt.Muon([parameter(4, 4)], lr=0.01)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["params"]
    with pytest.raises(ValueError, match="saved group 0 has no 'params'"):
        optimizer.load_state_dict(saved)
