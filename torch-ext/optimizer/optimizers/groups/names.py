"""The components of parameters' names, without those that wrappers of a model add."""

from __future__ import annotations

# Components that wrappers put into names: torch.compile, activation checkpointing, FSDP1.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def components(name: str) -> list[str]:
    """The parts of a qualified name without those that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:  # DistributedDataParallel
        del parts[0]
    return parts


def has_component(name: str, key: str) -> bool:
    """Whether `key` occurs in `name` as whole components; `shared_experts.w1` has no `experts`."""
    parts, wanted = components(name), key.split(".")
    last = len(parts) - len(wanted)
    return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))
