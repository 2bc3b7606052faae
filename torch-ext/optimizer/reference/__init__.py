"""What "correct" means: plain PyTorch, about 20 lines per topic; imports nothing of the package."""
