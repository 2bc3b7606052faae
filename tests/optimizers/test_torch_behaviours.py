"""What torch's generic tests ask of every optimizer: construction, steps, hooks, errors, state."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_same_bits
from ..kernels._tensors import LAYOUTS
from ._steps import CLASSES, LeastSquares, by_input, make, parameters, train, values

SHAPES = [(10, 5), (5,), (4, 6), (3, 2, 2, 2), (1, 7), (9, 1), (1,)]


@pytest.mark.sees_defect("a group of mixed shapes is a RuntimeError")
@pytest.mark.sees_defect("autotuning picks different configurations, hence different bits")
@pytest.mark.sees_defect("compiled and eager steps may differ")
@by_input
def test_a_loop_and_a_batch_agree(opt, device, name, options) -> None:
    """The same bits in one group, in a group per parameter, and in another run. Nanochat stacks a
    group; ours buckets it, and zero-sized matrices have nothing to update.
    """

    def run(separate: bool) -> list[nn.Parameter]:
        shapes = [(10, 5), (10, 7), (10, 5), (10, 0), (3,), (4,), (3,), ()]
        params = parameters(shapes, device=device)
        pairs = zip(params[:4], params[4:], strict=True)  # which are two groups each, by shape
        groups = [{"params": pair} for pair in pairs] if separate else params
        optimizer = make(opt, name, groups, **options)
        train(optimizer, params, 3)
        return params

    batched = run(separate=False)
    assert_all_same_bits(batched, run(separate=True))
    assert_all_same_bits(batched, run(separate=False))


@CLASSES
def test_mixed_devices_and_dtypes(opt, device, name) -> None:
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
    assert_all_same_bits(params, twins)


@pytest.mark.parametrize("layout", ["transposed", "gaps", "unaligned", "expanded"])
@CLASSES
def test_gradients_of_any_strides(opt, device, name, layout) -> None:
    """Also with stride 0, as from sum().backward(); they are read, not written."""
    params, twins = (parameters([(10, 5), (6, 6), (5,)], device=device) for _ in range(2))
    for param, twin in zip(params, twins, strict=True):
        given = twin.grad
        if layout == "expanded":
            param.grad = given.reshape(-1)[:1].reshape((1,) * given.dim()).expand(given.shape)
            twin.grad = param.grad.contiguous()
        else:
            param.grad = LAYOUTS[layout](given)
    kept = [param.grad.clone() for param in params]
    make(opt, name, params, lr=0.1, none_grad=False).step()
    make(opt, name, twins, lr=0.1, none_grad=False).step()
    assert_all_same_bits(params, twins)
    assert_all_same_bits([param.grad for param in params], kept)


@by_input
def test_options_changed_later(opt, device, name, options) -> None:
    """The next steps are those of an optimizer that was made with them and loads the state."""
    params, twins = (parameters([(10, 5), (10, 4), (10,)], device=device) for _ in range(2))
    of_the_layout = ("beta2", "num_heads", "split_sizes")  # which state that was made cannot follow
    options = {key: value for key, value in options.items() if key not in of_the_layout}
    optimizer, fresh = make(opt, name, params), make(opt, name, twins, **options)
    train(optimizer, params, 2)
    for group, wanted in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        group |= {key: value for key, value in wanted.items() if key != "params"}
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param.data)
    train(optimizer, params, 2)
    train(fresh, twins, 2)
    assert_all_same_bits(params, twins)


@CLASSES
def test_a_default_changed_later_is_that_of_the_next_group(opt, device, name) -> None:
    params = parameters([(6, 4), (3, 4)], device=device)
    optimizer = make(opt, name, params[:1])
    optimizer.defaults |= {"weight_decay": 0.4, "none_grad": False}
    optimizer.add_param_group({"params": params[1:], "kind": "muon", "lr": 0.05})
    assert optimizer.param_groups[-1]["weight_decay"] == 0.4
    optimizer.step()
    assert params[1].grad is not None


@CLASSES
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
    assert_all_same_bits(problem.params, plain.params)


def stepped(opt, device, name, **options):
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
    for _ in range(3):
        optimizer.step(problem.loss)
        other.step(other_problem.loss)
    assert_all_same_bits(other_problem.params, problem.params)
    assert_equal(other.state_dict(), optimizer.state_dict())


@CLASSES
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
        twin = copy.deepcopy(problem)
        loaded = make(opt, name, twin.params, **options)
        loaded.load_state_dict(older)
        assert_equal(loaded.state_dict()["state"], saved["state"])
        for group, expected in zip(loaded.param_groups, saved["param_groups"], strict=True):
            assert {**group, "params": None} == {**expected, "params": None}
        loaded.step(twin.loss)


@CLASSES
def test_loaded_options_replace_those_of_the_constructor(opt, device, name) -> None:
    """What was saved continues as it was; defaults stay those of the constructor."""
    saved = {"momentum": 0.6, "betas": (0.5, 0.6), "ns_steps": 3, "beta2": 0.9}
    saved |= {"momentum_dtype": torch.bfloat16}  # which decides what the state is, as beta2 does
    problem, optimizer = stepped(opt, device, name, lr=0.03, weight_decay=0.2, **saved)
    twin = copy.deepcopy(problem)
    loaded = make(opt, name, twin.params, lr=0.5, none_grad=False, adjust_lr_fn="none")
    defaults, saved = copy.deepcopy(loaded.defaults), optimizer.state_dict()
    kept = copy.deepcopy(saved)
    loaded.load_state_dict(saved)
    assert_equal(saved, kept)  # untouched by loading it
    assert_equal(loaded.state_dict(), kept)
    assert {key: loaded.defaults[key] for key in defaults} == defaults
    assert_continues(problem, optimizer, twin, loaded)


@CLASSES
def test_a_step_count_may_be_a_number(opt, device, name) -> None:
    """As optimizers wrote it before it was a tensor, nanochat's still; on any default device."""
    problem, optimizer = stepped(opt, device, name)
    saved = copy.deepcopy(optimizer.state_dict())
    counts = [state for state in saved["state"].values() if "step" in state]
    assert [state["step"].item() for state in counts] == [3.0]
    for state in counts:
        state["step"] = 3
    twin = copy.deepcopy(problem)
    loaded = make(opt, name, twin.params, rounding="residual")
    with torch.device("meta"):
        loaded.load_state_dict(saved)
    assert counts[0]["step"] == 3
    assert loaded.state[twin.bias]["step"].device == twin.bias.device
    assert_continues(problem, optimizer, twin, loaded)


