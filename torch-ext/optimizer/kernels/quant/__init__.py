"""Experts in 4 bits: pack, decode, and products that decode on their way."""
