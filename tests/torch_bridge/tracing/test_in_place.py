"""In-place ops: results rebound, thrown away, or read again by an old name."""

import pytest
import torch
from torch import nn

import qsdk

X = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """As in torchvision: ReLU in place, and `out += identity`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = self.relu(self.first(x))
        out = self.second(identity)
        out += identity
        return self.relu(out)


class Discarding(nn.Module):
    """The ReLU's result is thrown away; its tensor goes on under the old name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.first(x)
        self.relu(y)
        z = self.second(y)
        z.mul_(2.0)
        z += y
        return z


def made(model):
    torch.manual_seed(0)
    module = model().eval()
    sim = qsdk.quantize(module, X[:2], qsdk.w8a8())
    qsdk.calibrate(sim, [X], progress=False)
    return module, sim


@pytest.mark.slow
def test_a_discarded_in_place_result_is_quantized_all_the_same(tmp_path):
    _, sim = made(Discarding)
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert rows["relu:output"]["state"] == "quantized"
    assert rows["second:bias"]["dtype"] == "int32"  # so its input is known to be quantized
    with sim.captured() as found:
        sim(X)
    encoding = sim.encodings["relu:output"]
    assert (encoding.fake_quantize(found["relu:output"]) == found["relu:output"]).all()
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [X], progress=False).summary["passed"]


def test_a_discarded_result_that_gradients_are_computed_from_cannot_be_trained_and_says_why():
    _, sim = made(Discarding)
    with (
        sim.training() as model,
        pytest.raises(qsdk.ModelError, match=r"in-place op at relu:output .* read again by its old name; write y = op"),
    ):
        model(X)


class Hidden(nn.Module):
    """Scores of which some are written over, in a statement or by a new name."""

    def __init__(self, in_place):
        super().__init__()
        self.query, self.key, self.in_place = nn.Linear(5, 5), nn.Linear(5, 5), in_place

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        mask = torch.eye(5, dtype=torch.bool)
        if self.in_place:
            scores.masked_fill_(mask, -2.0)
            scores.mul_(x)
        else:
            scores = scores.masked_fill(mask, -2.0) * x
        return scores.softmax(-1) @ x


def test_a_statement_that_writes_into_a_tensor_trains_as_the_op_with_a_new_name():
    gradients = []
    for in_place in (True, False):
        _, sim = made(lambda in_place=in_place: Hidden(in_place))
        with sim.training(learn_scales=True) as model:
            model(X).square().sum().backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    first, second = gradients
    assert len(first) == len(second) > 10
    for name, wanted in second.items():
        torch.testing.assert_close(first[name], wanted, msg=name)


@pytest.mark.slow
def test_ordinary_in_place_ops_train_and_agree_with_the_exported_file(tmp_path):
    _, sim = made(Residual)
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(X).square().sum().backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "qsdk" not in name)
        optimizer.step()
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [X], progress=False).summary["passed"]


@pytest.mark.slow
def test_in_place_ops_cost_no_copy_where_nothing_reads_the_old_name():
    _, sim = made(Residual)
    assert sim.runtime.written.write_back == frozenset()
    assert sim.coverage().summary["float"] == 2  # inside Conv+Relu and Add+Relu, and nothing else


def test_a_slice_of_two_axes_shares_the_encoding_of_its_source(tmp_path):
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 1)

        def forward(self, x):
            return self.conv(x)[:, 1:, 1:]

    _, sim = made(Sliced)
    row = next(row for row in sim.coverage().rows if row["site"] == "getitem.0:output")
    assert row["state"] == "tied"
    assert "conv:output" in row["reason"]


def assigned_twice(c):
    c[..., 0] = c[..., 0] / 7.0
    c[..., 1] = c[..., 1] / 8.0
    return c


def rectified_parts(c):
    c[..., :2] = torch.relu(c[..., :2])
    c[..., 2:] = c[..., 2:].sigmoid()
    return c


def counted(c):
    n = c.new_zeros(4)
    n.scatter_add_(0, torch.tensor([0, 1, 1, 2]), c.new_ones(4))
    n = n.clamp(min=1)
    return c / n


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.first, self.last = write, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.write(self.first(x).clone()))


@pytest.mark.parametrize("write", [assigned_twice, rectified_parts, counted])
def test_what_is_written_over_after_it_was_quantized_trains_as_in_float(write):
    torch.manual_seed(0)
    model, x = Written(write).eval(), torch.randn(16, 4)
    sim = qsdk.quantize(model, x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    model(x).square().mean().backward()
    for learn in (False, True):
        with sim.training(learn_scales=learn) as live:
            live.zero_grad()
            live(x).square().mean().backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(live.get_parameter(name).grad, p.grad, rtol=0.1, atol=0.06)
