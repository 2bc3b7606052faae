"""Short runs of the fuzzer and of the soak, and the defects that they must see."""

# ruff: noqa: F811 - tests take the imported fixture as an argument

from typing import Any

import pytest
import torch

from ..distributed.conftest import ranks  # noqa: F401 - a fixture
from . import _cases, _episode, _meshes, _together
from ._calls import CALLS, Call, Package
from ._problem import assert_same

QUICK = [name for name in CALLS if not name.startswith("integrations.")]


@pytest.fixture
def package(opt, tmp_path) -> Package:
    return Package(opt, tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_valid_calls_are_taken(package, name, monkeypatch) -> None:
    monkeypatch.setattr(_cases, "VALID_RATE", 1.0)
    monkeypatch.setattr(_cases, "CALLS", {name: CALLS[name]})
    assert {_cases.play(package, number) for number in range(3)} <= {"right", "refused"}


def test_every_public_function_is_called(opt) -> None:
    """Or it is a module, a record that another call makes, or a name of the same function."""
    same = {
        "COEFFICIENT_SETS": "gram_newton_schulz",
        "DistMuonAdamW": "MuonAdamW",
        "MuonFactory": "get_default_muon_param_groups",
        "ProfileCallback": "profile_steps",
        "save_optimizer_async": "save_optimizer",
    }
    modules = {"integrations", "layers", "moe", "muon", "tensor_parallel"}  # the last needs ranks
    of_ranks = {"CommUnavailable", "all_gather_lc", "reduce_scatter_lc"}
    for name in set(opt.__all__) - modules - of_ranks:
        assert same.get(name, name) in CALLS
    records = {"ActiveExperts", "ExpertOrder", "ExpertsLora", "LoraFactors", "ExpertOffload"}
    for name in set(opt.moe.__all__) - records:
        assert f"moe.{name}" in CALLS
    switches = {"set_lora", "disable_lora", "enable_lora", "merge_lora", "unmerge_lora"}
    switches |= {"detach_lora", "lora_disabled", "save_peft_adapter"}
    switches |= {"load_quantized"}  # of a quantised folder, in tests/integrations
    switches |= {"checkpoint"}  # a module, whose functions the package has under its own names
    for name in set(opt.integrations.__all__) - switches:
        assert f"integrations.{name}" in CALLS


def judged(function: Any, spoiled: tuple[str, ...] = ("x",), **options: Any) -> str:
    call = Call("planted", function, {"x": torch.ones(3)}, **options)
    call.spoiled = list(spoiled)
    return _cases.judge(call)


def _raise(error: BaseException) -> Any:
    def function(x: Any) -> None:
        raise error

    return function


def _write(x: torch.Tensor, error: BaseException | None = None) -> None:
    x.zero_()
    if error is not None:
        raise error


REFUSAL = ValueError("x must be two")
DEFECTS = {
    "another error": lambda: judged(_raise(KeyError("x"))),
    "an assertion": lambda: judged(_raise(AssertionError("x"))),
    "a message without the argument": lambda: judged(_raise(ValueError("bad input"))),
    "an input that changes": lambda: judged(_write),
    "an output that changes before a refusal": lambda: judged(
        lambda x: _write(x, REFUSAL), written=("x",)
    ),
    "a result that fails its check": lambda: judged(
        lambda x: x, (), check=_raise(AssertionError("not finite"))
    ),
    "a refusal of valid arguments": lambda: judged(_raise(REFUSAL), ()),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name) -> None:
    """And what is documented is no finding."""
    with pytest.raises((KeyError, AssertionError)):
        DEFECTS[name]()
    assert judged(_raise(REFUSAL)) == "refused"
    assert judged(lambda x: None) == "accepted"
    assert judged(lambda x: x, ()) == "right"


def test_plans_on_random_meshes(package) -> None:
    assert sum(_meshes.play(package, number) for number in range(12)) > 5


@pytest.mark.parametrize("what", ["owner", "size"])
def test_a_rank_that_plans_otherwise_is_seen(package, submodule, what, monkeypatch) -> None:
    if what == "owner":
        module, name = submodule("optimizers.sharded.partition"), "assign"
        original, calls = module.assign, iter(range(10**6))

        def defective(costs: Any, candidates: Any, ranks: int) -> Any:
            owners = original(costs, candidates, ranks)
            turned = tuple((owner + 1) % ranks for owner in owners)
            return turned if next(calls) % 2 else owners
    else:
        module, name = submodule("distributed.message_layout"), "boxes"
        original = module.boxes

        def defective(runs: Any, region: Any) -> Any:
            return original(runs, region)[:1]

    monkeypatch.setattr(module, name, defective)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        for number in range(12):
            _meshes.play(package, number)


SEEDS = range(4)


def findings(opt: Any) -> list[str]:
    found = []
    for seed in SEEDS:
        try:
            _episode.play(opt, seed, 12)
        except Exception as error:
            found.append(str(error))
    return found


def test_a_short_run_finds_nothing(opt) -> None:
    assert findings(opt) == []


@pytest.mark.parametrize("seed", [0, 1], ids=["MuonAdamW", "Muon"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["on device", "in tiny batches"])
@pytest.mark.parametrize("name", _episode.EVENTS)
def test_every_event_is_followed_by_a_restart(
    opt, submodule, name, offloaded, seed, monkeypatch
) -> None:
    episode = _episode.Episode(opt, seed)
    if offloaded:
        for module in ("optimizers.plan", "optimizers.state.in_host_memory"):
            monkeypatch.setattr(submodule(module), "BATCH_BYTES", 64)
        episode.run.optimizer.turn_on_cpu_offload()
    try:
        episode.fill_gradients()
        with torch.inference_mode():  # what is made here is stepped, changed and saved outside
            episode.step("the first step")
        for event in (name, "save_and_restart"):
            episode.fill_gradients()
            _episode.EVENTS[event](episode)
            assert_same(episode.run, episode.twin, f"after {event}")
            episode.step(event)
    finally:
        episode.close()


@pytest.mark.parametrize(
    ("event", "method"),
    [("state_dict_to_itself", "load_state_dict"), ("offload_on", "turn_on_cpu_offload")],
)
def test_the_soak_sees_lost_state(opt, event, method, monkeypatch) -> None:
    original = getattr(opt.MuonAdamW, method)

    def damaged(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        first = self.param_groups[0]["params"][0]
        self.state[first]["momentum_buffer"].zero_()

    monkeypatch.setattr(opt.MuonAdamW, method, damaged)
    monkeypatch.setattr(opt.Muon, method, damaged)
    monkeypatch.setattr(_episode, "EVENTS", {event: _episode.EVENTS[event]})
    assert any("momentum_buffer differs" in text for text in findings(opt))


def test_half_a_step_that_goes_on_is_seen(opt, submodule, monkeypatch) -> None:
    """A step that raises after a batch, and an optimizer that forgets it."""
    events = {name: _episode.EVENTS[name] for name in ("step_is_interrupted", "offload_on")}
    monkeypatch.setattr(_episode, "EVENTS", events)
    assert findings(opt) == []
    forgetful = submodule("optimizers.sharded.consistency").Consistency
    monkeypatch.setattr(forgetful, "check_unbroken", lambda self: None)
    assert any("was interrupted" in text for text in findings(opt))


@pytest.mark.dist
def test_several_ranks(ranks) -> None:
    ranks(2).run(_together.play, 1, 6)
