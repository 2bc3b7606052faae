"""Triton's kernels as machine code in threads: no C compiler, and all kernels of a layer at once.

`kernel[grid](...)` compiles one kernel after the other while the caller waits, and a launcher in C
for each of them. A launch plan launches through the driver, so it needs the machine code alone:
Triton's passes and ptxas, which run without Python's lock. What was compiled stays in Triton's
cache folder (TRITON_CACHE_DIR), under keys of its own: Triton's would read all of its library,
which takes a second. What came with the package (`prebuilt`) is compiled nowhere.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .prebuilt import CAPABILITY, Compiled, prebuilt

_logger = logging.getLogger(__name__)

_WARP = 32  # threads
_LARGE = 49_152  # bytes of shared memory that a block gets without asking
_MOST_THREADS = 16  # the part in Python keeps no more of them busy
_NICE = 10  # of the compiling threads: the training goes first
_MAX_DYNAMIC_SHARED, _PREFER_SHARED = 8, 1  # CUfunction_attribute, CUfunc_cache of cuda.h
_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
_REFUSED = "%s came with the package and is compiled instead: %s"
_CODE, _DESCRIBED = "kernel.cubin", "kernel.json"  # files of a kernel in the cache
_ALIGNMENT = 16  # of addresses and integers: a multiple is compiled in


@dataclasses.dataclass(frozen=True)
class Specialization:
    """What a kernel is compiled for.

    Args:
        signature: Parameter -> Triton's name of its type, "constexpr" for what is compiled in.
        constants: (place,) -> value of each of these.
        attributes: (place,) -> that the argument is a multiple of 16.
    """

    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A kernel in a device's memory: CUfunction, threads of a block, bytes of shared memory."""

    function: int
    threads: int
    shared: int