@CLASSES
def test_hooks_of_state_dict_and_of_loading(opt, device, name) -> None:
    """The first hook sees what is there, the last may replace what is returned or loaded, checks
    included; post hooks of a load see it loaded.
    """
    problem, optimizer = stepped(opt, device, name)
    loaded = make(opt, name, copy.deepcopy(problem).params)
    calls = []

    def note(word):
        return lambda o, *rest: calls.append(word)

    def faster(o, state_dict):
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    before_load = loaded.register_load_state_dict_pre_hook
    handles = [
        optimizer.register_state_dict_pre_hook(note("second")),
        optimizer.register_state_dict_pre_hook(note("first"), prepend=True),
        optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "extra": 1}),
        optimizer.register_state_dict_post_hook(note("third")),
        before_load(lambda o, saved: calls.append("fifth") or faster(o, saved)),
        before_load(note("fourth"), prepend=True),
        loaded.register_load_state_dict_post_hook(
            lambda o: calls.append(o.param_groups[0]["lr"]), prepend=True
        ),
    ]
    saved = optimizer.state_dict()
    assert saved.pop("extra") == 1
    loaded.load_state_dict(saved)
    expected = ["first", "second", "third", "fourth", "fifth", 0.25]
    assert calls == expected
    assert_equal(loaded.state_dict()["state"], saved["state"])
    for handle in handles:
        handle.remove()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    loaded.load_state_dict(saved)
    assert calls == expected
    assert_equal(loaded.state_dict(), saved)
    assert len(loaded._optimizer_load_state_dict_pre_hooks) == 0


@pytest.mark.sees_defect("caches are module globals: optimizers share and clear each other's")
@by_input
def test_copies_and_pickles(opt, device, name, options) -> None:
    for copied in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        problem, optimizer = stepped(opt, device, name, **options)
        other = copied(optimizer)
        public = [{key for key in o.__dict__ if key[0] != "_"} for o in (optimizer, other)]
        assert public[0] == public[1] >= {"defaults", "state", "param_groups", "debug"}
        assert_equal(other.state_dict(), optimizer.state_dict())
        assert str(other) == str(optimizer)
        assert other.parameter_names(0) == optimizer.parameter_names(0)
        twin = copy.deepcopy(problem)
        twin.weight, twin.bias = (group["params"][0] for group in other.param_groups)
        before = values(problem.params)
        other.step(twin.loss)
        assert_all_same_bits(problem.params, before)
        optimizer.step(problem.loss)
        assert_continues(problem, optimizer, twin, other)
