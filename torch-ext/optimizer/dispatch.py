"""Which implementation of an op serves a device, and why: one table, read by the ops and `explain`.

`path_name` is what an op asks in a call: it says once, through logging, that a slow path runs.
`runs_compiled` is asked by code that chooses between ops. The rows speak of devices alone; what
depends on dtypes, strides or sizes stands with the op that looks at them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging

import torch

from ._ops import add_op_namespace_prefix

_logger = logging.getLogger(__name__)

HOPPER = (9, 0)  # the one capability that has wgmma and runs code for 9.0a
# Of the other CUDA kernels, as "8.0+PTX" in build.toml says, and of Triton's: below it Triton uses
# no tensor cores, its products spill kilobytes per thread and take minutes to compile.
LEAST = (8, 0)


@dataclasses.dataclass(frozen=True)
class Path:
    """Which implementation serves a call, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Where an op has kernels, and what runs elsewhere.

    Args:
        hopper: The CUDA kernel is for capability 9.0 alone, not for every one from 8.0 on.
        compiled: There is a CUDA kernel at all.
        cpu: The CPU variant has the op.
        triton: Other CUDA devices have a Triton kernel.
        note: Said of the CUDA kernel, `on_hopper` also on capability 9.0.
        otherwise: Name of the path that runs where there is no kernel.
        because: What it is; `{device}` stands for the type of the device.
    """

    hopper: bool = False
    compiled: bool = True
    cpu: bool = False
    triton: bool = False
    note: str = ""
    on_hopper: str = ""
    otherwise: str = "reference"
    because: str = "the loaded variant has no kernel for {device} tensors"


_LISTS = Kernels(cpu=True)
_BY_THE_CALLER = Kernels(hopper=True, otherwise="caller", because="several ops instead of one")
_BY_TORCH = Kernels(otherwise="torch", because="copies and comparisons; no kernel for {device}")
TABLE: dict[str, Kernels] = {
    "momentum": _LISTS,
    "apply_update": _LISTS,
    "adamw": _LISTS,
    "scale_rows": Kernels(
        note="torch where x is float64",
        otherwise="torch",
        because="norms and a product; no kernel for {device} tensors",
    ),
    "symmetric_matmul": Kernels(
        on_hopper="sm90 tiles for half precision",
        because="float64 products of torch; no kernel for {device} tensors",
    ),
    "matmul_add": Kernels(
        hopper=True,
        note="half precision with strides that TMA can take, else torch",
        otherwise="torch",
        because="baddbmm; no kernel for {device} tensors but on capability 9.0",
    ),
    "normalize": Kernels(
        note="torch where a dtype is float64",
        otherwise="torch",
        because="a norm and a division; no kernel for {device} tensors",
    ),
    "square_chain": _BY_THE_CALLER,
    "nf4_dequant": Kernels(cpu=True, triton=True),
    "nf4_quantize": Kernels(
        cpu=True,
        note="with the bits of bitsandbytes' own",
        because="torch in chunks; no kernel for {device} tensors is loaded",
    ),
    "mxfp4_dequant": Kernels(compiled=False, triton=True),
    "fp8_dequant": Kernels(compiled=False, triton=True),
    "nf4_product": Kernels(hopper=True, otherwise="triton", because="Triton's product"),
    "push": _BY_TORCH,
    "stream_write_value32": _BY_TORCH,
    "memset32": _BY_TORCH,
    "wait_signals": _BY_TORCH,
    "progress_matmul": Kernels(
        hopper=True,
        note="half precision with strides that TMA can take, else after all chunks",
        because="torch.matmul after all chunks; no kernel but on capability 9.0",
    ),
}


def is_hopper(device: torch.device) -> bool:
    """Whether the device runs kernels for capability 9.0 alone: an H100, an H200 or a GH200.

    A GPU of AMD may also call its capability 9.0.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == HOPPER
    )


def has_compiled(op: str, key: str) -> bool:
    """Whether the loaded library implements an op for a dispatch key, "CUDA" or "CPU"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(op), key)


def has_triton() -> bool:
    """Whether Triton can be imported; torch for CPUs comes without it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def pick(op: str, device: torch.device) -> Path:
    """The path of an op on a device."""
    kernels = TABLE[op]
    if device.type == "meta":
        return Path("compiled", "shapes only")
    if device.type == "cpu" and kernels.cpu and has_compiled(op, "CPU"):
        return Path("compiled", "multi-threaded C++ of the CPU variant")
    if device.type == "cuda":
        if _has_cuda_kernel(op, device):
            return Path("compiled", _described(kernels, device))
        if kernels.triton and _has_triton_kernels(device):
            return Path("triton", f"{torch.cuda.get_device_name(device)} has no compiled kernel")
    return Path(kernels.otherwise, kernels.because.format(device=device.type))


def _has_cuda_kernel(op: str, device: torch.device) -> bool:
    if torch.version.hip is not None or not TABLE[op].compiled or not has_compiled(op, "CUDA"):
        return False
    if TABLE[op].hopper:
        return is_hopper(device)
    return torch.cuda.get_device_capability(device) >= LEAST


