"""launch_plan: launches of Triton's kernels, recorded at a first call and played again by one op.

A layer of experts is a dozen launches forward and two dozen back. To bind their arguments, look up
the compiled kernels and allocate in Python takes the host several times what the GPU needs. What is
launched is a function of shapes, strides, dtypes, alignment and constants, never of values. So
`replayed` runs a function once without launching anything, records its launches, allocations and
waits, and hands them to the op as a program; every call with operands alike is one call of the op,
which allocates anew and puts the new addresses in place. From the third play on the launches are
nodes of CUDA graphs, whose arguments change; in a capture they are launches as before.

Recorded are launches by `launch`, memory by torch's empty functions and streams of `beside`. What
is allocated meanwhile are stand-ins: tensors with addresses at which nothing is. The kernels are
compiled in threads (`triton_compile`), those of a later function too if `prepare` was told of it.
A function that computes anything by torch cannot be played, and runs as it stands.

`beside` gives a function two streams. Both begin after what was launched before, and what is
launched afterwards waits for both; a CUDA graph captures it so. A first stream keeps its second
one, which is as urgent. torch hands streams out from a pool of 32 per device and priority, so with
many first streams two may share a second one: their launches there then follow one another, which
takes time and changes nothing else. What both touch must be allocated before the second begins and
let go after they have met: the allocator knows of a block the stream that asked for it alone.

path     | source                         | taken
compiled | kernels-src/launch             | CUDA
python   | the function that was recorded | what cannot be played, and away from CUDA
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ... import dispatch
from ..._ops import ops
from ..checks import on_device_of
from .plan_memory import Span, arranged, next_place
from .triton_compile import Kernel, Loaded, compile_kernel, specialization

_FROM_PYTHON = "%s is launched from Python in every call: %s"

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
# c10::ScalarType, which the C++ interface shares
_SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}
_ALLOCATE, _FREE, _WAIT, _LAUNCH, _NF4_PRODUCT = range(5)  # kernels-src/launch/launch_plan.h
_VALUE = -1  # the base of an argument that is no address
_MOST_KEPT = 4096  # tags, and refusals
_NO_MEMORY = "aoti_torch_empty_strided"  # in the message of an allocation that failed

_here = threading.local()
_tags: dict[tuple, int] = {}
_numbers = itertools.count()  # no tag is given twice, whatever becomes of _tags
_refused: set[tuple] = set()
_stand_ins = itertools.count()  # whose addresses are above all that a GPU has, 256 GiB apart


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, which a recording takes down."""
    recording = getattr(_here, "recording", None)
    return kernel[grid] if recording is None else functools.partial(recording.launch, kernel, grid)


