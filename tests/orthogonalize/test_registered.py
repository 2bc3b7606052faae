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
    """The package's ops, and the names of those that were called."""

    def __init__(self, ops, called: list[str]) -> None:
        self.ops, self.called = ops, called

    def __getattr__(self, name):
        def call(*arguments):
            self.called.append(name)
            return getattr(self.ops, name)(*arguments)

        return call


@pytest.fixture
def called(submodule, monkeypatch) -> list[str]:
    """The iterations that are called as ops."""
    called: list[str] = []
    for name in set(METHODS.values()):
        module = submodule(f"orthogonalize.{name}")
        monkeypatch.setattr(module, "ops", Recorded(module.ops, called))
    return called


@pytest.mark.parametrize("method", METHODS)
def test_an_eager_call_passes_the_op_by(opt, called, device, method) -> None:
    """The same bits as the op, and autograd knows what was written."""
    x, out = torch.randn(3, 4, 6, device=device), torch.empty(3, 4, 6, device=device)
    before = out._version
    opt.orthogonalize(x, method, dtype=torch.float32, out=out)
    assert called == []
    assert out._version > before

    class Watched(torch.Tensor):
        pass

    by_op = torch.empty_like(out)
    opt.orthogonalize(x, method, dtype=torch.float32, out=by_op.as_subclass(Watched))
    assert called == [METHODS[method]]
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
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum(f".{METHODS[method]}" in target for target in targets) == 1, targets
    assert not any("bmm" in target or "matmul" in target for target in targets)
    assert_same_bits(result, opt.orthogonalize(x, method))


def test_fake_tensors_see_one_op(opt, called) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        result = opt.orthogonalize(torch.empty(3, 5, 40), "newton_schulz")
    assert called == ["newton_schulz"]
    assert result.shape == (3, 5, 40)
