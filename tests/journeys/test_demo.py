"""The demo's data and network."""

import torch

import qsdk.demo


def test_pictures_have_a_mean_of_0_and_a_deviation_of_1_and_the_network_knows_them():
    data = qsdk.demo.data()
    for images in (data.calibration_images, data.test_images):
        assert abs(images.mean()) < 0.03
        assert abs(images.std() - 1) < 0.03
    with torch.no_grad():
        scores = qsdk.demo.network()(torch.from_numpy(data.test_images[:512])).numpy()
    assert (scores.argmax(1) == data.test_labels[:512]).mean() > 0.88
