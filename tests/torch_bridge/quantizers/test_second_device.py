"""A module on another device: verbs take batches of the host, and sims cross devices. No hardware is needed."""

import copy
import functools
import pickle

import pytest
import torch
from device_models import MODELS, VERBS
from second_device import FAR, noting_waits, second_device
from torch import nn

import qsdk
from torch_bridge.torch_values.batches import Example, move_arguments

# calibration with more methods feeds its batches in the same way, and a training loop is the user's own
SHARED = {"moving_average", "percentile", "mse", "training", "sim"}


@pytest.fixture(autouse=True, scope="module")
def _second_device():
    with second_device():
        yield


def sims(kind, *, fold=True):
    """One sim on the CPU and one on the second device, calibrated with data of their own devices."""
    return (*(copy.deepcopy(sim) for sim in quantized(kind, fold)), MODELS[kind][1])


@functools.cache
def quantized(kind, fold):
    make, data = MODELS[kind]
    found = []
    for device in (torch.device("cpu"), FAR):
        torch.manual_seed(0)
        own = [x.to(device) for x in data]
        sim = qsdk.quantize(make().eval().to(device), own[0], qsdk.w4a8(), fold_batch_norm=fold)
        qsdk.calibrate(sim, own, progress=False)
        found.append(sim)
    return found


def require_same(one, other):
    assert one.encodings == other.encodings
    values, others = one.model.state_dict(), other.model.state_dict()
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.equal(value.cpu(), others[name].cpu()), name


def devices_of(sim):
    return {value.device for value in sim.model.state_dict().values()}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "verb"),
    [("images", verb) for verb in VERBS if verb not in SHARED] + [("text", "gptq"), ("text", "awq")],
)
def test_verbs_take_batches_of_the_host_for_a_module_on_another_device(kind, verb):
    here, far, data = sims(kind, fold=verb != "reestimate_batch_norm")
    for sim in (here, far):
        VERBS[verb](sim, data)
    assert devices_of(far) == {FAR}
    require_same(here, far)


@pytest.mark.slow
def test_files_of_a_module_on_another_device_are_those_of_the_cpu(tmp_path):
    here, far, data = sims("text")
    moved = copy.deepcopy(here)
    moved.model.to(FAR)
    for name, sim in (("here", here), ("far", far), ("moved", moved)):
        qsdk.export(sim, tmp_path / f"{name}.onnx")
        assert qsdk.check_parity(sim, tmp_path / f"{name}.onnx", data, progress=False).summary["passed"]
    files = [(tmp_path / f"{name}.onnx").read_bytes() for name in ("here", "far", "moved")]
    assert files[0] == files[1] == files[2]


@pytest.mark.slow
def test_sims_are_saved_and_loaded_across_devices(tmp_path):
    here, far, data = sims("images")
    wanted = here(data[0])
    for name, sim in (("here", here), ("far", far)):
        qsdk.save(sim, tmp_path / name)
        for device in (torch.device("cpu"), FAR):
            torch.manual_seed(1)
            back = qsdk.load(tmp_path / name, MODELS["images"][0]().eval().to(device))
            assert devices_of(back) == {device}
            require_same(back, here)
            assert torch.equal(back(data[0].to(device)).cpu(), wanted)
            qsdk.calibrate(back, data, progress=False)


@pytest.mark.slow
def test_copies_and_moved_sims_compute_the_same():
    here, far, data = sims("images")
    wanted = here(data[0])
    to_far, to_cpu = copy.deepcopy(here), copy.deepcopy(far)
    to_far.model.to(FAR)
    to_cpu.model.to("cpu")
    for sim, device in ((to_far, FAR), (to_cpu, "cpu"), (copy.deepcopy(far), FAR), (copy.deepcopy(to_far), FAR)):
        assert torch.equal(sim(data[0].to(device)).cpu(), wanted)
        qsdk.calibrate(sim, data, progress=False)
    assert devices_of(to_cpu) == {torch.device("cpu")}
    assert torch.equal(pickle.loads(pickle.dumps(here))(data[0]), wanted)


