"""Quantization-aware training in a Lightning module, at W4A4.

    pip install ".[examples]"    # in a copy of the repository
    python examples/lightning_module.py

The module is given `sim.model` as it would be given the float model; its optimizer gets the parameter groups that know
the learned scales. The task: the class of a point in one of three spirals.
"""

import math
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qsdk


def spirals(count: int, seed: int) -> TensorDataset:
    """Points [count, 2] on three spirals, and the number of the spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 3 * radius + labels * 2 * math.pi / 3 + 0.1 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels)


class Classifier(pl.LightningModule):
    """Trains any classifier, quantized or not."""

    def __init__(self, model: nn.Module, groups: Any) -> None:
        super().__init__()
        self.model, self.groups = model, groups

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, labels = batch
        return F.cross_entropy(self.model(x), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on the groups of parameters that were given."""
        return torch.optim.AdamW(self.groups)


def train(model: nn.Module, groups: Any, epochs: int) -> None:
    """An ordinary training: the same for the float model and for the quantized one."""
    loader = DataLoader(spirals(1024, seed=0), batch_size=64, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(model, groups), loader)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of right answers on points that were not trained on."""
    points, labels = spirals(1024, seed=1).tensors
    return float((model.eval()(points).argmax(-1) == labels).float().mean())


def main(out: str = "spirals.onnx") -> dict[str, float]:
    """Train in float, quantize, train again, export; gives the accuracies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    train(model, [{"params": list(model.parameters()), "lr": 1e-2}], epochs=15)
    found = {"float": accuracy(model)}

    batches = [spirals(256, seed=2).tensors[0]]
    sim = qsdk.quantize(model, batches[0], qsdk.w4a8().override("*", activation="uint4"))
    qsdk.calibrate(sim, batches, progress=False)
    found["quantized"] = accuracy(sim.model)

    with sim.training(learn_scales=True) as trained:
        train(trained, sim.parameter_groups(lr=1e-3, scale_lr=1e-2), epochs=6)
    found["trained"] = accuracy(sim.model)

    qsdk.export(sim, out)
    assert qsdk.check_parity(sim, out, batches, progress=False).to_dict()["summary"]["passed"]
    return found


if __name__ == "__main__":
    print(main())
