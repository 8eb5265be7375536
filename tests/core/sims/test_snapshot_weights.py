"""`sim.snapshot(weights=True)`: what a verb may change comes back bit for bit, at both doors."""

import gc
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from islands import batches, everything, onnx_model, outputs, sim_at
from stored_values import stored_bytes
from torch import nn

import qsdk
from qsdk import ModelError, calibrate, check_parity, export, mixed_precision, quantize, w8a8
from qsdk.core.sims.state import put_back_on_error

both = pytest.mark.parametrize("door", ["torch", "onnx"])


def change(sim, factor=1.5):
    """Change a weight, a bias, and a BatchNorm's statistics."""
    if hasattr(sim, "model"):
        with torch.no_grad():
            sim.model.conv1.weight.mul_(factor)
            sim.model.fc2.bias.add_(factor)
            sim.model.bn1.running_mean.add_(factor)
        return
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in sim.traced().model.graph.initializer}
    names = sim.stored_names()
    norm = next(node for node in sim.traced().model.graph.node if node.op_type == "BatchNormalization")
    weight, bias, mean = names["conv1:weight"], names["fc2:bias"], norm.input[3]
    sim.change_stored({weight: stored[weight] * factor, bias: stored[bias] + factor, mean: stored[mean] + factor})


@both
def test_weights_encodings_and_outputs_come_back_bit_for_bit(door):
    sim = sim_at(door)
    sim.freeze("conv1")
    before, stored, given = everything(sim), stored_bytes(sim), outputs(sim)
    state = sim.snapshot(weights=True)
    change(sim)
    sim.unfreeze("conv1")
    calibrate(sim, batches(door), progress=False)
    sim.set_precision("fc1", "int4")
    assert stored_bytes(sim) != stored
    assert not np.array_equal(outputs(sim), given)
    sim.restore(state)
    assert stored_bytes(sim) == stored
    assert everything(sim) == before
    assert np.array_equal(outputs(sim), given)


@both
def test_snapshots_nest_and_each_leads_to_its_own_moment(door):
    sim = sim_at(door)
    moments = []
    for factor in (1.5, 0.5, 2.0):
        moments.append((sim.snapshot(weights=True), stored_bytes(sim), outputs(sim)))
        change(sim, factor)
    for index in (1, 2, 0, 1):
        state, stored, given = moments[index]
        sim.restore(state)
        assert stored_bytes(sim) == stored
        assert np.array_equal(outputs(sim), given)


@both
def test_a_snapshot_without_weights_leaves_them_alone(door):
    sim = sim_at(door)
    state = sim.snapshot()
    change(sim)
    changed = stored_bytes(sim)
    sim.restore(state)
    assert stored_bytes(sim) == changed


@pytest.mark.spread(1)
@both
def test_changed_weights_are_what_is_calibrated_simulated_and_exported(door, tmp_path):
    sim = sim_at(door)
    old = sim.encodings["conv1:weight"].scale
    change(sim, 2.0)
    calibrate(sim, batches(door), progress=False)
    np.testing.assert_array_equal(sim.encodings["conv1:weight"].scale, old * 2)
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", batches(door), progress=False).summary["passed"]


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_weights_as_they_were(door, error):
    sim = sim_at(door)
    before, stored = everything(sim), stored_bytes(sim)

    def fails():
        change(sim)
        sim.set_precision("fc1", "int4")
        raise error

    with pytest.raises(error), put_back_on_error(sim, weights=True):
        fails()
    assert stored_bytes(sim) == stored
    assert everything(sim) == before


@both
def test_the_weights_of_another_model_are_refused(door):
    sim, other = sim_at(door), _other(door)
    before = stored_bytes(sim)
    with pytest.raises(ModelError, match=r"restore it in the (sim|model) that it was taken of"):
        sim.restore(replace(sim.snapshot(), stored=other.snapshot(weights=True).stored))
    assert stored_bytes(sim) == before


