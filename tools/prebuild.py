"""Compile what listed layers of experts launch, for a GPU of capability 9.0 that is not there.

make prebuilt, or: python tools/prebuild.py [--layers 1] [VARIANT...]

Writes the archive that `kernels/launch/prebuilt.py` reads into CUDA variants, and their digests
anew: for these layers nothing is compiled at a first call. Their launches are recorded as at a
first call, with stand-ins for tensors, at each height of tiles, with and without gradients. Kernels
are compiled for dtypes, divisibility of sizes and tiles, so other models find most of theirs, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from compile_triton import PACKAGE, load
from local_build.package import PREBUILT, python_digest
from triton.backends.compiler import GPUTarget

BUILD = Path(__file__).resolve().parents[1] / "build"
ON = torch.device("cpu")  # where stand-ins lie: tables of tiles take it for capability 9.0
# Whether x, gate_up, its A and B and bias, down, its own, and the gates want a gradient.
TRAINED = (True, False, True, True, False, False, True, True, False, True)
FIRST = (False, *TRAINED[1:-1], False)  # before it nothing trains
FROZEN = (True, *(False,) * 8, True)
MULTIPROCESSORS = 132  # of an H100 or H200
# Whose code was measured; that of 3.7.1 takes up to 8 % longer. `make prebuilt` finds it.
TRITON = "3.6.0"
# Mean rows per expert. Between the heights of tiles memory decides what runs beside what, and so
# which kernels: densely where it is scarce.
MEANS = (1, 2, *range(4, 64, 4), 49, 64, 96, 128, 512, 1024)


class Model(NamedTuple):
    """Sizes of a layer; `oss` has gpt-oss's layout, biases and activation."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    oss: bool = False


MODELS = {
    "Qwen3-30B-A3B": Model(128, 2048, 768, 8),
    "Qwen3.5-35B-A3B": Model(256, 2048, 512, 8),
    "OLMoE-1B-7B": Model(64, 2048, 1024, 8),
    "Mixtral-8x7B": Model(8, 4096, 14336, 2),
    "gpt-oss-20b": Model(32, 2880, 2880, 4, oss=True),
}
USUAL = (16, 8)
RANKS = (*USUAL, 32, 64)
# Of the usual ranks alone. Their kernels differ by the experts per token, which are compiled in.
OTHERS = {
    "DeepSeek-V2-Lite": Model(64, 2048, 1408, 6),
    "ERNIE-4.5-21B-A3B": Model(64, 2560, 1536, 6),
    "GLM-4.5-Air": Model(128, 4096, 1408, 8),
    "Qwen3-Next-80B-A3B": Model(512, 2048, 512, 10),
}
FORMATS = ("'nf4'", "'nf4' nested=True", "'fp8'", "'mxfp4'")  # of gpt-oss the last one
LORA = (torch.bfloat16, torch.float32)  # PEFT makes the second one of the first


class Layer(NamedTuple):
    """A layer in bfloat16 whose adapters lie as PEFT stores them; without any if the rank is 0."""

    model: Model
    rank: int = 0
    lora: torch.dtype = torch.bfloat16
    gates: torch.dtype = torch.bfloat16
    format: str | None = None
    wants: tuple[bool, ...] = TRAINED


def layers() -> list[Layer]:
    """What is compiled."""
    models = (*MODELS.values(), *OTHERS.values())
    kinds = list(itertools.product(models, LORA))
    found = [
        Layer(model, rank, lora) for model in MODELS.values() for lora in LORA for rank in RANKS
    ]
    found += [
        Layer(model, rank, lora) for model in OTHERS.values() for lora in LORA for rank in USUAL
    ]
    found += [Layer(model, 16, lora, torch.float32) for model, lora in kinds]
    found += [Layer(model, rank, lora, wants=FIRST) for model, lora in kinds for rank in USUAL]
    found += [Layer(model, wants=FROZEN) for model in models]
    return found + [
        Layer(model, 16, lora, format=kind)
        for model, lora in kinds
        for kind in (FORMATS[-1:] if model.oss else FORMATS[:-1])
    ]


