"""Sessions that read the blocks of convolutions give the same bits as those that go back to rows of pixels."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import qsdk
from onnx_backend.calibration.observe import statistics_graph
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.session import RepeatedSession, session_in_blocks, simulation_session
from onnx_backend.workarounds.blocked_layout import DOMAIN, keep_blocks
from qsdk.core.ranges.statistics import observed_sites


class Network(nn.Module):
    """Convolutions with everything around them that can read blocks, and some that cannot."""

    def __init__(self, channels: int, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in parts)
        self.wide = nn.Conv2d(2 * channels, channels, 1)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(channels, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives [N, 5, h, w]."""
        x = self.first(x)
        for part, conv in zip(self.parts, self.convs, strict=True):
            x = getattr(self, part)(conv(x), x)
        return self.last(x)

    def add(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.relu(new + old)

    def silu(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(new)

    def hardswish(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return nn.functional.hardswish(new)

    def clip(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return (new + old).clamp(0.25, 1.5)

    def join(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return self.wide(torch.cat([new, old], 1))

    def split(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        left, right = new.chunk(2, 1)
        return self.wide(torch.cat([left, right, old], 1))

    def pool(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(new, 3, 1, 1) * old

    def squeeze(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return new * torch.sigmoid(self.gate(new.mean((2, 3), keepdim=True)))

    def exp(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.exp(-new.abs()) / (1 + old.abs())


PARTS = ("add", "silu", "hardswish", "clip", "join", "split", "pool", "squeeze", "exp")


def calibrated(channels: int, parts: tuple[str, ...], seed: int = 0):
    torch.manual_seed(seed)
    sim = qsdk.quantize(exported(Network(channels, parts)), None, qsdk.w8a8())
    batches = [torch.randn(2, 3, 9, 7).numpy() for _ in range(2)]
    qsdk.calibrate(sim, batches, progress=False)
    return sim, batches[0]


def exported(model: nn.Module):
    program = torch.onnx.export(
        model.eval(), (torch.randn(2, 3, 9, 7),), dynamo=True, opset_version=21, verbose=False, external_data=False
    )
    assert program is not None
    return program.model_proto


def reorders(model) -> int:
    return sum(node.domain == DOMAIN and node.op_type.startswith("Reorder") for node in model.graph.node)


@pytest.fixture
def kept(monkeypatch):
    """Collect, for each session, the number of reorders before and after blocks are kept, and the model."""
    found = []

    def recorded(model, shapes) -> bool:
        before = reorders(model)
        changed = keep_blocks(model, shapes)
        found.append((before, reorders(model), model))
        return changed

    monkeypatch.setattr("onnx_backend.runtime.session.keep_blocks", recorded)
    return found


def compared(sim, x: np.ndarray) -> None:
    """Require the same bits of every output in both sessions."""
    model = sim.qdq_model()
    feeds = {model.graph.input[0].name: x}
    sessions = simulation_session(load(model)), session_in_blocks(load(model)) or simulation_session(load(model))
    rows, blocks = (session.run(None, feeds) for session in sessions)
    for one, other in zip(rows, blocks, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("channels", [24, 32])
def test_each_op_around_convolutions_changes_no_bit(part, channels):
    compared(*calibrated(channels, (part, part)))


@pytest.mark.slow
def test_a_network_of_convolutions_stays_in_blocks(kept):
    sim, _ = calibrated(32, ("add", "silu", "pool"))
    session_in_blocks(sim.qdq_model())
    before, after, model = kept[-1]
    assert before > 10, "the runtime keeps the blocks by itself: the workaround may go"
    assert after == 1, [node.op_type for node in model.graph.node]  # of the output's five channels


@pytest.mark.slow
def test_padded_channels_stay_in_blocks_where_zeros_stay_zeros(kept):
    sim, _ = calibrated(24, ("add", "add"))
    session_in_blocks(sim.qdq_model())
    before, after, _ = kept[-1]
    assert after < before / 2
    sim, _ = calibrated(24, ("clip", "exp"))
    session_in_blocks(sim.qdq_model())
    nodes = kept[-1][2].graph.node
    assert not any(node.op_type in ("Clip", "Exp") and node.input[0].endswith("/blocks") for node in nodes)


@pytest.mark.parametrize("channels", [24, 32])
def test_statistics_do_not_see_padding(channels, kept):
    """Values of 5 and more: the zeros of padding would be the smallest."""
    torch.manual_seed(0)
    convs = nn.Sequential(nn.Conv2d(3, channels, 1), nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 4, 1))
    with torch.no_grad():
        convs[0].weight.mul_(0.01)
        convs[0].bias.fill_(6.0)
    batch = torch.rand(2, 3, 9, 7).numpy()
    sim = qsdk.quantize(exported(convs), None, qsdk.w8a8())
    model, _ = statistics_graph(sim._marked, observed_sites(sim.plan.decisions.values()), sampled=False)
    rows, blocks = simulation_session(model), session_in_blocks(model)
    assert (blocks is not None) == (channels == 32)
    assert any(before > after for before, after, _ in kept) == (channels == 32)
    names = [output.name for output in rows.get_outputs()]
    found = [session.run(names, {rows.get_inputs()[0].name: batch}) for session in (rows, blocks or rows)]
    for name, one, other in zip(names, *found, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    assert any(5 < float(value) < 6.5 for name, value in zip(names, found[0], strict=True) if name.endswith("/low"))


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("time.perf_counter", found)
    return found


def test_a_session_is_opened_in_blocks_once_its_runs_have_taken_as_long(clock, kept, monkeypatch):
    sim, x = calibrated(32, ("add",))
    model = sim.qdq_model()
    feeds = {model.graph.input[0].name: x}
    kept.clear()

    def slow(*given, **options):
        clock.now += 2.0
        return simulation_session(*given, **options)

    monkeypatch.setattr("onnx_backend.runtime.session.simulation_session", slow)
    session = RepeatedSession(model)
    first = session._session
    monkeypatch.setattr(session, "_session", Slow(first, clock, seconds=0.9))
    results = [session.run(None, feeds) for _ in range(3)]  # 2.7 seconds, more than opening took
    assert not kept
    results += [session.run(None, feeds) for _ in range(3)]
    assert len(kept) == 1
    for result in results:
        np.testing.assert_array_equal(result[0], results[0][0])
    assert [value.name for value in session.get_outputs()] == [value.name for value in first.get_outputs()]


class Slow:
    """A session that takes some seconds of a clock."""

    def __init__(self, session, clock: Clock, seconds: float) -> None:
        self.session, self.clock, self.seconds = session, clock, seconds

    def run(self, *given):
        self.clock.now += self.seconds
        return self.session.run(*given)


@pytest.mark.parametrize("facts", [{}, {"noop_with_empty_axes": 1}])
def test_an_extreme_that_reduces_nothing_reads_rows(facts):
    """Without axes, `noop_with_empty_axes` gives the tensor itself back."""
    model = exported(nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3)))
    result = model.graph.output[0].name
    model.graph.node.append(helper.make_node("ReduceMax", [result], ["most"], keepdims=0, **facts))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("most", TensorProto.FLOAT, None))
    x = {model.graph.input[0].name: torch.randn(2, 3, 9, 7).numpy()}
    blocks = session_in_blocks(model)
    assert (blocks is None) == bool(facts)
    expected = simulation_session(model).run(None, x)[0]
    np.testing.assert_array_equal((blocks or simulation_session(model)).run(None, x)[0], expected)
    assert expected.ndim == (4 if facts else 0)
