"""Entries of `test_defects` that show only with several ranks: behaviour, and the tests."""

from __future__ import annotations

TOGETHER = "distributed/test_shared_step.py"
SHARING = "distributed/test_sharing.py"
WIRE = "distributed/test_wire.py"
OWNERSHIP = "distributed/test_ownership.py"
SCHEDULE = "distributed/test_schedule.py"
UNREDUCED = "distributed/test_unreduced.py"
WRAPPERS = "distributed/test_wrappers.py"

RANK_DEFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "M10": (
        "the path to compare with runs on CUDA only (here: one rank, on any device)",
        (
            f"{TOGETHER}::test_many_ranks_equal_one",
            f"{WRAPPERS}::test_wrapped_models_step_as_on_one_rank",
        ),
    ),
    "M11a": (
        "the owner is a global rank modulo the group's size: a strided group uses half its ranks",
        (f"{SHARING}::test_every_rank_of_a_strided_group_owns_something",),
    ),
    "M11b": (
        "owners in turn, not by what is left to do",
        (
            f"{OWNERSHIP}::test_longest_first_beats_turns",
            f"{OWNERSHIP}::test_balance_is_within_grahams_bound",
        ),
    ),
    "M11c": (
        "plans are cached by names, so that other shapes or meshes reuse wrong indices",
        (
            f"{TOGETHER}::test_many_ranks_equal_one",
            f"{SHARING}::test_a_parameter_that_is_sharded_anew_gets_a_new_plan",
        ),
    ),
    "M11d": (
        "ranks with different gradients make different plans and hang",
        (
            f"{SHARING}::test_differing_gradients_are_an_error_on_every_rank",
            f"{UNREDUCED}::test_differing_gradients_are_an_error",
        ),
    ),
    "M12": (
        "a chunk is a number of matrices, whatever their size",
        (
            f"{OWNERSHIP}::test_chunks_are_bounded_complete_and_mixed",
            f"{SHARING}::test_chunks_are_bounded_and_change_no_bit",
        ),
    ),
    "M13": (
        "directions are rounded to bfloat16 on the way to their owner",
        (
            f"{TOGETHER}::test_many_ranks_equal_one",
            f"{WIRE}::test_the_wire_keeps_eleven_bits_of_tiny_gradients",
        ),
    ),
    "M14": (
        "only the first gather runs under other work, and the pipeline drains between groups",
        (
            f"{SCHEDULE}::test_every_transfer_has_a_computation_to_hide_under",
            f"{SCHEDULE}::test_phases_are_in_order_and_few_chunks_are_alive",
        ),
    ),
    "N12": (
        "(kept: reduce, compute and gather of different groups run at once)",
        (
            f"{SCHEDULE}::test_every_transfer_has_a_computation_to_hide_under",
            f"{UNREDUCED}::test_unreduced_equals_one_rank",
        ),
    ),
    "N13a": (
        "rows that the number of ranks does not divide are dropped, then fail in NCCL",
        (f"{UNREDUCED}::test_unreduced_equals_one_rank",),
    ),
    "N13b": (
        "small gradients are reduced one by one, into p.grad",
        (
            f"{UNREDUCED}::test_small_parameters_share_one_all_reduce",
            f"{UNREDUCED}::test_unreduced_equals_one_rank",
        ),
    ),
    "N14a": (
        "fewer matrices than ranks leave ranks idle, and padding travels both ways",
        (
            f"{UNREDUCED}::test_small_parameters_share_one_all_reduce",
            f"{OWNERSHIP}::test_equal_work_goes_to_all_ranks_equally",
        ),
    ),
    "N14b": (
        "gradients that DDP reduced are averaged again",
        (f"{UNREDUCED}::test_gradients_that_ddp_reduced_are_noticed",),
    ),
}
