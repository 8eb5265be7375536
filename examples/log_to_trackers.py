"""The numbers of long verbs in TensorBoard, MLflow or Weights & Biases.

    pip install . tensorboard    # in a copy of the repository
    python examples/log_to_trackers.py && tensorboard --logdir runs

A callback is a function of `(name, value, step)`. `qsdk.train.callbacks` passes it what the verbs measure; your own
training loop calls it as well, with its loss, and a schedule with the scales that are learned.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import qsdk

Callback = Callable[[str, float, int], object]


def to_tensorboard(writer: Any) -> Callback:
    """A `torch.utils.tensorboard.SummaryWriter`: its `add_scalar` is a callback as it is."""
    return writer.add_scalar


def to_mlflow(mlflow: Any) -> Callback:
    """The module `mlflow`, inside `with mlflow.start_run():`."""
    return lambda name, value, step: mlflow.log_metric(name, value, step=step)


def to_wandb(run: Any) -> Callback:
    """A run of `wandb.init()`.

    W&B drops what is logged at a lower step than it has seen, and every name here counts from 0: so each name gets a
    step of its own, which `define_metric` makes the axis of its chart.
    """
    known = set()

    def log(name: str, value: float, step: int) -> None:
        if name not in known:
            known.add(name)
            run.define_metric(name, step_metric=f"{name}/step")
        run.log({name: value, f"{name}/step": step})

    return log


def main(log: Callback) -> qsdk.Report:
    """Round the weights of a small network, and train it; gives the report of `adaround`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [torch.randn(32, 16) for _ in range(8)]
    targets = [model(x).detach() for x in batches]

    with qsdk.train.callbacks(log):
        sim = qsdk.quantize(model, batches[0], qsdk.w4a8())
        qsdk.calibrate(sim, batches, progress=False)
        report = qsdk.adaround(sim, batches, progress=False)

    def log_scales(sim: Any, step: int) -> None:
        for site, encoding in sim.encodings.items():
            log(f"scale/{site}", float(encoding.scale.mean()), step)

    with sim.training(learn_scales=True, schedules=[log_scales]) as trained:
        optimizer = torch.optim.AdamW(sim.parameter_groups(lr=1e-3, scale_lr=1e-2))
        for step, (x, y) in enumerate(zip(batches, targets, strict=True)):
            loss = F.mse_loss(trained(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log("train/loss", loss.item(), step)
    return report


if __name__ == "__main__":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install tensorboard, or pass another tracker's callback to main") from error

    with SummaryWriter() as tensorboard:
        print(main(to_tensorboard(tensorboard)))
