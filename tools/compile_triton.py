"""Compile the Triton kernels of the experts for a GPU that is not there, and say what ptxas made.

python tools/compile_triton.py [--arch 90] [--model qwen3.5]

Every launch of a step of one layer is caught before it reaches a device and compiled with the
types, strides and tiles that it has: what cannot compile fails here, without a GPU. Prints
registers and stack (spills) per thread, shared memory and tensor-core instructions per kernel.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

PACKAGE = Path(__file__).resolve().parents[1] / "torch-ext" / "optimizer"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BLOCKSIZE = 64  # of 4-bit experts
COMPILED = ("nf4_product", "nf4_dequant", "nf4_quantize")
# tokens, experts per token, experts, hidden, intermediate, rank, rows per tile
MODELS = {
    "qwen3.5": (256, 8, 16, 2048, 512, 16, 128),
    "mixtral": (256, 2, 8, 4096, 2048, 64, 128),
    "decode": (1, 8, 16, 2048, 512, 16, 16),
    "odd": (50, 3, 5, 100, 72, 24, 32),
}


def load(name: str) -> types.ModuleType:
    """A module of the package's sources; packages are bare, and `_ops`, which builds have, made."""
    for package in ("optimizer", "optimizer.kernels", "optimizer.reference"):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(PACKAGE.joinpath(*package.split(".")[1:]))]
            sys.modules[package] = module
    if "optimizer._ops" not in sys.modules:
        made = types.ModuleType("optimizer._ops")
        made.ops, made.add_op_namespace_prefix = torch.ops.compiled, "compiled::{}".format
        sys.modules["optimizer._ops"] = made
        for op in COMPILED:  # modules register what these are for tensors without data
            torch.library.define(f"compiled::{op}", "(Tensor x) -> ()")
    return importlib.import_module(f"optimizer.{name}")


