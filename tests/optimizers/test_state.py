"""State: made at the first step, exact through every way of saving, and loaded all or nothing."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from .._compare import assert_all_same_bits, assert_same_bits
from ._steps import CLASSES, new_gradients, nothing_written, parameters, train, values

NAMES = ["experts.w", "qkv", "wide", "conv", "table", "bias"]
SHAPES = [(3, 4, 6), (12, 4), (4, 12), (4, 2, 2, 2), (7, 3), (5,)]


def muon(opt, params, **options):
    groups = [
        {"params": params[:4], "names": NAMES[:4], "use_muon": True},
        {"params": params[4:], "names": NAMES[4:], "use_muon": False},
    ]
    groups[0] |= {"expert_keys": ["experts"], "split_sizes": {"qkv": [6, 4, 2]}, "beta2": 0.9}
    return opt.Muon(groups, **{"lr": 0.05, **options})


def muon_adamw(opt, params, **options):
    shared = {"lr": 0.05, "weight_decay": 0.1, **options}
    return opt.MuonAdamW(
        [
            {"kind": "muon", "params": params[1:4], "num_heads": {}, **shared},
            {"kind": "adamw", "params": [params[0], *params[4:]], **shared},
        ]
    )


MAKERS = pytest.mark.parametrize("make", [muon, muon_adamw], ids=["Muon", "MuonAdamW"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def state_tensors(optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (key, optimizer.state[param][key])
        for group in optimizer.param_groups
        for param in group["params"]
        for key in sorted(optimizer.state[param])
    ]


def assert_same_state(one, other) -> None:
    pairs = zip(state_tensors(one), state_tensors(other), strict=True)
    for (key, mine), (other_key, theirs) in pairs:
        assert key == other_key
        assert_same_bits(mine, theirs)


@pytest.mark.sees_defect("state is stacked under params[0]: it depends on membership and order")
@pytest.mark.sees_defect(
    "the buffer has the gradient's dtype, 8 bits of mantissa for bfloat16",
    "\n    wide = torch.promote_types(param.dtype, torch.float32)",
    "\n    wide = param.dtype",
)
@pytest.mark.sees_defect("moments in the parameter's dtype")
@DTYPES
@MAKERS
def test_state_is_made_for_all_parameters_at_once(opt, device, make, dtype) -> None:
    """Per parameter, float32 (float64 for float64), on its device, with or without a gradient."""
    params = parameters(SHAPES, dtype=dtype, device=device)
    for param in params:
        param.grad = None
    optimizer = make(opt, params)
    assert not optimizer.state
    optimizer.step()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if group.get("use_muon", group.get("kind") == "muon"):
                assert set(state) == {"momentum_buffer", "second_momentum_buffer"}
                assert state["second_momentum_buffer"].dtype == wide
            else:
                assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
                assert state["step"].dtype == torch.float32
                assert state["step"].shape == ()
            for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & set(state):
                assert (state[key].shape, state[key].dtype) == (param.shape, wide)
            for tensor in state.values():
                assert tensor.device == param.device
                assert not tensor.requires_grad
                assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_momentum_dtype(opt, device, dtype) -> None:
    (param,) = parameters([(6, 4)], device=device)
    optimizer = opt.Muon([param], momentum_dtype=dtype, none_grad=False)
    optimizer.step()
    assert_same_bits(optimizer.state[param]["momentum_buffer"], param.grad.to(dtype))


def through_memory(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ROUNDED = [
    *((dtype, "nearest") for dtype in (torch.float32, torch.float16, torch.float64)),
    *((torch.bfloat16, rounding) for rounding in ("nearest", "stochastic", "residual")),
]


@pytest.mark.kernels_ci
@pytest.mark.sees_defect("a loaded run does not continue exactly")
@pytest.mark.parametrize("way", ["direct", "weights_only", "file"])
@pytest.mark.parametrize(("dtype", "rounding"), ROUNDED, ids=str)
@MAKERS
def test_a_loaded_run_continues_bit_for_bit(
    opt, device, tmp_path, make, dtype, rounding, way
) -> None:
    """Also with bfloat16 parameters, whose float32 state torch would cast on loading."""
    params = parameters(SHAPES, dtype=dtype, device=device)
    optimizer = make(opt, params, rounding=rounding)
    train(optimizer, params, 3)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(opt, copies, lr=0.5)  # what is saved replaces it, as all options
    if way == "file":
        opt.save_optimizer(optimizer, tmp_path)
        opt.load_optimizer(resumed, tmp_path)
    else:
        saved = optimizer.state_dict()
        resumed.load_state_dict(through_memory(saved) if way == "weights_only" else saved)
    assert resumed.param_groups[0]["lr"] == 0.05
    assert_same_state(resumed, optimizer)
    train(optimizer, params, 3, seed=50)
    train(resumed, copies, 3, seed=50)
    assert_all_same_bits(values(params), values(copies))
    assert_same_state(resumed, optimizer)


@MAKERS
def test_a_rate_that_a_scheduler_made_with_numpy_is_saved_as_a_number(opt, device, make) -> None:
    """Between `scheduler.step()` and the next step, where a loop saves."""
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 9.0))
    train(optimizer, params, 1)
    scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    loaded = through_memory(optimizer.state_dict())["param_groups"]
    assert type(rate) is numpy.float64
    assert [type(group["lr"]) for group in loaded] == [float] * len(loaded)
    assert loaded[0]["lr"] == rate


def test_a_function_for_the_rate_is_not_saved(opt, device) -> None:
    """The rule: the optimizer that loads keeps its own function, and must have one."""

    def rule(lr, rows, columns):
        return lr * rows

    params = parameters(SHAPES, device=device)
    saved = through_memory(muon(opt, params, adjust_lr_fn=rule).state_dict())
    other = muon(opt, params, adjust_lr_fn=rule)
    other.load_state_dict(saved)
    assert other.param_groups[0]["adjust_lr_fn"] is rule
    train(other, params, 1)
    with pytest.raises(ValueError, match="group 0: adjust_lr_fn was a function"):
        muon(opt, params).load_state_dict(saved)


def of_group(number: int, **changes):
    return lambda s: s["param_groups"][number].update(changes)


def of_state(number: int, **changes):
    return lambda s: s["state"][number].update(changes)


def negative(number: int, name: str):
    """State that no step leaves behind."""
    edit = lambda s: s["state"][number][name].view(-1)[-1].fill_(-2)  # noqa: E731
    return edit, f"the loaded {name} holds -2"


FAULTS = {
    "fewer groups": (lambda s: s["param_groups"].pop(), r"groups of \[4\] parameters"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[3, 2\]"),
    "no state of one": (lambda s: s["state"].pop(0), "'experts.w': .* no momentum_buffer; it has"),
    "missing key": (lambda s: s["state"][4].pop("exp_avg_sq"), "1, .*'table': .* no exp_avg_sq"),
    "wrong shape": (
        of_state(2, momentum_buffer=torch.zeros(3, 3)),
        r"'wide': .*momentum_buffer has shape \(3, 3\), expected \(4, 12\)",
    ),
    "other kind": (of_group(1, use_muon=True), "group 1: .* of kind 'muon', this one of 'adamw'"),
    "no kind": (lambda s: s["param_groups"][1].pop("use_muon"), "group 1 has no 'use_muon'"),
    "no parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        "saved group 0 has no 'params'",
    ),
    "bad option": (of_group(0, momentum=2), "group 0: momentum must"),
    "unknown option": (of_group(0, momentums=2), "group 0, saved: unknown key 'momentums'"),
    "option of the other kind": (of_group(1, ns_steps=5), "group 1: the saved .*'ns_steps'"),
    "another front end": (
        of_group(1, kind="adamw", betas=(0.5, 0.5), eps=1e-8),
        "group 1: the saved group has 'betas', 'eps', 'kind'",
    ),
    "integer state": (
        of_state(2, momentum_buffer=torch.zeros(4, 12, dtype=torch.int32)),
        "'wide': the loaded momentum_buffer must be floating-point.*, got torch.int32",
    ),
    "complex state": (
        of_state(4, exp_avg=torch.zeros(7, 3, dtype=torch.complex64)),
        "'table': the loaded exp_avg must be floating-point.*, got torch.complex64",
    ),
    "no values": (
        of_state(4, step=torch.zeros((), device="meta")),
        "'table': .*step is on the meta",
    ),
    "unknown state": (of_state(2, exp_avg=torch.zeros(4, 12)), "'wide': .*state has 'exp_avg'"),
    "state of no parameter": (
        lambda s: s["state"].update({9: {"momentum_buffer": torch.zeros(2, 2)}}),
        r"state for \[9\], which no group lists",
    ),
    "count": negative(4, "step"),
    "count of rounding": negative(0, "rounding_step"),
    "square": negative(4, "exp_avg_sq"),
    "mean square": negative(2, "second_momentum_buffer"),
    "split_sizes of no parameter": (
        lambda s: s["param_groups"][0]["split_sizes"].update(nobody=(2, 2)),
        r"group 0: split_sizes\['nobody'\] names no parameter",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_before_anything_changes(opt, device, fault) -> None:
    params = parameters(SHAPES, dtype=torch.bfloat16, device=device)
    optimizer = muon(opt, params, rounding="stochastic")
    train(optimizer, params, 2)
    change, message = FAULTS[fault]
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with nothing_written(optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == groups
    train(optimizer, params, 1)


# Values that a product with 0 or a sum with 0 would change.
DELICATE = (-0.0, float("inf"), float("-inf"), 1e-40, 65504.0)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.fixture
def nothing_else() -> Iterator[None]:
    """What was there before is not gone through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@MAKERS
