"""The case `offload/Qwen3-30B-A3B`: a training step with NF4 experts in host memory.

Four layers of the model's shapes, attention included, frozen but for LoRA on the experts, over one
sequence of 8192 tokens. The baseline is the same model with its experts on the device. The gate:
the same bits in the output and every gradient, and at most two layers' experts on the device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..built_package import Built, settle
from ..device import peak_mb
from ..lazy import torch
from ..report import Goal, Line, failed, judged, line, passed, said
from ..timer import Times, times
from .goals import OFFLOAD
from .problems import MODELS, Layer
from .quant import BLOCKSIZE, BYTES, floors

MODEL, LAYERS, TOKENS = "Qwen3-30B-A3B", 4, 8192
HEADS, KEY_HEADS, HEAD = 32, 4, 128
ROUNDS, WARMUP = 5, 1
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch looks at it when it is asked to be repeatable
BASELINE = "the same model, experts on the device"


def build(built: Built, sizes: tuple[int, int, int, int], layers: int, tokens: int, device: str):
    """The model, a function of (tokens, hidden) and an input; experts are quantised one by one."""
    from torch import nn

    experts, hidden, intermediate, top_k = sizes
    moe = built.package.moe
    factory = {"device": device, "dtype": torch.bfloat16}
    torch.manual_seed(0)

    def stack(rows: int, columns: int):
        drawn = (torch.randn(rows, columns, **factory) * 0.02 for _ in range(experts))
        shape = (experts, rows, columns)
        return moe.QuantizedExperts.from_experts(drawn, shape, device=device, blocksize=BLOCKSIZE)

    class Block(nn.Module):
        """Attention and experts, each behind a norm and beside a residual."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(hidden, **factory) for _ in range(2))
            self.qkv = nn.Linear(hidden, (HEADS + 2 * KEY_HEADS) * HEAD, bias=False, **factory)
            self.out = nn.Linear(HEADS * HEAD, hidden, bias=False, **factory)
            self.router = nn.Linear(hidden, experts, bias=False, **factory)
            self.requires_grad_(False)
            self.gate_up_proj = stack(2 * intermediate, hidden)
            self.down_proj = stack(hidden, intermediate)
            layout = moe.ExpertsLayout()
            self.lora = moe.ExpertAdapters(experts, hidden, intermediate, layout)
            self.lora.add_adapter("default", r=16, alpha=32, device=device)
            self.layout = layout

        def forward(self, x):
            x = x + self.attention(self.norms[0](x))
            rows = self.norms[1](x)
            weights, index = self.router(rows).float().softmax(-1).topk(top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            return x + moe.experts_forward(
                rows,
                index,
                weights.to(rows.dtype),
                self.gate_up_proj,
                self.down_proj,
                layout=self.layout,
                lora=self.lora.factors(),
            )

        def attention(self, rows):
            sizes = [heads * HEAD for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
            q, k, v = (
                part.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None]
                for part in self.qkv(rows).split(sizes, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return self.out(mixed[0].transpose(0, 1).flatten(1))

    model = nn.Sequential(*(Block() for _ in range(layers)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave A without a gradient
            nn.init.normal_(parameter, std=0.01)
    return model, torch.randn(tokens, hidden, **factory)


@contextlib.contextmanager
def repeatable_kernels() -> Iterator[None]:
    """torch refuses what is not repeatable, and cuBLAS without a workspace of its own."""
    before = os.environ.get(WORKSPACE)
    os.environ[WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        if before is None:
            del os.environ[WORKSPACE]
        else:
            os.environ[WORKSPACE] = before


def offload_row(
    built: Built,
    sizes: tuple[int, int, int, int] = MODELS[MODEL],
    layers: int = LAYERS,
    tokens: int = TOKENS,
    device: str = "cuda",
) -> Line:
    """The row and its printed line."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.cuda.empty_cache()
    model, x = build(built, sizes, layers, tokens, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> list:
        out = model(x)
        return [out.detach(), *torch.autograd.grad(out, trained, x)]

    def repeatable() -> list:
        # An attention's backward adds by atomics otherwise, cuDNN's even then, and flash's where a
        # warning is enough: other bits in every run.
        with repeatable_kernels(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return step()

    def measure() -> tuple[Times, float]:
        settle(built.package, [step])
        turns = {"step": lambda _: step()}
        timed = times(turns, sets=1, rounds=ROUNDS, warmup=WARMUP)
        return timed["step"], peak_mb(step)

    expected = repeatable()
    plain, plain_mb = measure()
    offload = built.package.moe.ExpertOffload(model, device)
    try:
        step()  # learns the order
        before = offload.transfers
        found = repeatable()
        copied = offload.transfers - before
        there = len(offload.resident)
        good = all(map(torch.equal, found, expected)) and there <= 2
        name = f"offload/{MODEL}"
        if not good:
            row = failed(name)
            return row, line(row, gigabytes=0)
        here, mb = measure()
    finally:
        offload.turn_off()
    weights = BYTES * 3 * sizes[0] * sizes[1] * sizes[2]
    least = layers * floors(Layer(MODEL, *sizes, tokens=tokens), sizes[0])["fwd+bwd"]
    found, peaks = {"ours": here, "baseline": plain}, {"peak_mb": mb, "peak_baseline_mb": plain_mb}
    row = passed(name, found, BASELINE, least, **peaks)
    row = judged(row, {"slower": Goal(OFFLOAD, False)}, {"slower": here.wall_ms / plain.wall_ms})
    printed = line(row, gigabytes=copied * weights / 1e9)
    return row, f"{printed}  {copied} layers copied per step, {there} on the device{said(row)}"
