"""LoRA adapters of experts: attach, merge, PEFT's files."""
