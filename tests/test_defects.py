"""Every known defect of the predecessors, and the tests that fail on it.

Numbered as in the list of behaviours that this package is built from: M1 to M28 are entries on the
Motif optimizer, N1 to N15 on nanochat's optimizer, T traps found in other packages. An entry that
several defects share is split by a letter. `Elsewhere` gives the reason why no test can show a
defect, and only the entries of `NOT_SHOWN` may have one. That the tests really fail on
such a defect is sampled by `optimizers/test_mutations.py`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from ._defects_clip_state import CLIP_AND_STATE
from .static.project import ROOT
from .static.rank_defects import RANK_DEFECTS, SHARING, TOGETHER, UNREDUCED

pytestmark = pytest.mark.static

UPDATE = "optimizers/test_update_rules.py"
STEP = "optimizers/test_step.py"
PRODUCTS = "orthogonalize/test_products.py"
NUMBERS = "optimizers/test_numbers.py"
GROUPS = "optimizers/test_groups.py"
SPLIT = "optimizers/test_param_groups.py"
BLOCKS = "optimizers/test_blocks.py"
STATE = "optimizers/test_state.py"
RANKS = "optimizers/test_muon_adamw.py"
OPTIONS = "optimizers/test_options.py"
KERNELS = "optimizers/test_step_kernels.py"
ROUNDING = "optimizers/test_rounding.py"
REPORT = "optimizers/test_report.py"
DOCS = "optimizers/test_documentation.py"
CHECKPOINT = "integrations/test_checkpoint.py"
DCP = "integrations/test_distributed_checkpoint.py"


@dataclass(frozen=True)
class Defect:
    behaviour: str
    tests: tuple[str, ...]  # "file::function" below tests/


@dataclass(frozen=True)
class Elsewhere:
    behaviour: str
    reason: str


def defect(behaviour: str, *tests: str) -> Defect:
    return Defect(behaviour, tests)


DEFECTS: dict[str, Defect | Elsewhere] = {
    "M1a": defect(
        "the documentation lists arguments that do not exist",
        f"{DOCS}::test_documented_arguments_are_the_arguments",
        f"{DOCS}::test_every_option_of_a_group_is_an_argument_of_muon",
    ),
    "M1b": defect(
        "the documentation claims an update of spectral norm lr, and 0.02 as a good default",
        f"{UPDATE}::test_update_has_the_promised_root_mean_square",
    ),
    "M2a": defect(
        "a list of tensors is an AttributeError; other iterators are consumed by the check",
        f"{GROUPS}::test_forms_of_params",
    ),
    "M2b": defect("no ranges are checked", f"{GROUPS}::test_wrong_option_of_a_muon_group"),
    "M2c": defect(
        "1-D and 3-D parameters surface only at the first step",
        f"{GROUPS}::test_wrong_parameter",
        f"{BLOCKS}::test_three_dimensions_need_a_decision",
    ),
    "M2d": defect(
        "add_param_group skips every check and falls back to use_muon=True",
        f"{GROUPS}::test_wrong_option_of_a_muon_group",
        f"{GROUPS}::test_wrong_parameter",
        f"{GROUPS}::test_wrong_group",
        f"{GROUPS}::test_later_groups_start_out_like_the_first",
    ),
    "M2e": defect(
        "a bad chunk_size surfaces at the first step",
        f"{OPTIONS}::test_the_flow_of_chunks_is_checked_at_construction",
    ),
    "M3a": defect(
        "names and parameters of different lengths are cut short in silence",
        f"{GROUPS}::test_wrong_group",
        f"{GROUPS}::test_a_group_that_changed_size_is_refused",
    ),
    "M3b": defect(
        "duplicate names collapse",
        f"{GROUPS}::test_names_and_parameters_are_unique_over_all_groups",
    ),
    "M3c": defect(
        "missing names are a KeyError at the first step",
        f"{GROUPS}::test_forms_of_params",
        f"{GROUPS}::test_wrong_group",
    ),
    "M3d": defect(
        "the list of names is copied under every parameter of a checkpoint",
        f"{GROUPS}::test_names_are_not_kept_in_the_groups",
        f"{DCP}::test_its_files_do_not_grow_with_the_square_of_the_parameters",
    ),
    "M4a": defect(
        "embed_tokens, wte, tok_embeddings and output go to Muon",
        f"{SPLIT}::test_default_is_muon",
        f"{SPLIT}::test_types_decide_before_names",
    ),
    "M4b": defect(
        "tied weights are unknown",
        f"{SPLIT}::test_a_tied_weight_is_an_embedding_under_any_name",
        f"{SPLIT}::test_a_transformer",
    ),
    "M6a": defect(
        "Nesterov writes into p.grad; without it p.grad is the momentum buffer",
        f"{STEP}::test_gradients_are_never_written",
    ),
    "M6b": defect(
        "zero_grad(set_to_none=False) zeroes the momentum",
        f"{STEP}::test_zeroing_gradients_in_place_keeps_the_momentum",
    ),
    "M6c": defect(
        "the buffer has the gradient's dtype, 8 bits of mantissa for bfloat16",
        f"{STATE}::test_state_is_made_for_all_parameters_at_once",
    ),
    "M6d": defect(
        "state is made lazily, so that keys depend on which gradients were present",
        f"{STATE}::test_state_is_made_for_all_parameters_at_once",
        f"{STATE}::test_keys_do_not_depend_on_which_gradients_were_present",
    ),
    "M6e": defect(
        "torch.tensor(momentum) at every step copies to the default device",
        f"{NUMBERS}::test_the_device_is_the_parameters",
    ),
    "M7a": defect(
        "none_grad is ignored on some paths and forced for experts",
        f"{STEP}::test_none_grad_means_the_same_on_every_path",
    ),
    "M7b": defect(
        "a gradient is freed while it is still needed (here: by a later chunk)",
        f"{BLOCKS}::test_none_grad_waits_for_the_last_piece",
    ),
    "M7c": defect(
        "a freed gradient is reused under an asynchronous push",
        f"{SHARING}::test_a_freed_gradient_may_be_reused_at_once",
    ),
    "M8a": defect(
        "replicated DTensors go to kernels as they are",
        f"{RANKS}::test_replicated_dtensors_step_as_local_tensors",
    ),
    "M8b": defect(
        "other DTensors must be routed or refused, never taken for local tensors",
        f"{TOGETHER}::test_many_ranks_equal_one",
        f"{RANKS}::test_sums_that_are_not_made_are_refused_by_name",
        f"{RANKS}::test_a_gradient_placed_otherwise_is_refused",
        f"{RANKS}::test_a_partial_gradient_is_refused_before_any_write",
    ),
    "M8c": defect(
        "autotuning picks different configurations, hence different bits",
        f"{NUMBERS}::test_runs_repeat_bit_for_bit",
        f"{BLOCKS}::test_a_bound_smaller_than_a_stack_changes_no_bit",
    ),
    "M8d": defect(
        "replicas repeat the same orthogonalization",
        f"{SHARING}::test_no_matrix_is_orthogonalized_twice",
    ),
    "M9": defect(
        "one matrix at a time",
        f"{BLOCKS}::test_same_shapes_are_orthogonalized_as_one_batch",
    ),
    "M15a": defect(
        "expert keys match substrings: shared_experts, routers",
        f"{BLOCKS}::test_expert_keys_match_whole_components_only",
        f"{BLOCKS}::test_matrices_beside_experts_are_not_cut",
    ),
    "M15b": defect(
        "one batch over all experts with full-size temporaries",
        f"{BLOCKS}::test_batches_are_bounded_and_cover_everything_once",
        f"{BLOCKS}::test_a_bound_smaller_than_a_stack_changes_no_bit",
    ),
    "M15c": defect(
        "plain batched products without a symmetric kernel",
        f"{PRODUCTS}::test_hopper_computes_every_symmetric_product_by_halves",
    ),
    "M15d": defect(
        "a key that matches nothing is ignored",
        f"{BLOCKS}::test_an_expert_key_that_names_nothing_is_refused",
    ),
    "M16a": defect(
        "views are cached by id, so that updates go to dead memory after a .data swap",
        f"{STEP}::test_a_swapped_storage_is_followed",
        f"{STEP}::test_a_replaced_parameter_gets_state",
    ),
    "M16b": defect(
        "an expert tensor without a gradient stops training",
        f"{STEP}::test_parameters_without_gradient_are_left_alone",
        f"{SHARING}::test_experts_that_are_sharded_along_themselves_stay_local",
    ),
    "M16c": defect(
        "convolutions and N-D tensors are refused",
        f"{BLOCKS}::test_convolution_filters_are_flattened",
    ),
    "M17a": defect(
        "decay and update are rounded apart: in bfloat16 the decay never changes a weight",
        f"{NUMBERS}::test_low_precision_parameters_are_rounded_once",
        f"{NUMBERS}::test_decay_of_bfloat16_parameters_survives_with_the_update",
    ),
    "M17b": defect(
        "a Tensor lr breaks, or waits for the device",
        f"{NUMBERS}::test_schedulers_and_tensor_learning_rates",
        f"{NUMBERS}::test_tensor_learning_rate_at_construction",
        f"{NUMBERS}::test_a_step_never_waits_for_the_device",
    ),
    "M17c": defect(
        "updates are grouped by the float lr of their shape: a Tensor lr breaks or waits",
        f"{NUMBERS}::test_tensor_learning_rate_with_several_shapes",
    ),
    "M17d": defect(
        "no master copy and no stochastic rounding",
        f"{ROUNDING}::test_decay_is_not_lost_over_1000_steps",
        f"{ROUNDING}::test_small_updates_are_not_lost_over_1000_steps",
        f"{ROUNDING}::test_with_its_residual_a_parameter_is_a_float32_one",
    ),
    "M18": defect(
        "one learning-rate rule only",
        f"{UPDATE}::test_learning_rate_rules",
        f"{UPDATE}::test_learning_rate_rules_of_a_wide_matrix",
    ),
    "M23": defect(
        "caches are module globals: optimizers share and clear each other's",
        f"{STATE}::test_two_optimizers_are_independent",
    ),
    "M26a": defect(
        "the norm is taken in bfloat16",
        f"{UPDATE}::test_float32_step_is_close_to_float64",
    ),
    "M26b": defect(
        "the symmetric product serves 2-D tensors only",
        "kernels/test_symmetric_matmul.py::test_a_matrix_gives_the_same_bits_in_any_batch",
    ),
    "M27a": defect("(kept: the ranges of a trace)", f"{STEP}::test_profiler_ranges"),
    "M27b": defect(
        "logs of single routes, no summary",
        f"{REPORT}::test_report_names_every_parameter_its_route_and_its_work",
        f"{REPORT}::test_report_says_who_computes_with_what_and_at_which_cost",
        f"{REPORT}::test_measured_times",
        f"{STEP}::test_debug_logs_the_report_once_per_plan",
    ),
    "M28": defect(
        'the device "cuda" is written into the code',
        f"{NUMBERS}::test_the_device_is_the_parameters",
    ),
    "N1": defect(
        "two classes whose logic drifted apart",
        f"{RANKS}::test_dist_muon_adamw_with_one_rank",
        f"{RANKS}::test_an_initialised_group_changes_nothing",
    ),
    "N2a": defect("an unknown kind is found at the step", f"{GROUPS}::test_wrong_group"),
    "N2b": defect("step() takes no closure", f"{STEP}::test_closure"),
    "N2c": defect(
        "a group of mixed shapes is a RuntimeError",
        f"{BLOCKS}::test_mixed_shapes_and_empty_parameters_in_one_group",
    ),
    "N2d": defect(
        "a missing gradient is a TypeError",
        f"{STEP}::test_parameters_without_gradient_are_left_alone",
        f"{STEP}::test_a_step_without_any_gradient_changes_nothing",
    ),
    "N2e": defect(
        "an empty Muon group is an IndexError",
        f"{GROUPS}::test_empty_groups",
        f"{RANKS}::test_dist_muon_adamw_with_one_rank",
    ),
    "N3": defect(
        "more than 8 distinct shapes fail to compile",
        f"{STEP}::test_any_number_of_shapes",
    ),
    "N4a": defect(
        "(kept: changed values take effect)",
        f"{NUMBERS}::test_options_are_read_at_every_step",
        f"{NUMBERS}::test_momentum_can_be_scheduled",
        f"{OPTIONS}::test_options_are_checked_only_when_they_change",
    ),
    "N4b": defect(
        "CPU scalars are frozen into a captured graph (here: a rate on the device is read by it)",
        f"{KERNELS}::test_a_captured_step_equals_the_eager_one",
        f"{NUMBERS}::test_a_step_never_waits_for_the_device",
    ),
    "N5a": defect(
        "state is stacked under params[0]: it depends on membership and order",
        f"{STATE}::test_state_does_not_depend_on_group_membership",
        f"{STATE}::test_shapes_of_the_second_moment",
    ),
    "N5b": defect(
        "state is lost if params[0] is replaced",
        f"{STEP}::test_a_replaced_parameter_gets_state",
    ),
    "N5c": defect(
        "moments in the parameter's dtype",
        f"{STATE}::test_state_is_made_for_all_parameters_at_once",
    ),
    "N5d": defect(
        "state depends on the number of ranks",
        f"{TOGETHER}::test_many_ranks_equal_one",
        f"{SHARING}::test_a_resumed_run_continues_bit_for_bit",
        f"{UNREDUCED}::test_a_resumed_run_continues_bit_for_bit",
    ),
    "N6": defect(
        "(kept: the gradient itself stays untouched)",
        f"{STEP}::test_gradients_are_never_written",
    ),
    "N7a": defect(
        "ns_steps above 5 equals 5, below 5 it cuts a table made for 5",
        f"{UPDATE}::test_every_step_count_is_honoured",
    ),
    "N7b": defect(
        "the norm is taken in bfloat16",
        f"{UPDATE}::test_float32_step_is_close_to_float64",
    ),
    "N7c": defect(
        "eps is fixed against the scale of the gradient",
        f"{UPDATE}::test_tiny_gradients_are_orthogonalized_too",
    ),
    "N7d": defect(
        "dense products, 1.4 to 2.4 times the operations needed",
        f"{PRODUCTS}::test_hopper_computes_every_symmetric_product_by_halves",
        f"{PRODUCTS}::test_which_products_run_by_halves",
    ),
    "N8a": defect(
        "beta2=None is instant normalization instead of none",
        f"{UPDATE}::test_beta2_none_is_off_and_not_instant_normalization",
    ),
    "N8b": defect(
        "beta2 is rounded to bfloat16",
        f"{UPDATE}::test_beta2_is_not_rounded_to_bfloat16",
    ),
    "N9a": defect(
        "lr and weight decay are rounded to bfloat16",
        f"{UPDATE}::test_learning_rate_and_decay_are_not_rounded_to_bfloat16",
    ),
    "N9b": defect(
        "compiled and eager steps may differ (here: one path)",
        f"{NUMBERS}::test_runs_repeat_bit_for_bit",
    ),
    "N10": defect(
        "the decay depends on the shape factor, without a choice",
        f"{UPDATE}::test_decay_by_raw_or_shaped_rate",
        f"{UPDATE}::test_cautious_decay_spares_weights_the_update_grows",
    ),
    "N11a": defect(
        "stacks and copies back, 3 to 4 more passes over the parameters",
        f"{KERNELS}::test_directions_are_written_to_their_places_in_the_batch",
        f"{KERNELS}::test_calls_do_not_grow_with_the_parameters",
    ),
    "N11b": defect(
        "the copies are as large as the model (here: as a batch)",
        f"{BLOCKS}::test_batches_are_bounded_and_cover_everything_once",
    ),
    "N15": Elsewhere(
        "(to keep: one static buffer serves the reduce and the gather)",
        "messages of bounded size come from torch's caching allocator; a static arena comes with "
        "a transport that needs one",
    ),
    "T1": defect(
        "torch.optim.Muon, bfloat16, nesterov=False: the division overwrites the momentum",
        f"{UPDATE}::test_bfloat16_without_nesterov_keeps_its_momentum",
    ),
    "T2": defect(
        "gram-newton-schulz divides the caller's float32 tensor in place (here: the buffer)",
        f"{UPDATE}::test_bfloat16_without_nesterov_keeps_its_momentum",
        f"{STEP}::test_gradients_are_never_written",
    ),
    "T3": defect(
        "learning-rate modes of different packages are compared unaligned",
        f"{UPDATE}::test_muon_equals_torchs_where_they_are_comparable",
    ),
    "T4": defect(
        "dion's NorMuon normalizes per shard",
        f"{TOGETHER}::test_many_ranks_equal_one",
    ),
}
DEFECTS |= {name: Defect(*entry) for name, entry in CLIP_AND_STATE.items()}
DEFECTS |= {name: defect(what, *tests) for name, (what, tests) in RANK_DEFECTS.items()}
ENTRIES = (
    *(f"M{number}" for number in (*range(1, 5), *range(6, 29))),
    *(f"N{number}" for number in range(1, 15)),
)  # M5 describes a behaviour without a defect
# The whole list of what no test here shows. A new entry is a decision, not an excuse.
NOT_SHOWN = frozenset({"N15"})


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_has_tests_that_exist(name) -> None:
    entry = DEFECTS[name]
    assert entry.behaviour
    if isinstance(entry, Elsewhere):
        assert entry.reason
        return
    assert entry.tests
    for node in entry.tests:
        file, function = node.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{node} does not exist"


def test_only_the_listed_entries_have_a_reason_instead_of_tests() -> None:
    excused = {name: entry for name, entry in DEFECTS.items() if isinstance(entry, Elsewhere)}
    assert excused.keys() == NOT_SHOWN


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_test(entry) -> None:
    parts = [DEFECTS[name] for name in DEFECTS if name.rstrip("abcde") == entry]
    assert any(isinstance(part, Defect) for part in parts)
