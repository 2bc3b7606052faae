"""What the host does for a step, counted: time says little on a machine that others share."""

import sys
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters

from .._compare import assert_all_same_bits, assert_same_bits
from ._steps import both, new_gradients, parameters, train, values

CLASSES = pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
KINDS = {
    "matrices": {"use_muon": True, "beta2": None},
    "second moments": {"use_muon": True, "beta2": 0.9},
    "adamw": {"use_muon": False},
}
CALLS_PER_SHAPE = 85
CALLS_PER_STEP = 235  # of which torch's own wrapper of `step` makes 60


@pytest.fixture
def build(opt, submodule, device, monkeypatch):
    """`build(name, shapes, **options)`: an optimizer whose matrices are not orthogonalized."""
    monkeypatch.setattr(submodule("optimizers.step"), "orthogonalize", lambda x, **options: x)

    def make(name, shapes, **options):
        params = parameters(shapes, device=device)
        group = {"params": params, "lr": 0.02, "none_grad": False, **options}
        return getattr(opt, name)([group])

    return make


@contextmanager
def counted_calls():
    """A list that has one entry per call of a function, of Python or C, when it is left."""
    calls: list[str] = []

    def hook(frame, event, argument) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__name__)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def calls_of_a_step(optimizer) -> list[str]:
    for _ in range(2):  # the plan, and what is cached
        optimizer.step()
    with counted_calls() as calls:
        optimizer.step()
    return calls


@CLASSES
@pytest.mark.parametrize("kind", KINDS)
def test_calls_per_parameter(build, name, kind) -> None:
    few, many = (len(calls_of_a_step(build(name, [(4, 2)] * n, **KINDS[kind]))) for n in (20, 120))
    assert many == few


@CLASSES
def test_calls_per_shape(build, name) -> None:
    one, more = (
        len(calls_of_a_step(build(name, [(k + 1, 2) for k in range(n)], **KINDS["matrices"])))
        for n in (1, 21)
    )
    assert (more - one) / 20 <= CALLS_PER_SHAPE


@CLASSES
@pytest.mark.parametrize("kind", KINDS)
def test_calls_per_step(build, name, kind) -> None:
    assert len(calls_of_a_step(build(name, [(4, 2)], **KINDS[kind]))) <= CALLS_PER_STEP


def test_tensors_that_the_ops_are_given(build, submodule, monkeypatch) -> None:
    """What a list costs it costs per tensor: directions and updates are one each, never views."""
    lists = submodule("kernels.step.tensor_lists")
    given = {}

    class Counted:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, op):
            def call(*arguments):
                found = [a for a in arguments if isinstance(a, (list, tuple, torch.Tensor))]
                flat = [x for a in found for x in ([a] if isinstance(a, torch.Tensor) else a)]
                given[op] = sum(isinstance(x, torch.Tensor) for x in flat)
                return getattr(self.ops, op)(*arguments)

            return call

    monkeypatch.setattr(lists, "ops", Counted(lists.ops))
    build("Muon", [(4, 2)] * 40, **KINDS["matrices"]).step()
    assert given == {"momentum": 2 * 40 + 1, "apply_update": 40 + 1}


def test_ranges_are_made_for_a_profiler_only(build, submodule, monkeypatch) -> None:
    """torch's ranges take 8 us each, watched or not. The stages are visible in a trace."""
    optimizer = build("Muon", [(4, 2)], **KINDS["matrices"])
    vector = torch.nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    optimizer.add_param_group({"params": [vector], "use_muon": False})
    optimizer.step()
    made = []
    timing = submodule("optimizers.report")
    record = torch.autograd.profiler.record_function
    monkeypatch.setattr(
        timing.profiler, "record_function", lambda name: (made.append(name), record(name))[1]
    )
    optimizer.step()
    assert not [name for name in made if name.startswith("muon::")]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        optimizer.step()
    stages = {name for name in made if name.startswith("muon::")}
    expected = {"momentum", "newton_schulz", "update_params", "adamw"}
    assert stages == {f"muon::{stage}" for stage in expected}


