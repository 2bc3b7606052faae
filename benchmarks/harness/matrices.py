"""The matrices that orthogonalization is judged on: spectra, Gaussians, and a model's own.

Known spectra are built as U S V^T, so that neither the matrix nor its polar factor needs a float64
SVD. Everything is seeded and made on the CPU in float64, so that every machine judges the same; but
for `momenta`, which come from a GPT that is trained on text on the GPU, within the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .built_package import demo_modules

GAUSSIAN_ASPECTS = (1, 2, 4, 8)
HEAVY = "heavy"
# Where rounding rules: on the non-zero subspace of few large values beside none or tiny ones.
RANK_DEFICIENT = ("half_zero", "rank_10", "two_and_1e-3", "two_and_1e-5", "two_and_1e-7")

# Of the GPT whose momenta are taken: the demo's decoder, on the bytes of Python files.
STEPS, LR = 50, 2e-3
BATCH, CONTEXT, HEAD, TEXT = 8, 512, 64, 8 * 2**20
KEPT = 4  # of the last steps' momenta

# k = 1 .. m -> singular values.
SPECTRA: dict[str, Callable[[Tensor, int], Tensor]] = {
    "linear": lambda k, m: 0.002 + 0.998 * (m - k) / (m - 1),
    "log_1e-2": lambda k, m: 10 ** (-2 * (k - 1) / (m - 1)),
    "log_1e-3": lambda k, m: 10 ** (-3 * (k - 1) / (m - 1)),
    "log_1e-5": lambda k, m: 10 ** (-5 * (k - 1) / (m - 1)),
    "log_1e-7": lambda k, m: 10 ** (-7 * (k - 1) / (m - 1)),
    "power_half": lambda k, m: k**-0.5,
    "power_one": lambda k, m: 1 / k,
    "half_zero": lambda k, m: (1 - k / m) * (2 * k <= m),
    "rank_10": lambda k, m: (k <= 10).double(),
    "two_and_1e-3": lambda k, m: torch.where(k <= 2, 1.0, 1e-3).double(),
    "two_and_1e-5": lambda k, m: torch.where(k <= 2, 1.0, 1e-5).double(),
    "two_and_1e-7": lambda k, m: torch.where(k <= 2, 1.0, 1e-7).double(),
    "gamma": lambda k, m: _gamma(m),
}


@dataclass(frozen=True)
class Specimen:
    """x = U S V^T (m, n) in float64, of rank r: u (m, r), values (r,), v (n, r)."""

    x: Tensor
    u: Tensor
    values: Tensor
    v: Tensor

    def distance(self, result: Tensor) -> float:
        """||U^T result V - I||_F / ||I||_F: from the polar factor, on the non-zero subspace."""
        inner = self.u.mT @ result.double().to(self.u.device) @ self.v  # (r, r)
        inner.diagonal().sub_(1)
        return (inner.norm() / math.sqrt(len(self.values))).item()

    def to(self, device: torch.device | str) -> Specimen:
        """The same numbers on a device."""
        return Specimen(*(t.to(device) for t in (self.x, self.u, self.values, self.v)))


def known(name: str, m: int, n: int, seed: int = 0) -> Specimen:
    """An m x n specimen, m <= n, of a spectrum of `SPECTRA` with random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    values = SPECTRA[name](torch.arange(1, m + 1, dtype=torch.float64), m).double()
    u, v = (_orthonormal(rows, m, generator) for rows in (m, n))
    kept = values > 0
    return Specimen((u * values) @ v.mT, u[:, kept], values[kept], v[:, kept])


def gaussian(m: int, n: int, seed: int = 0) -> Tensor:
    """(m, n) standard normal, float64."""
    return torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heavy(m: int, n: int, seed: int = 0) -> Tensor:
    """A diag(1/k) B^T (m, n) with Gaussian A (m, m), B (n, m) of unit columns, m <= n; float64."""
    left, right = gaussian(m, m, seed), gaussian(n, m, seed + 1)
    k = torch.arange(1, m + 1, dtype=torch.float64)
    return (left / left.norm(dim=0) / k) @ (right / right.norm(dim=0)).mT


def wide(x: Tensor) -> Tensor:
    """x (m, n), turned if it is tall."""
    return x if x.shape[0] <= x.shape[1] else x.mT


def decomposed(x: Tensor) -> Specimen:
    """A specimen from any matrix, by a float64 SVD; values below 1e-12 of the largest are zero."""
    x = x.double()
    u, values, vh = torch.linalg.svd(x, full_matrices=False)
    kept = values > 1e-12 * values[0]
    return Specimen(x, u[:, kept], values[kept], vh.mT[:, kept])