def resources(cubin: bytes) -> str:
    """Registers and stack of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return f"{registers:>4} registers {stack:>4} B stack"


def catch(arch: int) -> None:
    """Replace launches by compilations for the architecture."""
    seen = set()

    def run(self, *arguments, grid, warmup, **options):
        del grid, warmup
        own = {p.name for p in self.params}
        compiler = {name: value for name, value in options.items() if name not in own}
        mine = {name: value for name, value in options.items() if name in own}
        found = load("kernels.launch.triton_compile").specialization(self, arguments, mine)
        key = str((self.__name__, found, compiler))
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(self, found.signature, found.constants, found.attributes)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compiler)
        room = load("kernels.experts.tile_tables").SHARED_MEMORY.get(
            f"sm{arch}", made.metadata.shared
        )
        if made.metadata.shared > room:
            raise RuntimeError(
                f"{self.__name__} takes {made.metadata.shared} bytes of shared memory, sm_{arch} "
                f"has {room}: {mine} {compiler}"
            )
        ptx = made.asm["ptx"]
        blocks = {n: v for n, v in mine.items() if n.startswith("BLOCK")} | compiler
        print(
            f"{self.__name__:<18}{resources(made.asm['cubin'])} {made.metadata.shared:>7} B shared"
            f" {ptx.count('wgmma.mma_async'):>3} wgmma {ptx.count('mma.sync'):>4} mma  {blocks}",
            flush=True,
        )

    JITFunction.run = run


def step(model: str, dtype: torch.dtype, lora: torch.dtype) -> None:
    """Every launch of forward and backward of one layer, trained experts included."""
    tokens, top_k, experts, hidden, inner, rank, rows = MODELS[model]
    rows_of, grouped = (
        load(f"kernels.experts.{name}_triton") for name in ("rows", "grouped_launch")
    )
    directions = {
        name: getattr(grouped, f"grouped_lora_{name}_triton")
        for name in ("forward", "dx", "dab", "dw")
    }

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    rows_of.expert_sort_triton(ids, experts, rows)
    order = expert_order(ids, experts, rows)
    total, gates = tokens * top_k, new(tokens, top_k, of=torch.float32)
    low = new(total, rank)
    for k, n, x_fan in ((hidden, 2 * inner, top_k), (inner, hidden, 0)):
        down = x_fan == 0
        dy_fan = top_k if down else 0
        x, dy = new(total if down else tokens, k), new(tokens if down else total, n)
        weight, a = new(experts, n, k).transpose(1, 2), new(experts, rank, k, of=lora)
        b = new(n, rank * experts, of=lora).view(n, rank, experts).permute(2, 0, 1)
        bias, gate = (new(experts, n), gates) if down else (None, None)
        weights = projection(weight, a, b, bias)
        directions["forward"](x, weights, order, x_fan, True)
        wanted = x if down else None
        directions["dx"](dy, weights, order, gate, wanted, dy_fan, x_fan, True, True)
        directions["dab"](x, dy, low, low, gate, order, a, b, x_fan, dy_fan)
        directions["dw"](x, dy, gate, order, weight, new(experts, n), x_fan, dy_fan)
    gated_step(model, dtype, lora, order)
    packed_step(model, dtype, lora, order)
    rows_of.combine_triton(new(total, hidden), gates, order.rows, order.offsets, top_k)
    wide = new(total, 2 * inner)
    rows_of.glu_triton(wide, "silu", False)
    rows_of.glu_triton(wide, "silu", False, new(total, inner))


def expert_order(ids: torch.Tensor, experts: int, tile_rows: int) -> Any:
    """The `ExpertOrder` of ids (T, k)."""
    slots, rows, offsets, tiles = load("reference.moe").expert_sort(ids, experts, tile_rows)
    order = load("kernels.experts.expert_sort").ExpertOrder
    return order.of(slots, offsets, rows, tiles, tile_rows, ids.shape[1])


def projection(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    """The `ExpertWeights` of a projection."""
    return load("kernels.experts.grouped_lora").ExpertWeights.of(weight, a, b, bias, 2.0)


def gated_step(model: str, dtype: torch.dtype, lora: torch.dtype, order: Any) -> None:
    """Forward and backward of the layer in one op, the experts frozen."""
    tokens, top_k, experts, hidden, inner, rank, _ = MODELS[model]
    module = load("kernels.experts.gated_launch_triton")

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    x, gates = new(tokens, hidden), new(tokens, top_k, of=torch.float32)
    projections = []
    for k, n in ((hidden, 2 * inner), (inner, hidden)):
        b = new(n, rank * experts, of=lora).view(n, rank, experts).permute(2, 0, 1)
        projections.append(
            projection(new(experts, n, k).mT, new(experts, rank, k, of=lora), b, None)
        )
    record = load("kernels.experts.grouped_lora").GatedLayer
    layer = record(x, *projections, order, gates, "silu", False)
    _, *kept = module.gated_experts_triton(layer, True)
    frozen = (True, False, True, True, False, False, True, True, False, True)
    wants = module.Wants(*frozen)
    module.gated_experts_backward_triton(x, layer, kept, wants)


def packed_stacks(module: types.ModuleType, stored: tuple[int, int, int]) -> list:
    """A stack of each kind that the fused product reads."""
    experts, n, k = stored
    elements = experts * n * k
    packed, codes = (torch.empty(size, dtype=torch.uint8) for size in (elements // 2, elements))
    table = torch.empty(16)
    scales = torch.empty(experts * -(-n // 128) * -(-k // 128))
    nf4 = (packed, torch.empty(elements // BLOCKSIZE), table, None, stored, BLOCKSIZE)
    mxfp4 = (packed, codes[: elements // 32], table, None, stored, 32, "mxfp4")
    fp8 = (codes, scales, None, None, stored, 128, "fp8", 128)
    return [module.PackedStack(*one) for one in (nf4, mxfp4, fp8)]


def packed_step(model: str, dtype: torch.dtype, lora: torch.dtype, order: Any) -> None:
    """The products of a layer over packed experts, with every tile of the fused product's table."""
    tokens, top_k, experts, hidden, inner, rank, _ = MODELS[model]
    if hidden % BLOCKSIZE or inner % BLOCKSIZE:
        return  # blocks would leave their row, which the fused product refuses
    module = load("kernels.quant.packed_product_triton")
    total = tokens * top_k

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    gates, low = new(tokens, top_k, of=torch.float32), new(total, rank)
    for k, n, fan in ((hidden, 2 * inner, top_k), (inner, hidden, 0)):
        stacks = packed_stacks(module, (experts, n, k))
        down = fan == 0
        back = {"gates": gates, "other": new(total, k)} if down else {}
        tables = (module.ALONG, module.ACROSS)
        for last, table in zip((True, False), tables, strict=True):
            depth, columns = (k, n) if last else (n, k)
            x = new(tokens if (fan if last else down) else total, depth)
            factor = new(experts, rank, columns, of=lora)
            out, options = new(total, columns), {} if last else back
            fans = fan if last else top_k if down else 0
            every = dict.fromkeys(tile for _, *both in table for tile in both)
            for stack, tile in itertools.product(stacks, every):
                operands = (x, stack, last, low, factor, order, out)
                module.packed_product(*operands, fan=fans, tile=tile, scatter=False, **options)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, default=90, help="80, 90, 100: compute capability")
    parser.add_argument("--model", choices=MODELS, default="qwen3.5")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--lora", choices=("bfloat16", "float32"), default="float32")
    options = parser.parse_args(arguments)
    catch(options.arch)
    launch = load("kernels.experts.grouped_launch_triton")
    launch.arch = lambda device: f"sm{options.arch}"
    native = load("kernels.quant.packed_product_triton")
    native.is_native = lambda x, kind: kind != "fp8" or options.arch >= 89
    print(f"triton {triton.__version__}, sm_{options.arch}, {options.model}, {options.dtype}")
    step(options.model, getattr(torch, options.dtype), getattr(torch, options.lora))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
