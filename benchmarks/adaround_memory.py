"""Memory that AdaRound takes beyond a calibrated sim: a ResNet of 175,000 parameters, 512 images in batches of 64.

One JSON line, in MiB: `extra` is the peak of the process during `adaround` less what it held before, with W4A8, random
weights and random images (memory does not depend on them), `images` what the images themselves hold. Linux alone.
"""

import json

import torch
from ptq_measure import calibrated, one_thread
from ptq_networks import resnet14
from qat_memory import forget_peak, resident

import qsdk
from qsdk.core.freed_memory import give_back

IMAGES, BATCH = 512, 64


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    batches = list(torch.randn(IMAGES, 1, 28, 28).split(BATCH))
    sim = calibrated(resnet14().eval(), batches, qsdk.w4a8())
    qsdk.adaround(sim, batches[:1], progress=False)  # what the first call loads and caches is not of the data
    sim = calibrated(resnet14().eval(), batches, qsdk.w4a8())
    give_back()  # what was freed before is not to count
    before = resident("VmRSS")
    forget_peak()
    qsdk.adaround(sim, batches, progress=False)
    extra, images = resident("VmHWM") - before, sum(4 * batch.numel() for batch in batches) // 1024
    print(json.dumps({"benchmark": "adaround_memory", "extra": round(extra / 1024), "images": round(images / 1024, 1)}))


if __name__ == "__main__":
    main()