class Lengths(nn.Module):
    """As code that packs sequences: lengths live on the host."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, lengths, scale=None):
        if lengths.device.type != "cpu":
            raise RuntimeError("lengths are on the device")
        x = self.layer(x)
        return x if scale is None else x * scale


@pytest.mark.slow
@pytest.mark.parametrize("keywords", [False, True])
def test_an_argument_that_was_on_the_host_in_the_example_stays_there(keywords, tmp_path):
    x, lengths = torch.randn(3, 8), torch.tensor([3, 2, 1])
    sim = qsdk.quantize(Lengths().to(FAR), (x.to(FAR), lengths), qsdk.w8a8())
    batch = {"x": x, "lengths": lengths, "scale": torch.ones(3, 1)} if keywords else [x, lengths]
    qsdk.calibrate(sim, [batch], progress=False)
    qsdk.save(sim, tmp_path / "sim")
    qsdk.calibrate(qsdk.load(tmp_path / "sim", Lengths().to(FAR)), [batch], progress=False)
    with pytest.raises(qsdk.DataError, match="lengths are on the device"):
        qsdk.calibrate(sim, [(x, lengths.to(FAR))], progress=False)


def test_a_batch_that_its_owner_has_placed_stays_as_it_is_after_the_module_has_moved():
    x, lengths = torch.randn(3, 8), torch.tensor([3, 2, 1])
    sim = qsdk.quantize(Lengths(), (x, lengths), qsdk.w8a8())
    sim.model.to(FAR)
    qsdk.calibrate(sim, [(x.to(FAR), lengths)], progress=False)
    with pytest.raises(
        qsdk.DataError, match=r"lengths are on the device.*forward="
    ):  # nothing says that they are apart
        qsdk.calibrate(sim, [(x, lengths)], progress=False)
    qsdk.calibrate(sim, [(x, lengths)], forward=lambda m, b: m(b[0].to(FAR), b[1]), progress=False)


def test_with_forward_the_batch_is_the_users():
    x, seen = torch.randn(3, 8), []
    sim = qsdk.quantize(nn.Linear(8, 4).to(FAR), x.to(FAR), qsdk.w8a8())

    def forward(model, batch):
        seen.append(batch)
        return model(batch.to(FAR))

    qsdk.calibrate(sim, [x], forward=forward, progress=False)
    assert seen[0] is x


def test_a_module_on_several_devices_gets_its_batches_as_they_are():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).to(FAR)), torch.randn(3, 8)
    args, kwargs = move_arguments(model, (x,), {"y": x}, Example((x,), {}).beside(model))
    assert args[0] is x
    assert kwargs["y"] is x


# --- what a GPU would have to wait for ---


CONFIGS = {
    "w4a8": qsdk.w4a8(),
    "per tensor": qsdk.w8a8().override("*", per_channel=False),
    "blocks": qsdk.w4a16(block_size=4),
    "float8": qsdk.w8a8().override("*", weight="float8e4m3fn", activation="float8e4m3fn"),
    "float4": qsdk.w8a8().override("*", weight="float4e2m1"),
    "dynamic": qsdk.w8a8().override("*", dynamic_activations=True),
}
OPTIONS = [{}, {"learn_scales": True, "learn_zero_points": True}, {"learn_scales": True, "gradient": "pact"}]


def test_reads_of_a_device_are_noted():
    x = torch.arange(4.0).to(FAR)
    reads = [
        lambda: x[0].item(),
        lambda: bool(x[0] > 1),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: torch.zeros(4).copy_(x),
        lambda: x[x > 1],
        lambda: x[[0, 1]],
        lambda: torch.tensor([1.0], device=FAR),
        lambda: x.copy_(torch.zeros(4)),
    ]
    for number, read in enumerate(reads):
        with noting_waits() as waits:
            read()
        assert len(waits) == 1, number
    with noting_waits() as waits:
        (x * 2 + 1).sum().clamp(0, 5) / torch.ones(4, device=FAR)
    assert waits == []


def waits_of_training(sim, batch, options):
    with sim.training(**options) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-4))
        with noting_waits() as waits:
            for _ in range(2):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return waits


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_waits_for_nothing_in_any_dtype(config):
    make, data = MODELS["text"]
    torch.manual_seed(0)
    batch = data[0].to(FAR)
    sim = qsdk.quantize(make().eval().to(FAR), batch, CONFIGS[config])
    qsdk.calibrate(sim, [batch], progress=False)
    for options in OPTIONS:
        assert waits_of_training(sim, batch, options) == []
    with noting_waits() as waits:
        sim(batch)
    assert waits == []


@pytest.mark.parametrize("options", OPTIONS)
def test_a_training_step_with_batch_norms_waits_for_nothing(options):
    _, far, data = sims("images")
    assert waits_of_training(far, data[0].to(FAR), options) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", MODELS)
def test_calibration_waits_once_for_each_batch(kind):
    _, far, data = sims(kind)
    counts = []
    for batches in (data[:1], data):
        own = [x.to(FAR) for x in batches]
        with noting_waits() as waits:
            qsdk.calibrate(far, own, progress=False)
        counts.append(len(waits))
    assert counts[1] - counts[0] == len(data) - 1


def test_an_example_in_another_dtype_keeps_what_is_no_tensor_of_the_old_one():
    given = Example((torch.ones(2), 3), {"scale": 0.5, "ids": torch.arange(2)})
    made = given.converted(torch.float32, torch.float64)
    assert (made.args[0].dtype, made.args[1]) == (torch.float64, 3)
    assert (made.kwargs["scale"], made.kwargs["ids"].dtype) == (0.5, torch.int64)
