"""Train a byte-level transformer cut over ranks: with plain, fused and float8 products.

    torchrun --standalone --nproc-per-node 2 examples/train_tp.py     # GPUs, one GPU, else the CPU
    torchrun --standalone --nproc-per-node 8 examples/train_tp.py --channels 4096 --layers 4 \
        --heads 32 --context 2048 --batch 8 --steps 50

Every form trains the same model from the same weights on the same batches, so that the curves of
plain and fused products lie on each other, and that of float8 shows what its rounding costs.
Between layers a rank has a part of every sequence, inside of them some heads and some hidden
channels. Where no product can be fused, as on a CPU, the run says why. The text is the source of
Python's standard library, found on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Ranks may share a GPU, for a try; torch reads this when it is imported.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.nn.functional as F
from demo.command_line import add_corpus, add_decoder, exit_status
from demo.config import DemoError
from demo.corpus import read_corpus, windows
from demo.device import device_name, has_bfloat16, joined
from demo.model import Decoder, ModelConfig, rotate
from demo.package import load_first
from demo.report import curves, smooth
from torch import Tensor, distributed, nn

# Form -> options of the products; "plain" is what tensor parallelism is without fusion.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"fuse": "never"},
    "fused": {"fuse": "always"},
    "float8": {"fuse": "always", "scaling": "rowwise_sharded"},
}
FLOAT8 = (8, 9)  # capability whose tensor cores multiply float8


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--forms", nargs="+", choices=[*FORMS], help="default: all that the device has")
    add("--lr", type=float, default=3e-3)
    add("--steps", type=int, default=200)
    add_decoder(parser, channels=256, heads=8, batch=16, context=256)
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add_corpus(parser, "demo_out/tp")
    add("--device", choices=("cpu", "cuda"), help="default: CUDA where it is, else the CPU")
    return parser.parse_args(arguments)


class ShardedDecoder(nn.Module):
    """This rank's part of a `Decoder`: B sequences of T tokens, C channels, H heads, W ranks.

    Args:
        whole: The model, equal on all ranks.
        tp: The package's `tensor_parallel`.
        form: Options of its products.
    """

    def __init__(self, whole: Decoder, tp: Any, form: dict[str, Any]) -> None:
        super().__init__()
        self.tp, self.form, self.heads = tp, form, whole.config.heads
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.embedding, self.norm, self.head = whole.embedding, whole.norm, whole.head
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)
        self.norms = nn.ModuleList(
            norm for block in whole.blocks for norm in (block.attention_norm, block.mlp_norm)
        )
        self.blocks = nn.ModuleList(map(self._shards, whole.blocks))

    def _shards(self, block: nn.Module) -> nn.ParameterDict:
        """Rows of the weights whose outputs are cut, columns of those whose inputs are."""
        attention = block.attention
        rows = {"q": attention.q, "k": attention.k, "v": attention.v, "up": block.up}
        columns = {"out": attention.out, "down": block.down}
        shards = {name: self._part(linear.weight, 0) for name, linear in rows.items()}
        shards |= {name: self._part(linear.weight, 1) for name, linear in columns.items()}
        return nn.ParameterDict(shards)

    def _part(self, x: Tensor, dim: int) -> Tensor:
        return x.detach().chunk(self.world, dim)[self.rank].clone()

    def _gathered(self, x: Tensor, *weights: Tensor) -> list[Tensor]:
        """x (B, T / W, C) of all ranks times each weight (out / W, C): (B, T, out / W)."""
        return self.tp.all_gather_matmul(x, [w.t() for w in weights], 1, **self.form)

    def _scattered(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (B, T, in / W) times a weight (C, in / W), summed over ranks: (B, T / W, C)."""
        return self.tp.matmul_reduce_scatter(x, weight.t(), "sum", 1, **self.form)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's share of the mean cross-entropy: its tokens' sum over all tokens.

        tokens and targets (B, T) are those of all ranks.
        """
        batch, length = tokens.shape
        x = self.embedding(tokens.chunk(self.world, 1)[self.rank])  # (B, T / W, C)
        for number, block in enumerate(self.blocks):
            attention_norm, mlp_norm = self.norms[2 * number], self.norms[2 * number + 1]
            q, k, v = (
                part.view(batch, length, self.heads // self.world, -1).transpose(1, 2)
                for part in self._gathered(attention_norm(x), block["q"], block["k"], block["v"])
            )  # (B, H / W, T, D)
            q, k = (rotate(part, self.cos[:length], self.sin[:length]) for part in (q, k))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(batch, length, -1)  # (B, T, C / W)
            x = x + self._scattered(mixed, block["out"])
            (hidden,) = self._gathered(mlp_norm(x), block["up"])  # (B, T, 4 C / W)
            x = x + self._scattered(F.relu(hidden).square(), block["down"])
        logits = self.head(self.norm(x)).float()
        wanted = targets.chunk(self.world, 1)[self.rank].flatten()
        return F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum") / targets.numel()

    def reduce_shared_gradients(self) -> None:
        """Embedding, norms and head are on every rank, each of which saw its tokens alone."""
        shared = [self.embedding, self.norm, self.head, self.norms]
        grads = [p.grad for module in shared for p in module.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def train(
    options: argparse.Namespace, name: str, package: Any, corpus: Any, device: torch.device
) -> dict:
    """One form's losses, milliseconds of a step, and the paths that its products took."""
    tp = package.tensor_parallel
    config = ModelConfig(options.layers, options.channels, options.heads, options.context)
    whole = Decoder(config, seed=options.seed).to(device)
    model = ShardedDecoder(whole, tp, FORMS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    starts = corpus.train_starts(
        seed=options.seed, steps=options.steps, batch=options.batch, context=options.context
    )
    tp.reset_comm_report()
    losses, began = [], time.perf_counter()
    for index in range(options.steps):
        if index == 1:  # the first step prepares symmetric memory
            _synchronize(device)
            began = time.perf_counter()
        tokens, targets = windows(corpus.train, starts[index], options.context)
        with torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
            loss = model(tokens, targets)
        loss.backward()
        model.reduce_shared_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _synchronize(device)
    taken = time.perf_counter() - began
    curve = torch.stack(losses)
    distributed.all_reduce(curve)  # every rank has the share of its tokens
    paths = [vars(record) for record in tp.comm_report()]
    step_ms = 1e3 * taken / max(1, options.steps - 1)
    return {"losses": curve.tolist(), "step_ms": step_ms, "paths": paths}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_results(folder: Path, results: dict[str, dict]) -> None:
    """The curves as numbers and as a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    with curves(folder / "loss.png", "train loss, nats per byte") as axes:
        for name, style in zip(results, ("-", "--", ":"), strict=False):
            losses = results[name]["losses"]
            label = f"{name}, {results[name]['step_ms']:.1f} ms a step"
            axes.plot(range(1, len(losses) + 1), smooth(losses, span=5), style, label=label)


def run(options: argparse.Namespace, device: torch.device) -> int:
    """One rank's run; returns its exit status."""
    world = distributed.get_world_size()
    for name in ("heads", "context"):
        if getattr(options, name) % world:
            raise DemoError(f"{world} ranks do not divide --{name} {getattr(options, name)}")
    package, _ = load_first([device])
    forms = options.forms
    if forms is None:
        has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8
        forms = [name for name in FORMS if has_float8 or name != "float8"]
    corpus = read_corpus(options.corpus, context=options.context, max_bytes=2**22, device=device)
    first, results = distributed.get_rank() == 0, {}
    if first:
        print(f"{package.variant} on {world} x {device_name(device)}")
    for name in forms:
        results[name] = train(options, name, package.module, corpus, device)
        if first:
            found = results[name]
            print(f"{name}: loss {found['losses'][-1]:.4f}, {found['step_ms']:.1f} ms a step")
            for path in found["paths"]:
                because = f", because {path['reason']}" if path["reason"] else ""
                print(f"  {path['op']}: {path['path']} {path['calls']} times{because}")
    if first:
        write_results(options.out_dir, results)
        print(f"wrote {options.out_dir / 'loss.png'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)

    def started() -> int:
        with joined(options.device, "train_tp", "nccl") as device:
            return run(options, device)

    return exit_status("train_tp", started)


if __name__ == "__main__":
    sys.exit(main())
