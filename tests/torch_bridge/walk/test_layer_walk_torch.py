"""The walk over a module's layers: inputs as of full runs, one pass of either kind, and nothing left behind."""

import _thread
import copy
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_models import calibrated, seeded
from walked import product

from qsdk import DataError, QuantSim, w4a8
from torch_bridge.torch_values.parameters import stored_tensor
from torch_bridge.walk.layer_walk import LayerWalk, walk_layers


class Branches(nn.Module):
    """Every kind of convolution and linear layer, with branches, a residual and stored tensors read by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect")
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.line = nn.Conv1d(4, 6, 3, stride=2)
        self.head = nn.Linear(6, 6)
        self.loose = nn.Parameter(seeded(5, 6, seed=3))
        self.bias = nn.Parameter(seeded(5, seed=4))
        self.columns = nn.Parameter(seeded(5, 4, seed=5))
        self.rows = nn.Parameter(seeded(3, 31, seed=6))

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        """Gives [N, 3, 4]."""
        x = F.relu(self.conv(x))
        x = self.left(x) + self.right(x) + x
        x = self.line(self.up(x).flatten(2)[..., :64] * gain)
        x = x + self.head(x.mT).mT
        x = F.linear(x.mT, self.loose, self.bias) @ self.columns
        return self.rows @ x


CALLED = {"conv", "left", "right", "up", "line", "head"}


def branch_data(count: int = 3) -> list[dict[str, Tensor]]:
    return [{"x": seeded(n + 2, 3, 6, 6, seed=n), "gain": seeded(1, seed=9 + n).abs()} for n in range(count)]


@pytest.fixture(scope="module")
def branches() -> QuantSim:
    torch.manual_seed(0)
    return calibrated(Branches().eval(), branch_data()[0], w4a8())


@pytest.fixture
def sim(branches: QuantSim) -> QuantSim:
    return copy.deepcopy(branches)


def full_inputs(sim: QuantSim, batch: Any, paths: set[str], *, quantized: bool) -> dict[str, list[Tensor]]:
    """Path -> the inputs of a module's calls in an ordinary run."""
    found: dict[str, list[Tensor]] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args: found.setdefault(path, []).append(args[0].clone())

    handles = [sim.model.get_submodule(path).register_forward_pre_hook(keep(path)) for path in paths]
    if quantized:
        sim.run(batch)
    else:
        with torch.no_grad(), sim.float_phase():
            sim.model(**batch) if isinstance(batch, dict) else sim.model(batch)
    for handle in handles:
        handle.remove()
    return found


def state(sim: QuantSim) -> dict[str, Any]:
    frozen = {site: quantizer.frozen for site, quantizer in sim.quantizers.items()}
    hooks = {path: len(m._forward_pre_hooks) + len(m._forward_hooks) for path, m in sim.model.named_modules()}
    values = {name: tensor.clone() for name, tensor in sim.model.state_dict().items()}
    modes = {path: m.training for path, m in sim.model.named_modules()}
    runtime = sim.runtime.frame, sim.runtime.phase, sim.runtime.visitor, sim.runtime.recurrent_hook
    return {"frozen": frozen, "hooks": hooks, "modes": modes, "runtime": runtime, **values}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k] for k, v in one.items())


def change(walk: LayerWalk, site: str) -> None:
    """Write other weights and a shifted bias, as a solver might."""
    encoding = walk.encoding(site)
    found = torch.from_numpy(encoding.fake_quantize(walk.weight(site).numpy() * 0.9))
    layer = next(layer for layer in walk.layers if layer.site == site)
    outputs = layer.layout.matrix_shape[0] * layer.layout.matrix_shape[1]
    walk.write(site, encoding=encoding, weight=found, bias_shift=torch.full((outputs,), 0.01) if layer.bias else None)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(2, 4, (3, 2), padding="same", dilation=(3, 2), bias=False),
        nn.Conv1d(2, 4, 3, padding="valid", stride=2, bias=False),
        nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular", groups=2, bias=False),
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False),
    ],
    ids=["same", "valid", "circular", "transposed"],
)
def test_patches_of_the_input_times_the_weight_are_the_output(module: nn.Module) -> None:
    x = seeded(2, module.in_channels, *[9] * len(module.kernel_size))
    wanted = module.eval()(x).detach().flatten(2).mT.flatten(0, 1)
    with walk_layers(calibrated(module, x, w4a8()), [x]) as walk:
        found = torch.from_numpy(product(walk.layers[0], module.weight.detach().numpy(), x.numpy()))
    torch.testing.assert_close(found.movedim(0, 1).flatten(1), wanted)


