"""Known defects of the predecessor's integration, and the tests here that fail on them.

The predecessor is axolotl's scattermoe_lora; P are defects of PEFT's own. Numbers are those of the
list of behaviours that this package is built from: reading adapters (27), layout of the factors
(28), walking the wrappers (29), the router's LoRA (30), where the layer is hooked in (34) and how
it is registered (41); letters split an entry of several defects. Every test was
seen failing with its defect put into the source.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.static

MODELS = "test_transformers.py"
PEFT = "test_peft.py"
LORA = "test_transformers_lora.py"
FILES = "test_peft_adapter.py"

DEFECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "27a": (
        "disabled adapters act on: reference passes of DPO and GRPO see LoRA",
        (
            f"{PEFT}::test_disabled_adapters_leave_the_base_bit_for_bit",
            f"{LORA}::test_switching_off_is_the_base_bit_for_bit",
        ),
    ),
    "27b": (
        "merged adapters count twice",
        (f"{PEFT}::test_merged_adapters_count_once", f"{LORA}::test_merge_and_unmerge"),
    ),
    "27c": (
        "the first of several active adapters is taken in silence",
        (
            f"{PEFT}::test_active_adapter_is_the_one_that_is_set",
            f"{LORA}::test_several_adapters",
        ),
    ),
    "28a": (
        "A and B change roles by a rule for one version of PEFT, and nobody sees it where 2I == H",
        (
            f"{PEFT}::test_roles_of_a_and_b_follow_the_wrapper_and_not_the_shape",
            f"{FILES}::test_roles_of_a_and_b_follow_the_version_and_not_the_shape",
        ),
    ),
    "28b": (
        "B is read expert by expert, while PEFT's expert varies fastest",
        (
            f"{PEFT}::test_logits_and_gradients_are_pefts",
            f"{LORA}::test_logits_are_those_of_the_sum",
            f"{FILES}::test_our_adapter_in_peft",
        ),
    ),
    "28c": (
        "B is copied on every forward; gradients come back in another layout",
        (f"{PEFT}::test_factors_are_views_of_the_parameters", f"{LORA}::test_gradients_are_pefts"),
    ),
    "29a": (
        "an adapter of one projection is read as the other's, or not at all",
        (
            f"{PEFT}::test_one_projection",
            f"{FILES}::test_one_projection_has_no_base_layer_in_its_key",
        ),
    ),
    "29b": (
        "the order of the wrappers is taken for granted; PEFT turns it round over 4-bit experts",
        (
            f"{PEFT}::test_two_forwards_are_bit_equal_over_4_bit_experts",
            f"{FILES}::test_unfit_tensors_are_refused",
        ),
    ),
    "30": (
        "the router is bypassed: its LoRA, hooks, logits and auxiliary loss are lost",
        (
            f"{MODELS}::test_router_is_untouched",
            f"{MODELS}::test_logits_losses_and_gradients_are_eagers",
            f"{PEFT}::test_logits_and_gradients_are_pefts",
        ),
    ),
    "34a": (
        "routing, gates and layouts are written again for every model",
        (
            f"{MODELS}::test_logits_losses_and_gradients_are_eagers",
            f"{MODELS}::test_special_layouts_run_their_own_gate",
        ),
    ),
    "34b": (
        "ids of experts on other ranks reach the kernels",
        (f"{MODELS}::test_expert_parallel_sentinels_are_skipped",),
    ),
    "41a": (
        "a list of model types decides; text backbones need an entry of their own",
        (
            f"{MODELS}::test_logits_losses_and_gradients_are_eagers",
            f"{MODELS}::test_models_inside_other_modules_are_found",
            f"{MODELS}::test_model_is_loaded_with_our_experts",
        ),
    ),
    "41b": (
        "what cannot run is patched anyway, or left out in silence",
        (
            f"{MODELS}::test_models_that_cannot_run_are_refused_and_unchanged",
            f"{LORA}::test_other_implementations_do_not_drop_lora_in_silence",
            f"{PEFT}::test_wrapping_after_use_in_transformers_is_not_silent",
        ),
    ),
    "41c": (
        "one patch of a class changes every model in the process",
        (
            f"{PEFT}::test_other_models_keep_pefts_forward",
            f"{PEFT}::test_other_implementations_run_pefts_own_forward",
        ),
    ),
    "P1": (
        "PEFT 0.21.2 leaves its parametrization on 4-bit experts: every forward adds a delta",
        (f"{PEFT}::test_two_forwards_are_bit_equal_over_4_bit_experts",),
    ),
    "P2": (
        "PEFT forms W + delta for every expert on every forward",
        (f"{PEFT}::test_weights_are_never_replaced",),
    ),
    "P3": (
        "files of PEFT up to 0.19.0 load into later ones with A and B exchanged",
        (f"{FILES}::test_roles_of_a_and_b_follow_the_version_and_not_the_shape",),
    ),
}
ENTRIES = {"27", "28", "29", "30", "34", "41", "P1", "P2", "P3"}


def functions(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_has_tests_that_exist(name: str) -> None:
    behaviour, tests = DEFECTS[name]
    assert behaviour and tests
    for node in tests:
        file, function = node.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{node} does not exist"


def test_every_entry_is_covered() -> None:
    assert {name.rstrip("abc") for name in DEFECTS} == ENTRIES
