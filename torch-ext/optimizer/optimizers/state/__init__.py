"""Optimizer state: where it lies, how it is made, saved and loaded."""