@pytest.mark.slow
def test_inputs_equal_those_of_full_runs_after_earlier_writes(sim: QuantSim, branches: QuantSim) -> None:
    seen = []
    with walk_layers(sim, branch_data()) as walk:
        assert walk.batches == 3
        for step in walk:
            seen.append([layer.site for layer in step.layers])
            pairs = list(step.inputs())
            assert len(pairs) == 3
            expected = seen[-1][0].removesuffix(":weight")
            for batch, (x, x_quantized) in zip(branch_data(), pairs, strict=True):
                if expected in CALLED:
                    wanted = full_inputs(branches, batch, {expected}, quantized=False)[expected][0]
                    assert torch.equal(x, wanted)
                assert x.shape == x_quantized.shape
                assert not torch.equal(x, x_quantized)
            before = copy.deepcopy(sim)  # between steps the sim is as it was written so far
            for batch, (_, x_quantized) in zip(branch_data(), pairs, strict=True):
                if expected in CALLED:
                    wanted = full_inputs(before, batch, {expected}, quantized=True)[expected][0]
                    assert torch.equal(x_quantized, wanted)
            for layer in step.layers:
                change(walk, layer.site)
        written = {layer.site for layer in walk.layers}
    assert seen[:2] == [["conv:weight"], ["left:weight", "right:weight"]]
    assert [site for group in seen for site in group] == [
        *("conv:weight", "left:weight", "right:weight", "up:weight", "line:weight", "head:weight"),
        *("self:loose", "self:columns", "self:rows"),
    ]
    for site in written:
        raw = stored_tensor(sim.model, site).detach().numpy()
        assert (sim.encodings[site].fake_quantize(raw) == raw).all()
        assert sim.quantizers[site].frozen
    assert torch.allclose(sim.model.bias, branches.model.bias + 0.01)


class Operands(TorchFunctionMode):
    """Keeps what F.linear and @ multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function."""
        if func is F.linear or func in (Tensor.matmul, Tensor.__matmul__):
            self.found.append((args[0].clone(), args[1].clone()))
        return func(*args, **(kwargs or {}))


def test_inputs_of_functions_are_their_operands(sim: QuantSim) -> None:
    batch = branch_data()[1]
    with Operands() as operands, torch.no_grad(), sim.float_phase():
        sim.model(**batch)
    *_, linear, columns, product = operands.found
    with walk_layers(sim, branch_data()) as walk:
        for step in walk:
            site = step.layers[0].site
            x, x_quantized = list(step.inputs())[1]
            if site.startswith("self:"):
                wanted = {"self:loose": linear[0], "self:columns": columns[0], "self:rows": product[1].mT}[site]
                assert torch.equal(x, wanted)
                with Operands() as operands:
                    copy.deepcopy(sim)(**batch)
                at = {"self:loose": -3, "self:columns": -2, "self:rows": -1}[site]
                left, right = operands.found[at]
                assert torch.equal(x_quantized, right.mT if site == "self:rows" else left)
            for layer in step.layers:
                change(walk, layer.site)
    with Operands() as operands:
        sim(**batch)
    for site, (left, right) in zip(("self:loose", "self:columns", "self:rows"), operands.found[-3:], strict=True):
        assert torch.equal(left if site == "self:rows" else right, stored_tensor(sim.model, site))


def test_one_float_and_one_quantized_pass(sim: QuantSim) -> None:
    calls: Counter[str] = Counter()
    for path in CALLED:
        sim.model.get_submodule(path).register_forward_hook(
            lambda module, args, result, path=path: calls.update([f"{path} {sim.runtime.phase}"])
        )
    with walk_layers(sim, branch_data()) as walk:
        for step in walk:
            for layer in step.layers:
                change(walk, layer.site)
        assert 0 < walk.float_seconds < 60
    # the first batch runs in float once more, to see what reads the weights
    assert calls == {f"{path} float": 4 for path in CALLED} | {f"{path} visit": 3 for path in CALLED}


def test_quantized_forwards_end_before_the_last_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)).eval()
    sim, calls = calibrated(model, rows(2)[0], w4a8()), Counter[str]()
    sim.model[3].register_forward_hook(lambda *_: calls.update([sim.runtime.phase]))
    before = state(sim)["runtime"]
    with walk_layers(sim, rows(2, 3, 4)) as walk:
        sites = [layer.site for step in walk for layer in step.layers]
    assert sites == ["0:weight", "2:weight"]
    assert calls == {"float": 4}  # the first batch runs once more; those in float tell how long a pass takes
    assert state(sim)["runtime"] == before
    sim(rows(2)[0])
    assert calls["quantize"] == 1


class Raises(nn.Module):
    """Does something on a certain batch, in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, 4]."""
        x = self.first(x)
        if x.shape[0] == 3:
            self.act()
        return self.second(x)


def rows(*sizes: int) -> list[Tensor]:
    return [seeded(n, 4, seed=n) for n in sizes]


