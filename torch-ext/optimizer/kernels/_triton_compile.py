"""Triton's kernels as machine code in threads: no C compiler, and all kernels of a layer at once.

`kernel[grid](...)` compiles one kernel after the other while the caller waits, and a launcher in C
for each of them. A launch plan launches through the driver, so it needs the machine code alone:
Triton's passes and ptxas, which run without Python's lock. What was compiled stays in Triton's
cache folder (TRITON_CACHE_DIR), under keys of its own: Triton's would read all of its library,
which takes a second.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

_WARP = 32  # threads
_LARGE = 49_152  # bytes of shared memory that a block gets without asking
_NICE = 10  # of the compiling threads: the training goes first
_MAX_DYNAMIC_SHARED, _PREFER_SHARED = 8, 1  # CUfunction_attribute, CUfunc_cache of cuda.h
_POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
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


def load(
    kernel: Any, found: Specialization, options: dict[str, Any], device: torch.device
) -> Future[Loaded]:
    """The kernel on a device, compiled in another thread unless that was done or begun before."""
    parts = (found.signature, found.constants, found.attributes, options)
    key = (kernel, device, *(tuple(part.items()) for part in parts[:2]), repr(parts[2:]))
    with _guard:
        future = _futures.get(key)
        if future is None:
            future = _futures[key] = _pool().submit(_load, kernel, found, options, device)
    return future


def in_background(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in one of the compiling threads; what it raises is logged."""

    def run() -> None:
        try:
            function(*arguments)
        except Exception:
            if not _ending.is_set():  # else nothing can be asked for any more
                _logger.exception("%s failed beside the training", function.__name__)

    with _guard:
        _tasks.append(_pool().submit(run))


def settle() -> None:
    """Wait until all kernels that were asked for are compiled, or failed: for clocks."""
    while waited := [one for one in (*_tasks, *_futures.values()) if not one.done()]:
        wait(waited)


_guard = threading.Lock()
_ending = threading.Event()
_tasks: list[Future[None]] = []
_futures: dict[tuple, Future[Loaded]] = {}  # which also keeps the machine code loaded


@functools.cache
def _pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile", initializer=_yield_to_others)

    def end() -> None:
        _ending.set()
        pool.shutdown(wait=False, cancel_futures=True)

    # A process that ends waits for the kernels that are being compiled, and not for the others.
    threading._register_atexit(end)
    return pool


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _load(
    kernel: Any, found: Specialization, options: dict[str, Any], device: torch.device
) -> Loaded:
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability(device)
    target = GPUTarget("cuda", 10 * major + minor, _WARP)
    code, made = machine_code(kernel, found, options, target)
    function = _in_memory(code, made["name"], made["shared"], device.index)
    return Loaded(function, _WARP * made["num_warps"], made["shared"])


def machine_code(
    kernel: Any, found: Specialization, options: dict[str, Any], target: Any
) -> tuple[bytes, dict[str, Any]]:
    """A kernel for a target, from the cache or compiled.

    Args:
        kernel: Of triton.jit.
        found: What for.
        options: Triton's, such as num_warps.
        target: triton.backends.compiler.GPUTarget.

    Returns:
        Machine code; and the name in it, warps of a block and bytes of dynamic shared memory.

    Raises:
        RuntimeError: the kernel needs more than a plain launch.
    """
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_manager

    source = ASTSource(kernel, found.signature, found.constants, found.attributes)
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    parts = (triton.__version__, source.hash(), backend.hash(), parsed.hash())
    cache = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    described = cache.get_file("kernel.json")
    if described is None:
        code, metadata = _compiled(source, backend, parsed, target)
        kept = {name: metadata[name] for name in ("name", "num_warps", "shared")}
        plain = metadata["num_ctas"] == 1 and not metadata["launch_cooperative_grid"]
        if not plain or metadata.get("global_scratch_size"):
            raise RuntimeError(f"{kernel.__name__} needs more than a plain launch")
        cache.put(code, "kernel.cubin")
        described = cache.put(json.dumps(kept), "kernel.json", binary=False)
    described = Path(described)
    return described.with_name("kernel.cubin").read_bytes(), json.loads(described.read_text())


def _compiled(source: Any, backend: Any, options: Any, target: Any) -> tuple[bytes, dict]:
    """triton.compile without its cache."""
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **options.__dict__}
    made = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    for stage in stages.values():
        made = stage(made, metadata)
    return made, metadata


def _in_memory(code: bytes, name: str, shared: int, device: int) -> int:
    """The CUfunction of machine code, loaded into the context that torch has on a device."""
    context, module, function = (ctypes.c_void_p() for _ in range(3))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)  # of this thread, which may have none
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared > _LARGE:
        _call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
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
