"""The stages of a step that compute: momentum, update, AdamW, QK-clip."""
