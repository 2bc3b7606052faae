"""Known defects of the predecessor's kernels and autograd, and the tests here that fail on them.

The predecessor is axolotl's scattermoe_lora. Numbers are those of the list of behaviours that the
kernels are built from: routing and base operations (1 to 6), LoRA kernels (7 to 18), autograd and
modules (19 to 25); letters split an entry of several defects, "kept" marks a behaviour without one.
What shows in the layer alone stands in test_defects_layer.py.
"""

from __future__ import annotations

import pytest

from .test_defects_layer import functions

SORT = "../kernels/test_expert_sort.py"
FORWARD = "../kernels/test_grouped_lora_forward.py"
DX = "../kernels/test_grouped_lora_dx.py"
DAB = "../kernels/test_grouped_lora_dab.py"
DW = "../kernels/test_grouped_lora_dw.py"
COMBINE = "../kernels/test_combine.py"
LINEAR = "test_grouped_linear.py"
AUTOGRAD = "test_autograd.py"
ERRORS = "test_grouped_linear_errors.py"
PATHS = "test_paths.py"
PARALLEL = "test_parallel_linear.py"
GPU = "test_grouped_linear_gpu.py"
EXPERTS = "test_experts.py"

DEFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1a": (
        "compiled anew for each shape, with a wait for the device",
        (
            f"{SORT}::test_compiles_without_a_graph_break",
            f"{GPU}::test_nothing_waits_for_the_device",
        ),
    ),
    "1b": (
        "ids of sentinels lengthen the offsets in silence",
        (f"{SORT}::test_cases", f"{SORT}::test_generated_reference", f"{LINEAR}::test_routings"),
    ),
    "2a": (
        "tiles straddle experts, and experts without rows are visited",
        (f"{SORT}::test_cases", f"{SORT}::test_many_chunks_and_groups"),
    ),
    "2b": (
        "32-bit offsets into the stack and its rows",
        (
            f"{AUTOGRAD}::test_stacks_above_two_to_the_31_elements",
            f"{GPU}::test_stack_above_two_to_the_31_elements",
        ),
    ),
    "2c": (
        "masked loads without a value for masked lanes, sizes that are no multiple of a tile",
        (f"{LINEAR}::test_generated_problems", f"{PATHS}::test_triton"),
    ),
    "2d": ("no tokens", (f"{LINEAR}::test_routings", f"{COMBINE}::test_no_tokens")),
    "3": ("rows are gathered by a pass of their own", (f"{FORWARD}::test_no_gathered_copy",)),
    "4": (
        "the gradient of a frozen weight is computed in every step",
        (
            f"{AUTOGRAD}::test_a_frozen_weight_costs_no_gradient",
            f"{AUTOGRAD}::test_without_lora_no_lora_gradient_is_computed",
            f"{GPU}::test_peak_memory_of_a_step",
        ),
    ),
    "5": ("kept: one token", (f"{LINEAR}::test_routings", f"{GPU}::test_real_shapes")),
    "6": (
        "padding each expert to whole blocks waits for the device once per expert",
        (
            f"{SORT}::test_tile_rows_follow_the_mean_and_never_the_routing",
            f"{GPU}::test_nothing_waits_for_the_device",
        ),
    ),
    "7": ("kept: Y of the six shapes", (f"{PARALLEL}::test_kernel_shapes",)),
    "8": (
        "x A^T is computed again for every tile of columns",
        (f"{FORWARD}::test_low_rank_products_are_computed_once",),
    ),
    "9a": (
        "A and B are copied contiguous in every call",
        (f"{AUTOGRAD}::test_strided_operands", f"{FORWARD}::test_factors_are_read_in_place"),
    ),
    "9b": (
        "float32 LoRA over half-precision activations raises",
        (f"{LINEAR}::test_lora_dtype_differs_from_the_activations", f"{FORWARD}::test_opcheck"),
    ),
    "10": (
        "the plan is chosen by mutable globals, which the tests overwrite",
        (f"{FORWARD}::test_every_shape_has_a_tile_that_fits", f"{ERRORS}::test_explain"),
    ),
    "11a": (
        "dY B is computed again for every tile of columns",
        (f"{FORWARD}::test_low_rank_products_are_computed_once",),
    ),
    "11b": (
        "the fallback loops over experts on the host",
        (f"{GPU}::test_nothing_waits_for_the_device",),
    ),
    "12": (
        "dA and dB compute x A^T and dY B again for every block",
        (f"{FORWARD}::test_low_rank_products_are_computed_once", f"{DAB}::test_results"),
    ),
    "13": (
        "kept: exact zeros for experts without rows",
        (f"{DAB}::test_experts_without_rows_get_exact_zeros", f"{DW}::test_results"),
    ),
    "14": (
        "gradients are added by atomics in the parameter's dtype: rounded often, never the same",
        (
            f"{FORWARD}::test_no_kernel_uses_atomics",
            f"{AUTOGRAD}::test_two_runs_give_the_same_bits",
            f"{GPU}::test_two_runs_give_the_same_bits",
        ),
    ),
    "15": (
        "kept: any rank, powers of two or not",
        (
            f"{FORWARD}::test_rank_is_padded_to_a_block",
            f"{LINEAR}::test_generated_problems",
            f"{GPU}::test_any_rank",
        ),
    ),
    "16a": (
        "pruning leaves one tile of 32 x 32, or none",
        (
            f"{FORWARD}::test_every_shape_has_a_tile_that_fits",
            f"{FORWARD}::test_rows_of_64_and_more_use_wide_tiles",
        ),
    ),
    "16b": (
        "shared memory is asked of a driver: no tile without a GPU",
        (f"{FORWARD}::test_every_shape_has_a_tile_that_fits",),
    ),
    "17": (
        "tuned anew for each number of tokens, without the rank in the key",
        (f"{FORWARD}::test_what_a_tile_depends_on",),
    ),
    "18": (
        "kept: float32 sums, gradients in the parameter's dtype",
        (f"{LINEAR}::test_error_against_float64", f"{PATHS}::test_triton"),
    ),
    "19": (
        "a flat list of fifteen arguments, no registered op",
        (
            "../kernels/test_grouped_lora_linear.py::test_opcheck",
            f"{AUTOGRAD}::test_compiles_without_a_graph_break",
        ),
    ),
    "20": (
        "the weights of every layer are kept alive or copied for backward",
        (f"{AUTOGRAD}::test_what_is_saved",),
    ),
    "21a": (
        "backward overwrites the expanded result: wrong when run twice",
        (f"{AUTOGRAD}::test_backward_twice_is_right", f"{AUTOGRAD}::test_second_order_raises"),
    ),
    "21b": (
        "the expanded result is stored for the gradient of the gates",
        (f"{AUTOGRAD}::test_what_is_saved", f"{DX}::test_results"),
    ),
    "22": (
        "kept: the sum over k, in float32 and in one order",
        (f"{COMBINE}::test_sums", f"{COMBINE}::test_strides_and_repeats"),
    ),
    "23": (
        "the gradient of a bias is None and that of a trained weight is zero",
        (
            f"{DW}::test_results",
            f"{LINEAR}::test_error_against_float64",
            f"{AUTOGRAD}::test_gradcheck",
        ),
    ),
    "24": (
        "kept: no scaling, no adapter: the base",
        (f"{AUTOGRAD}::test_scaling_zero_and_no_lora_are_the_base",),
    ),
    "25a": (
        "kept: the call, its layouts and its order that need not be stable",
        (
            f"{PARALLEL}::test_kernel_shapes",
            f"{PARALLEL}::test_two_projections_as_the_predecessor_chains_them",
            f"{PARALLEL}::test_wrong_arguments",
        ),
    ),
    "25b": (
        "LoRA on one projection, with experts that have no rows",
        (f"{EXPERTS}::test_error_against_float64", f"{LINEAR}::test_routings"),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_has_tests_that_exist(name) -> None:
    behaviour, tests = DEFECTS[name]
    assert behaviour and tests
    for node in tests:
        file, function = node.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{node} does not exist"


def test_every_entry_is_covered() -> None:
    assert {int(name.rstrip("abcde")) for name in DEFECTS} == set(range(1, 26))
