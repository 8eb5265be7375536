"""Small models, data and every verb, for tests of where tensors are made."""

import torch
from torch import nn
from torch.nn import functional as F

import qsdk

IMAGES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
IDS = [torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.last, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        return self.head(self.last(F.relu(self.conv2(x)) + 1).mean((2, 3)))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.mlp = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return self.mlp(F.gelu(x))


MODELS = {"images": (Images, IMAGES), "text": (Text, IDS)}


def loss(model, batch):
    return model(batch).square().mean()


def tune(sim, data):
    qsdk.tune_blocks(sim, data, iterations=2, progress=False)


def train(sim, data):
    with sim.training(learn_scales=True):
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-4))
        for batch in data:
            optimizer.zero_grad()
            loss(sim.model, batch).backward()
            optimizer.step()


def calibrate_by(method):
    return lambda sim, data: qsdk.calibrate(sim, data, method=method, weight_method="mse", progress=False)


VERBS = {
    **{method: calibrate_by(method) for method in ("min_max", "moving_average", "percentile", "mse", "entropy")},
    "seq_mse": lambda sim, data: qsdk.seq_mse(sim, data, progress=False),
    "adaround": lambda sim, data: qsdk.adaround(sim, data, iterations=20, progress=False),
    "gptq": lambda sim, data: qsdk.gptq(sim, data, progress=False),
    "smooth_quant": lambda sim, data: qsdk.smooth_quant(sim, data, progress=False),
    "awq": lambda sim, data: qsdk.awq(sim, data, progress=False),
    "equalize": lambda sim, data: qsdk.equalize(sim, data, progress=False),
    "correct_bias": lambda sim, data: qsdk.correct_bias(sim, data, progress=False),
    "reestimate_batch_norm": lambda sim, data: qsdk.reestimate_batch_norm(sim, data, progress=False),
    "tune_blocks": tune,
    "training": train,
    "sim": lambda sim, data: sim(data[0]),
}
