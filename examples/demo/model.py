"""A decoder-only transformer: pre-norm, RMSNorm, rotary positions, ReLU² MLP, no biases.

Legend of the shape comments: B sequences, T tokens of one sequence, C channels, H heads, D = C / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value: no tokenizer to download or to train


@dataclass(frozen=True)
class ModelConfig:
    """Size of a `Decoder`.

    Args:
        layers: Number of blocks.
        channels: Width of the residual stream; a multiple of `2 * heads`.
        heads: Attention heads.
        context: Longest sequence, in tokens.
        vocabulary: Number of tokens.
    """

    layers: int
    channels: int
    heads: int
    context: int
    vocabulary: int = VOCABULARY


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.channels, config.channels, bias=False)
        self.k = nn.Linear(config.channels, config.channels, bias=False)
        self.v = nn.Linear(config.channels, config.channels, bias=False)
        self.out = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the tokens of each sequence; x and result (B, T, C), cos and sin (T, D)."""
        batch, tokens, channels = x.shape
        q, k, v = (
            projection(x).view(batch, tokens, self.heads, -1).transpose(1, 2)  # (B, H, T, D)
            for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, channels))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.channels)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.channels)
        self.up = nn.Linear(config.channels, 4 * config.channels, bias=False)
        self.down = nn.Linear(4 * config.channels, config.channels, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One residual block; x and result (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class Decoder(nn.Module):
    """Embedding, blocks, norm and an untied head.

    Args:
        config: Size of the model.
        seed: Seed of the initial weights; equal seeds give equal weights on every device.
    """

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.channels)
        self.head = nn.Linear(config.channels, config.vocabulary, bias=False)
        cos, sin = rotary_tables(config.context, config.channels // config.heads)
        self.register_buffer("cos", cos, persistent=False)  # (T, D)
        self.register_buffer("sin", sin, persistent=False)  # (T, D)
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Variance-preserving weights; branches that add to the residual stream start small."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # RMSNorm scales start at 1
            std = parameter.shape[1] ** -0.5  # fan-in of a Linear, width of the Embedding
            if name.endswith(("out.weight", "down.weight")):
                std *= (2 * self.config.layers) ** -0.5  # GPT-2: 2 L branches sum to variance 1
            parameter.normal_(std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64, what follows each token.

        Returns:
            A scalar, float32.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()  # (B, T, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotary_tables(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (RoFormer, arXiv 2104.09864), each (length, dim)."""
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + D/2) of x (B, H, T, D) by its token's angle."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
