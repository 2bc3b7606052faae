"""Gradients that leave for their owners in backward: once, as they are in the step, or not."""

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

from ._arenas import Direct, arenas_on_threads
from ._cases import bits
from ._ranks import on_ranks, same_everywhere
from .test_partition import assert_equal_bits, message_of, module_of
from .test_unreduced import contribution, groups, missing, parameters

pytestmark = pytest.mark.dist

LIMIT = 3 * 4000  # bytes under way: several chunks


class Hooked(Direct):
    """p2p whose messages leave in backward; counts exchanges and those before the step."""

    def __init__(
        self, opt: Any, silent: tuple[int, ...] = (), pushed: int | None = None, **options: Any
    ) -> None:
        """`silent`: ranks whose messages leave in the step. `pushed`: PUSHED meanwhile."""
        super().__init__(opt, **options)
        self.silent = distributed.get_rank() in silent
        self.hooks = module_of(opt, "optimizers.sharded.in_backward").InBackward
        self.scatter = module_of(opt, "optimizers.sharded.reduce_scatter")
        self.pushed = self.scatter.PUSHED if pushed is None else pushed

    def __enter__(self) -> Any:
        counted = super().__enter__()
        send, drop = self.hooks._send, self.hooks._drop

        def counted_send(here: Any) -> None:
            if not self.silent:
                before = here._left
                send(here)
                counted["begun"] += here._left - before

        def counted_drop(here: Any) -> None:
            counted["dropped"] += 1
            drop(here)

        self.patch.setattr(self.hooks, "_send", counted_send)
        self.patch.setattr(self.hooks, "_drop", counted_drop)
        self.patch.setattr(self.scatter, "PUSHED", self.pushed)
        return counted


def made(opt: Any, backwards: int, **options: Any) -> tuple[Any, list[nn.Parameter]]:
    params = parameters()
    options = {"in_flight_bytes": LIMIT, "prefetch": 2} | options
    config = opt.DistributedConfig(reduce_in_backward=backwards, **options)
    return opt.DistMuonAdamW(groups(params), distributed=config), params


