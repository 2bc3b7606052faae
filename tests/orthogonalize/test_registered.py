"""Which calls of an iteration go through its registered op: those that somebody traces."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits

METHODS = {
    "newton_schulz": "newton_schulz",
    "polar_express": "newton_schulz",
    "gram_newton_schulz": "gram_newton_schulz",
    "gram_polynomial": "gram_polynomial",
}


class Recorded:
    """The package's ops, and the names of those that were asked for."""

    def __init__(self, ops) -> None:
        self.ops, self.asked = ops, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.ops, name)


@pytest.fixture
def recorded(submodule, monkeypatch):
    module = submodule("orthogonalize.registered")
    ops = Recorded(module.ops)
    monkeypatch.setattr(module, "ops", ops)
    return ops


@pytest.mark.parametrize("method", METHODS)
def test_an_eager_call_passes_the_op_by(opt, submodule, recorded, device, method) -> None:
    """The same bits as the op, and autograd knows what was written."""
    x, out = torch.randn(3, 4, 6, device=device), torch.empty(3, 4, 6, device=device)
    before = out._version
    opt.orthogonalize(x, method, dtype=torch.float32, out=out)
    assert recorded.asked == []
    assert out._version > before

    class Watched(torch.Tensor):
        pass

    by_op = torch.empty_like(out)
    opt.orthogonalize(x, method, dtype=torch.float32, out=by_op.as_subclass(Watched))
    assert recorded.asked == [METHODS[method]]
    assert_same_bits(out, by_op)


@pytest.mark.parametrize("method", METHODS)
def test_a_compiler_sees_one_op(opt, device, method) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(40, 4, 6, device=device)
    result = torch.compile(opt.orthogonalize, fullgraph=True, backend=backend)(x, method)
    torch._dynamo.reset()
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum(f".{METHODS[method]}" in target for target in called) == 1, called
    assert not any("bmm" in target or "matmul" in target for target in called)
    assert_same_bits(result, opt.orthogonalize(x, method))


def test_fake_tensors_see_one_op(opt, recorded) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        result = opt.orthogonalize(torch.empty(3, 5, 40), "newton_schulz")
    assert recorded.asked == ["newton_schulz"]
    assert result.shape == (3, 5, 40)
