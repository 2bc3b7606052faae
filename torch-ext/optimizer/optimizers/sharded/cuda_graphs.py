"""Stages of a step that repeat themselves, as CUDA graphs: a replay costs the host one launch.

A stage reads and writes memory that stays where it is (`staging`), and tensors of the caller. What
it depends on is its key: addresses, options, which gradients there are. A key that comes back in
the next step is captured, and replayed for as long as it comes. Numbers that change from step to
step, such as learning rates, reach a graph through tensors on the device.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...distributed import Message
from .buffers import Block, Staging, lasting

if TYPE_CHECKING:
    from ..plan import OnDevice
    from ..state.in_host_memory import InHostMemory
    from .chunks import SharedChunk, SmallChunk
    from .reduce_scatter import Contributions

Body = Callable[[], None]
# A stage whose graphs go out of date is captured again after twice as many equal steps each time.
LONGEST_WAIT = 1024
# Pools: graphs on the current stream run one behind another, and those beside them likewise.
HERE, BESIDE = "here", "beside"
# Of a pool, per element that a stage orthogonalizes. In float32 and float16 12 were in use at the
# peak of an iteration; the rest is for holes.
POOL_BYTES = 13
# Captures that did not end well: the allocator may go on asking them which streams are theirs.
_UNFINISHED: list[Any] = []


class Replayable(Protocol):
    """A captured stage."""

    def replay(self) -> None:
        """Queue it on the current stream."""
        ...


@dataclass(eq=False)
class _Stage:
    key: Any = None
    equal: int = 0  # steps one behind another that had this key
    wait: int = 1  # of them before it is captured
    graph: Replayable | None = None


class Graphs:
    """The graphs of a plan. Those that run one behind another share a pool of memory."""

    def __init__(self) -> None:
        self._stages: dict[Hashable, _Stage] = {}
        self._capture: dict[tuple[torch.device, str], Callable[[Body], Replayable] | None] = {}
        self._numbers: dict[Hashable, tuple[float, Tensor]] = {}
        self._room: dict[tuple[torch.device, str], int] = {}
        self._second: dict[torch.device, torch.cuda.Stream] = {}
        self._failures: list[str] = []
        self._on = False

    def reserve(self, device: torch.device, room: int, pool: str = HERE) -> None:
        """Say how many bytes the stages of a pool work in, before the first is captured."""
        self._room[device, pool] = max(room, self._room.get((device, pool), 0))

    def begin(self, *, on: bool) -> None:
        """Start a step, whose stages are captured and replayed only if `on`."""
        self._on = on
        for device, stream in self._second.items():  # where a step that failed left something
            torch.cuda.current_stream(device).wait_stream(stream)

    def _of(self, device: torch.device, pool: str = HERE) -> Callable[[Body], Replayable] | None:
        """What captures on a device in this step."""
        if not self._on:
            return None
        if (device, pool) not in self._capture:
            room = self._room.get((device, pool), 0)
            self._capture[device, pool] = capturer(device, room)
        return self._capture[device, pool]

    def of_stage(
        self,
        name: Hashable,
        device: torch.device,
        key: Callable[[], Any] | None,
        body: Body,
        pool: str = HERE,
    ) -> Replayable | None:
        """The graph of a stage; None as long as it has none.

        Args:
            name: of the stage in the plan.
            device: its own.
            key: returns all that it depends on; None for a stage that cannot be captured this time.
            body: writes nothing but tensors on the device that are known by the key.
            pool: where its memory is.
        """
        if self._of(device, pool) is None or key is None:
            return None
        stage = self._stages.setdefault(name, _Stage())
        found = key()
        if found != stage.key:
            if stage.graph is not None:
                stage.wait = min(2 * stage.wait, LONGEST_WAIT)
            stage.key, stage.equal, stage.graph = found, 0, None
        elif stage.graph is None:
            stage.equal += 1
            if stage.equal >= stage.wait:
                stage.graph = self.captured(device, body, pool)
        return stage.graph

    def run_beside(self, device: torch.device, graph: Replayable) -> Callable[[], None]:
        """Replay a graph of the other pool on the second stream; returns what waits for it.

        Away from a GPU it runs in order.
        """
        if device.type != "cuda":
            graph.replay()
            return lambda: None
        if device not in self._second:
            self._second[device] = torch.cuda.Stream(device)
        stream, over = self._second[device], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            graph.replay()
            over.record(stream)
        return lambda: torch.cuda.current_stream(device).wait_event(over)

    def captured(self, device: torch.device, body: Body, pool: str = HERE) -> Replayable | None:
        """The graph of a body; none where that fails, and no other attempt on the device.

        Other ranks wait for this one: what was only to save time must not end its step, and what
        went wrong is said after it, by `tell_failures`.
        """
        capture = self._of(device, pool)
        if capture is None:
            return None
        try:
            with _nothing_collected():
                return capture(body)
        except Exception as error:
            self._capture |= {(device, HERE): None, (device, BESIDE): None}
            self._failures.append(
                f"the stages of a step on {device} could not be captured in CUDA graphs and run "
                f"without them: {type(error).__name__}: {error}"
            )
            return None

    def tell_failures(self) -> None:
        """Warn of captures that failed, in the step that is over."""
        failures, self._failures = self._failures, []
        for failure in failures:
            warnings.warn(failure, RuntimeWarning, stacklevel=3)

    def number(self, name: Hashable, value: Any, device: torch.device) -> Any:
        """A number as a tensor that the graphs read; itself where nothing is captured."""
        if self._of(device) is None:
            return value
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                return value
            value = value.item()
        name = (name, device)
        last, place = self._numbers.get(name, (None, None))
        if place is None:
            with lasting():
                place = torch.empty((), dtype=torch.float32, device=device)
        if last != value:
            place.fill_(value)
            self._numbers[name] = (value, place)
        return place


def capturer(device: torch.device, room: int) -> Callable[[Body], Replayable] | None:
    """What captures stages on a device, into a pool with so many bytes; None where none can be."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _Capture(device, room)