def _other(door):
    if door == "torch":
        return quantize(nn.Sequential(nn.Linear(4, 2)), torch.randn(2, 4), w8a8())
    return quantize(onnx_model(), None, w8a8(), fold_batch_norm=False)


def test_parameters_stay_the_same_objects_and_optimizers_keep_them():
    sim = sim_at("torch")
    weight, storage = sim.model.conv1.weight, sim.model.conv1.weight.data_ptr()
    state = sim.snapshot(weights=True)
    with sim.training(learn_scales=True):
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.1))
        sim.model(batches("torch")[0]).square().sum().backward()
        optimizer.step()
        inside = sim.snapshot(weights=True)
    trained = weight.detach().clone()
    sim.restore(state)
    assert sim.model.conv1.weight is weight
    assert weight.data_ptr() == storage
    assert not torch.equal(weight, trained)
    sim.restore(inside)  # what was held while scales were learned holds no parameter of theirs
    assert torch.equal(weight, trained)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("nowhere", (2,), "no float tensor of the name 'nowhere'"), ("fc2.bias", (3,), r"fc2.bias has the shape")],
)
def test_a_stored_tensor_that_cannot_be_changed_is_named(name, shape, message):
    sim = sim_at("onnx")
    before = stored_bytes(sim)
    bias = sim.stored_names()["fc1:bias"]
    with pytest.raises(ModelError, match=message):
        sim.change_stored({bias: sim.stored_floats(["fc1:bias"])["fc1:bias"] + 1, name: np.zeros(shape, np.float32)})
    assert stored_bytes(sim) == before


@pytest.mark.slow
def test_a_weight_in_a_file_is_changed_in_memory_and_put_back_as_a_reference(tmp_path):
    rng = np.random.default_rng(0)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")],
        "large",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 640])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 640])],
        [onnx.numpy_helper.from_array(rng.normal(size=(640, 640)).astype(np.float32), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "large.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    file = (tmp_path / "w.data").read_bytes()
    sim = quantize(tmp_path / "large.onnx", None, w8a8())
    x = rng.normal(size=(4, 640)).astype(np.float32)
    calibrate(sim, [x], progress=False)
    before, given = stored_bytes(sim), sim.run(x)[0]
    assert (tmp_path / "w.data").resolve() in sim.files_read()
    state = sim.snapshot(weights=True)
    name = sim.stored_names()["matmul:weight"]
    sim.change_stored({name: sim.stored_floats(["matmul:weight"])["matmul:weight"] * 0.5})
    assert not np.allclose(sim.run(x)[0], given)
    assert (tmp_path / "w.data").resolve() in sim.files_read()  # the snapshot may want it again
    sim.restore(state)
    assert stored_bytes(sim) == before
    assert np.array_equal(sim.run(x)[0], given)
    sim.change_stored({name: sim.stored_floats(["matmul:weight"])["matmul:weight"] * 0.5})
    del state
    gc.collect()
    assert (tmp_path / "w.data").resolve() in sim.files_read()  # the value that was given
    assert (tmp_path / "w.data").read_bytes() == file


@both
def test_looking_for_sensitive_sites_leaves_the_sim_bit_for_bit(door):
    sim = sim_at(door)
    sim.freeze("conv1")
    before, stored, given, random = everything(sim), stored_bytes(sim), outputs(sim), torch.get_rng_state()
    qsdk.analysis.advise(sim, batches(door), progress=False)
    mixed = sim.snapshot(weights=True)
    report = mixed_precision(
        sim, batches(door), lambda s: -float(np.abs(outputs(s) - given).max()), max_drop=np.inf, progress=False
    )
    assert report.summary["raised"] == []  # any loss is allowed, so nothing was raised
    assert everything(sim) == before
    assert stored_bytes(sim) == stored
    assert np.array_equal(outputs(sim), given)
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ZeroDivisionError):
        mixed_precision(sim, batches(door), lambda s: 1 / 0, max_drop=0.1, progress=False)
    assert everything(sim) == before
    sim.restore(mixed)
    assert stored_bytes(sim) == stored