def specimens(m: int = 256) -> dict[str, Specimen]:
    """Every specimen by name: the spectra at m x 2m, Gaussians, heavy tails, a model's own."""
    found = {name: known(name, m, 2 * m) for name in SPECTRA}
    for aspect in GAUSSIAN_ASPECTS:
        found[f"gaussian_1:{aspect}"] = decomposed(gaussian(m, aspect * m))
    for aspect in (1, 4):
        found[f"{HEAVY}_1:{aspect}"] = decomposed(heavy(m, aspect * m))
    found |= {name: decomposed(x) for name, x in trained(m // 4).items()}
    return found


def allowed(name: str) -> float:
    """The accuracy rule: how far `auto` may be from the polar factor, in distances of 5 steps."""
    return 1.1 if name in RANK_DEFICIENT else 1.02


def trained(width: int, steps: int = 30) -> dict[str, Tensor]:
    """Gradients and momenta (0.95) of a small attention block on text, after some AdamW steps."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = _Block(width)
    finally:
        torch.set_rng_state(torch_state)
    text = torch.frombuffer(bytearray(_text()), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    momenta: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (16,), generator=generator)
        batch = torch.stack([text[start : start + 65] for start in starts])  # (16, 65)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        for name, parameter in model.matrices().items():
            momenta[name] = 0.95 * momenta.get(name, 0) + parameter.grad
    found = {}
    for name, parameter in model.matrices().items():
        for kind, x in (("gradient", parameter.grad), ("momentum", momenta[name])):
            found[f"{kind}_{name}"] = x if x.shape[0] <= x.shape[1] else x.mT.contiguous()
    return {name: x.detach().clone() for name, x in found.items()}


def momenta(package: ModuleType, width: int, layers: int) -> dict[tuple[int, int], list[Any]]:
    """Momentum buffers of `Muon` in a GPT's training, in batches of all layers' matrices.

    Returns:
        (m, n) -> KEPT batches (layers, m, n), float32: of the square matrices q, k, v and the
        attention's output after the last step, of the others the last steps' ones.
    """
    demo = demo_modules()
    config = demo["model"].ModelConfig(layers, width, width // HEAD, CONTEXT)
    model = demo["model"].Decoder(config, seed=0).cuda()
    device = torch.device("cuda")
    corpus = demo["corpus"].read_corpus(None, context=CONTEXT, max_bytes=TEXT, device=device)
    starts = corpus.train_starts(seed=0, steps=STEPS, batch=BATCH, context=CONTEXT)
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    groups = package.get_default_muon_param_groups(model, no_decay=False, split_fused=False)
    optimizer = package.Muon(groups, lr=LR, none_grad=True)
    named = dict(model.named_parameters())
    found: dict[tuple[int, int], list[Any]] = {}

    def stacked(which: str):
        """One matrix of every layer: (layers, m, n)."""
        return torch.stack(
            [
                optimizer.state[named[name]]["momentum_buffer"].float()
                for name in matrices
                if name.endswith(f".{which}.weight")
            ]
        )

    for step in range(STEPS):
        batch = demo["corpus"].windows(corpus.train, starts[step], CONTEXT)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= STEPS - KEPT:
            for which in ("up", "down"):
                batch = stacked(which)
                found.setdefault(tuple(batch.shape[1:]), []).append(batch)
    if not loss.item() < 4.0:  # nats per byte; 5.5 at the start
        raise RuntimeError(f"the GPT of width {width} does not learn: loss {loss.item():.2f}")
    found[width, width] = [stacked(which) for which in ("q", "k", "v", "out")]
    return found


class _Block(nn.Module):
    """Embedding, one causal attention and one MLP, head: (B, T) bytes -> (B, T, 256) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(nn.functional.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden = self.up(nn.functional.rms_norm(x, x.shape[-1:]))
        x = x + self.down(nn.functional.relu(hidden).square())
        return self.head(nn.functional.rms_norm(x, x.shape[-1:]))

    def matrices(self) -> dict[str, nn.Parameter]:
        """What Muon would be given."""
        named = {"qkv": self.qkv, "out": self.out, "up": self.up, "down": self.down}
        return {name: layer.weight for name, layer in named.items()}


def _text() -> bytes:
    """Source text that every Python has."""
    import argparse
    import inspect

    return inspect.getsource(argparse).encode()


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal).Q


def _gamma(m: int) -> Tensor:
    """m values of Gamma(3, 0.5), the sum of three exponentials, in falling order."""
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(3, m, generator=generator, dtype=torch.float64)
    return (-0.5 * uniform.clamp_min(1e-12).log().sum(0)).sort(descending=True).values
