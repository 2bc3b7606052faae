"""`kernels benchmark`: decoding and orthogonalization, checked against plain PyTorch.

The Hub's runner times the wall clock, one synchronisation per call; run.py has the quotable times.
"""

import math

import torch
from kernels.benchmark import Benchmark


def decode(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    ids: torch.Tensor,
    shape: tuple[int, ...],
    blocksize: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The definition: high nibble first, codebook times the block's absmax, one rounding."""
    numel = math.prod(shape)
    element = ids.long()[:, None] * numel + torch.arange(numel, device=packed.device)
    byte = packed[element // 2]
    nibble = torch.where(element % 2 == 0, byte >> 4, byte & 15)
    value = codebook[nibble.long()] * absmax[element // blocksize]
    return value.to(dtype).reshape(-1, *shape)


def polar_factor(x: torch.Tensor, coefficients: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    """The iteration as it is written, in float64: X <- a X + (b A + c A^2) X with A = X X^T."""
    x = x.double()
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True))
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Nf4DequantBenchmark(Benchmark):
    """Expert projections of Qwen3-30B-A3B and OLMoE-1B-7B at full and at decode-time width."""

    seed = 0
    blocksize = 64

    def _setup(self, experts: int, rows: int, columns: int, active: int) -> None:
        elements = experts * rows * columns
        self.shape = (rows, columns)
        self.packed = torch.randint(0, 256, (elements // 2,), dtype=torch.uint8, device=self.device)
        self.absmax = torch.rand(elements // self.blocksize, device=self.device)
        self.codebook = torch.linspace(-1, 1, 16, device=self.device)
        self.ids = torch.randperm(experts, device=self.device)[:active]

    def _run(self) -> None:
        self.out = self.kernel.nf4_dequant(
            self.packed,
            self.absmax,
            self.ids,
            self.shape,
            self.blocksize,
            torch.bfloat16,
            codebook=self.codebook,
        )

    def _verify(self) -> torch.Tensor:
        return decode(
            self.packed,
            self.absmax,
            self.codebook,
            self.ids,
            self.shape,
            self.blocksize,
            torch.bfloat16,
        )

    def setup_qwen3_down(self) -> None:
        self._setup(experts=128, rows=2048, columns=768, active=16)

    def setup_olmoe_down_of_8(self) -> None:
        self._setup(experts=64, rows=2048, columns=1024, active=8)

    benchmark_qwen3_down = benchmark_olmoe_down_of_8 = _run
    verify_qwen3_down = verify_olmoe_down_of_8 = _verify


class PolarExpressBenchmark(Benchmark):
    """The attention and up projections of a 124M GPT: one stack for all layers."""

    seed = 0

    def _setup(self, *shape: int) -> None:
        self.x = torch.randn(shape, device=self.device)

    def _run(self) -> None:
        self.out = self.kernel.polar_express(self.x).float()

    def _verify(self) -> torch.Tensor:
        return polar_factor(self.x, self.kernel.polar_express_coefficients(5)).float()

    def setup_gpt_attention(self) -> None:
        self._setup(12, 768, 768)

    def setup_gpt_up(self) -> None:
        self._setup(12, 768, 3072)

    benchmark_gpt_attention = benchmark_gpt_up = _run
    verify_gpt_attention = verify_gpt_up = _verify
