"""A GPT trained on text within a benchmark's run, for what random numbers do not show.

Model and text are the demo's: a decoder with rotary positions and ReLU^2, on the bytes of this
machine's Python files.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .sources import ROOT

STEPS, LR = 50, 2e-3
BATCH, CONTEXT, HEAD, TEXT = 8, 512, 64, 8 * 2**20
KEPT = 4  # of the last steps' momenta


def momenta(package: ModuleType, width: int, layers: int) -> dict[tuple[int, int], list[Any]]:
    """Momentum buffers of `Muon` in a GPT's training, in batches of all layers' matrices.

    Returns:
        (m, n) -> KEPT batches (layers, m, n), float32: of the square matrices q, k, v and the
        attention's output after the last step, of the others the last steps' ones.
    """
    import torch

    demo = demo_modules()
    config = demo["model"].ModelConfig(layers, width, width // HEAD, CONTEXT)
    model = demo["model"].Decoder(config, seed=0).cuda()
    device = torch.device("cuda")
    corpus = demo["corpus"].read_corpus(None, context=CONTEXT, max_bytes=TEXT, device=device)
    starts = corpus.train_starts(seed=0, steps=STEPS, batch=BATCH, context=CONTEXT)
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    groups = package.get_default_muon_param_groups(model)
    optimizer = package.Muon(groups, lr=LR)
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


def demo_modules() -> dict[str, ModuleType]:
    """The demo's model and corpus."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from demo import corpus, model

    return {"corpus": corpus, "model": model}
