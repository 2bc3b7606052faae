"""The optimizer's step on lists of tensors: momentum, update, AdamW."""