def new(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A stand-in, contiguous."""
    strides = torch.empty(shape, device="meta").stride()
    return load("kernels.launch.launch_plan").stand_in(shape, strides, of, ON)


def format_of(layer: Layer) -> Any:
    """The `Format` of packed experts."""
    for name in ("fp8", "mxfp4"):
        load(f"kernels.quant.formats.{name}")
    return load("kernels.quant.formats").format_of_text(f"quant_type={layer.format}")


def weights_of(layer: Layer, tokens: int) -> tuple[Any, list, list]:
    """The launches of a layer, both stored weights, and the frozen tensors."""
    experts, hidden, inner, top_k, oss = layer.model
    sizes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    if layer.format is None:
        dense = load("moe.eager_layer")._DENSE[oss]
        return dense, [new(*((e, k, n) if oss else (e, n, k))) for e, n, k in sizes], []
    form = format_of(layer)
    constants = [new(*one.shape, of=one.dtype) for one in form.constants(ON)]
    stacks, frozen = [], []
    for stored in sizes:
        tensors = [new(count, of=kind) for count, kind in form.layout(stored).values()]
        stacks.append((form, stored, True, len(tensors), tuple(range(len(constants)))))
        frozen += tensors
    frozen += constants
    quantized, strategy = (load(f"moe.quantized.{n}") for n in ("eager_quantized", "strategy"))
    path, slices = load("dispatch").MEASURED, (0, 0)
    if tokens * top_k > strategy.COMPILED_UP_TO_ROWS * experts:
        path = "triton"
        slices = tuple(
            strategy.chunk_experts(e, n * k, torch.bfloat16.itemsize) for e, n, k in sizes
        )
    return quantized.QuantizedLayer(tuple(stacks), path, slices), [None, None], frozen


def record(layer: Layer, tokens: int) -> None:
    """Forward without gradients, and forward and backward, of so many tokens."""
    eager, prepare = load("moe.eager_layer"), load("kernels.launch.launch_plan").prepare
    experts, hidden, inner, top_k, oss = layer.model
    launches, (w1, w2), frozen = weights_of(layer, tokens)
    factors, biases = [], []
    for k, n in ((hidden, 2 * inner), (inner, hidden)):
        shapes = ((experts * layer.rank, k), (n, experts * layer.rank))
        factors += (new(*shape, of=layer.lora) if layer.rank else None for shape in shapes)
        biases.append(new(experts, n) if oss else None)
    activation = "gpt_oss" if oss else "silu"
    transposed = oss and layer.format is None
    lies = "matrices" if layer.rank else None
    form = load("moe.layout").Form(activation, oss, transposed, (2.0, 2.0), (lies, lies))
    leaves = (new(tokens, hidden), w1, *factors[:2], biases[0], w2, *factors[2:], biases[1])
    leaves += (new(tokens, top_k, of=layer.gates),)
    operands = (*leaves, new(tokens, top_k, of=torch.int64), *frozen)
    if prepare(eager._forward, operands, (launches, form, False)) is None:
        raise RuntimeError(f"{layer} cannot be recorded")
    out, *kept = prepare(eager._forward, operands, (launches, form, True))
    operands = (out, *leaves, *kept, *frozen)
    if prepare(eager._backward, operands, (launches, form, layer.wants)) is None:
        raise RuntimeError(f"the backward of {layer} cannot be recorded")


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, tuple]]:
    """By their keys, the kernels that are asked for meanwhile, as for one H100."""
    found: dict[str, tuple] = {}
    plans, launches = load("kernels.launch.launch_plan"), "kernels.experts.grouped_launch_triton"
    key_of = load("kernels.launch.prebuilt").key_of

    def compile_kernel(kernel: Any, what: Any, options: dict, _: Any) -> None:
        found[key_of(kernel, what, options)] = (kernel, what, options)

    stream = types.SimpleNamespace(cuda_stream=0)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (plans, "compile_kernel", compile_kernel),
            (torch.cuda, "current_stream", lambda *_: stream),
            (load(launches), "overlaps", lambda _: True),
            (load(launches), "_multiprocessors", lambda _: MULTIPROCESSORS),
            (load("kernels.experts.gated_launch_triton"), "overlaps", lambda _: True),
            (load("kernels.quant.gated_quantized_experts_triton"), "overlaps", lambda _: True),
            (load("dispatch"), "is_hopper", lambda _: True),
            (
                load("kernels.quant.packed_product"),
                "ops",
                types.SimpleNamespace(nf4_product=lambda *_: None),
            ),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield found


_found: dict[str, tuple] = {}  # what processes compile, which begin as copies of this one


def compiled(key: str) -> tuple[str, Any]:
    """The machine code of a kernel that was found."""
    compiler = load("kernels.launch.triton_compile")
    kernel, what, options = _found[key]
    target = GPUTarget("cuda", 90, 32)
    return key, compiler.machine_code(compiler.begin(kernel, what, options, target))


def check_sources(variant: Path) -> None:
    """Exit unless the kernels of a variant are those of this checkout."""
    for path in load("kernels.launch.prebuilt").sources(PACKAGE):
        there = variant / path.relative_to(PACKAGE)
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            sys.exit(f"{there} is not as in this checkout; build {variant.name} again")


def put(archive: bytes, variant: Path, *, complete: bool) -> None:
    """The archive into a variant, and the digests of metadata.json anew."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    (variant / PREBUILT).write_bytes(archive)
    if complete:  # any other one tools/publish.py refuses
        with zipfile.ZipFile(variant / PREBUILT, "a") as file:
            file.comment = python_digest(variant).encode()
    path = variant / "metadata.json"
    metadata = json.loads(path.read_text())
    files = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    metadata["digest"] = {"algorithm": "sha256", "files": files}
    path.write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")
    Metadata.read_from_file(path)  # raises for anything that a client would refuse


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the list, for a try; default: all")
    parser.add_argument("variants", type=Path, nargs="*", help="default: those in build/")
    options = parser.parse_args(arguments)
    variants = options.variants or sorted(BUILD.glob("torch*-cu[0-9]*"))
    if not variants:
        sys.exit(f"{BUILD} has no CUDA variant: make build BACKEND=cuda")
    for variant in variants:
        check_sources(variant)
    os.environ["TRITON_CACHE_DIR"] = str(BUILD / ".objects" / "prebuilt")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # which names this machine's folders
    if triton.__version__ != TRITON:
        sys.exit(f"Triton is {triton.__version__}, not {TRITON}: run `make prebuilt`")
    start = time.perf_counter()
    with recorded() as found:
        for layer, mean in itertools.product(layers()[: options.layers], MEANS):
            record(layer, max(mean * layer.model.experts // layer.model.top_k, 1))
    _found.update(found)
    fork, workers = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=fork) as pool:
        made = list(pool.map(compiled, found, chunksize=4))
    archive = load("kernels.launch.prebuilt").archive_of(made)
    for variant in variants:
        put(archive, variant, complete=options.layers is None)
        seconds, size = time.perf_counter() - start, len(archive) / 1e6
        print(f"{variant / PREBUILT}: {len(made)} kernels, {size:.1f} MB, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