def backward(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Add this rank's contributions, by autograd."""
    terms = []
    for index, param in enumerate(params):
        if not missing(step, index):
            grad = contribution(param.shape, distributed.get_rank(), step, index) * factor
            terms.append((param * grad).sum())
    torch.stack(terms).sum().backward()


def advance(optimizer: Any, params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    backward(params, step, factor)
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def two_of(opt: Any, **options: Any) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Counts, and two optimizers with their parameters, equal in the end: the first sends early."""
    with Hooked(opt, **options) as counted:
        early, plain = made(opt, 1), made(opt, 0)
        yield counted, (early, plain)
        early[0].state_dict()
    assert_equal_bits(early[1], plain[1])


def trained(
    opt: Any, backwards: int, passes: int, to_none: bool, pushed: int, silent: tuple[int, ...] = ()
) -> None:
    """Some steps, bit for bit as with gradients that are packed in the step."""

    def steps(optimizer: Any, params: list[nn.Parameter]) -> None:
        for step in range(5):
            for part in range(passes):
                backward(params, step, 1 + part)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    with Hooked(opt, silent, pushed) as counted:
        optimizer, params = made(opt, backwards)
        steps(optimizer, params)
        optimizer.state_dict()
        rows = optimizer.comm_report()
    plain, expected = made(opt, 0)
    steps(plain, expected)
    assert_equal_bits(params, expected)
    begins = backwards == passes and distributed.get_rank() not in silent
    assert (counted["begun"] > 4) == begins and not counted["dropped"]
    assert any("begun in backward" in row["reason"] for row in rows) == begins
    in_place = sum("pushed from where it lies" in row["reason"] for row in rows)
    assert (in_place > 4) == (pushed == 0)
    assert {row["transport"] for row in rows} == {"p2p"}


@pytest.mark.sees_defect("a gradient that left in backward is added up again in the step")
@pytest.mark.parametrize("pushed", [0, 2**40], ids=["in place", "packed"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("backwards", "passes"), [(1, 1), (2, 2), (3, 2)])
@on_ranks(2)
def test_steps_have_the_bits_of_those_that_send_all(
    opt, backwards, passes, to_none, pushed
) -> None:
    """With parameters that have no gradient in some steps, and with passes that are added up."""
    trained(opt, backwards, passes, to_none, pushed)


@pytest.mark.parametrize("how", ["added up", "thrown away"])
@on_ranks(2)
def test_what_left_too_early_is_sent_again(opt: Any, how) -> Any:
    """A pass that is not the last one, or is thrown away: what had left is sent again."""
    with two_of(opt) as (counted, both):
        for optimizer, params in both:
            for step in (0, 3, 3):
                backward(params, 3)
                if how == "thrown away":
                    optimizer.zero_grad()
                advance(optimizer, params, step)
    assert counted["dropped"] == 2 and counted["begun"] > 4
    return counted["begun"]


def at_random(opt: Any, seed: int) -> int:
    """Steps of random groups, options and limits, with and without hooks: the same bits."""
    generator = random.Random(seed)
    shapes = [(generator.randint(1, 40), generator.randint(1, 40)) for _ in range(9)]
    shapes += [(3, generator.randint(1, 9), generator.randint(1, 9)) for _ in range(3)]
    others = [(generator.choice([1100, 33 * 33]),), (70, 20), (5, 4), ()]
    dtype = generator.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    wire = generator.choice([None, torch.float16])
    limits = {
        "prefetch": generator.randint(1, 5),
        "in_flight_bytes": generator.choice([1, 3000, 20000, 2**28]),
        "chunk_size": generator.choice([-1, 1, 4]),
        "wire_dtype": wire,
    }
    none_grad, backwards = generator.random() < 0.5, generator.randint(1, 2)
    absent = [{k for k in range(16) if generator.random() < 0.1} for _ in range(4)]
    pushed = generator.choice([0, 300, 2**40])
    results, begun = [], 0
    for early in (backwards, 0):
        noise = torch.Generator().manual_seed(seed)
        params = [
            nn.Parameter(torch.randn(shape, generator=noise).to(dtype))
            for shape in (*shapes, *others)
        ]
        names = [f"experts.{k}" if len(s) == 3 else f"w.{k}" for k, s in enumerate(shapes)]
        listed = [
            {"kind": "muon", "params": params[:7], "names": names[:7], "lr": 0.1},
            {"kind": "muon", "params": params[7:12], "names": names[7:], "lr": 0.05},
            {"kind": "adamw", "params": params[12:], "lr": 0.1},
        ]
        listed[1]["expert_keys"], listed[1]["beta2"] = ["experts"], None
        listed = [group | {"none_grad": none_grad} for group in listed]
        config = opt.DistributedConfig(reduce_in_backward=early, **limits)
        optimizer = opt.DistMuonAdamW(listed, distributed=config)
        noise.manual_seed(seed + 1 + distributed.get_rank())
        with Hooked(opt, pushed=pushed) as counted:
            for step in range(4):
                for _ in range(backwards):
                    weights = [torch.randn(p.shape, generator=noise).to(dtype) for p in params]
                    pairs = enumerate(zip(params, weights, strict=True))
                    there = [(p * w).sum() for k, (p, w) in pairs if k not in absent[step]]
                    torch.stack(there).sum().backward()
                optimizer.step()
                assert not none_grad or all(param.grad is None for param in params)
                optimizer.zero_grad()
            optimizer.state_dict()
            begun += counted["begun"]
        results.append([bits(param) for param in params])
    assert results[0] == results[1]
    return begun


@pytest.mark.parametrize(("world", "pushed"), [(2, 0), (2, 2**40), (3, 0)])
@on_ranks()
def test_some_ranks_send_in_the_step(opt, world, pushed) -> None:
    """What others have begun in backward waits for them, and no rank waits in backward.

    Threads stand for streams here; test_symm.py has the streams of GPUs.
    """
    with arenas_on_threads(opt, pushed):
        trained(opt, 1, 1, True, pushed, silent=(1,))


@pytest.mark.parametrize("count", [2, 3])
def test_random_plans(ranks, count) -> None:
    begun = [same_everywhere(ranks(count).run(at_random, 50 * count + k)) for k in range(3)]
    assert sum(map(bool, begun)) > 1, begun


CHANGES = {
    "clipped": lambda params: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    "scaled": lambda params: [param.grad.mul_(0.5) for param in params],
    "replaced": lambda params: [setattr(param, "grad", param.grad.clone()) for param in params],
    "taken away": lambda params: [setattr(param, "grad", None) for param in params],
}


@pytest.mark.sees_defect("a gradient that is clipped after it was sent is stepped unclipped")
@pytest.mark.parametrize("how", CHANGES)
@on_ranks(2)
def test_a_gradient_that_changed_is_refused(opt: Any, how) -> None:
    """Nothing is written then, and another backward pass goes on."""
    with two_of(opt) as (_, both):
        for optimizer, params in both:
            advance(optimizer, params, 3)
            backward(params, 3)
            if optimizer is both[0][0]:
                CHANGES[how](params)
                before = [bits(param) for param in params]
                heard = message_of(optimizer.step)
                same = before == [bits(param) for param in params]
            optimizer.zero_grad()
            backward(params, 4)
            optimizer.step()
    assert heard.startswith("RuntimeError: ") and "had left for its owner" in heard and same
    assert "group " in heard and "parameter " in heard


@on_ranks(2)
def test_a_hook_of_the_tensor_comes_before(opt: Any) -> None:
    with two_of(opt) as (counted, both):
        for param in both[0][1]:
            param.register_hook(lambda grad: grad / 2)
        for (optimizer, params), factor in zip(both, (1.0, 0.5), strict=True):
            for step in (3, 4):
                advance(optimizer, params, step, factor)
    assert counted["begun"] > 1


def one_rank_alone(opt: Any, how: str) -> str:
    """One rank makes a pass more than the other, or gets a new plan in between."""
    with Hooked(opt, timeout_ms=1000):
        optimizer, params = made(opt, 1)
        for step in (3, 4):
            backward(params, step)
            if step == 4 and distributed.get_rank() == 1:
                if how == "another pass":
                    backward(params, step)
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            heard = message_of(optimizer.step)
            heard = heard if heard != "none" else message_of(optimizer.state_dict)
    return heard


@pytest.mark.parametrize("how", ["another pass", "loads state"])
def test_a_rank_that_sends_anew_alone_is_noticed(doomed, how) -> None:
    """Messages of different passes are never taken for each other's."""
    first, second = doomed(2).run(one_rank_alone, how, timeout=60)
    if how == "another pass":
        text = "gradients that had left in backward were made anew"
        assert text in first and text in second
    else:
        assert "did not arrive at an exchange" in first or "Timed out" in first
        assert "this rank alone got a new plan" in second


@contextlib.contextmanager
def said_once(opt: Any) -> Iterator[list[str]]:
    """What plans say meanwhile."""
    plan, said = module_of(opt, "optimizers.sharded.shared_plan"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "say_once", lambda text, *given: said.append(text % given))
        yield said


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_where_nothing_can_leave_it_is_said(opt: Any, strict) -> Any:
    with said_once(opt) as said:
        optimizer, params = made(opt, 1, transport="nccl", strict=strict)
        backward(params, 3)
        heard = message_of(optimizer.step)
    (text,) = [heard] if strict else said
    assert text.removeprefix("CommUnavailable: ").startswith("reduce_in_backward sends nothing")
    assert strict != (heard == "none")
    return said


@pytest.mark.sees_defect("ranks wait for each other: an all-gather of one is paired with a sum")
@pytest.mark.parametrize("why", ["float16", "frozen"])
@on_ranks(2)
def test_what_may_not_leave_in_backward_goes_in_the_step(opt, why) -> None:
    """Scales of float16 travel outside of exchanges; a frozen parameter has no hook."""
    wire = torch.float16 if why == "float16" else None
    frozen = (0, 1, 5) if why == "frozen" else ()
    with said_once(opt) as said, arenas_on_threads(opt, 3), Hooked(opt, (1,)) as counted:
        results = []
        for backwards in (1, 0):
            optimizer, params = made(opt, backwards, wire_dtype=wire)
            for k in frozen:
                params[k].requires_grad_(False)
            for step in (0, 3, 4):
                backward([p for p in params if p.requires_grad], step)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.state_dict()
            results.append([bits(param) for param in params])
    assert results[0] == results[1] and not counted["begun"]
    (text,) = said
    assert "wire_dtype of float32, and parameters that train" in text


@pytest.mark.sees_defect("after a captured backward pass every step raises, for ever")
@on_ranks(2)
def test_a_captured_pass_takes_back_what_had_left(opt: Any) -> Any:
    """A backward pass is captured behind an eager one; replays, of which Python sees nothing."""
    module = module_of(opt, "optimizers.sharded.in_backward")
    with two_of(opt) as (counted, both), pytest.MonkeyPatch.context() as patch:
        for optimizer, params in both:
            advance(optimizer, params, 3)
            backward(params, 3)  # warms up
            optimizer.zero_grad()
            with pytest.MonkeyPatch.context() as capturing:
                capturing.setattr(module, "_is_capturing", lambda param: True)
                backward(params, 4)
            optimizer.step()
            begun = counted["begun"]
            patch.setattr(module.InBackward, "_accumulated", lambda *_: None)  # replays
            for step in (3, 4):
                optimizer.zero_grad()
                backward(params, step)
                optimizer.step()
            patch.undo()
    assert begun > 1 and counted["dropped"] == 1
    return begun


class Stream:
    """What a stream is told to wait for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.wait_stream = self.wait_event = self.waited.append

    def record_event(self) -> Any:
        return "memory is free", self


@pytest.mark.sees_defect("a hook on another stream packs into memory that the last step reads")
def test_every_stream_waits_for_the_last_step(opt, monkeypatch) -> None:
    """Backward on two streams: the first begins the step, and only it waited for the last one."""
    module = module_of(opt, "optimizers.sharded.in_backward")
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    device, route = torch.device("cuda", 0), SimpleNamespace(gathered=None, owned=())
    team = SimpleNamespace(transport=SimpleNamespace(begin_early=lambda coming: None))
    chunks = [
        SimpleNamespace(
            members=[SimpleNamespace(param=p)], params={p}, device=device, team=team, route=route
        )
        for p in params
    ]

    class Shared:
        def begin_in_backward(self) -> Any:
            return SimpleNamespace(begun={})

    shared, streams = Shared(), [Stream(), Stream()]
    monkeypatch.setattr(module, "Contributions", lambda *_: SimpleNamespace(launch=lambda: None))
    early = module.InBackward(chunks, 1, shared)
    for param, stream in zip(params, streams, strict=True):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, here=stream: here)
        early._whole[param] = stream
        early._send()
    assert early._left == 2
    assert ("memory is free", streams[0]) in streams[1].waited


@on_ranks(2)
def test_an_optimizer_that_is_gone_sends_nothing(opt: Any) -> None:
    with Hooked(opt) as counted:
        optimizer, params = made(opt, 1)
        for _ in range(2):
            advance(optimizer, params, 3)
        optimizer.add_param_group(
            {"kind": "adamw", "params": [nn.Parameter(torch.zeros(2, 2))], "lr": 0.1}
        )
        backward(params, 3)
        optimizer.step()
        begun = counted["begun"]
        del optimizer
        backward(params, 3)
        assert counted["begun"] == begun
    assert begun > 1
