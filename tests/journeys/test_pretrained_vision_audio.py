"""EfficientNet-Lite0 and CREPE with their published weights through the whole road."""

import pytest
import zoo
import zoo_audio
from pretrained_road import require_whole_road, travelled

import qsdk

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    images, labels = zoo.imagenet_images(lite=True)
    road = travelled(zoo.efficientnet_lite0(), images.split(5), qsdk.w8a8(), tmp_path_factory.mktemp("lite0"))
    return road, images, labels


@pytest.fixture(scope="module")
def tones():
    return zoo_audio.tones(200)


@pytest.fixture(
    scope="module",
    params=[pytest.param("w8a8", marks=pytest.mark.slow), pytest.param("w4a8", marks=pytest.mark.nightly)],
)
def crepe(request, tmp_path_factory):
    config = {"w8a8": qsdk.w8a8, "w4a8": qsdk.w4a8}[request.param]()
    calibration = zoo_audio.tones(100, seed=1)[0].split(50)
    return travelled(zoo_audio.crepe(), calibration, config, tmp_path_factory.mktemp("crepe"))


@pytest.mark.nightly
def test_efficientnet_lite0_keeps_its_accuracy_in_every_form(lite0):
    road, images, labels = lite0
    correct = [int((run([images]).argmax(1) == labels).sum()) for run in (road.in_float, road.simulated, road.deployed)]
    assert correct[0] == 18
    assert min(correct) >= 17


@pytest.mark.nightly
def test_efficientnet_lite0_pads_before_its_convolutions_and_folds_all_its_batch_norms(lite0):
    road, images, _ = lite0
    summary = road.sim.coverage().summary
    assert summary["folded"] == 49
    assert not [key for key in summary if "not folded" in key]
    require_whole_road(road, [images[:2]])


def test_crepe_hears_the_same_pitch_in_every_form(crepe, tones):
    waves, pitch = tones
    for run in (crepe.in_float, crepe.simulated, crepe.deployed):
        within = (zoo_audio.cents(run([waves])) - pitch).abs() <= 50
        assert within.double().mean() >= 0.98


def test_crepe_keeps_its_batch_norms_behind_relus_and_says_why(crepe, tones):
    summary = crepe.sim.coverage().summary
    assert summary["folded"] == 0
    reasons = [reason for key, reason in summary.items() if "not folded" in key]
    assert reasons == ["no Linear or convolution stands directly before or after it"] * 6
    require_whole_road(crepe, [tones[0][:8]])
