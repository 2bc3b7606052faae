"""One training run: the same loop, batches, schedule and clipping for both optimizers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from demo.checkpoint import Checkpoints
from demo.config import ADAMW, RunConfig
from demo.corpus import Corpus, windows
from demo.model import Decoder
from demo.package import Package


@dataclass
class History:
    """What a run has produced so far.

    Args:
        train: Loss of each step, nats per byte.
        held_out: Pairs (steps done, held-out loss).
        seconds: Time in training steps; evaluations and checkpoints do not count.
    """

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.train)


def learning_rate_factor(step: int, run: RunConfig) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < run.warmup:
        return (step + 1) / run.warmup
    done = (step - run.warmup) / (run.steps - run.warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(run: RunConfig, model: Decoder, package: Package) -> Optimizer:
    """The optimizer of a run, with one peak learning rate and one decay for all its groups."""
    if run.optimizer == ADAMW:
        return torch.optim.AdamW(
            model.parameters(),
            lr=run.lr,
            betas=(0.9, 0.95),
            weight_decay=run.weight_decay,
            fused=True,
        )
    matrices, rest = package.module.get_default_muon_param_groups(model, no_decay=False)
    shared = {"lr": run.lr, "weight_decay": run.weight_decay}
    return package.module.MuonAdamW(
        [
            # match_rms_adamw gives the update the size of an AdamW update, so that both halves
            # share one learning rate; the two switches make the decay AdamW's own
            {
                "kind": "muon",
                "params": matrices["params"],
                "adjust_lr_fn": "match_rms_adamw",
                "shaped_decay": False,
                "cautious": False,
            }
            | shared,
            {"kind": "adamw", "params": rest["params"], "betas": (0.9, 0.95)} | shared,
        ]
    )


class Trainer:
    """Model, optimizer and data of one run, and the step that joins them."""

    def __init__(self, run: RunConfig, corpus: Corpus, device: torch.device, package: Package):
        self.run, self.corpus, self.device, self.package = run, corpus, device, package
        self.model = Decoder(run.model, seed=run.seed).to(device)
        self.optimizer = build_optimizer(run, self.model, package)
        context = run.model.context
        self.starts = corpus.train_starts(
            seed=run.seed, steps=run.steps, batch=run.batch, context=context
        )  # (steps, B)
        self.held_out = corpus.held_out_batch(sequences=run.eval_sequences, context=context)

    def step(self, index: int) -> Tensor:
        """One training step; returns its loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * learning_rate_factor(index, self.run)
        tokens, targets = windows(self.corpus.train, self.starts[index], self.run.model.context)
        loss = self._loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Held-out loss, still on the device."""
        return self._loss(*self.held_out)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.autocast):
            return self.model(tokens, targets)


def train(
    trainer: Trainer,
    *,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    progress: bool = False,
) -> History:
    """Train to the end, or until `interrupted` says so.

    Args:
        trainer: The run.
        checkpoints: Where to save the run, at its own interval, at the end and if interrupted.
        resume: Continue from the newest of `checkpoints`, if there is one.
        interrupted: Asked after every step.
        progress: Show a bar with loss and tokens per second.

    Returns:
        The losses; `history.step < run.steps` if interrupted.
    """
    run = trainer.run
    saved = checkpoints.load(trainer.model, trainer.optimizer) if checkpoints and resume else None
    history = History(**saved) if saved else History()
    losses: list[Tensor] = []
    began = time.perf_counter()
    with tqdm(
        total=run.steps,
        initial=history.step,
        desc=run.optimizer,
        mininterval=0.5,
        disable=not progress,
    ) as bar:
        for index in range(history.step, run.steps):
            losses.append(trainer.step(index))
            bar.update()
            done = index + 1
            stop = interrupted() or done == run.steps
            save = checkpoints is not None and (stop or done % checkpoints.every == 0)
            evaluate = done % run.eval_every == 0 or done == run.steps
            if not save and not evaluate:
                continue
            history.train += torch.stack(losses).tolist()  # waits for the device
            history.seconds += time.perf_counter() - began
            losses = []
            if evaluate:
                history.held_out.append((done, trainer.evaluate().item()))
                bar.set_postfix_str(_status(history, run), refresh=False)
            if save:
                checkpoints.save(trainer.model, trainer.optimizer, vars(history))
            if stop:
                break
            began = time.perf_counter()
    return history


def _status(history: History, run: RunConfig) -> str:
    rate = history.step * run.batch * run.model.context / history.seconds
    recent = history.train[-run.eval_every :]
    return (
        f"loss {sum(recent) / len(recent):.3f}, held-out {history.held_out[-1][1]:.3f}, "
        f"{rate:,.0f} tokens/s"
    )
