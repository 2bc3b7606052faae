"""Small problems of the fused products over packed experts, and their dense twins."""

from __future__ import annotations

import dataclasses

import torch

EXPERTS, TOP_K = 4, 2


@dataclasses.dataclass(frozen=True)
class Stack:
    """Sizes and format of a stack (E, N, K), and how it is multiplied."""

    n: int = 96
    k: int = 128
    blocksize: int = 64
    transposed: bool = True  # seen as (E, K, N)
    nested: bool = False
    quant_type: str = "nf4"
    block: tuple[int, int] = (128, 128)  # of FP8
    rank: int | None = 3
    tokens: int = 23
    bias: bool = True

    def __str__(self) -> str:
        flags = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is True]
        return "-".join([f"{self.n}x{self.k}b{self.options()}", *flags, self.quant_type])

    def options(self) -> dict:
        """What `QuantizedExperts` takes beside the shape."""
        if self.quant_type == "mxfp4":
            return {}
        if self.quant_type == "fp8":
            return {"block_rows": self.block[0], "block_columns": self.block[1]}
        return {"blocksize": self.blocksize, "nested": self.nested}


STACKS = (
    Stack(),
    Stack(n=70, k=192, blocksize=64, nested=True),  # N ends inside a tile, K in the middle of one
    Stack(transposed=False, bias=False),
    Stack(n=40, k=64, blocksize=32, quant_type="fp4", rank=None),
    Stack(n=33, k=256, blocksize=256, rank=20, tokens=50),
    # Sides end inside of blocks and tiles, and a step of the sum holds several scales.
    Stack(n=70, k=96, quant_type="mxfp4"),
    Stack(n=33, k=160, quant_type="mxfp4", transposed=False, bias=False, rank=1),
    Stack(n=64, k=64, quant_type="mxfp4", rank=128, tokens=2),
    Stack(n=150, k=200, quant_type="fp8"),
    Stack(n=150, k=89, quant_type="fp8", block=(32, 32), transposed=False, rank=128, tokens=7),
    Stack(n=40, k=57, quant_type="fp8", block=(1, 0), bias=False, rank=1),
    Stack(n=33, k=16, quant_type="fp8", block=(0, 0), transposed=False, rank=None),
)


BUDGETS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
# Every stack in float32, two of them in the narrow dtypes: the interpreter is slow.
CASES = (
    *((stack, torch.float32) for stack in STACKS),
    *((STACKS[n], dtype) for n in (1, 5, 8) for dtype in (torch.float16, torch.bfloat16)),
    (STACKS[2], torch.bfloat16),
)


def budget(path: str, device: torch.device, dtype: torch.dtype) -> float:
    """Roundings of the result and of xa; the interpreter truncates where it makes bfloat16."""
    truncates = path == "triton" and device.type == "cpu" and dtype == torch.bfloat16
    return BUDGETS[dtype] * (2 if truncates else 1)


def draw(submodule, stack: Stack, device, dtype, seed: int = 0) -> dict:
    """Operands by name; expert 1 has no rows, some slots are sentinels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, kind=dtype, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator)).to(device, kind)

    module = submodule("moe.quantized.quantized_experts").QuantizedExperts.from_weight(
        normal(EXPERTS, stack.n, stack.k, kind=torch.float32, std=stack.k**-0.5),
        quant_type=stack.quant_type,
        **stack.options(),
    )
    record = module.transpose(1, 2) if stack.transposed else module.quantized_weight()
    _, inner, outer = record.shape
    ids = torch.tensor([0, 2, 3, 2, -1, EXPERTS])[
        torch.randint(0, 6, (stack.tokens, TOP_K), generator=generator)
    ].to(device)
    lora = (None, None)
    if stack.rank is not None:
        small = {"kind": torch.float32, "std": 0.3}
        lora = (
            normal(EXPERTS, stack.rank, inner, **small),
            normal(outer, stack.rank, EXPERTS, **small).permute(2, 0, 1),
        )
    order = submodule("moe").expert_sort(ids, EXPERTS)
    return {
        "weight": record,
        "dense": record.decode(dtype=dtype),
        "order": order,
        "x": normal(stack.tokens, inner),
        "dy": normal(stack.tokens, outer),
        "gates": normal(stack.tokens, TOP_K, kind=torch.float32),
        "lora": lora,
        "bias": normal(EXPERTS, outer) if stack.bias else None,
    }


def weights_of(submodule, problem: dict, scaling: float):
    """The projection as ops take it."""
    kind = submodule("kernels.experts.grouped_lora").ExpertWeights
    return kind.of(problem["weight"], *problem["lora"], problem["bias"], scaling)


def way(module, path: str) -> dict:
    """Options of the op: "slices" of three experts and the "active" ones are Triton's too."""
    slices = {"slices": 3, "active": module.ACTIVE}.get(path, 0)
    return {"slice_experts": slices, "path": path if path == "reference" else "triton"}


def valid(order) -> torch.Tensor:
    """Rows in expert order that are no sentinels."""
    return torch.arange(order.slots.shape[0], device=order.slots.device) < order.offsets[-1]
