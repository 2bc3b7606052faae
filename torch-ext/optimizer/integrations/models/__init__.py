"""Models of transformers: their experts, found, replaced, quantised, loaded and saved."""
