"""A layer of experts: sort, grouped products with LoRA, activation, combine."""
