"""Known defects of the predecessor's layer, and the tests here that fail on them.

The predecessor is axolotl's scattermoe_lora. Numbers are those of the list of behaviours that this
layer is built from: modules (26), routers (31, 32), shared experts (33), the gated MLP (34) and the
selection of LoRA (39); letters split an entry of several defects. What shows in the kernels alone
stands in test_defects.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LORA = "test_lora.py"
ROUTERS = "test_routers.py"
EXPERTS = "test_experts.py"
AUTOGRAD = "test_experts_autograd.py"
BLOCK = "test_block.py"
LAYERS = "test_layers.py"

DEFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "26a": (
        "LoRA held as plain attributes is in no state dict",
        (
            f"{AUTOGRAD}::test_state_dict_names_and_round_trip",
            f"{LORA}::test_one_adapter_of_several_is_in_use",
            f"{BLOCK}::test_state_dict_round_trip",
        ),
    ),
    "26b": (
        "LoRA held as plain attributes stays behind when the module moves or is copied",
        (
            f"{AUTOGRAD}::test_moving_to_a_dtype_moves_lora_too",
            f"{AUTOGRAD}::test_deepcopy_shares_nothing",
        ),
    ),
    "26c": (
        "set_lora and clear_lora forget the adapter: no second one, no reference pass",
        (
            f"{LORA}::test_off_equals_a_layer_that_never_had_lora",
            f"{LORA}::test_switching_between_adapters",
            f"{LORA}::test_disabled_is_restored_after_an_error",
        ),
    ),
    "31a": (
        "softmax routing has no groups, although a model that needs them is listed",
        (f"{ROUTERS}::test_groups_restrict_softmax_too", f"{ROUTERS}::test_group_top_k"),
    ),
    "31b": (
        "softmax in the dtype of the logits",
        (f"{ROUTERS}::test_softmax_top_k", f"{ROUTERS}::test_scores_are_float32"),
    ),
    "32a": (
        "sigmoid routing is guessed from the presence of a correction",
        (f"{ROUTERS}::test_the_rule_is_named_and_never_guessed",),
    ),
    "32b": (
        "corrected scores leak into the weights or their gradient",
        (
            f"{ROUTERS}::test_correction_chooses_but_does_not_weight",
            f"{ROUTERS}::test_gradients",
        ),
    ),
    "32c": (
        "renormalization divides by zero",
        (f"{ROUTERS}::test_renormalization_stays_finite_where_sigmoids_underflow",),
    ),
    "33": (
        "shared experts or the router are bypassed with what is wrapped around them",
        (
            f"{BLOCK}::test_lora_around_the_other_linears_acts_and_learns",
            f"{BLOCK}::test_hooks_see_the_router_logits",
            f"{BLOCK}::test_block_equals_its_definition",
        ),
    ),
    "34a": (
        "routing is written again for every model",
        (
            f"{LAYERS}::test_forward_equals_the_eager_one",
            f"{LAYERS}::test_layout_is_read_off_the_attributes",
        ),
    ),
    "34b": (
        "the input must be contiguous",
        (f"{EXPERTS}::test_leading_shapes_and_strides",),
    ),
    "34c": (
        "LoRA must be on both projections",
        (f"{EXPERTS}::test_error_against_float64", f"{LORA}::test_switching_between_adapters"),
    ),
    "34d": (
        "a frozen stack is copied, or gets a gradient as large as itself, in every step",
        (
            f"{EXPERTS}::test_frozen_base_gets_no_gradient_and_lora_does",
            f"{AUTOGRAD}::test_nothing_expanded_or_copied_is_kept_for_backward",
            "test_experts_gpu.py::test_a_step_allocates_a_fraction_of_the_weights",
        ),
    ),
    "34e": (
        "backward overwrites what forward saved: a second backward is wrong",
        (f"{AUTOGRAD}::test_backward_twice_over_one_graph",),
    ),
    "39a": (
        "selecting LoRA by advanced indexing sorts in backward",
        (f"{LORA}::test_selective_gradient_needs_no_sort",),
    ),
    "39b": (
        "an empty batch selects no expert and divides by zero",
        (f"{LORA}::test_selective_of_no_expert", f"{EXPERTS}::test_routings"),
    ),
}
ENTRIES = ("26", "31", "32", "33", "34", "39")


def functions(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_has_tests_that_exist(name) -> None:
    behaviour, tests = DEFECTS[name]
    assert behaviour and tests
    for node in tests:
        file, function = node.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{node} does not exist"


def test_every_entry_is_covered() -> None:
    assert {name.rstrip("abcde") for name in DEFECTS} == set(ENTRIES)
