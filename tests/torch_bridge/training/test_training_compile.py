"""A model under torch.compile in training: one graph, compiled once, with the outputs and gradients of eager mode."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch_models import Block, calibrated, randomized, seeded
from training_models import Layer, Residual, same_gradients, steps

from qsdk import w8a8

# torch.compile makes an instance of each autograd.Function that it traces
pytestmark = pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled_and_not(model: nn.Module, batches: list[Tensor], backend: str) -> None:
    """Three steps of both.

    The fake quantizations are equal. In eager mode the gradient of a scale is a difference of two dot products, and
    compiled a sum over elements, so that they agree within the rounding errors of the former.
    """
    sim = calibrated(model, batches[0])
    eager = steps(copy.deepcopy(sim), batches)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = steps(copy.deepcopy(sim), batches, wrap=lambda m: torch.compile(m, fullgraph=True, backend=backend))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert torch.equal(eager[0]["out"], compiled[0]["out"])
    for one, other in zip(eager, compiled, strict=True):
        same_gradients(one, other, tolerance=2e-3)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.nightly)],
)
def test_a_network_with_folded_batch_norms_in_one_compiled_graph(backend: str):
    batches = [seeded(4, 3, 6, 6, seed=seed) for seed in range(3)]
    compiled_and_not(randomized(Residual()), batches, backend)


@pytest.mark.nightly
def test_a_transformer_layer_in_one_compiled_graph():
    torch.manual_seed(0)
    compiled_and_not(Layer(), [seeded(2, 5, 8, seed=seed) for seed in range(2)], backend="aot_eager")


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass: [N, 4] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


@pytest.mark.slow
def test_a_checkpointed_block_in_one_compiled_graph():
    torch.manual_seed(0)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compiled_and_not(Checkpointed(), [seeded(2, 4, seed=seed) for seed in range(2)], backend="aot_eager")


@pytest.mark.slow
def test_learned_zero_points_and_live_batch_norms_in_one_compiled_graph():
    sim = calibrated(randomized(Residual()), seeded(4, 3, 6, 6), w8a8())
    found = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        own = copy.deepcopy(sim)
        with own.training(learn_scales=True, learn_zero_points=True, freeze_bn_after=1) as model:
            called = wrap(model)
            optimizer = torch.optim.SGD(own.parameter_groups(lr=0.01))
            for seed in range(3):  # the second step is frozen: compiled once more
                out = called(seeded(4, 3, 6, 6, seed=seed))
                optimizer.zero_grad()
                out.square().mean().backward()
                optimizer.step()
        found.append((out.detach(), own))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
