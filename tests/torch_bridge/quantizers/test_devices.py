"""Every tensor that a verb makes is on the device of the module: the default device is a trap meanwhile."""

import pytest
import torch
from device_models import MODELS, VERBS

import qsdk


@pytest.mark.spread(1)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", MODELS)
def test_no_verb_makes_a_tensor_on_the_default_device(kind, verb):
    make, data = MODELS[kind]
    torch.manual_seed(0)
    fold = verb != "reestimate_batch_norm"
    sim = qsdk.quantize(make().eval(), data[0], qsdk.w4a8(), fold_batch_norm=fold)
    qsdk.calibrate(sim, data, progress=False)
    with torch.device("meta"):  # a tensor made without device= has no values, and fails beside one that has
        VERBS[verb](sim, data)
    stored = sim.model.state_dict().values()
    assert {value.device.type for value in stored} == {"cpu"}
    assert sim(data[0]).device.type == "cpu"
