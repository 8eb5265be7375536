"""The Python of the guide to models of other tools runs as it stands, on the demo network."""

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from foreign_models import by_onnxruntime, integers

from onnx_backend.runtime.session import simulation_session
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "foreign_models.md"


@pytest.mark.slow
def test_the_guide_to_models_of_other_tools_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = load().calibration_images[:16]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        net, example = load_pretrained(), torch.from_numpy(images[:2])
        torch.onnx.export(net, (example,), "demo.onnx", dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},))
        theirs = by_onnxruntime(
            onnx.load("demo.onnx"), images.shape, tmp_path, extra_options={"QDQKeepRemovableActivations": True}
        )
    onnx.save(theirs, "theirs.onnx")
    names: dict = {"images": images}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), names)
    (feed,) = [value.name for value in theirs.graph.input]
    np.testing.assert_array_equal(names["outputs"][0], simulation_session(theirs).run(None, {feed: images})[0])
    assert integers(onnx.load("applied.onnx")) == integers(onnx.load("model.onnx"))
    assert names["report"].summary["unmatched"] == 0
    kept = names["sim"].encodings
    assert all(names["more"].encodings[site] == kept[site] for site in kept)
