"""`Muon`: the step with groups marked `use_muon` and the defaults of Moonlight's Muon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .groups.options import LrRule
from .groups.param_groups import Format, default_is_muon, get_default_muon_param_groups
from .sharded.buffers import DistributedConfig, config_of
from .sharded.shared_plan import Ranks
from .step import MuonBase

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]


class Muon(MuonBase):
    """Muon for hidden matrices and AdamW for everything else, in groups marked `use_muon`.

    A matrix moves along its orthogonalized momentum by lr 0.2 sqrt(max(rows, columns)), so that its
    update has the root mean square 0.2 lr that AdamW's typically has: learning rates and decays
    tuned for AdamW carry over. Decoupled weight decay shrinks it by lr weight_decay. AdamW groups
    share lr, weight_decay and none_grad unless they override them. A group's options are read at
    every step.

    Args:
        params: groups `{"params", "names" (optional), "use_muon": bool, **options}`, as from
            `get_default_muon_param_groups(model)`; or any iterable of parameters or of (name,
            parameter) pairs, which become one Muon group. Every argument below but `debug`,
            `clip_config` and those from `process_group` on is an option of Muon groups; AdamW
            groups take lr, adamw_betas, adamw_eps, weight_decay, rounding, rounding_seed and
            none_grad.
        lr: learning rate; a number or a 0-D Tensor, which is never read on the host by a step.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: orthogonalize g + momentum * buffer instead of the buffer.
        ns_steps: steps of the iteration, 1 to 100; its coefficients are derived for this count.
        weight_decay: decoupled decay, times the raw lr; a number or a 0-D Tensor, as lr.
        adamw_betas, adamw_eps: of AdamW groups.
        none_grad: set `p.grad = None` as soon as it was used; False leaves it bit for bit.
        debug: log `report()` at INFO whenever the work is planned.
        clip_config: QK-clip of the attention layers in the Muon groups, which needs names; None for
            none. A dict with q_indices and k_indices (the query head and the key head of every
            entry of a layer's `qk_logits`), head_dim (128) and threshold (100.0); for MLA is_mla,
            qk_nope_head_dim, qk_rope_head_dim and v_head_dim. See `ClipConfig`.
        expert_keys: name components such as "experts" of 3-D parameters (experts, out, in), of
            which every expert is a matrix of its own. Needs names, and each must occur in the
            group. "experts" does not match "shared_experts".
        adjust_lr_fn: "match_rms_adamw"; "original", lr sqrt(max(1, rows / columns)); "spectral",
            lr sqrt(rows / columns); None, lr; or a callable (lr, rows, columns) -> lr, which is not
            saved in a state_dict.
        method: "auto", "polar_express", "gram_newton_schulz", "gram_polynomial" (for ns_steps=5,
            not in bfloat16) or "newton_schulz".
        dtype: dtype of the iteration; None picks float16 on GPUs that have it, else float32.
        split_sizes: row counts of the parts of fused parameters (Q, K, V; gate, up), each
            orthogonalized on its own; or a dict from names to them.
        num_heads: the rows are cut into so many equal blocks, each orthogonalized on its own; or a
            dict from names to numbers.
        flatten: take 3-D parameters that are no experts as matrices (out, rest). Parameters with 4
            and more dimensions, such as convolution filters, always are.
        cautious: decay only weights whose update does not push them away from zero.
        beta2: decay of the row- or column-wise second moment that evens out the update (NorMuon,
            arXiv 2510.05491); None for none.
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
        process_group: the ranks that hold the same plain parameters and, after
            DistributedDataParallel has reduced them, the same gradients. Each orthogonalizes its
            part of the matrices for all. None: this process does all of them. DTensors bring their
            own mesh.
        distributed: how ranks exchange what they share; see `DistributedConfig`.
        warmup_step, chunk_size: `prefetch` and `chunk_size` of `distributed`, as Motif's optimizer
            names them; None for the defaults. Refused beside `distributed`.
        removed: keywords that are fields of `DistributedConfig` now; refused.

    Raises:
        ValueError, TypeError: an option, a parameter or a name is invalid; the message names it.

    Sources: Keller Jordan's Muon, arXiv 2502.16982 (scale), arXiv 2505.16932 (Polar Express).
    """

    format = Format("use_muon", {"betas": "adamw_betas", "eps": "adamw_eps"})

    def __init__(  # noqa: PLR0913 - one keyword per group option, in the order of its predecessor
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float | Tensor = 0.1,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,
        clip_config: dict[str, Any] | None = None,
        expert_keys: Sequence[str] | None = None,
        *,
        adjust_lr_fn: str | LrRule | None = "match_rms_adamw",
        method: str = "auto",
        dtype: torch.dtype | None = None,
        split_sizes: Sequence[int] | dict[str, Sequence[int]] | None = None,
        num_heads: int | dict[str, int] | None = None,
        flatten: bool = False,
        cautious: bool = False,
        beta2: float | None = None,
        momentum_form: str = "heavy_ball",
        momentum_dtype: torch.dtype | None = None,
        shaped_decay: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        process_group: Any = None,
        distributed: DistributedConfig | None = None,
        warmup_step: int | None = None,
        chunk_size: int | None = None,
        **removed: Any,
    ) -> None:
        config = config_of(distributed, removed, warmup_step=warmup_step, chunk_size=chunk_size)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "none_grad": none_grad,
            "expert_keys": expert_keys,
            "adjust_lr_fn": adjust_lr_fn,
            "method": method,
            "dtype": dtype,
            "split_sizes": split_sizes,
            "num_heads": num_heads,
            "flatten": flatten,
            "cautious": cautious,
            "beta2": beta2,
            "momentum_form": momentum_form,
            "momentum_dtype": momentum_dtype,
            "shaped_decay": shaped_decay,
            "rounding": rounding,
            "rounding_seed": rounding_seed,
        }
        super().__init__(
            _as_groups(params),
            defaults,
            debug=debug,
            clip_config=clip_config,
            ranks=Ranks(process_group, config),
        )


def _as_groups(params: Any) -> list[Any]:
    """Groups as they are; anything else that can be iterated becomes one Muon group."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one Tensor")
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must be ordered; a set has no fixed order between runs")
    entries = list(params)
    if entries and not isinstance(entries[0], dict):
        return [{"params": entries, "use_muon": True}]
    return entries
