"""Layers whose experts are stored in 4 bits."""
