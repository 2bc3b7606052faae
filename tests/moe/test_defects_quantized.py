"""Known defects of the predecessor over 4-bit experts, and the tests here that fail on them.

The predecessor is axolotl's scattermoe_lora. Numbers are those of the list of behaviours that this
package is built from: the active set (35), decoding (36), bitsandbytes' formats (37), access to the
weights (38), how much is decoded (40) and where such experts are placed (42); letters split an
entry of several defects.
"""

from __future__ import annotations

import pytest

from .test_defects_layer import functions

DECODE = "../kernels/test_nf4_dequant.py"
DECODE_GPU = "../kernels/test_nf4_dequant_gpu.py"
WEIGHTS = "test_expert_weights.py"
LINEAR = "test_quantized_linear.py"
LOADING = "../integrations/test_quantized_loading.py"
LORA = "../integrations/test_quantize_experts.py"

DEFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "35a": (
        "which experts are active is found by a wait for the device",
        (
            f"{WEIGHTS}::test_active_experts_do_not_wait_for_the_device",
            f"{LINEAR}::test_no_strategy_waits_for_the_device",
        ),
    ),
    "35b": (
        "inactive experts are remapped to whatever lay in memory",
        (f"{WEIGHTS}::test_active_experts",),
    ),
    "35c": (
        "an empty batch has no experts and divides by zero",
        (f"{WEIGHTS}::test_active_experts_of_an_empty_batch",),
    ),
    "36a": (
        "32-bit offsets into the decoded experts and into the stack",
        (
            f"{DECODE}::test_stack_beyond_two_to_the_31_elements",
            f"{DECODE_GPU}::test_output_beyond_two_to_the_31_elements",
            f"{DECODE_GPU}::test_stack_beyond_two_to_the_31_elements_is_read",
        ),
    ),
    "36b": (
        "values that are close to bitsandbytes' and not the same",
        (f"{DECODE}::test_same_bits_as_bitsandbytes", f"{DECODE}::test_decodes"),
    ),
    "37a": (
        "blocks that straddle experts, and odd experts, are decoded wrongly in silence",
        (
            f"{DECODE}::test_any_shape",
            f"{WEIGHTS}::test_straddling_blocks_and_odd_experts",
        ),
    ),
    "37b": (
        "nested absmax is decoded for every expert on each call",
        (
            f"{DECODE}::test_nested_absmax_is_rounded_twice",
            f"{LINEAR}::test_no_slice_decodes_more_than_its_bound",
        ),
    ),
    "37c": (
        "FP4 and other storage dtypes take another, slower way",
        (
            f"{DECODE}::test_storage_dtype_and_shape_of_packed_do_not_matter",
            f"{WEIGHTS}::test_real_bitsandbytes_experts",
        ),
    ),
    "38a": (
        "the shape of a projection is guessed from the hidden size",
        (f"{WEIGHTS}::test_shape_comes_from_the_caller_where_the_state_has_none",),
    ),
    "38b": (
        "the number of experts is guessed from the highest active one",
        (
            f"{WEIGHTS}::test_selective_weights_dense_and_packed",
            f"{WEIGHTS}::test_active_experts",
        ),
    ),
    "38c": (
        "formats that nobody knows are returned whole",
        (f"{WEIGHTS}::test_unknown_formats_are_refused",),
    ),
    "40a": (
        "nothing ever turns it on",
        (
            f"{LINEAR}::test_choice_is_a_pure_function_of_rows_per_expert",
            f"{LINEAR}::test_bits_of_the_decoded_weight",
            f"{LORA}::test_lora_over_4_bits_is_lora_over_the_rounded_experts",
        ),
    ),
    "40b": (
        "at training lengths the whole stack is decoded",
        (
            f"{LINEAR}::test_no_slice_decodes_more_than_its_bound",
            f"{LINEAR}::test_only_packed_bytes_are_kept_for_backward",
        ),
    ),
    "42a": (
        "automatic placement sizes the experts by their 16 bits and moves some to the CPU",
        (f"{LOADING}::test_placement",),
    ),
    "42b": (
        "the 16-bit stacks exist while the model is loaded",
        (f"{LOADING}::test_host_peak_is_two_experts",),
    ),
}
ENTRIES = ("35", "36", "37", "38", "40", "42")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_has_tests_that_exist(name: str) -> None:
    behaviour, tests = DEFECTS[name]
    assert behaviour and tests
    for node in tests:
        file, function = node.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{node} does not exist"


def test_every_entry_is_covered() -> None:
    assert {name.rstrip("abc") for name in DEFECTS} == set(ENTRIES)
