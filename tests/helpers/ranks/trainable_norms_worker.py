"""One of two processes that train a sim with live BatchNorms: `python trainable_norms_worker.py rank store out`."""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from rank_group import in_process_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch_models import seeded
from trainable_norm_models import fresh

import qsdk
from qsdk import QuantSim

BATCHES = [seeded(8, 2, 6, 6, seed=k) for k in range(4)]


def stepped(model: nn.Module, sim: QuantSim, batches: list[Tensor]) -> None:
    """An ordinary loop."""
    optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.05, scale_lr=0.01))
    for x in batches:
        optimizer.zero_grad()
        (model(x) - 0.3).square().mean().backward()
        optimizer.step()


def result(sim: QuantSim) -> dict[str, Any]:
    """What a trained sim is."""
    return {"state": {name: x.clone() for name, x in sim.model.state_dict().items()}, "output": sim(BATCHES[0])}


def trained(rank: int) -> dict[str, Any]:
    """Train with statistics frozen from the start, after two steps, and never but re-estimated at the end; sharded."""
    mine = [x[rank::2] for x in BATCHES]
    found = {}
    for name, after in (("frozen", 0), ("half", 2), ("estimated", 100)):
        sim = fresh()
        with sim.training(learn_scales=True, freeze_bn_after=after) as live:
            stepped(nn.parallel.DistributedDataParallel(live), sim, mine)
            if name == "estimated":
                qsdk.reestimate_batch_norm(sim, mine, progress=False)
        found[name] = result(sim)
    sim = fresh()
    with sim.training(learn_scales=True, freeze_bn_after=0) as live:
        for layer in (live.conv1, live.conv2, live.fc):
            fully_shard(layer)
        stepped(fully_shard(live), sim, mine)
        inside = live.eval()(BATCHES[0])
    return found | {"sharded": {"output": sim(BATCHES[0]), "inside": inside}}


def main() -> None:
    """Write down what was found each way."""
    rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    found = in_process_group(lambda: trained(rank), rank=rank, size=2, store=store)
    stream = io.BytesIO()
    torch.save(found, stream)
    Path(out).write_bytes(stream.getvalue())


if __name__ == "__main__":
    main()
