"""Layers of experts: in 16 and in 4 bits."""
