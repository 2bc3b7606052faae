"""gram_polynomial_slice: the bits of the same iteration op by op, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ..conftest import module_fixture

HALF = torch.float16


module = module_fixture("kernels.products.gram_polynomial_slice")
iteration = module_fixture("orthogonalize.gram_polynomial")


def test_the_table_in_the_form_that_the_op_takes(module, submodule) -> None:
    table = submodule("orthogonalize.polynomials").POLYNOMIALS
    both = module.Polynomials(table, 64.0, 1.02)
    assert both.operands == [square.operand for square in table[1]]
    assert len(both.coefficients) == 3 * sum(map(len, table))
    assert both.coefficients[-1] == table[1][-1].delta
    with pytest.raises(ValueError, match="two polynomials of one form"):
        module.Polynomials([table[0], table[1][:-1]], 64.0, 1.02)


def test_it_serves_float16_alone(module) -> None:
    cpu = torch.device("cpu")
    assert not module.serves(torch.float32, HALF, cpu)
    assert not module.serves(torch.float32, torch.float32, cpu)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    @pytest.mark.parametrize(
        "shape",
        [
            *[(14, 512, 640), (7, 768, 768), (50, 1300, 200), (140, 128, 256), (9, 129, 131)],
            *[(2, 1100, 2300), (1, 2048, 1024)],
        ],
    )
    def test_bits_of_the_ops_one_by_one(self, opt, iteration, device, monkeypatch, shape):
        """With the chain, without it, and op by op from Python; alone and in a batch."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        assert iteration._runs_compiled(x.dtype, HALF, x.device)
        found = opt.orthogonalize(x, method="gram_polynomial")
        few = opt.orthogonalize(x[:1], method="gram_polynomial")
        assert_same_bits(few, found[:1])
        chained = iteration.chain_serves(len(x), min(shape[1:]), HALF, x.device)
        assert chained == (shape[0] > 2 and shape[0] != 9)
        monkeypatch.setattr(iteration, "chain_serves", lambda *_: False)
        assert_same_bits(found, opt.orthogonalize(x, method="gram_polynomial"))
        monkeypatch.setattr(iteration, "_runs_compiled", lambda *_: False)
        assert_same_bits(found, opt.orthogonalize(x, method="gram_polynomial"))

    def test_refused(self, module, iteration, device):
        both = iteration._BOTH
        x = torch.randn(2, 64, 64, device=device)
        cases = {
            "float16": torch.empty(2, 64, 64, device=device),
            "room": torch.empty(1, 64, 64, device=device, dtype=HALF),
        }
        for words, out in cases.items():
            with pytest.raises(RuntimeError, match=words):
                module.gram_polynomial_slice([x], out, both, chain=False)
