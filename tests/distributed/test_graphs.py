"""Stages that repeat themselves are replayed, and nothing that a replay depends on goes unnoticed.

On CPUs, where there are no graphs, a stage that was captured is its function at that time, with the
tensors and numbers it had then: what its key does not name is out of date in a replay here too.
"""

import contextlib
import copy
import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn

from ._cases import CASES, Case, bits, device, local, mesh_of, spread, whole
from ._ranks import on_ranks
from .test_partition import module_of
from .test_shared_step import compare
from .test_unreduced import contribution, equals_one_rank

pytestmark = pytest.mark.dist

STEPS = 22
MATRICES = [(24, 12), (12, 24), (24, 12), (48, 12), (24, 12), (12, 24)]
TABLE = (64, 24)


class Again:
    """A captured stage of a CPU, whose views are made anew as they were made then."""

    def __init__(self, body, counted: Counter[str]) -> None:
        self.body, self.counted = body, counted
        self.inferred = torch.is_inference_mode_enabled()

    def replay(self) -> None:
        self.counted["replayed"] += 1
        with torch.inference_mode() if self.inferred else contextlib.nullcontext():
            self.body()


@contextlib.contextmanager
def captured(opt: Any, before: Callable[[], None] = lambda: None) -> Iterator[Counter[str]]:
    """Captures stages on any device, and counts captures and replays.

    `before` is called in every capture, ahead of the stage.
    """
    module, counted = module_of(opt, "optimizers.sharded.cuda_graphs"), Counter()
    original = module.capturer

    def capturer(where: torch.device, room: int):
        real = original(where, room)
        counted["room"] = max(room, counted["room"])  # of one pool or the other

        def capture(body):
            def stage() -> None:
                before()
                body()

            counted["captured"] += 1
            if real is not None:
                return Again(real(stage).replay, counted)
            before()
            return Again(body, counted)

        return capture

    with mock.patch.object(module, "capturer", capturer):
        yield counted


def replayed_in_cases(opt: Any, seed: int, count: int, where: Any, offload: bool = False) -> int:
    """Random cases have the bits of one rank; returns how many stages were replayed."""
    world, generator = distributed.get_world_size(), random.Random(seed)
    with captured(opt) as counted:
        compare(opt, [Case.random(generator, world, where.type) for _ in range(count)], offload)
    return counted["replayed"]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "in host memory"])