@dataclasses.dataclass(frozen=True)
class Streams:
    """The current stream and the second one; away from a GPU neither, and all runs in order."""

    first: torch.cuda.Stream | None = None
    second: torch.cuda.Stream | None = None

    def there(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose launches go to the second stream."""
        return contextlib.nullcontext() if self.second is None else torch.cuda.stream(self.second)

    def there_waits(self) -> None:
        """The second stream goes on after what was launched on the first so far."""
        self._wait(self.second, self.first)

    def here_waits(self) -> None:
        """The first stream goes on after what was launched on the second so far."""
        self._wait(self.first, self.second)

    def _wait(self, stream: torch.cuda.Stream | None, awaited: torch.cuda.Stream | None) -> None:
        recording = getattr(_here, "recording", None)
        if stream is not None and recording is not None:
            recording.wait(stream, awaited)
        elif stream is not None:
            stream.wait_stream(awaited)


@functools.cache
def _second(first: torch.cuda.Stream, priority: int) -> torch.cuda.Stream:
    """As urgent as the first, whose handle may be a stream of another priority later."""
    return torch.cuda.Stream(first.device, priority=priority)


@contextlib.contextmanager
def beside(x: Tensor) -> Iterator[Streams]:
    """Yields two streams of x's device, which meet at the end of the context.

    Args:
        x: Where it lies, the launches run. Away from a GPU nothing runs beside anything.
    """
    streams, region = Streams(), contextlib.nullcontext()
    if x.is_cuda:
        first = torch.cuda.current_stream(x.device)
        streams = Streams(first, _second(first, first.priority))
        recording = getattr(_here, "recording", None)
        region = region if recording is None else recording.region(streams)
    with region:
        streams.there_waits()
        try:
            yield streams
        finally:
            streams.here_waits()


def replayed(
    name: str,
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    constants: tuple,
    ahead: Callable[[], None] | None = None,
    joins: bool = False,
) -> Sequence[Tensor]:
    """function(*operands, *constants), whose launches are recorded once and played.

    Args:
        name: Of the function, which depends on nothing but its arguments.
        function: Returns tensors that it allocated, as many for the same constants.
        operands: What it reads; the first is a tensor on the device of all.
        constants: Hashable.
        ahead: Called before a recording: to `prepare` what will be called later.
        joins: Give all results but the first as one tensor, which `apart` takes apart. Each tensor
            of a call takes the host some microseconds: to allocate, wrap, save, read and let go.
            Where nothing can be played they come as the function gives them.
    """
    present = [x for x in operands if x is not None]
    if not _plays(present[0].device) or getattr(_here, "recording", None) is not None:
        return function(*operands, *constants)
    numbers = [id(x) for x in present]
    aliases = None if len(set(numbers)) == len(numbers) else tuple(map(numbers.index, numbers))
    key = (name, constants, aliases, tuple([x is None for x in operands]))
    tag = _tags.get(key)
    if tag is None:
        if len(_tags) >= _MOST_KEPT:
            _tags.clear()
        tag = _tags.setdefault(key, next(_numbers))
    try:
        played = ops.launch_plan(present, tag, ())
        if not played and _recorded(
            name, function, operands, constants, present, tag, ahead, joins
        ):
            played = ops.launch_plan(present, tag, ())
    except RuntimeError as error:
        if _NO_MEMORY not in str(error):
            raise
        played = ()  # Nothing was written; launched from Python, torch says that memory ran out.
    if played:
        return played
    with on_device_of(present[0]):
        return function(*operands, *constants)


def apart(joined: Tensor, described: Iterable[tuple]) -> list[Tensor]:
    """Views of what `replayed` joined.

    Args:
        joined: (bytes,) uint8.
        described: Of each tensor its shape, strides and dtype.
    """
    found, at = [], 0
    for sizes, strides, dtype in described:
        size = _bytes_of(sizes, strides, dtype)
        flat = joined[at : at + size].view(dtype)
        found.append(flat.as_strided(sizes, strides, flat.storage_offset()))
        at += next_place(size)
    return found


def prepare(
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    constants: tuple,
) -> Sequence[Tensor] | None:
    """Begin to compile what `replayed` of this function will launch; nothing is computed.

    Args:
        function: As in `replayed`.
        operands: Tensors, or stand-ins of such.
        constants: As in `replayed`.

    Returns:
        Stand-ins of the results; None if they are not to be had without computing.
    """
    recording = Recording([x for x in operands if x is not None])
    try:
        # Another recording may be on, of a function that asks what this one gives.
        with _disable_current_modes(), torch.no_grad(), recording.on():
            return function(*operands, *constants)
    except _NotPlayableError:
        return None


def stand_in(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor with an address at which nothing is: for `prepare`, and never to be read."""
    size = _bytes_of(sizes, strides, dtype)
    address = 1 << 60 | next(_stand_ins) % (1 << 22) << 38
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    with _disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, sizes, strides)