def test_no_tensor_is_alive_before_the_first_step(opt, device, nothing_else, make) -> None:
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
def test_a_report_keeps_no_parameter_that_a_trainer_replaces(opt, device, make) -> None:
    """As trainers that shard a model do before the first step."""
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    optimizer.report()
    gone = [*map(weakref.ref, params)]
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(param.detach().clone()) for param in group["params"]]
    del params
    gc.collect()
    assert not any(param() is not None for param in gone)


@MAKERS
def test_an_empty_state_dict_goes_out_and_in(opt, device, tmp_path, make) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    opt.save_optimizer(optimizer, tmp_path)
    train(optimizer, params, 1)
    optimizer.load_state_dict(saved)  # as torch.optim does: the state is gone
    assert not optimizer.state
    fresh = make(opt, params, lr=0.5)
    opt.load_optimizer(fresh, tmp_path)
    assert not fresh.state and fresh.param_groups[0]["lr"] == 0.05
    fresh.load_state_dict(copy.deepcopy(saved))
    fresh.step()
    assert all(fresh.state[param] for param in params[1:])


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


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tensor_rate", [False, True], ids=["float", "tensor"])
@MAKERS
def test_the_initial_step_of_dcp_changes_nothing(
    opt, device, make, dtype, rounding, tensor_rate
) -> None:
    """Zero gradients at a zero rate: parameters keep their bits and counters are 0."""
    params, model = parameters(SHAPES, dtype=dtype, device=device), nn.Module()
    for number, param in enumerate(params):
        model.register_parameter(f"p{number}", param)
        param.grad = None
        delicate = torch.tensor(DELICATE, device=device).to(dtype)
        param.detach().view(-1)[: len(DELICATE)] = delicate[: param.numel()]
    before = [param.detach().clone() for param in params]
    rate = torch.tensor(0.05, device=device) if tensor_rate else 0.05
    optimizer = make(opt, params, lr=rate, rounding=rounding)
    get_optimizer_state_dict(model, optimizer)
    for param, old in zip(params, before, strict=True):
        words = {2: torch.int16, 4: torch.int32}[param.dtype.itemsize]
        assert torch.equal(param.detach().view(words), old.view(words))
        assert param.grad is None
    found = state_tensors(optimizer)
    assert {"exp_avg", "momentum_buffer", "step"} <= {key for key, _ in found}
    assert not any(tensor.any() for _, tensor in found)


