"""`Muon`: the step with groups marked `use_muon` and the defaults of Moonlight's Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .groups.default_groups import default_is_muon, get_default_muon_param_groups
from .groups.options import POLAR_EXPRESS, LrRule, MuonOptions, option_names
from .groups.param_groups import Format, refuses_foreign_arguments
from .sharded.buffers import DistributedConfig, config_of
from .sharded.shared_plan import Ranks
from .step import MuonBase

__all__ = ["Muon", "MuonFactory", "default_is_muon", "get_default_muon_param_groups"]

_OF_ADAMW = ("adamw_lr", "adamw_betas", "adamw_eps")


class Muon(MuonBase):
    """Muon for hidden matrices and AdamW for everything else, in groups marked `use_muon`.

    A matrix moves along its orthogonalized momentum by lr 0.2 sqrt(max(rows, columns)), so that its
    update has the root mean square 0.2 lr that AdamW's typically has: learning rates and decays
    tuned for AdamW carry over; 0.01 and more are logged as too large. Decoupled weight decay
    shrinks it by lr weight_decay. AdamW groups share lr, weight_decay and none_grad unless they
    override them. A group's options are read at every step.

    Args:
        params: groups `{"params", "names" (optional), "use_muon": bool, **options}`, as from
            `get_default_muon_param_groups(model)`; or any iterable of parameters or of (name,
            parameter) pairs. What has no mark is told apart by `default_is_muon`, or without names
            by shape alone, which is logged; fused projections are split as far as names and shapes
            tell. Pairs leave `param_names` in the groups and their state, as in torch; `names` are
            not saved. Keys that are no options are kept and saved. Every
            argument below but `adamw_lr`, `debug`, `clip_config`, `process_group`, `distributed`
            and the last four is an option of Muon groups; AdamW groups take lr, adamw_betas,
            adamw_eps, weight_decay, rounding, rounding_seed and none_grad.
        lr: learning rate; a number or a 0-D Tensor, which is never read on the host by a step.
        weight_decay: decoupled decay, times the raw lr; a number or a 0-D Tensor, as lr.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: orthogonalize g + momentum * buffer instead of the buffer.
        ns_steps: steps of the iteration, 1 to 100.
        ns_coefficients: "polar_express", derived for ns_steps; or, for method "auto" and
            "newton_schulz" alone, a name in `COEFFICIENT_SETS`, (a, b, c) for all steps as in
            torch, or one (a, b, c) per step.
        eps: taken as torch takes it, and kept. Nothing is added to a norm here: every matrix is
            divided by its own, and a matrix of zeros gives zeros.
        adjust_lr_fn: "match_rms_adamw"; "original", lr sqrt(max(1, rows / columns)), which None
            means too, as in torch; "spectral", lr sqrt(rows / columns); "none", lr; or a callable
            (lr, rows, columns) -> lr, which is not saved in a state_dict.
        adamw_lr: lr of AdamW groups that have none of their own; None for `lr`.
        adamw_betas, adamw_eps: of AdamW groups.
        expert_keys: name components such as "experts" of 3-D parameters (experts, out, in), of
            which every expert is a matrix of its own. Needs names; what no name has is logged.
            "experts" does not match "shared_experts".
        clip_config: QK-clip of the attention layers in the Muon groups, which needs names; None for
            none. A dict with q_indices and k_indices (the query head and the key head of every
            entry of a layer's `qk_logits`), head_dim (128) and threshold (100.0); for MLA is_mla,
            qk_nope_head_dim, qk_rope_head_dim and v_head_dim. See `ClipConfig`.
        none_grad: set `p.grad = None` at the end of a step; False leaves it bit for bit.
        debug: log `report()` at INFO whenever the work is planned.
        process_group: the ranks that hold the same plain parameters and, after
            DistributedDataParallel has reduced them, the same gradients. Each orthogonalizes its
            part of the matrices for all. None: this process does all of them. DTensors bring their
            own mesh.
        distributed: how ranks exchange what they share; see `DistributedConfig`.
        method: "auto", "polar_express", "gram_newton_schulz", "gram_polynomial" (for ns_steps=5,
            not in bfloat16) or "newton_schulz" (Keller Jordan's coefficients, unless
            ns_coefficients has others).
        dtype: dtype of the iteration; None picks float16 on GPUs that have it, else float32.
        split_sizes: row counts of the parts of fused parameters (Q, K, V; gate, up), each
            orthogonalized on its own; or a dict from names to them.
        num_heads: the rows are cut into so many equal blocks, each orthogonalized on its own; or a
            dict from names to numbers.
        transposed: matrices are (in, out), as of transformers' Conv1D (GPT-2): adjust_lr_fn, beta2,
            row_equilibration, split_sizes and num_heads take their columns for rows.
        flatten: take 3-D parameters that are no experts as matrices (out, rest). Parameters with 4
            and more dimensions, such as convolution filters, always are.
        cautious: decay only weights whose update does not push them away from zero.
        beta2: decay of the row- or column-wise second moment that evens out the update (NorMuon,
            arXiv 2510.05491); None for none.
        row_equilibration: give every row of a direction the norm 1 before the iteration (MuonEq,
            arXiv 2603.28254).
        renormalize: give every update the Frobenius norm sqrt(min(m, n)) of a semi-orthogonal
            matrix, before variance reduction (Muon+, arXiv 2602.21545).
        momentum_form: "heavy_ball", buf <- momentum buf + g, or "ema", the moving average. They
            differ by a factor, which orthogonalization removes.
        momentum_dtype: dtype of the buffer; None for float32 (float64 for float64 parameters).
        shaped_decay: decay by the rate after adjust_lr_fn instead of the raw lr.
        rounding: how bfloat16 and float16 parameters take a step, which is computed in float32.
            "nearest" loses what is below half a unit in the last place. "stochastic" rounds up or
            down at random, so that nothing is lost on average. "residual" keeps what rounding drops
            in 16 bits per element: a bfloat16 run has the parameters of a float32 one, rounded.
        rounding_seed: of "stochastic", in [0, 2^64). The bits depend on it, on the number of the
            step, of the parameter in the optimizer and of the element, and on nothing else.
        warmup_step, chunk_size: `prefetch` and `chunk_size` of `distributed`, as Motif's optimizer
            names them; None for the defaults. Refused beside `distributed`.
        use_distributed_muon: Motif's; False is taken, True refused.

    Raises:
        ValueError, TypeError: an option, a parameter or a name is invalid; the message names it.

    Sources: Keller Jordan's Muon, arXiv 2502.16982 (scale), arXiv 2505.16932 (Polar Express).
    """

    format = Format("use_muon", {"betas": "adamw_betas", "eps": "adamw_eps"}, shares_lr=True)

    @refuses_foreign_arguments
    def __init__(  # noqa: PLR0913 - one keyword per group option
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float | Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = POLAR_EXPRESS,
        eps: float = 1e-7,
        adjust_lr_fn: str | LrRule | None = "match_rms_adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        expert_keys: Sequence[str] | None = None,
        clip_config: dict[str, Any] | None = None,
        none_grad: bool = False,
        debug: bool = False,
        process_group: Any = None,
        distributed: DistributedConfig | None = None,
        method: str = "auto",
        dtype: torch.dtype | None = None,
        split_sizes: Sequence[int] | dict[str, Sequence[int]] | None = None,
        num_heads: int | dict[str, int] | None = None,
        transposed: bool = False,
        flatten: bool = False,
        cautious: bool = False,
        beta2: float | None = None,
        row_equilibration: bool = False,
        renormalize: bool = False,
        momentum_form: str = "heavy_ball",
        momentum_dtype: torch.dtype | None = None,
        shaped_decay: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        warmup_step: int | None = None,
        chunk_size: int | None = None,
        use_distributed_muon: bool = False,
    ) -> None:
        given = locals()
        defaults = {option: given[option] for option in (*option_names(MuonOptions), *_OF_ADAMW)}
        if use_distributed_muon:
            raise ValueError(
                "use_distributed_muon=True is Motif's, for tests; leave it out: ranks share the "
                "work of DTensors and of a process_group without it"
            )
        config = config_of(distributed, warmup_step=warmup_step, chunk_size=chunk_size)
        super().__init__(
            _as_groups(params),
            defaults,
            debug=debug,
            clip_config=clip_config,
            ranks=Ranks(process_group, config),
        )


class MuonFactory:
    """What transformers' Trainer, and trainers of TRL, call with the model to make its optimizer.

    `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 2e-3}))`. Given `Muon` itself, it
    passes groups without names, in which an embedding or a head looks like any matrix.
    """

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        is_muon_func: Callable[[str, Tensor], bool] = default_is_muon,
        no_decay: bool = True,
        split_fused: bool = True,
        **options: Any,
    ) -> Muon:
        """A `Muon` of `get_default_muon_param_groups(model, ...)`.

        Args:
            model: the model.
            is_muon_func: as for `get_default_muon_param_groups`.
            no_decay: as there.
            split_fused: as there.
            options: arguments of `Muon`.
        """
        groups = get_default_muon_param_groups(
            model, is_muon_func, no_decay=no_decay, split_fused=split_fused
        )
        return Muon([group for group in groups if group["params"]], **options)


def _as_groups(params: Any) -> list[Any]:
    """The entries, which torch takes for one group without a mark if they are no groups."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one Tensor")
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must be ordered; a set has no fixed order between runs")
    return list(params)