def _bytes_of(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """From its first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else (last + 1) * dtype.itemsize


@functools.cache
def _plays(device: torch.device) -> bool:
    """Whether launches on a device can be played again: CUDA's, by the compiled op."""
    return device.type == "cuda" and dispatch.has_compiled("launch_plan", "CUDA")


def _recorded(
    name: str,
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    constants: tuple,
    present: list[Tensor],
    tag: int,
    ahead: Callable[[], None] | None,
    joins: bool,
) -> bool:
    """Make the plan of a function; False if it has to run as it stands."""
    seen = (tag, *((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in present))
    if seen in _refused:
        return False
    places = {str(x.device) for x in present}
    if len(places) > 1:
        raise ValueError(f"tensors are on {' and '.join(sorted(places))}; move them to one device")
    recording = Recording(present)
    try:
        with on_device_of(present[0]):
            if ahead is not None:
                ahead()
            with recording.on():
                results = function(*operands, *constants)
            ops.launch_plan(present, tag, recording.program(results, joins))
    except _NotPlayableError as reason:
        if len(_refused) >= _MOST_KEPT:
            _refused.clear()
        _refused.add(seen)
        dispatch.say_once(_FROM_PYTHON, name, str(reason))
        return False
    return True


class _NotPlayableError(Exception):
    """What a function does cannot be put into a program; the message says what."""


@dataclasses.dataclass
class _Buffer:
    """What an allocation was; from `start` to `end` in bytes."""

    start: int
    end: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass
class _Step:
    """One step of a program: its integers, a launch's arguments, and the buffers it touches."""

    code: list[int]
    arguments: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    early: bool = False  # a launch that begins before its predecessor ended
    stream: int = 0
    touches: set[int] = dataclasses.field(default_factory=set)
    kernel: Kernel | None = None


def _is_view(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether what an op gives lies in its first argument: contiguous, reshape and to may copy."""
    if not func.is_view or not isinstance(args[0], Tensor):
        return False
    x = args[0]
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    where = {
        name: "meta" if name == "device" and value else value for name, value in kwargs.items()
    }
    result = func(like, *args[1:], **where)
    found = result if isinstance(result, (list, tuple)) else (result,)
    return all(one.untyped_storage()._cdata == like.untyped_storage()._cdata for one in found)


def _ready(kernel: Kernel) -> Loaded:
    """The kernel in memory, when it is compiled."""
    try:
        return kernel.loaded()
    except Exception as error:
        raise _NotPlayableError(f"a kernel was not compiled: {error}") from error


def _extent(x: Tensor) -> tuple[int, int]:
    """Where the elements of x lie, in bytes."""
    return (start := x.data_ptr()), start + _bytes_of(x.shape, x.stride(), x.dtype)


class Recording(TorchDispatchMode):
    """Takes down what is launched and allocated while it is on, and does neither.

    Args:
        operands: Tensors whose addresses a later call replaces, on one CUDA device.

    Raises:
        _NotPlayableError: In the function that is recorded, or by `program`.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        # Of a tensor that is given twice the last counts, as of any other call with this tag.
        same = {id(x): n for n, x in enumerate(operands)}
        self._last = [same[id(x)] for x in operands]
        self._operands = [_extent(x) for x in operands]
        self._device = operands[0].device
        self._buffers: list[_Buffer] = []
        self._steps: list[_Step] = []
        self._streams: list[int] = []
        self._regions: list[tuple[int, int]] = []  # steps from a beginning to its end
        self._in_region = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no graph is traced here, and torch would load its compiler to say so."""
        return False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A context in which this thread's launches and allocations are taken down."""
        before, _here.recording = getattr(_here, "recording", None), self
        try:
            with self:
                yield
        finally:
            _here.recording = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            like = func(*args, **(kwargs | {"device": "meta"}))
            made = stand_in(like.shape, like.stride(), like.dtype, self._device)
            self._buffers.append(
                _Buffer(*_extent(made), made.dtype, tuple(made.shape), made.stride())
            )
            return made
        if func is ops.nf4_product.default:
            return self._nf4_product(*args)
        if not _is_view(func, args, kwargs):
            raise _NotPlayableError(f"{func} is computed by torch")
        return func(*args, **kwargs)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Take down a launch, and begin to compile the kernel."""
        sides = (*grid, 1, 1)[:3]
        if 0 in sides:
            return  # Triton launches nothing then, either
        if not hasattr(kernel, "params"):
            raise _NotPlayableError(f"{kernel} is interpreted")
        own = {one.name for one in kernel.params}
        options = {name: value for name, value in named.items() if name not in own}
        named = {name: value for name, value in named.items() if name in own}
        found = specialization(kernel, args, named)
        step = _Step([], kernel=compile_kernel(kernel, found, options, self._device))
        for one, value in zip(kernel.params, args, strict=False):
            kind = found.signature[one.name]
            if kind != "constexpr":  # or an integer that is compiled in, as 1 is
                step.arguments.append(self._argument(kind, value, step))
        step.arguments += [(_VALUE, 0)] * 2  # Triton's scratch, of which there is none
        step.stream = self._stream(torch.cuda.current_stream(self._device))
        step.early = bool(options.get("launch_pdl"))
        step.code = [_LAUNCH, step.stream, *sides, int(step.early), len(step.arguments)]
        self._steps.append(step)

    def _nf4_product(self, *args: Any) -> None:
        """Take down a call of the compiled product: its sizes and addresses, in the C++ order."""
        x, packed, absmax, codebook, stored, blocksize, along, low, factor, bias, gates = args[:11]
        slots, offsets, out, fan, scatter, format, block_rows, activated, early = args[11:]
        experts, n, k = stored
        if slots.shape[0] == 0:
            return
        step = _Step([], early=early)
        places = (packed, absmax, codebook, x, low, factor, bias, gates, slots, offsets)
        for one in (*places, out, activated):
            step.arguments.append((_VALUE, 0) if one is None else self._address(one, step))
        row = x.stride(0) if x.shape[0] > 1 else 0
        strides, rank = ((0, 0, 0), 0) if factor is None else (factor.stride(), factor.shape[1])
        sizes = (row, *strides, experts, slots.shape[0], n, k, rank, fan)
        flags = (blocksize.bit_length() - 1, int(along), int(scatter))
        flags = (*flags, format, block_rows.bit_length() - 1, int(early))
        stream = self._stream(torch.cuda.current_stream(self._device))
        step.stream = stream
        step.code = [_NF4_PRODUCT, stream, *sizes, *flags]
        self._steps.append(step)

    @contextlib.contextmanager
    def region(self, streams: Streams) -> Iterator[None]:
        """What is launched meanwhile may run on either stream; they meet at its end."""
        if self._in_region:
            raise _NotPlayableError("one region of two streams lies in another")
        self._in_region, begin = True, len(self._steps)
        self._stream(streams.first)
        self._stream(streams.second)
        yield
        self._regions.append((begin, len(self._steps) - 1))
        self._in_region = False

    def wait(self, stream: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        """The stream waits for the awaited one."""
        self._steps.append(_Step([_WAIT, self._stream(stream), self._stream(awaited)]))

    def program(self, returned: Sequence[Tensor], joins: bool = False) -> list[int]:
        """The integers of launch_plan.h, when all is compiled; `joins` as in `replayed`."""
        kept = [self._result(x) for x in returned]
        if len(set(kept)) != len(kept):
            raise _NotPlayableError("two results share their memory")
        used = self._uses()
        spans = {
            index: Span(self._bytes(index), *when)
            for index, when in used.items()
            if index not in kept
        }
        buffers = [self._buffers[index] for index in kept]
        shapes = [(one.dtype, one.sizes, one.strides) for one in buffers]
        begins = {
            place: used[index][1][0] if index in used else len(self._steps)
            for place, index in enumerate(kept)
        }
        # In the program: the results, then the pieces in which all other buffers have their places.
        bases = {index: (place, 0) for place, index in enumerate(kept)}
        if joins:
            ends_at = itertools.accumulate(next_place(self._bytes(index)) for index in kept[1:])
            offsets = [0, *ends_at]
            bases |= {index: (1, at) for index, at in zip(kept[1:], offsets, strict=False)}
            begins = {0: begins[0], 1: min(begins[place] for place in range(1, len(kept)))}
            shapes[1:] = [(torch.uint8, (offsets[-1],), (1,))]
        sizes = (_bytes_of(sizes, strides, dtype) for dtype, sizes, strides in shapes)
        results = {place: (size, begins[place]) for place, size in enumerate(sizes)}
        pieces = arranged(results, spans, len(self._steps))
        returns = len(shapes)
        ends: dict[int, int] = {}
        for piece in pieces:
            place = len(shapes)
            bases |= {index: (place, offset) for index, offset in piece.offsets.items()}
            begins[place], ends[place] = piece.steps
            shapes.append((torch.uint8, (piece.bytes,), (1,)))
        found: list[list[int]] = []
        for at in range(len(self._steps) + 1):
            found += ([_ALLOCATE, place] for place, when in begins.items() if when == at)
            if at < len(self._steps):
                found.append(self._code(self._steps[at], bases))
            found += ([_FREE, place] for place, when in ends.items() if when == at)
        return [
            max(len(self._streams) - 1, 0),
            len(shapes),
            *itertools.chain.from_iterable(
                (self._scalar_type(dtype), len(sizes), *sizes, *strides)
                for dtype, sizes, strides in shapes
            ),
            *(returns, *range(returns)),
            *(len(found), *itertools.chain.from_iterable(found)),
        ]

    def _bytes(self, index: int) -> int:
        return self._buffers[index].end - self._buffers[index].start

    def _stream(self, stream: torch.cuda.Stream) -> int:
        """Its number in the program; the first that is seen is the current one."""
        if not self._streams:
            self._streams.append(torch.cuda.current_stream(self._device).cuda_stream)
        if stream.cuda_stream not in self._streams:
            self._streams.append(stream.cuda_stream)
        return self._streams.index(stream.cuda_stream)

    def _argument(self, kind: str, value: Any, step: _Step) -> tuple[int, int]:
        if kind.startswith("*"):
            return self._address(value, step)
        if kind == "fp32":
            return _VALUE, struct.unpack("<q", struct.pack("<fi", value, 0))[0]
        if kind[0] in "iu":
            return _VALUE, int(value)
        raise _NotPlayableError(f"an argument is of type {kind}")

    def _address(self, x: Tensor, step: _Step) -> tuple[int, int]:
        """(base, bytes behind it) of a tensor's first element."""
        start = x.data_ptr()
        if x.numel() == 0:
            return _VALUE, 0
        # Memory may have been let go and allocated again: the last one counts.
        for index in reversed(range(len(self._buffers))):
            if self._buffers[index].start <= start < self._buffers[index].end:
                step.touches.add(index)
                return len(self._operands) + index, start - self._buffers[index].start
        inside = [n for n, (low, high) in enumerate(self._operands) if low <= start < high]
        whole = [n for n in inside if self._operands[n] == _extent(x)]
        found = {self._last[n] for n in whole or inside}
        if len(found) != 1:
            raise _NotPlayableError("an address lies in none of the operands, or in several")
        (base,) = found
        return base, start - self._operands[base][0]

    def _result(self, x: Tensor) -> int:
        """The buffer of a result, which gets the result's shape."""
        low, high = _extent(x)
        for index in reversed(range(len(self._buffers))):
            one = self._buffers[index]
            if one.start == low and one.end == high and low < high:
                one.sizes, one.strides = tuple(x.shape), x.stride()
                return index
        if x.numel() > 0:
            raise _NotPlayableError("a result is not what was allocated")
        self._buffers.append(_Buffer(0, 0, x.dtype, tuple(x.shape), x.stride()))
        return len(self._buffers) - 1

    def _uses(self) -> dict[int, tuple[tuple[int, int], tuple[int, int], int | None]]:
        """Of every buffer `Span`'s steps, region and stream."""
        ends, after = list(range(len(self._steps))), {}
        for at in reversed(range(len(self._steps))):
            step = self._steps[at]
            if step.code[0] == _WAIT:
                continue
            following = after.get(step.stream)
            if following is not None and self._steps[following].early:
                ends[at] = ends[following]  # it may write while this one reads
            after[step.stream] = at
        found: dict[int, tuple[tuple[int, int], tuple[int, int], int | None]] = {}
        for at, step in enumerate(self._steps):
            region = next((one for one in self._regions if one[0] <= at <= one[1]), (at, ends[at]))
            for index in step.touches:
                steps, whole, stream = found.get(index, ((at, at), region, step.stream))
                found[index] = (
                    (min(steps[0], at), max(steps[1], ends[at])),
                    (min(whole[0], region[0]), max(whole[1], region[1], ends[at])),
                    stream if stream == step.stream else None,
                )
        return found

    def _code(self, step: _Step, bases: dict[int, tuple[int, int]]) -> list[int]:
        """The integers of a step, addresses told from the operands and the program's buffers."""
        code = list(step.code)
        if step.kernel is not None:
            loaded = _ready(step.kernel)
            code[2:2] = (loaded.function, loaded.threads, loaded.shared)
        for base, value in step.arguments:
            if base >= len(self._operands):
                inner, offset = bases[base - len(self._operands)]
                base, value = len(self._operands) + inner, value + offset
            code += (base, value)
        return code

    def _scalar_type(self, dtype: torch.dtype) -> int:
        if dtype not in _SCALAR_TYPES:
            raise _NotPlayableError(f"a result is of {dtype}")
        return _SCALAR_TYPES[dtype]