def test_a_first_step_at_rate_zero_with_gradients_is_a_step(opt, device) -> None:
    """As warm-up schedules begin: momentum is kept and the step is counted."""
    params = parameters(SHAPES, device=device)
    before = [param.detach().clone() for param in params]
    optimizer = muon_adamw(opt, params, lr=0.0, none_grad=True)
    optimizer.step()
    assert optimizer.state[params[1]]["momentum_buffer"].any()
    assert optimizer.state[params[5]]["step"] == 1
    assert_all_same_bits(params, before)


@pytest.mark.parametrize("none_grad", [True, False])
def test_a_second_step_of_zeros_is_counted(opt, device, none_grad) -> None:
    """And one of zeros drops gradients where steps do."""
    params = parameters([(4, 6), (5,)], device=device)
    group = {"kind": "adamw", "params": params, "lr": 0.0, "none_grad": none_grad}
    optimizer = opt.MuonAdamW([group])
    for steps in (0, 1):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == steps
        assert all((param.grad is None) == none_grad for param in params)


WRAPPED = ["module.", "_orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."]


def of_names(opt, prefix: str = "", **kwargs):
    """Fresh parameters of one layer, and Muon by their names."""
    params = parameters([(12, 4), (4, 5), (4,)])
    names = [f"{prefix}0.{name}" for name in ("qkv_proj.weight", "o_proj.weight", "norm.bias")]
    return params, opt.Muon(list(zip(names, params, strict=True)), beta2=0.9, **kwargs)