def test_replayed_stages_have_the_bits_of_one_rank(ranks, world, device, offload) -> None:
    """With state in host memory none is: its momentum visits another place in every step."""
    seed, count = (50, CASES[world] // 3) if offload else (100, CASES[world])
    replayed = ranks(world).run(replayed_in_cases, seed + world, count, device, offload)
    assert not any(replayed) if offload else sum(replayed) > CASES[world] or world == 1


def unreduced_cases(opt: Any, limit: int) -> int:
    with captured(opt) as counted:
        equals_one_rank(opt, "sum", limit)
    return counted["replayed"]


@pytest.mark.parametrize("limit", [2**28, 20000])
def test_replayed_stages_of_unreduced_gradients(ranks, world, limit) -> None:
    assert sum(ranks(world).run(unreduced_cases, limit)) > 0 or world == 1


class Story:
    """Steps in which one thing after another changes, each of which some stage depends on."""

    def __init__(
        self,
        opt: Any,
        form: str,
        wire: torch.dtype | None,
        *,
        together: bool,
        inferring: bool = False,
    ) -> None:
        self.form, self.together, self.inferring = form, together, inferring
        self.raised: list[str] = []
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        generator = torch.Generator().manual_seed(3)
        shapes = [*MATRICES, TABLE]
        drawn = [torch.randn(shape, generator=generator).to(device()) for shape in shapes]
        self.params = [nn.Parameter(self._placed(*each)) for each in enumerate(drawn)]
        muon, others = {"params": self.params[:-1]}, {"params": self.params[-1:]}
        if form == "shards":
            muon |= {"use_muon": True, "none_grad": False}
            others |= {"use_muon": False, "none_grad": False}
            self.optimizer = opt.Muon([muon, others], distributed=opt.DistributedConfig(wire))
            return
        muon |= {"kind": "muon", "lr": 0.1}
        others |= {"kind": "adamw", "lr": 0.1}
        if together:
            self.optimizer = opt.DistMuonAdamW(
                [muon, others],
                reduce_op="sum",
                distributed=opt.DistributedConfig(wire, in_flight_bytes=27000),
            )
        else:
            self.optimizer = opt.MuonAdamW([muon, others])

    def _placed(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if not self.together or self.form != "shards":
            return tensor.clone()
        return spread(tensor, mesh_of((self.world,)), ("S0", "S0", "S1", "R")[index % 4])

    def gradient(self, step: int, index: int, shape) -> torch.Tensor:
        if self.form == "shards":
            return self._placed(index, contribution(shape, 0, step, index))
        if self.together:
            return contribution(shape, self.rank, step, index)
        parts = [contribution(shape, rank, step, index) for rank in range(self.world)]
        return torch.stack(parts).sum(0)

    def _before(self, step: int) -> None:
        muon, others = self.optimizer.param_groups
        for group in (muon, others):
            group["lr"] = 0.1 / (1 + step)
            group["weight_decay"] = 0.1 if step < 4 else 0.2
        if step == 6:
            muon["momentum"] = 0.8
        if step == 8:
            muon["ns_steps"], muon["cautious"] = 3, True
            others["betas" if "betas" in others else "adamw_betas"] = (0.8, 0.9)
        if step == 10:
            state = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer.load_state_dict(state)
        if step == 12:
            for param in self.params[:2]:  # as `module.to` moves them
                param.data = param.data.clone()
        if step == 18:
            muon["adjust_lr_fn"] = lambda lr, rows, columns: lr * rows / columns

    def run(self) -> list[torch.Tensor]:
        for step in range(STEPS):
            self._before(step)
            for index, param in enumerate(self.params):
                grad = self.gradient(step, index, tuple(param.shape))
                if (step, index) in {(5, 2), (5, 6), (9, 0)}:
                    param.grad = None
                elif param.grad is None or step in (3, 7):
                    param.grad = grad
                else:
                    param.grad.copy_(grad)
            try:
                with torch.inference_mode(self.inferring and step % 3 == 0):
                    self.optimizer.step()
            except RuntimeWarning as warned:
                self.raised.append(str(warned))
        return [param.detach() for param in self.params]


def told(
    opt: Any,
    form: str,
    wire: torch.dtype | None,
    before: Callable[[], None] = lambda: None,
    inferring: bool = False,
) -> Counter[str]:
    with captured(opt, before) as counted:
        story = Story(opt, form, wire, together=True, inferring=inferring)
        found = story.run()
        counted["raised"] = sum("could not be captured" in one for one in story.raised)
    for index, (one, other) in enumerate(
        zip(found, Story(opt, form, wire, together=False).run(), strict=True)
    ):
        if form != "shards" and wire == torch.float16:  # which one rank does not round to
            assert (one - other).abs().max() <= 0.02
        else:
            assert bits(whole(one)) == bits(other), f"parameter {index}"
    return counted


@pytest.mark.parametrize(
    ("form", "wire", "inferring"),
    [
        ("shards", torch.float32, False),
        ("shards", torch.float16, False),
        ("shards", torch.float16, True),
        ("unreduced", torch.float32, False),
        ("unreduced", torch.float32, True),
        ("unreduced", torch.float16, False),
    ],
    ids=str,
)
@on_ranks(2)
def test_whatever_a_stage_depends_on_may_change(opt, form, wire, inferring) -> None:
    """Addresses of gradients, parameters and state, numbers, options, missing gradients.

    What a step in inference mode makes and keeps, others write to.
    """
    counted = told(opt, form, wire, inferring=inferring)
    assert counted["captured"] > 10
    assert counted["replayed"] > counted["captured"]
    assert counted["room"] > 0


class Litter:
    """Garbage that only the collector finds, with a graph in it on a GPU."""

    def __init__(self, found: list[str]) -> None:
        self.itself, self.found = self, found
        self.graph = torch.cuda.CUDAGraph() if device() == "cuda" else None
        if self.graph is not None:
            place = torch.zeros(4, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                self.graph.capture_begin(capture_error_mode="thread_local")
                place.add_(1)
                self.graph.capture_end()

    def __del__(self) -> None:
        self.found.append("collected")


@pytest.mark.parametrize("form", ["shards", "unreduced"])
@on_ranks(2)
def test_garbage_is_not_collected_in_a_capture(opt: Any, form) -> None:
    """CUDA gives up a capture in which a graph is destroyed; the other ranks then wait in vain."""
    found: list[str] = []
    waiting = [Litter(found) for _ in range(3)]
    within = 0

    def collects() -> None:
        nonlocal within
        before = len(found)
        if waiting:
            waiting.pop()
        kept = [[number] for number in range(20 * gc.get_threshold()[0])]
        within += len(found) - before
        del kept

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a capture that fails is one
        counted = told(opt, form, torch.float32, collects)
    gc.collect()
    assert len(found) == 3
    assert gc.isenabled()
    assert counted["captured"] > 10
    assert within == 0


def capture_fails(opt: Any, form: str, action: str) -> tuple[Counter[str], list[str]]:
    """On rank 1 alone, with what CUDA does not allow."""
    captures = 0

    def breaks() -> None:
        nonlocal captures
        captures += 1
        if captures >= 4 and distributed.get_rank() == 1:
            if device() == "cuda":
                torch.cuda.current_stream().synchronize()
            raise RuntimeError("this capture fails")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter(action, RuntimeWarning)
        counted = told(opt, form, torch.float32, breaks)
    said = [str(one.message) for one in warned if "could not be captured" in str(one.message)]
    return counted, said


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("form", ["shards", "unreduced"])
def test_ranks_with_and_without_graphs_step_together(ranks, form, action) -> None:
    """A warning that is an error comes after the step, in which the other rank would wait."""
    (whole, quiet), (broken, said) = ranks(2).run(capture_fails, form, action)
    assert whole["raised"] == 0 and whole["replayed"] > whole["captured"]
    assert bool(broken["raised"]) == (action == "error")
    if action == "always":
        assert said and not quiet
        assert 3 < broken["captured"] < whole["captured"]
        assert broken["replayed"] < whole["replayed"]


@pytest.mark.gpu
@on_ranks(2)
def test_an_empty_stage_is_captured_without_a_warning(opt: Any) -> None:
    """torch has one, which may be an error."""
    where = torch.device("cuda", torch.cuda.current_device())
    graphs = module_of(opt, "optimizers.sharded.cuda_graphs").Graphs()
    graphs.begin(on=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [graphs.of_stage("empty", where, lambda: 0, lambda: None) for _ in range(3)]
        graphs.tell_failures()
    assert [graph is not None for graph in found] == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["shards", "unreduced"])
@on_ranks(2)
def test_a_step_in_a_capture_of_the_caller_is_refused(opt: Any, form: str) -> None:
    """Before anything is written or sent; the next step goes on."""
    story = Story(opt, form, torch.float32, together=True)
    for index, param in enumerate(story.params):
        param.grad = story.gradient(0, index, tuple(param.shape))
    story.optimizer.step()
    expected = [param.detach().clone() for param in story.params]
    torch.cuda.synchronize()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), capture:
        story.optimizer.step()
    for param, before in zip(story.params, expected, strict=True):
        assert torch.equal(local(param.detach()), local(before))
    story.optimizer.step()


@on_ranks(2)
def test_graphs_can_be_turned_off(opt: Any) -> None:
    params = [nn.Parameter(torch.ones(8, 4, device=device())) for _ in range(3)]
    optimizer = opt.Muon(
        params,
        process_group=distributed.group.WORLD,
        none_grad=False,
        distributed=opt.DistributedConfig(cuda_graphs=False),
    )
    with captured(opt) as counted:
        for _ in range(4):
            for param in params:
                param.grad = torch.ones_like(param) if param.grad is None else param.grad
            optimizer.step()
    assert counted == Counter()
