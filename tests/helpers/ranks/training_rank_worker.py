"""One of two processes that train together: `torchrun --nproc-per-node=2 training_rank_worker.py folder`."""

import copy
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from rank_group import in_process_group
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_models import calibrated, seeded
from training_models import Transformer, loss_of

import qsdk
from qsdk import ModelError, QuantSim

BATCHES = [seeded(8, 5, 4, seed=seed) for seed in range(4)]


class Branches(nn.Module):
    """Skips a branch, with its sites, in every second step: [N, 5, 4] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.skips = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x.mean(1))
        return x if self.skips else self.sometimes(torch.sigmoid(x))


@functools.cache
def _made(model: type[nn.Module]) -> QuantSim:
    torch.manual_seed(0)
    return calibrated(model(), BATCHES[0])


def sim_of(model: type[nn.Module] = Transformer) -> QuantSim:
    """The same sim in every process."""
    return copy.deepcopy(_made(model))


def train(
    sim: QuantSim,
    wrap: Callable[[nn.Module], Any],
    part: slice,
    *,
    before_step: Callable[[int], None] = lambda step: None,
    at_end: Callable[[nn.Module], Any] = lambda model: None,
) -> Any:
    """Train with this process's part of each batch; gives what `at_end` makes of the model inside of the block."""
    with sim.training(learn_scales=True, learn_zero_points=True) as model:
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.05, scale_lr=20.0), momentum=0.9)
        for step, x in enumerate(BATCHES):
            before_step(step)
            optimizer.zero_grad()
            loss_of(wrapped(x[part])).backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
        assert int(model.qsdk_steps) == len(BATCHES)
        return at_end(model)


def facts(sim: QuantSim) -> dict[str, Any]:
    """What was trained."""
    weights = {name: p.detach().flatten().tolist() for name, p in sim.model.named_parameters()}
    scales = {site: e.scale.flatten().tolist() for site, e in sim.encodings.items()}
    points = {site: e.zero_point.flatten().tolist() for site, e in sim.encodings.items()}
    return {"weights": weights, "scales": scales, "zero_points": points}


def shard(model: nn.Module) -> nn.Module:
    """FSDP2: a unit for each layer, for the head, and for the rest."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model.head)
    return fully_shard(model)


def fsdp(half: slice, folder: Path) -> dict[str, Any]:
    """Train sharded, and bring what was trained into a sim that is not."""
    sim, options = sim_of(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    state = train(sim, shard, half, at_end=lambda model: get_model_state_dict(model, options=options))
    evaluated = sim(BATCHES[0])
    refused = [_refusal(sim.unwrap), _refusal(lambda: qsdk.export(sim, str(folder / "sharded.onnx")))]
    buffers = all(type(buffer) is Tensor for buffer in sim.model.buffers())
    whole = sim_of()
    whole.model.load_state_dict(state)
    found = {
        **facts(whole),
        "buffers": buffers,
        "refused": refused,
        "off": float((whole(BATCHES[0]) - evaluated).abs().max()),
    }
    if torch.distributed.get_rank() == 0:
        found["parity"] = exported(whole, folder / "fsdp.onnx")
    return found


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


def exported(sim: QuantSim, path: Path) -> dict[str, Any]:
    """Export, and hold the file against the sim."""
    qsdk.export(sim, str(path))
    return qsdk.check_parity(sim, str(path), BATCHES[:1], progress=False).to_dict()["summary"]


def ddp(half: slice, folder: Path, **options: Any) -> dict[str, Any]:
    """Train with DistributedDataParallel."""
    sim = sim_of()
    train(sim, lambda model: DistributedDataParallel(model, **options), half)
    found = facts(sim)
    if torch.distributed.get_rank() == 0 and not options:
        found["parity"] = exported(sim, folder / "ddp.onnx")
    return found


def skipping(wrap: Callable[[nn.Module], Any], part: slice) -> dict[str, Any]:
    """Train a model that skips sites in every second step."""
    sim = sim_of(Branches)

    def switch(step: int) -> None:
        sim.model.skips = step % 2 == 1

    train(sim, wrap, part, before_step=switch)
    return facts(sim)


def made_too_early(half: slice) -> str:
    """DistributedDataParallel around a model that has no learned scales yet."""
    sim = sim_of()
    early = DistributedDataParallel(sim.model)
    try:
        train(sim, lambda model: early, half)
    except ModelError as error:
        return str(error)
    return ""


def together(folder: Path) -> dict[str, Any]:
    """Train each way with the other rank."""
    rank = torch.distributed.get_rank()
    half = slice(rank * 4, rank * 4 + 4)
    found: dict[str, Any] = {"ddp": ddp(half, folder), "static": ddp(half, folder, static_graph=True)}
    found["fsdp"] = fsdp(half, folder)
    finding = lambda model: DistributedDataParallel(model, find_unused_parameters=True)  # noqa: E731
    found["skipping"] = skipping(finding, half)
    return found | {"early": made_too_early(half)}


def main() -> None:
    """Write down what was found each way."""
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    found = in_process_group(lambda: together(folder))
    if rank == 0:
        alone, everything = sim_of(), slice(None)
        before = facts(copy.deepcopy(alone))
        train(alone, lambda model: model, everything)
        found |= {"before": before, "alone": facts(alone), "skipping alone": skipping(lambda m: m, everything)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
