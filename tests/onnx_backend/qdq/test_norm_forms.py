"""GroupNormalization as the InstanceNormalization of its groups, and codes joined in the place of floats."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from fast_files import exported, require_same_sim
from torch import nn

import qsdk
from onnx_backend.qdq.fast_forms import with_pairs

CONFIGS = {"all": qsdk.w8a8(), "kernels": qsdk.w8a8().for_dialect("onnxruntime", processor="vnni")}


def results(model, feed):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: feed.numpy()})[0]


@pytest.mark.parametrize(
    ("groups", "places", "placement"),
    [
        (8, 1, "kernels"),
        (4, 2, "all"),
        *(
            pytest.param(groups, places, placement, marks=pytest.mark.slow)
            for groups, places, placement in (
                (4, 1, "kernels"),
                (8, 1, "all"),
                (1, 2, "all"),
                (1, 2, "kernels"),
                (8, 3, "all"),
                (4, 3, "kernels"),
            )
        ),
    ],
)
def test_a_group_norm_is_one_kernel_for_its_groups_at_any_size(groups, places, placement, tmp_path):
    torch.manual_seed(groups + places)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1]
    model = nn.Sequential(conv(3, 8, 3, padding=1), nn.GroupNorm(groups, 8, eps=0.1), nn.SiLU(), conv(8, 4, 1))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    batches = [torch.randn(2, 3, *(9, 7, 5)[:places])]
    sim, path, ran, wanted, got = exported(model, batches, CONFIGS[placement], tmp_path)
    assert ran.count("InstanceNormalization") == 1
    assert not {"ReduceMean", "Sqrt", "Div"} & set(ran), "the runtime has written the norm out"
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    file = onnx.load(path)
    plain = with_pairs(file)
    assert Counter(node.op_type for node in plain.graph.node)["GroupNormalization"] == 1
    for feed in (torch.randn(5, *batches[0].shape[1:]), 100 * torch.ones(1, *batches[0].shape[1:])):
        np.testing.assert_allclose(results(file, feed), results(plain, feed), atol=0.02 * np.abs(wanted).max())


def test_a_group_norm_of_half_precision_or_of_any_places_stays_as_it_is(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 1))
    batches = [torch.randn(2, 3, 6, 6)]
    for example, axes in ((batches[0].half(), None), (batches[0], {"input": {0: "n", 2: "h", 3: "w"}})):
        sim = qsdk.quantize(model.to(example.dtype), example, qsdk.w8a8(), dynamic_shapes=axes)
        qsdk.calibrate(sim, [example], progress=False)
        qsdk.export(sim, tmp_path / "m.onnx")
        file = onnx.load(tmp_path / "m.onnx")
        assert Counter(node.op_type for node in file.graph.node)["GroupNormalization"] == 1
        model.float()


@pytest.mark.parametrize("groups", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_file_with_a_group_norm_of_signed_codes_loads(groups, tmp_path):
    """The runtime does not load a Reshape beside them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(groups, 8), nn.Conv2d(8, 4, 1))
    batches, config = [torch.randn(2, 3, 6, 6)], qsdk.w8a8().override("*", activation="int8")
    sim, path, ran, wanted, got = exported(model, batches, config, tmp_path)
    assert ("InstanceNormalization" in ran) == (groups == 8)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


class Pyramid(nn.Module):
    """Joins an image and enlarged ones, as heads for segmentation do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(3, channels, 4, stride=4)
        self.last = nn.Conv2d(2 * channels + 3, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives five channels."""
        large = nn.functional.interpolate(self.second(x), scale_factor=4.0, mode="bilinear")
        return self.last(torch.cat([large, torch.tanh(self.first(x)), large[:, :3]], 1))


@pytest.mark.parametrize(
    ("channels", "joins_codes"), [(40, True), pytest.param(4, False, marks=pytest.mark.slow)], ids=["many", "few"]
)
def test_many_floats_are_quantized_before_they_are_joined(channels, joins_codes, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(1, 3, 24, 24)]
    sim, path, _, wanted, got = exported(Pyramid(channels), batches, CONFIGS["kernels"], tmp_path)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    file = onnx.load(path)
    makers = {name: node.op_type for node in file.graph.node for name in node.output}
    (concat,) = (node for node in file.graph.node if node.op_type == "Concat")
    assert {makers[name] == "QuantizeLinear" for name in concat.input} == {joins_codes}
    feed = torch.randn(3, 3, 24, 24)
    np.testing.assert_array_equal(results(file, feed), results(with_pairs(file), feed))
