"""Adapters to other libraries, which are imported only when a function here is called."""

from . import checkpoint
from .adapters.adapter_file import load_peft_adapter, save_peft_adapter
from .adapters.lora import (
    attach_lora,
    detach_lora,
    disable_lora,
    enable_lora,
    lora_disabled,
    merge_lora,
    set_lora,
    unmerge_lora,
)
from .models.quantize_in_memory import quantize_experts
from .models.quantized_loading import load_quantized
from .models.transformers import use_in_transformers

__all__ = [
    "attach_lora",
    "checkpoint",
    "detach_lora",
    "disable_lora",
    "enable_lora",
    "load_peft_adapter",
    "load_quantized",
    "lora_disabled",
    "merge_lora",
    "quantize_experts",
    "save_peft_adapter",
    "set_lora",
    "unmerge_lora",
    "use_in_transformers",
]
