"""What decides the numbers of one training run, and the sizes the demo offers."""

from __future__ import annotations

from dataclasses import dataclass

from demo.model import ModelConfig

ADAMW = "AdamW"  # torch.optim.AdamW
MUON = "MuonAdamW"  # ours: Muon for the hidden matrices, AdamW for everything else
OPTIMIZERS = (ADAMW, MUON)


class DemoError(Exception):
    """Something the person at the terminal can put right; printed without a traceback."""


@dataclass(frozen=True)
class RunConfig:
    """Everything but the text and the machine that decides the numbers of one run.

    Args:
        optimizer: `ADAMW` or `MUON`.
        lr: Peak learning rate, of all parameters.
        model: Size of the model.
        batch: Sequences per step.
        steps: Length of the run; warm-up and cosine are fractions of it.
        eval_sequences: Held-out sequences per evaluation, the same ones every time.
        autocast: Multiply in bfloat16 (parameters and optimizer state stay float32).
        seed: Of the initial weights and of the batches.
        weight_decay: Decoupled, of all parameters.
        clip: Largest norm of the whole gradient.
    """

    optimizer: str
    lr: float
    model: ModelConfig
    batch: int
    steps: int
    eval_sequences: int
    autocast: bool
    seed: int
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up: a tenth of the run."""
        return max(1, self.steps // 10)

    @property
    def eval_every(self) -> int:
        """Steps between evaluations: 2.5% of the run, the resolution of "steps to a loss"."""
        return max(1, self.steps // 40)


@dataclass(frozen=True)
class Preset:
    """A size of the experiment and the learning rates it takes unless others are given.

    Args:
        model: Size of the model.
        batch: Sequences per step.
        steps: Steps per run.
        eval_sequences: Held-out sequences per evaluation.
        max_bytes: Train text to read at most.
        autocast: Whether CUDA devices that have bfloat16 use it.
        lr: Learning rate of each optimizer.
        swept: Whether `lr` is what a sweep of this size found best (docs/benchmarks/demo-sweep.md).
            If not, the rates train well, but another one may be better for either optimizer.
    """

    model: ModelConfig
    batch: int
    steps: int
    eval_sequences: int
    max_bytes: int
    autocast: bool
    lr: dict[str, float]
    swept: bool


PRESETS = {
    # For tests: seconds on one core.
    "tiny": Preset(
        model=ModelConfig(layers=2, channels=32, heads=2, context=32),
        batch=8,
        steps=60,
        eval_sequences=16,
        max_bytes=1 << 20,
        autocast=False,
        lr={ADAMW: 1.6e-2, MUON: 3.2e-2},
        swept=False,
    ),
    # For two CPU cores: about a minute per run.
    "cpu": Preset(
        model=ModelConfig(layers=4, channels=128, heads=4, context=128),
        batch=32,
        steps=320,
        eval_sequences=64,
        max_bytes=8 << 20,
        autocast=False,
        lr={ADAMW: 4e-3, MUON: 1.1e-2},
        swept=True,
    ),
    # For a GPU: 12 times the parameters, 4 times the tokens per step.
    "gpu": Preset(
        model=ModelConfig(layers=6, channels=384, heads=6, context=256),
        batch=64,
        steps=600,
        eval_sequences=128,
        max_bytes=16 << 20,
        autocast=True,
        lr={ADAMW: 2e-3, MUON: 4e-3},
        swept=False,
    ),
}