def reshaped(optimizer, param) -> None:
    param.grad = None
    param.data = param.data.view(2, 4)
    optimizer.state[param] = {}
    param.grad = torch.ones_like(param)


def cast(optimizer, param) -> None:
    param.grad = None
    param.data = param.data.bfloat16()
    param.grad = torch.ones_like(param)


CHANGES = {
    "a form": reshaped,
    "a dtype": cast,
    "an option of the layout": lambda o, p: o.param_groups[0].update(num_heads=2),
    "a loaded state": lambda o, p: o.load_state_dict(o.state_dict()),
    "a state put in its place": lambda o, p: o.state.update({p: dict(o.state[p])}),
    "a group": lambda o, p: o.add_param_group({"params": [p.detach().clone()], "use_muon": True}),
}
NO_CHANGES = {
    "nothing": lambda o, p: None,
    "a rate": lambda o, p: o.param_groups[0].update(lr=0.5),
    "a gradient": lambda o, p: new_gradients([p], seed=9),
    "no gradient": lambda o, p: setattr(p, "grad", None),
    "a tensor of the state": lambda o, p: o.state[p].update(
        momentum_buffer=torch.ones_like(p.detach())
    ),
    "a storage": lambda o, p: setattr(p, "data", p.data.clone()),
}


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
def test_a_plan_is_made_anew_where_it_must_be(build, monkeypatch, change) -> None:
    optimizer = build("Muon", [(4, 2), (4, 2)], **KINDS["matrices"])
    optimizer.step()
    plans = []
    make = optimizer._make_plan
    monkeypatch.setattr(
        optimizer, "_make_plan", lambda *arguments: (plans.append(1), make(*arguments))[1]
    )
    param = optimizer.param_groups[0]["params"][1]
    (CHANGES | NO_CHANGES)[change](optimizer, param)
    optimizer.step()
    assert len(plans) == (change in CHANGES)
    optimizer.step()
    assert len(plans) == (change in CHANGES)


@CLASSES
@pytest.mark.parametrize("kind", KINDS)
def test_state_put_in_its_place_is_used(build, name, kind) -> None:
    """A tensor, or all of a parameter's state, from outside: the next step advances it."""
    results = []
    for replaced in (False, True):
        optimizer = build(name, [(4, 2)] * 3, **KINDS[kind])
        params = optimizer.param_groups[0]["params"]
        train(optimizer, params, 2)
        kept = dict(optimizer.state[params[1]])
        if replaced:
            copied = {key: value.clone() for key, value in kept.items()}
            optimizer.state[params[1]] = copied
            for key, value in optimizer.state[params[2]].items():
                optimizer.state[params[2]][key] = value.clone()
        before = {key: value.clone() for key, value in kept.items()}
        train(optimizer, params, 2, seed=7)
        results.append(values(params))
        if replaced:
            for key, value in kept.items():
                assert_same_bits(value, before[key])
    assert_all_same_bits(*results)


@pytest.fixture
def counted():
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["step", "function"])
def test_a_compiled_step_under_a_schedule(opt, device, counted, name, wrapped) -> None:
    """Twelve rates, beyond the compiler's limit of 8 graphs: nothing of the step is traced."""
    results = []
    for compiled in (False, True):
        params = parameters([(6, 4), (3, 8), (5,)], device=device)
        optimizer = both(opt, params, weight_decay=0.1)[name]()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def train(optimizer=optimizer, params=params):
            torch._foreach_mul_([param.grad for param in params], 2.0)
            optimizer.step()

        step = train if wrapped else optimizer.step
        step = torch.compile(step, backend="aot_eager") if compiled else step
        for seed in range(12):
            new_gradients(params, seed=seed)
            step()
            scheduler.step()
            if seed == 1:
                counted["after two"] = dict(counted["frames"])
        results.append(values(params))
    assert_all_same_bits(results[1], results[0])
    assert counted["stats"]["unique_graphs"] <= 1  # what is around the step
    assert counted["frames"] == counted["after two"]