def specialization(kernel: Any, arguments: Sequence, named: dict[str, Any]) -> Specialization:
    """As Triton derives it from the arguments of a launch.

    Raises:
        TypeError: an argument that no kernel here takes, such as a bool that is not constexpr.
    """
    names = [one.name for one in kernel.params]
    values = dict(zip(names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name], multiple = _POINTERS[value.dtype], value.data_ptr() % _ALIGNMENT == 0
        elif type(value) is int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            multiple = free and value % _ALIGNMENT == 0
        elif type(value) is float:
            signature[name], multiple = "fp32", False
        else:
            raise TypeError(f"{kernel.__name__}: {name} is {value!r}, no tensor or number")
        if multiple:
            attributes[(place,)] = [["tt.divisibility", _ALIGNMENT]]
    return Specialization(signature, constants, attributes)


class Kernel:
    """A kernel for a device, which may still be compiled.

    No thread but the caller's touches the driver: it might be capturing a CUDA graph.

    Args:
        compiled: Its machine code.
        device: Whose memory it is loaded into.
        again: Compiles it, should the driver refuse code that came with the package.
    """

    def __init__(
        self,
        compiled: Future[Compiled],
        device: torch.device,
        again: Callable[[], Compiled] | None = None,
    ) -> None:
        self._compiled, self._device, self._again = compiled, device, again
        self._loaded: Loaded | None = None

    def loaded(self) -> Loaded:
        """The kernel in the device's memory, when it is compiled.

        Raises:
            Exception: whatever it could not be compiled or loaded for.
        """
        if self._loaded is None:
            found = self._compiled.result()
            try:
                function = _in_memory(found, self._device.index)
            except RuntimeError as error:
                if self._again is None:
                    raise
                _logger.warning(_REFUSED, found.name, error)
                found = self._again()
                function = _in_memory(found, self._device.index)
            self._loaded = Loaded(function, found.threads, found.shared)
        return self._loaded


def compile_kernel(
    kernel: Any, found: Specialization, options: dict[str, Any], device: torch.device
) -> Kernel:
    """The kernel, compiled in another thread unless that was done or begun before."""
    parts = (found.signature, found.constants, found.attributes, options)
    key = (kernel, device, *(tuple(part.items()) for part in parts[:2]), repr(parts[2:]))
    with _guard:
        if key not in _kernels:
            first = functools.partial(_begin, kernel, found, options, device)
            job = _Job(Future(), len(kernel.src), first, machine_code)
            came = prebuilt(kernel, found, options) if _takes_prebuilt(device) else None
            if came is not None:
                job.future.set_result(came)
            again = None if came is None else lambda: machine_code(first())
            _kernels[key] = job, Kernel(job.future, device, again)
        elif _later():
            return _kernels[key][1]
        job, result = _kernels[key]
    if job.future.done():
        return result
    _enqueue(job)
    return result


@functools.cache
def _takes_prebuilt(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def in_background(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a compiling thread; the kernels that it asks for come after all others.

    What it raises is logged.
    """

    def run() -> None:
        _here.later = True
        try:
            function(*arguments)
        except Exception:
            if not _ending.is_set():  # else nothing can be asked for any more
                _logger.exception("%s failed beside the training", function.__name__)
        finally:
            _here.later = False

    job = _Job(Future(), 0, run, lambda nothing: nothing)
    with _guard:
        _background[:] = [one for one in _background if not one.done()] + [job.future]
    _enqueue(job, later=True)


def compiles() -> bool:
    """Whether a kernel that was asked for is not compiled yet."""
    with _guard:
        return any(not job.future.done() for job, _ in _kernels.values())


def settle() -> None:
    """Wait until nothing is compiled any more: for clocks. What was only begun ahead is dropped."""
    while waited := _without_later():  # a call in the background may ask for kernels meanwhile
        wait(waited)


def _without_later() -> list[Future[Any]]:
    """Drop what was only begun ahead; the futures of what is not done."""
    with _guard:
        hurried = {id(job) for later, *_, job in _queue if not later}
        for later, *_, job in _queue:
            if later and id(job) not in hurried:
                job.future.cancel()
        for key in [key for key, (job, _) in _kernels.items() if job.future.cancelled()]:
            del _kernels[key]
        futures = (*_background, *(job.future for job, _ in _kernels.values()))
        return [one for one in futures if not one.done()]


@dataclasses.dataclass(frozen=True)
class _Job:
    """One kernel, or one call in the background.

    Args:
        future: Of the result.
        size: The larger, the sooner its turn comes: it takes longer.
        first: Runs Python, so one job's after the other's.
        rest: Takes what `first` gave and runs beside other jobs.
    """

    future: Future[Any]
    size: int
    first: Callable[[], Any]
    rest: Callable[[Any], Any]


_here = threading.local()
_guard, _turn = threading.Lock(), threading.Lock()
_ending = threading.Event()
_numbers = itertools.count()
_queue: list[tuple[bool, int, int, _Job]] = []
_kernels: dict[tuple, tuple[_Job, Kernel]] = {}  # which are loaded until the process ends
_background: list[Future[Any]] = []  # no jobs, whose arguments would stay alive


def _later() -> bool:
    return getattr(_here, "later", False)


def _enqueue(job: _Job, *, later: bool | None = None) -> None:
    """Let a job wait for its turn; what was asked for in the background may be hurried so."""
    place = (_later() if later is None else later, -job.size, next(_numbers), job)
    with _guard:
        heapq.heappush(_queue, place)
    try:
        turn = _pool().submit(_run_next)
    except RuntimeError as error:  # the pool is broken, or the process ends
        _fail_next(error)
    else:
        turn.add_done_callback(_without_turn)


def _without_turn(turn: Future[None]) -> None:
    """Fail a job for every turn that never came, or its waiter would wait for ever."""
    error = CancelledError() if turn.cancelled() else turn.exception()
    if error is not None:
        _fail_next(error)


def _fail_next(error: BaseException) -> None:
    job = _next()
    if job is not None:
        failure = RuntimeError(f"no thread compiles any more: {error!r}")
        failure.__cause__ = error
        job.future.set_exception(failure)


def _next() -> _Job | None:
    """The job whose turn it is, which runs from now on; None if it was hurried or dropped."""
    with _guard:
        job = heapq.heappop(_queue)[-1] if _queue else None
        if job is None or job.future.done() or job.future.running():
            return None
        job.future.set_running_or_notify_cancel()
    return job


def _run_next() -> None:
    # Python's own lock would give every job a part of each other's time, and all would end late.
    with _turn:
        job = _next()
        if job is None:
            return
        try:
            begun = job.first()
        except BaseException as error:
            job.future.set_exception(error)
            return
    try:
        job.future.set_result(job.rest(begun))
    except BaseException as error:
        job.future.set_exception(error)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    count = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    pool = ThreadPoolExecutor(count, "compile", initializer=_yield_to_others)

    def end() -> None:
        _ending.set()
        pool.shutdown(wait=False, cancel_futures=True)

    # A process that ends waits for the kernels that are being compiled, and not for the others.
    threading._register_atexit(end)
    return pool


def _yield_to_others() -> None:
    # Only root may make a thread less nice than it is, and it begins as nice as the process.
    thread = threading.get_native_id()
    niceness = max(_NICE, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _begin(
    kernel: Any, found: Specialization, options: dict[str, Any], device: torch.device
) -> _Compilation:
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability(device)
    target = GPUTarget("cuda", 10 * major + minor, _WARP)
    return begin(kernel, found, options, target)


@dataclasses.dataclass(frozen=True)
class _Compilation:
    """A kernel in Triton's first representation, and what takes it from there to machine code.

    Args:
        cache: Where the machine code is kept.
        described: File there that says so, if it was compiled before; then the rest is None.
        made: The representation.
        stages: Triton's, by name.
        metadata: What they note.
    """

    cache: Any
    described: str | None
    made: Any = None
    stages: dict[str, Callable[..., Any]] | None = None
    metadata: dict[str, Any] | None = None


def begin(kernel: Any, found: Specialization, options: dict[str, Any], target: Any) -> _Compilation:
    """The part of a compilation that is Python; nothing if the machine code is in the cache.

    Args:
        kernel: Of triton.jit.
        found: What for.
        options: Triton's, such as num_warps.
        target: triton.backends.compiler.GPUTarget.
    """
    import triton
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_manager

    source = ASTSource(kernel, found.signature, found.constants, found.attributes)
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    parts = (triton.__version__, source.hash(), backend.hash(), parsed.hash())
    cache = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    described = cache.get_file(_DESCRIBED)
    if described is not None:
        return _Compilation(cache, described)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    generators = (backend.get_codegen_implementation(parsed), backend.get_module_map())
    made = source.make_ir(target, parsed, *generators, context)
    return _Compilation(cache, None, made, stages, {"target": target, **parsed.__dict__})


def machine_code(compilation: _Compilation) -> Compiled:
    """What the cache has now, if it did not have it before.

    Raises:
        RuntimeError: the kernel needs more than a plain launch.
    """
    described = compilation.described
    if described is None:
        made, metadata = compilation.made, compilation.metadata
        for stage in compilation.stages.values():
            made = stage(made, metadata)
        plain = metadata["num_ctas"] == 1 and not metadata["launch_cooperative_grid"]
        if not plain or metadata.get("global_scratch_size"):
            raise RuntimeError(f"{metadata['name']} needs more than a plain launch")
        kept = {name: metadata[name] for name in ("name", "num_warps", "shared")}
        compilation.cache.put(made, _CODE)
        described = compilation.cache.put(json.dumps(kept), _DESCRIBED, binary=False)
    found, code = json.loads(Path(described).read_text()), Path(described).with_name(_CODE)
    threads = _WARP * found["num_warps"]
    return Compiled(code.read_bytes(), found["name"], threads, found["shared"])


def _in_memory(found: Compiled, device: int) -> int:
    """The CUfunction of machine code, loaded into the context that torch has on a device."""
    context, module, function = (ctypes.c_void_p() for _ in range(3))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)  # of this thread, which may have none
    _call("cuModuleLoadData", ctypes.byref(module), found.code)
    _call("cuModuleGetFunction", ctypes.byref(function), module, found.name.encode())
    if found.shared > _LARGE:
        _call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, found.shared)
    return function.value


def _call(name: str, *arguments: Any) -> None:
    """A function of the driver.

    Raises:
        RuntimeError: it failed.
    """
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
