"""matmul_add: which operands TMA takes, and the op beside its tiles (test_sm90_gpu.py)."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ..conftest import module_fixture
from ._products import TILES, Dense, exact_dense, laid_out, run_dense

HALF = torch.float16


module = module_fixture("kernels.products.matmul_add")


def test_the_tiles_have_their_numbers(module):
    assert ("auto", *module.TILES) == TILES


def test_half_precision_is_served_where_the_kernel_is(module, dispatch, monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "runs_compiled", lambda op, device: asked.append(op) or True)
    device = torch.device("cuda", 0)
    assert module.runs_compiled(device, HALF) and module.runs_compiled(device, torch.bfloat16)
    assert not module.runs_compiled(device, torch.float32)
    assert set(asked) == {"matmul_add"}


def test_strides_that_tma_takes(module):
    x = torch.zeros(2, 16, 16, dtype=HALF)
    assert module.by_tma(x) and module.by_tma(x.mT)
    buffer = torch.zeros(2, 16, 48, dtype=HALF)
    assert module.by_tma(buffer[..., 8:24]) and module.by_tma(buffer[1:, :, :16])
    rows_of_72_bytes = buffer.as_strided((2, 16, 16), (576, 36, 1))
    for bad in (buffer[..., 1:17], buffer[..., ::3], rows_of_72_bytes):
        assert not module.by_tma(bad)
    assert not module.by_tma(buffer[:1, :, :16].expand(2, -1, -1))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    @pytest.mark.parametrize("tile", TILES)
    def test_scalars_are_applied_before_the_rounding(self, ops, device, tile):
        """1 - 1 + 2^-12: a product rounded to float16 on its own would lose the rest."""
        A = torch.zeros(1, 8, 8, dtype=HALF, device=device)
        A[:, :, 0], A[:, :, 1] = 1.0, 2.0**-6
        C = torch.ones(1, 8, 8, dtype=HALF, device=device)
        expected = torch.full((1, 8, 8), 2.0**-12, dtype=HALF, device=device)
        assert_same_bits(run_dense(ops, A, A.mT, C=C, beta=-1.0, tile=tile), expected)
        scale = torch.tensor([4.0], device=device)
        found = run_dense(ops, A, A.mT, C=C, beta=-1.0, scale=scale, tile=tile)
        assert_same_bits(found, 4 * expected)

    @pytest.mark.parametrize("tile", TILES)
    def test_c_may_be_out_and_is_not_read_without_beta(self, ops, device, tile):
        arguments = Dense((2,), 136, 24, 72, beta=0.5).operands(HALF, device)
        expected = exact_dense(arguments, HALF)
        run_dense(ops, **arguments, out=arguments["C"], tile=tile)
        assert torch.equal(arguments["C"], expected)
        A = torch.ones(1, 8, 8, dtype=HALF, device=device)
        C = torch.full_like(A, torch.nan)
        assert_same_bits(run_dense(ops, A, A, C=C, tile=tile), torch.full_like(A, 8))

    @pytest.mark.parametrize("tile", TILES)
    def test_nan_stays_in_its_row_and_matrix(self, ops, device, tile):
        A = torch.ones(3, 70, 8, dtype=HALF, device=device)
        A[1, 5, 2] = torch.nan
        out = run_dense(ops, A, torch.ones(3, 8, 40, dtype=HALF, device=device), tile=tile)
        bad = torch.zeros_like(out, dtype=torch.bool)
        bad[1, 5] = True
        assert torch.equal(out.isnan(), bad)

    @pytest.mark.parametrize("added", (False, True))
    def test_opcheck(self, ops, device, added):
        A, B = (torch.randn(2, *s, device=device).half() for s in ((16, 24), (24, 16)))
        C = torch.zeros(2, 16, 16, device=device, dtype=HALF) if added else None
        out, scale = torch.zeros(2, 16, 16, device=device, dtype=HALF), torch.ones(2, device=device)
        arguments = (A, B, C, out, 1.0, 0.5 if added else 0.0, -1, scale)
        torch.library.opcheck(ops.matmul_add.default, arguments)

    def test_what_tma_cannot_take_is_refused_in_words(self, ops, device):
        x = torch.ones(2, 64, 64, dtype=HALF, device=device)
        with pytest.raises(RuntimeError, match="TMA cannot read an operand"):
            run_dense(ops, laid_out(x, "shifted"), x)
        with pytest.raises(RuntimeError, match="TMA cannot write out"):
            run_dense(ops, x, x, out=laid_out(x, "every-third"))
        with pytest.raises(RuntimeError, match="float16 or bfloat16"):
            run_dense(ops, x.float(), x.float())