class _Capture:
    """Captures on a stream of its own into one pool, in which later graphs reuse what is free."""

    def __init__(self, device: torch.device, room: int) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._room = room
        self._first: Replayable | None = None

    def __call__(self, body: Body) -> Replayable:
        if self._first is None:
            # It stays: a pool of which no graph is left takes no new ones.
            self._first = self._graph_of(self._make_room)
        return self._graph_of(body)

    def _make_room(self) -> None:
        """One block that later captures cut up, whatever sizes they need.

        Blocks that were reserved one by one are not joined: every larger one would come on top.
        """
        room = torch.empty(max(self._room, 1), dtype=torch.uint8, device=self._stream.device)
        room[:1].zero_()  # so that it has something to launch

    def _graph_of(self, body: Body) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        _UNFINISHED.append(graph)
        with torch.cuda.stream(self._stream):
            # Threads of process groups look at their events meanwhile, which "global" forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                with _quiet_if_empty():
                    graph.capture_end()
            except BaseException:
                self._end_allocations()
                raise
        _UNFINISHED.remove(graph)
        current.wait_stream(self._stream)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        # It says again what the body raised.
        with contextlib.suppress(RuntimeError), _quiet_if_empty():
            graph.capture_end()
        self._end_allocations()

    def _end_allocations(self) -> None:
        """The allocator thinks that a capture goes on which CUDA gave up.

        It would keep back every block that a second stream has used.
        """
        with contextlib.suppress(RuntimeError):  # they have ended
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile: it may hold graphs of an optimizer that is gone.

    CUDA forbids a thread that captures to destroy one, and gives up the capture. By reference
    count alone nothing of the kind goes away in a stage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet_if_empty() -> Iterator[None]:
    """torch warns of a graph without kernels: that of a stage which has nothing to do here.

    A warning may be an error, which would end the step of one rank.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        yield


def places(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Where tensors are and how they are laid out: part of the key of a stage that uses them."""
    return (
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.stride, tensors),
        *(tensor.dtype for tensor in tensors),
    )


