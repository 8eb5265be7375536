"""Activation checkpointing in training: bit-equal gradients, or a refusal that names the site."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch_models import calibrated, seeded
from training_models import loss_of

from qsdk import ModelError, QuantSim


class Inner(nn.Module):
    """Has a block of its own and a function that is no forward: [N, 6] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 6), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) + x * torch.sigmoid(x)

    def other(self, x: Tensor) -> Tensor:
        """The same with another activation."""
        return F.relu(self.fc(x)) + x


class Outer(nn.Module):
    """A block in a block, checkpointed as `run` says: [N, 6] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc, self.run = Inner(), nn.Linear(6, 6), _plain

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(self.run(self.inner, x)))


class Model(nn.Module):
    """Calls its blocks as `how` says, each part through `run`: [N, 6] to [N, 3]."""

    def __init__(self, how: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.nested, self.fc = nn.ModuleList(Inner() for _ in range(2)), Outer(), nn.Linear(6, 3)
        self.own, self.how, self.run = nn.Linear(6, 6), how, _plain

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sigmoid(self.how(self, x * x.abs())))


def _plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _in_a_loop(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = model.run(block, x)
    return x


def _all_of_it(model: Model, x: Tensor) -> Tensor:
    model.nested.run = model.run
    return model.run(model.nested, x)


MODULES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "block": lambda m, x: m.run(m.blocks[0], x),
    "leaf": lambda m, x: m.run(m.own, x),
    "forward": lambda m, x: m.run(m.blocks[0].forward, x),
    "loop": _in_a_loop,
    "nested": lambda m, x: m.run(m.nested, x),
    "nested twice": _all_of_it,
    "closure of one module": lambda m, x: m.run(lambda t: m.blocks[0](t), x),
    "closure of two modules": lambda m, x: m.run(lambda t: m.blocks[1](m.blocks[0](t)), x),
}
FUNCTIONS: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "closure": (lambda m, x: m.run(lambda t: F.relu(m.own(t)) + t, x), "relu.0:output"),
    "only functions": (lambda m, x: m.run(lambda t: torch.tanh(t) * 2, x), "tanh.0:output"),
    "one function": (lambda m, x: m.run(F.gelu, x), "gelu.0:output"),
    "a weight": (lambda m, x: m.run(lambda t: F.linear(t, m.own.weight), x), "own:weight"),
    "bound method": (lambda m, x: m.run(m.blocks[0].other, x), "relu.0:output"),
    "module and function": (lambda m, x: m.run(lambda t: m.blocks[0](t) + t, x), "add.0:output"),
    "closure after a block": (
        lambda m, x: m.run(lambda t: torch.tanh(t) + t, m.run(m.blocks[0], x)),
        "tanh.0:output",
    ),
}


def passed(sim: QuantSim, run: Callable[..., Any]) -> dict[str, Tensor]:
    """Output and gradients of one pass, also that of the input."""
    own = copy.deepcopy(sim)
    with own.training(learn_scales=True, learn_zero_points=True) as model:
        model.run = run
        x = seeded(5, 6, seed=1).requires_grad_()
        out = model(x)
        loss_of(out).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("log2" in name for name in found)
    assert any("shift" in name for name in found)
    return {"out": out.detach(), "x": x.grad, **found}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def simulated(how: Callable[[Model, Tensor], Tensor]) -> QuantSim:
    torch.manual_seed(0)
    return calibrated(Model(how), seeded(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_the_run_without(name: str):
    sim = simulated(MODULES[name])
    plain = passed(sim, _plain)
    for reentrant in (False, True):
        assert_equal(plain, passed(sim, functools.partial(checkpoint, use_reentrant=reentrant)))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_no_module_is_refused_by_name(name: str, reentrant: bool):
    how, site = FUNCTIONS[name]
    sim = simulated(how)
    before = sim.encodings
    with pytest.raises(ModelError, match=f"site {site} is in an activation checkpoint of a function that is no module"):
        passed(sim, functools.partial(checkpoint, use_reentrant=reentrant))
    assert passed(sim, _plain)["out"].shape == (5, 3)
    assert sim.encodings == before


def test_a_function_in_a_reentrant_checkpoint_is_refused_in_the_backward_pass():
    """No gradients are recorded in its forward pass, where what is in it looks like a pass without any."""

    def how(model: Model, x: Tensor) -> Tensor:
        model.nested.run = lambda inner, t: model.run(inner.other, t)
        return model.run(model.nested, x)

    sim = simulated(how)
    with pytest.raises(ModelError, match=r"site nested/relu.0:output is in an activation checkpoint"):
        passed(sim, functools.partial(checkpoint, use_reentrant=True))


@pytest.mark.slow
def test_the_models_own_no_grad_is_no_checkpoint():
    def how(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = torch.tanh(model.own(x))
        return model.blocks[0](x + frozen)

    sim = simulated(how)
    with torch.autograd.graph.save_on_cpu():
        saved = passed(sim, _plain)
    assert_equal(saved, passed(sim, _plain))


@pytest.mark.slow
def test_checkpoint_sequential():
    torch.manual_seed(0)
    sim = calibrated(nn.Sequential(Inner(), Inner(), Inner()), seeded(4, 6))
    found = []
    for segments in (0, 2):
        own = copy.deepcopy(sim)
        with own.training(learn_scales=True) as model:
            x = seeded(5, 6)
            # called as a list, so that the input passes no site in both runs
            parts = list(model)
            out = checkpoint_sequential(parts, segments, x, use_reentrant=False) if segments else _chain(parts, x)
            loss_of(out).backward()
            found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_equal(*found)


def _chain(parts: list[nn.Module], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


@pytest.mark.slow
def test_selective_checkpointing():
    sim = simulated(_in_a_loop)
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    selective = functools.partial(checkpoint, use_reentrant=False, context_fn=kept)
    assert_equal(passed(sim, _plain), passed(sim, selective))


@pytest.mark.parametrize(
    "reentrant", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
def test_gradient_checkpointing_of_transformers(reentrant: bool):
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    example = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    sim = calibrated(transformers.LlamaForCausalLM(config), example)
    found = []
    for saving in (False, True):
        own = copy.deepcopy(sim)
        if saving:
            own.model.activation_checkpointing_enable({"use_reentrant": reentrant})
            own.model.enable_input_require_grads()  # the reentrant kind needs it
        with own.training(learn_scales=True) as model:
            loss_of(model(**example).logits).backward()
            found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_equal(*found)
