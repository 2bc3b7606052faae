"""What torch's generic tests ask of the state of every optimizer: saved, loaded, copied, hooked."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch

from .._compare import assert_same_bits
from ._infos import LeastSquares, by_class, by_input, info
from ._steps import parameters, train, values


def make(opt, name, params, **options):
    return info(opt, name).optim_cls(params, **options)


def stepped(opt, device, name, **options):
    """A problem and its optimizer after a few steps."""
    problem = LeastSquares(device)
    optimizer = make(opt, name, problem.params, **options)
    for _ in range(3):
        optimizer.step(problem.loss)
    return problem, optimizer


def assert_equal(one, other) -> None:
    """Two state_dicts with the same keys in the same order, and the same bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.device == other.device
        assert_same_bits(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


def assert_continues(problem, optimizer, other_problem, other) -> None:
    """Both do the same from here, bit for bit."""
    for _ in range(3):
        optimizer.step(problem.loss)
        other.step(other_problem.loss)
    for one, expected in zip(other_problem.params, problem.params, strict=True):
        assert_same_bits(one.detach(), expected.detach())
    assert_equal(other.state_dict(), optimizer.state_dict())


@by_input()
def test_a_state_dict_is_deterministic(opt, device, name, entry) -> None:
    """Equal for equal but not identical parameters, and untouched by loading it."""
    problem, optimizer = stepped(opt, device, name, **entry.kwargs)
    _, again = stepped(opt, device, name, **entry.kwargs)
    saved = optimizer.state_dict()
    assert_equal(saved, again.state_dict())
    kept = copy.deepcopy(saved)
    twin = problem.copy()
    loaded = make(opt, name, twin.params, **entry.kwargs)
    loaded.load_state_dict(saved)
    assert_equal(saved, kept)
    assert_equal(loaded.state_dict(), kept)
    assert_continues(problem, optimizer, twin, loaded)
    assert len(kept["state"]) == 2


@by_input()
def test_weights_only_loading_loses_nothing(opt, device, name, entry) -> None:
    problem, optimizer = stepped(opt, device, name, **entry.kwargs)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert_equal(saved, optimizer.state_dict())
    twin = problem.copy()
    loaded = make(opt, name, twin.params)
    loaded.load_state_dict(saved)  # with the options it had, whatever these were
    assert_continues(problem, optimizer, twin, loaded)


@by_class()
def test_older_state_dicts_keep_the_present_value_of_any_option(opt, device, name) -> None:
    options = {"momentum": 0.7, "beta2": 0.8, "betas": (0.7, 0.8)}
    problem, optimizer = stepped(opt, device, name, **options)
    saved = optimizer.state_dict()
    mark = "use_muon" if name == "Muon" else "kind"
    known = {key for group in saved["param_groups"] for key in group} - {"params", mark}
    assert len(known) > 15
    for option in known:
        older = copy.deepcopy(saved)
        for group in older["param_groups"]:
            group.pop(option, None)
        twin = problem.copy()
        loaded = make(opt, name, twin.params, **options)
        loaded.load_state_dict(older)
        assert_equal(loaded.state_dict()["state"], saved["state"])
        for group, expected in zip(loaded.param_groups, saved["param_groups"], strict=True):
            assert {**group, "params": None} == {**expected, "params": None}
        loaded.step(twin.loss)


@by_class()
def test_loaded_options_replace_those_of_the_constructor(opt, device, name) -> None:
    """What was saved continues as it was; defaults stay those of the constructor."""
    problem, optimizer = stepped(
        opt, device, name, lr=0.03, weight_decay=0.2, momentum=0.6, betas=(0.5, 0.6), ns_steps=3
    )
    twin = problem.copy()
    loaded = make(opt, name, twin.params, lr=0.5, none_grad=False, adjust_lr_fn=None)
    defaults = copy.deepcopy(loaded.defaults)
    loaded.load_state_dict(optimizer.state_dict())
    assert {key: loaded.defaults[key] for key in defaults} == defaults
    assert_continues(problem, optimizer, twin, loaded)


@by_class()
def test_a_step_count_may_be_a_number(opt, device, name) -> None:
    """As optimizers wrote it before it was a tensor; nanochat's still do."""
    problem, optimizer = stepped(opt, device, name)
    saved = copy.deepcopy(optimizer.state_dict())
    counts = [state for state in saved["state"].values() if "step" in state]
    assert [state["step"].item() for state in counts] == [3.0]
    for state in counts:
        state["step"] = 3
    twin = problem.copy()
    loaded = make(opt, name, twin.params)
    loaded.load_state_dict(saved)
    assert counts[0]["step"] == 3
    assert loaded.state[twin.bias]["step"].device == twin.bias.device
    assert_continues(problem, optimizer, twin, loaded)


@by_class()
def test_names_are_no_part_of_a_state_dict(opt, device, name) -> None:
    """One with names loads into one without, and the other way round; names stay."""
    named, plain = LeastSquares(device), LeastSquares(device)
    optimizer = make(opt, name, [("w", named.weight), ("b", named.bias)])
    other = make(opt, name, plain.params)
    for _ in range(2):
        optimizer.step(named.loss)
        other.step(plain.loss)
    assert_equal(optimizer.state_dict(), other.state_dict())
    optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert [optimizer.parameter_names(i) for i in range(2)] == [["w"], ["b"]]
    assert [other.parameter_names(i) for i in range(2)] == [[None], [None]]
    assert_continues(named, optimizer, plain, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@by_class()
def test_state_from_another_device_and_dtype(opt, device, name, dtype) -> None:
    """A CPU checkpoint of float32 parameters continues on the device, in the wider dtype."""
    _, optimizer = stepped(opt, torch.device("cpu"), name)
    loaded = make(opt, name, LeastSquares(device, dtype).params)
    loaded.load_state_dict(optimizer.state_dict())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = zip(optimizer.state.values(), loaded.state.values(), strict=True)
    for state, expected in [(theirs, mine) for mine, theirs in pairs]:
        assert state.keys() == expected.keys()
        for key, tensor in state.items():
            assert tensor.device.type == device.type
            assert_same_bits(tensor, expected[key].to(torch.float32 if key == "step" else wide))
    params = [param for group in loaded.param_groups for param in group["params"]]
    before = values(params)
    train(loaded, params, 1)
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@by_class()
def test_hooks_of_state_dict(opt, device, name) -> None:
    """The first hook sees the optimizer as it is; the last may replace what is returned."""
    _, optimizer = stepped(opt, device, name)
    calls = []

    def note(word):
        return lambda o, *rest: calls.append(word)

    def extend(o, state_dict):
        return {**state_dict, "extra": 1}

    handles = [
        optimizer.register_state_dict_pre_hook(note("second")),
        optimizer.register_state_dict_pre_hook(note("first"), prepend=True),
        optimizer.register_state_dict_post_hook(extend),
        optimizer.register_state_dict_post_hook(note("third")),
    ]
    assert optimizer.state_dict()["extra"] == 1
    assert calls == ["first", "second", "third"]
    for handle in handles:
        handle.remove()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@by_class()
def test_hooks_of_load_state_dict(opt, device, name) -> None:
    """What a hook returns is what is loaded, checks included; post hooks see it loaded."""
    problem, optimizer = stepped(opt, device, name)
    saved = optimizer.state_dict()
    loaded = make(opt, name, problem.copy().params)
    calls = []

    def faster(o, state_dict):
        calls.append("second")
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    handles = [
        loaded.register_load_state_dict_pre_hook(faster),
        loaded.register_load_state_dict_pre_hook(lambda o, s: calls.append("first"), prepend=True),
        loaded.register_load_state_dict_post_hook(
            lambda o: calls.append(o.param_groups[0]["lr"]), prepend=True
        ),
    ]
    loaded.load_state_dict(saved)
    assert calls == ["first", "second", 0.25]
    assert_equal(loaded.state_dict()["state"], saved["state"])
    for handle in handles:
        handle.remove()
    loaded.load_state_dict(saved)
    assert calls == ["first", "second", 0.25]
    assert_equal(loaded.state_dict(), saved)
    assert len(loaded._optimizer_load_state_dict_pre_hooks) == 0


@by_class()
def test_a_state_dict_may_be_an_ordered_dict(opt, device, name) -> None:
    """torch.distributed's checkpoints hand over their own kinds of mappings and sequences."""
    problem, optimizer = stepped(opt, device, name)
    saved = OrderedDict(optimizer.state_dict())
    saved["state"] = OrderedDict((k, OrderedDict(v)) for k, v in saved["state"].items())
    saved["param_groups"] = tuple(OrderedDict(group) for group in saved["param_groups"])
    twin = problem.copy()
    loaded = make(opt, name, twin.params)
    loaded.load_state_dict(saved)
    assert_continues(problem, optimizer, twin, loaded)


@by_input()
def test_copies_and_pickles(opt, device, name, entry) -> None:
    """All public attributes, the options, the state and the parameters, sharing none of them."""
    for copied in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        problem, optimizer = stepped(opt, device, name, **entry.kwargs)
        other = copied(optimizer)
        public = [{key for key in o.__dict__ if key[0] != "_"} for o in (optimizer, other)]
        assert public[0] == public[1] >= {"defaults", "state", "param_groups", "debug"}
        assert_equal(other.state_dict(), optimizer.state_dict())
        assert str(other) == str(optimizer)
        twin = problem.copy()
        twin.weight, twin.bias = (group["params"][0] for group in other.param_groups)
        before = values(problem.params)
        other.step(twin.loss)
        for param, old in zip(problem.params, before, strict=True):
            assert_same_bits(param.detach(), old)
        optimizer.step(problem.loss)
        assert_continues(problem, optimizer, twin, other)


@by_class()
def test_state_survives_pickling(opt, device, name) -> None:
    problem, optimizer = stepped(opt, device, name)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert_equal(saved, optimizer.state_dict())
    assert all(saved["state"].values())
    twin = problem.copy()
    loaded = make(opt, name, twin.params)
    loaded.load_state_dict(saved)
    assert_continues(problem, optimizer, twin, loaded)


@by_class()
def test_a_group_added_after_steps_is_saved_and_loaded(opt, device, name) -> None:
    runs = []
    for _ in range(2):
        params = parameters([(10, 5), (10,), (4, 6), (3,)], device=device)
        optimizer = make(opt, name, params[:2])
        runs.append((params, optimizer))
    (params, optimizer), (twins, loaded) = runs
    train(optimizer, params[:2], 3)
    for added, o in ((params, optimizer), (twins, loaded)):
        o.add_param_group({"params": added[2:3], "kind": "muon", "lr": 0.03})
        o.add_param_group({"params": added[3:], "kind": "adamw", "lr": 0.04})
    train(optimizer, params, 2)
    loaded.load_state_dict(optimizer.state_dict())
    assert_equal(loaded.state_dict(), optimizer.state_dict())
    assert [state["step"].item() for state in optimizer.state.values() if "step" in state] == [5, 2]
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param.data)
    train(optimizer, params, 2, seed=50)
    train(loaded, twins, 2, seed=50)
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(twin.detach(), param.detach())
