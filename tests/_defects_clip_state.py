"""M19 to M25 of `test_defects.DEFECTS`: QK-clip, CPU offload and checkpoints."""

from __future__ import annotations

STATE = "optimizers/test_state.py"
CLIP = "optimizers/test_qk_clip.py"
OFFLOAD = "optimizers/test_offload.py"
OFFLOAD_GPU = "optimizers/test_offload_gpu.py"
CHECKPOINT = "integrations/test_checkpoint.py"
ASYNC = "integrations/test_async_checkpoint.py"
DCP = "integrations/test_distributed_checkpoint.py"

# name: (behaviour, tests); M23, on AdamW's caches, stands with the others.
CLIP_AND_STATE: dict[str, tuple[str, tuple[str, ...]]] = {
    "M19": (
        "a layer without logits is a KeyError",
        (f"{CLIP}::test_layers_without_logits_and_logits_without_layers",),
    ),
    "M20a": (
        "every logit is read on the host",
        (
            f"{CLIP}::test_a_clipped_step_never_waits_for_the_device",
            f"{CLIP}::test_a_captured_clip_equals_the_eager_one",
        ),
    ),
    "M20b": (
        "query heads that share a key head are clipped too much",
        (
            f"{CLIP}::test_shared_key_heads_are_exact",
            f"{CLIP}::test_clipped_logits_are_the_old_ones_times_gamma",
        ),
    ),
    "M20c": (
        "an infinite logit zeroes its head",
        (
            f"{CLIP}::test_strange_logits",
            f"{CLIP}::test_strange_logits_in_a_shared_group",
        ),
    ),
    "M21": (
        "(kept: nope rows by sqrt(gamma), rope rows by gamma, value rows not at all)",
        (
            f"{CLIP}::test_latent_attention",
            f"{CLIP}::test_strange_logits",
        ),
    ),
    "M22": (
        "(kept: local rows take the scale of their head; experts are never clipped)",
        (
            f"{CLIP}::test_rows_of_a_shard_take_the_scale_of_their_head",
            f"{CLIP}::test_experts_and_vectors_are_never_clipped",
        ),
    ),
    "M24a": (
        "state made after the registration is never offloaded",
        (f"{OFFLOAD}::test_state_made_later_is_offloaded_too",),
    ),
    "M24b": (
        "all state is moved before and after a step, and nothing else runs meanwhile",
        (
            f"{OFFLOAD}::test_batches_arrive_ahead_of_their_use_and_leave_behind_it",
            f"{OFFLOAD}::test_the_device_holds_three_batches_at_most",
            f"{OFFLOAD_GPU}::test_transfers_run_beside_the_step",
        ),
    ),
    "M24c": (
        "turned on before the first step it starts only after it",
        (
            f"{OFFLOAD}::test_it_starts_at_once_and_frees_the_device_state",
            f"{OFFLOAD_GPU}::test_device_memory_is_freed",
        ),
    ),
    "M25a": (
        "state cannot be saved or loaded while it is offloaded",
        (
            f"{OFFLOAD}::test_state_dicts_while_it_is_on",
            f"{OFFLOAD}::test_checkpoints_while_it_is_on",
        ),
    ),
    "M25b": (
        "a loaded run does not continue exactly",
        (
            f"{STATE}::test_a_loaded_run_continues_bit_for_bit",
            f"{CHECKPOINT}::test_a_resumed_run_continues_bit_for_bit",
            f"{DCP}::test_a_run_goes_on_bit_for_bit",
            f"{ASYNC}::test_later_steps_do_not_reach_the_checkpoint",
        ),
    ),
}
