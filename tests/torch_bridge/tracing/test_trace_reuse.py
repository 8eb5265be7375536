"""The trace made by quantize serves every export until more than values has changed."""

import copy

import numpy as np
import onnxruntime as ort
import pytest
import torch
from shared_translations import shared_translations
from torch import nn

import qsdk
import torch_bridge.sim
from qsdk import ExportError


class Gain:
    """A callable of the user's, no module."""

    def __init__(self) -> None:
        self.value = 1.5

    def __call__(self, x):
        return x * self.value


class Scaled(nn.Module):
    """A layer and a plain number that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.factor, self.options = 2.0, {"shift": [1.0]}
        self.gain, self.table, self.hidden = Gain(), np.ones(1), [nn.Linear(3, 3)]
        self.register_buffer("offset", torch.ones(5))

    def forward(self, x):
        y = self.last(torch.relu(self.first(x)) * self.factor + self.offset) + self.options["shift"][0]
        return self.gain(y) + float(self.table[0]) + self.hidden[0].bias


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def traces(monkeypatch):
    """The models that were traced after quantize."""
    found = []
    trace_marked = torch_bridge.sim.trace_marked

    def counted(model, *rest):
        found.append(model)
        return trace_marked(model, *rest)

    monkeypatch.setattr(torch_bridge.sim, "trace_marked", counted)
    return found


@pytest.fixture
def sim():
    torch.manual_seed(1)
    with shared_translations():  # of the first trace alone
        sim = qsdk.quantize(Scaled().eval(), X, qsdk.w8a8())
    qsdk.calibrate(sim, [X], progress=False)
    return sim


def runs_as_simulated(sim, path):
    qsdk.export(sim, path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    wanted = sim(X).numpy()
    step = max(float(encoding.scale.max()) for encoding in sim.encodings.values())
    return np.abs(got - wanted).max() <= 1.5 * step


@pytest.mark.slow
def test_exports_of_the_same_network_trace_once(sim, traces, tmp_path):
    for number in range(3):
        assert runs_as_simulated(sim, tmp_path / f"{number}.onnx")
    assert traces == []
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_traced_once_whatever_it_learns(kind, traces, tmp_path):
    torch.manual_seed(1)
    sim = qsdk.quantize(kind(6, 5), X[:, None], qsdk.w8a8())
    qsdk.calibrate(sim, [X[:, None]], progress=False)
    with sim.training() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(X[:, None])[0].square().mean().backward()
        optimizer.step()
    qsdk.export(sim, tmp_path / "model.onnx")
    assert traces == []
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [X[:, None]], progress=False)
    assert report.summary["passed"]


def fill(sim):
    with torch.no_grad():
        sim.model.first.weight.fill_(0.25)


def assign_data(sim):
    sim.model.first.weight.data = torch.full((5, 6), 0.25)


def replace_parameter(sim):
    sim.model.first.weight = nn.Parameter(torch.full((5, 6), 0.25))


def replace_buffer(sim):
    sim.model.offset = torch.full((5,), 0.5)


def load_state(sim):
    changed = {name: value * 0.5 if name.endswith("bias") else value for name, value in sim.model.state_dict().items()}
    sim.model.load_state_dict(changed)


def train(sim):
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("change", [fill, assign_data, replace_parameter, replace_buffer, load_state, train])
def test_new_values_are_exported_without_a_new_trace(sim, traces, tmp_path, change):
    before = sim(X)
    change(sim)
    assert not torch.equal(sim(X), before)
    qsdk.calibrate(sim, [X], progress=False)
    assert runs_as_simulated(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False).summary["passed"]
    assert traces == []


def change_number(sim):
    sim.model.factor = 3.0


def change_inside_a_container(sim):
    sim.model.options["shift"][0] = -4.0


def change_a_callable(sim):
    sim.model.gain.value = -3.0


def change_an_array(sim):
    sim.model.table[0] = 5.0


def change_an_unregistered_module(sim):
    sim.model.hidden[0].bias.data.fill_(7.0)


UNSEEN = [change_number, change_inside_a_container, change_a_callable, change_an_array, change_an_unregistered_module]


@pytest.mark.slow
@pytest.mark.parametrize("change", UNSEEN)
def test_a_changed_attribute_that_the_forward_reads_causes_a_new_trace(sim, traces, tmp_path, change):
    before = sim(X)
    change(sim)
    assert not torch.equal(sim(X), before)
    qsdk.calibrate(sim, [X], progress=False)
    assert runs_as_simulated(sim, tmp_path / "m.onnx")
    assert traces == [sim.model]


@pytest.mark.slow
def test_a_new_hook_is_traced(sim, traces, tmp_path):
    handle = sim.model.last.register_forward_hook(lambda module, args, result: result.contiguous())
    assert runs_as_simulated(sim, tmp_path / "m.onnx")
    handle.remove()
    assert runs_as_simulated(sim, tmp_path / "m.onnx")
    assert traces == [sim.model] * 2


@pytest.mark.slow
def test_a_changed_network_is_refused(sim, traces, tmp_path):
    sim.model.last = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(ExportError, match=r"last \(Sequential\) came into the model after that was quantized"):
        qsdk.export(sim, tmp_path / "m.onnx")
    assert traces == []
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_makes_another_op_of_its_op_is_refused(sim, tmp_path):
    sim.model.gain.value = 1.0  # x * 1 is no op
    with pytest.raises(ExportError, match="the model has changed since it was quantized: its ops differ"):
        qsdk.export(sim, tmp_path / "m.onnx")


@pytest.mark.slow
def test_a_copied_sim_exports_its_own_weights(sim, tmp_path):
    other = copy.deepcopy(sim)
    fill(other)
    qsdk.calibrate(other, [X], progress=False)
    assert runs_as_simulated(other, tmp_path / "other.onnx")
    assert runs_as_simulated(sim, tmp_path / "own.onnx")
    assert (tmp_path / "own.onnx").read_bytes() != (tmp_path / "other.onnx").read_bytes()