def _has_triton_kernels(device: torch.device) -> bool:
    if not has_triton():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST


def _described(kernels: Kernels, device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    notes = (kernels.note, kernels.on_hopper if (major, minor) == HOPPER else "")
    return "; ".join((f"CUDA kernel, capability {major}.{minor}", *filter(None, notes)))


@torch.compiler.assume_constant_result
def runs_compiled(op: str, device: torch.device) -> bool:
    """Whether tensors of a device are given to a compiled kernel of the op; not those on "meta"."""
    return device.type != "meta" and pick(op, device).name == "compiled"


@torch.compiler.assume_constant_result
def path_name(op: str, device: torch.device) -> str:
    """The name of an op's path on a device; the slow "reference" is reported once."""
    path = pick(op, device)
    if path.name == "reference":
        report_slow(op, path.reason)
    return path.name


def report_slow(op: str, reason: str) -> None:
    """Say once that an op runs its portable path."""
    say_once("%s runs its portable path, which is slow: %s", op, reason)


@functools.cache
def say_once(message: str, *arguments: object) -> None:
    """Log a warning, the same one once in the life of the process."""
    _logger.warning(message, *arguments)


def explain(op: str, device: torch.device | str) -> str:
    """Say which implementation an op takes for tensors on `device`, and why.

    Args:
        op: one of `TABLE`.
        device: device of the tensors.

    Returns:
        One line, "<name of the path>: <reason>".
    """
    path = pick(op, torch.device(device))
    return f"{path.name}: {path.reason}"


# The mixture-of-experts ops, whose path depends on the dtype and on the caller's wish, too:
# path      | what                                  | taken by "auto"
# triton    | kernels/experts/*_triton.py           | CUDA from capability 8.0 on, with Triton
# measured  | as triton; products over 4-bit        | over 4-bit experts instead of triton
#           | experts by CUDA where that is faster  |
# compiled  | as triton; products over 4-bit        | never; by name, on capability 9.0
#           | experts by CUDA where it can          |
# reference | reference/moe.py, expert after expert | everything else, and float64
EXPERTS_OPS = ("expert_sort", "grouped_lora_linear", "combine", "glu")
BACKENDS = ("auto", "compiled", "triton", "reference")
MEASURED = "measured"
# Paths that differ in the product over 4-bit experts alone; the other ops have Triton's kernels.
TRITON_PATHS = ("triton", "compiled", MEASURED)


@functools.cache
def experts_path(
    device: torch.device, dtype: torch.dtype, backend: str = "auto", *, dense: bool = False
) -> Path:
    """The path of the mixture-of-experts ops for tensors of a dtype on a device.

    With `dense` the weights are known to be of that dtype, which no compiled product takes.
    """
    if backend == "grouped_mm":
        raise ValueError(
            'backend="grouped_mm" is none of ours, as torch.nn.functional.grouped_mm takes no '
            'LoRA; use "auto"'
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "compiled" and dense:
        raise ValueError(
            'backend="compiled" is for 4-bit experts: products with dense weights are Triton\'s; '
            'use "auto" or "triton"'
        )
    if backend == "compiled" and not (is_hopper(device) and has_triton()):
        raise ValueError(
            f'backend="compiled" needs a device of capability 9.0 and Triton, got {device}; '
            'use "auto"'
        )
    if backend != "auto":
        return Path(backend, "asked for by name")
    if device.type == "meta":
        return Path("reference", "shapes only")
    if dtype == torch.float64:
        return Path("reference", "float64 is computed by torch, expert after expert")
    lacking = f"no kernel for {device.type} tensors"
    if device.type == "cuda" and torch.version.hip is None and has_triton():
        if _has_triton_kernels(device):
            return Path("triton", f"Triton on {torch.cuda.get_device_name(device)}")
        lacking = "Triton uses no tensor cores below capability 8.0"
    return Path("reference", f"torch, expert after expert; {lacking}")


@torch.compiler.assume_constant_result
def experts_path_name(
    op: str, device: torch.device, dtype: torch.dtype, backend: str, *, dense: bool = False
) -> str:
    """The name of the path; a slow one that nobody asked for is reported once."""
    path = experts_path(device, dtype, backend, dense=dense)
    if path.name == "reference" and backend == "auto":
        report_slow(op, path.reason)
    return path.name


def explain_experts(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
) -> str:
    """Say which implementation the mixture-of-experts ops take over dense weights, and why.

    Args:
        device: device of the tensors.
        dtype: dtype of the activations.
        backend: as in `grouped_lora_linear`.

    Returns:
        One line, "<triton | reference>: <reason>". Of 4-bit weights speaks `explain_quantized`.

    Raises:
        ValueError: unknown backend, or "compiled".
    """
    path = experts_path(torch.device(device), dtype, backend, dense=True)
    return f"{path.name}: {path.reason}"