@pytest.mark.parametrize("prefix", WRAPPED)
@pytest.mark.parametrize("into_wrapped", [False, True])
def test_names_of_wrappers_load(opt, prefix, into_wrapped) -> None:
    """The keys of split_sizes are the present names, and the next step is the uninterrupted one."""
    params, optimizer = of_names(opt, "" if into_wrapped else prefix)
    train(optimizer, params, 2)
    others, other = of_names(opt, prefix if into_wrapped else "")
    expected = dict(other.param_groups[0]["split_sizes"])
    with torch.no_grad():
        for here, there in zip(others, params, strict=True):
            here.copy_(there)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["split_sizes"] == expected
    for made, of in ((params, optimizer), (others, other)):
        new_gradients(made, seed=7)
        of.step()
    assert_all_same_bits(params, others)
    other.load_state_dict(other.state_dict())


REFUSED = {
    "other sizes": (
        lambda opt: of_names(opt, split_sizes={"0.qkv_proj.weight": (8, 2, 2)})[1],
        r"as .*\(4, 4, 4\).* here .*\(8, 2, 2\).*with the saved",
    ),
    "no split": (lambda opt: of_names(opt, num_heads=1)[1], r"as .* here None.*with the sav"),
    "no names": (
        lambda opt: opt.Muon(parameters([(12, 4), (4, 5), (4,)]), beta2=0.9),
        r"by names.* has none; con",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_split_under_names_of_wrappers_is_refused(opt, case) -> None:
    make, message = REFUSED[case]
    _, optimizer = of_names(opt, "module.")
    other = make(opt)
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"group 0: split_sizes was saved {message}"):
        other.load_state_dict(optimizer.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize("theirs", [torch.optim.Muon, torch.optim.AdamW])
@CLASSES
def test_state_of_torchs_optimizers_is_refused_with_what_converts_it(opt, name, theirs) -> None:
    params = parameters([(4, 3)])
    optimizer = getattr(opt, name)(params, lr=1e-3)
    with pytest.raises(ValueError, match=r"convert_state_dict\(optimizer, state, source='torch'\)"):
        optimizer.load_state_dict(theirs(params).state_dict())