def places_of_numbers(group: Any) -> tuple[Any, ...]:
    """`places` of the rate and the decay of a group, if graphs read them from tensors."""
    return places([v for v in (group.lr, group.weight_decay) if isinstance(v, Tensor)])


State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class StepRun:
    """What the chunks of one step share: state, memory on the way, and graphs of their stages."""

    state: State  # of the optimizer
    kept: OnDevice | InHostMemory  # where the step finds it
    staging: Staging
    graphs: Graphs
    # What has left for its owners in backward, by the id of its chunk.
    begun: dict[int, Contributions] = field(default_factory=dict)

    def take(self, chunk: SharedChunk, name: str, size: int) -> Block:
        return self.staging.take(name, chunk.device, size)

    def inbox(self, chunk: SharedChunk, message: Message) -> Block:
        """Memory for a message that comes here: where its transport wants it."""
        lease = chunk.team.transport.inbox(message)
        if lease is None:
            return self.take(chunk, "message", message.size)
        return Block(("message", chunk.device), lease.bytes, lease.bytes, lease)

    def give(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.staging.give(block)

    def stage(
        self,
        name: str,
        chunk: SharedChunk | SmallChunk,
        key: Callable[[], Any] | None,
        body: Body,
        touched: Sequence[Tensor] = (),
    ) -> None:
        """Run a stage of a chunk, or replay it. `touched`: what it writes and autograd is told."""
        graph = self._graph(name, chunk, key, body, HERE)
        if graph is None:
            body()
            return
        graph.replay()
        if touched:
            torch.autograd.graph.increment_version(touched)

    def stage_beside(
        self, name: str, chunk: SharedChunk, key: Callable[[], Any], body: Body
    ) -> Callable[[], None]:
        """`stage`, but a graph runs beside what follows.

        Launched one by one, kernels are not so many at once that it would help.

        Returns:
            What to call before its results are used, and before memory is that it uses.
        """
        graph = self._graph(name, chunk, key, body, BESIDE)
        if graph is None:
            body()
            return lambda: None
        return self.graphs.run_beside(chunk.device, graph)

    def _graph(
        self,
        name: str,
        chunk: SharedChunk | SmallChunk,
        key: Callable[[], Any] | None,
        body: Body,
        pool: str,
    ) -> Replayable | None:
        """`Graphs.of_stage`. float64 learning rates do not fit the numbers of a graph."""
        if chunk.dtype == torch.float64:
            return None
        return self.graphs.of_stage((id(chunk), name), chunk.device, key, body, pool)

    def on_device(self, number: int, rate: Any, chunk: SharedChunk | SmallChunk) -> Any:
        """The `Rate` or the `AdamWOptions` of a group with its numbers where graphs read them."""
        if chunk.dtype == torch.float64 or getattr(rate, "decay", None) is not None:
            return rate
        return replace(
            rate,
            lr=self.graphs.number((number, "lr"), rate.lr, chunk.device),
            weight_decay=self.graphs.number((number, "decay"), rate.weight_decay, chunk.device),
        )


def while_alive(rate: Any, chunk: SharedChunk) -> Any:
    """The rate, or 0 once a message of the chunk's transport did not arrive: nothing is written.

    The device decides when it gets there. What did not arrive reads as zeros by then.
    """
    alive = chunk.team.transport.alive
    if alive is None:
        return rate
    if chunk.dtype == torch.float64:
        alive = alive.double()
    if getattr(rate, "decay", None) is not None:
        return replace(rate, lr=rate.lr * alive, decay=rate.decay * alive)
    return replace(rate, lr=rate.lr * alive)  # by which the decay goes, too
