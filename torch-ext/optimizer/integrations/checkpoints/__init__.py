"""Optimizer checkpoints: files, background saves, other optimizers' states."""