def raising(act: Callable[[], None]) -> QuantSim:
    torch.manual_seed(1)
    sim = calibrated(Raises(), rows(2)[0], w4a8())
    sim.model.act = act
    sim.model.train()
    sim.model.second.eval()
    return sim


def fail_with(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("act", "expected", "message"),
    [
        (fail_with(RuntimeError("a shape")), DataError, "does not run on batch 2 .*a shape"),
        (fail_with(ZeroDivisionError("none")), ZeroDivisionError, "none"),
        (_thread.interrupt_main, KeyboardInterrupt, None),
    ],
)
def test_a_forward_that_fails_leaves_nothing_behind(
    act: Callable[[], None], expected: type[BaseException], message: str | None
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sim, threads = raising(act), set(threading.enumerate())
    before = state(sim)

    def solve_both() -> None:
        with walk_layers(sim, rows(2, 4, 3, 5)) as walk:
            for step in walk:
                change(walk, step.layers[0].site)

    with pytest.raises(expected, match=message):
        solve_both()
    assert set(threading.enumerate()) <= threads
    assert_same(before, state(sim))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("solver")])
def test_a_block_that_fails_leaves_nothing_behind(error: BaseException) -> None:
    sim, threads = raising(lambda: None), set(threading.enumerate())
    before = state(sim)

    def solve_both() -> None:
        with walk_layers(sim, rows(2, 4, 3)) as walk:
            for step in walk:
                change(walk, step.layers[0].site)
                if step.layers[0].site == "second:weight":
                    raise error

    with pytest.raises(type(error)):
        solve_both()
    assert set(threading.enumerate()) <= threads
    assert_same(before, state(sim))


def test_a_walk_that_is_left_early_keeps_what_was_written() -> None:
    sim, threads = raising(lambda: None), set(threading.enumerate())
    before = state(sim)
    with walk_layers(sim, rows(2, 4, 3)) as walk:
        change(walk, next(iter(walk)).layers[0].site)
    after = state(sim)
    assert set(threading.enumerate()) <= threads
    assert {k for k, v in after.items() if isinstance(v, Tensor) and not torch.equal(v, before[k])} == {
        "first.weight",
        "first.bias",
    }
    assert after["modes"] == before["modes"]
    assert after["hooks"] == before["hooks"]


class Stateful(nn.Module):
    """Sets things on modules while it runs, draws random numbers, and checks the state of its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[tuple[bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, 4]."""
        self.kept = x
        self.seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.ones(1).dtype))
        y = self.first(x)
        return self.second(y + self.kept + torch.rand(4))


def test_forwards_have_their_own_module_state_and_random_numbers() -> None:
    model = Stateful().eval()
    model.first.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    sim = calibrated(model, rows(2)[0], w4a8())
    random = torch.get_rng_state()
    expected = [full_inputs(sim, x, {"second"}, quantized=False)["second"][0].shape for x in rows(2, 3)]
    torch.set_rng_state(random)
    del sim.model.kept
    found = {}
    with torch.autocast("cpu", torch.bfloat16), walk_layers(sim, rows(2, 3)) as walk:
        sim.model.seen.clear()
        for step in walk:
            found[step.layers[0].site] = list(step.inputs())
    assert torch.equal(torch.get_rng_state(), random)
    assert [x.shape for x, _ in found["second:weight"]] == expected
    assert all(torch.equal(x, 2 * batch) for (x, _), batch in zip(found["first:weight"], rows(2, 3), strict=True))
    assert not hasattr(sim.model, "kept")
    x, x_quantized = found["second:weight"][0]  # the batch that the sim is calibrated on
    assert (x - x_quantized).abs().median() < 0.1  # the same random numbers in both; a few values are clipped
    sim.model(rows(2)[0])


def test_forwards_run_as_the_thread_that_walks() -> None:
    sim = calibrated(Stateful().eval(), rows(2)[0], w4a8())
    seen = sim.model.seen
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16), walk_layers(sim, rows(2)):
        pass
    assert set(seen) == {(False, True, torch.float32)}
    seen.clear()
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"), walk_layers(sim, rows(2)):
        pass
    assert set(seen) == {(False, False, torch.float32)}


class Residual(nn.Module):
    """A layer that is called three times, and whose input is written over after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        for _ in range(3):
            x += torch.tanh(self.layer(x))
        return x


@pytest.mark.slow
def test_inputs_of_a_repeated_layer_are_those_of_its_calls_though_they_are_written_over() -> None:
    torch.manual_seed(0)
    model, x = Residual().eval(), seeded(5, 4)
    with walk_layers(calibrated(model, x, config=w4a8()), [x]) as walk:
        found = [given.clone() for step in walk for given, _ in step.inputs()]
    wanted = [x * 2.0]
    with torch.no_grad():
        for _ in range(2):
            wanted.append(wanted[-1] + torch.tanh(model.layer(wanted[-1])))
    torch.testing.assert_close(found, wanted)
