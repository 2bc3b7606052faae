"""The plots of the examples: losses over steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def curves(path: Path, ylabel: str) -> Iterator[Any]:
    """Axes to draw on, which become an image."""
    import matplotlib

    matplotlib.use("Agg")  # a terminal has no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    yield axes
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
