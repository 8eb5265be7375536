"""Sims of checkpoint folders: the weights stay in their files, which nothing ever writes to."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import digests, token_rows, write_checkpoint
from tiny_decoders import VOCABULARY
from torch import nn
from transformers import AutoModelForCausalLM

import qsdk
from torch_bridge.stored_weights import WeightFiles
from torch_bridge.workarounds.mapped_pages import mapped_ranges, release_pages

DATA = token_rows(3, 12, VOCABULARY)
CONFIG = qsdk.w4a16(block_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def calibrated(folder: Path):
    sim = qsdk.quantize(folder, None, CONFIG)
    qsdk.calibrate(sim, DATA, progress=False)
    return sim


def test_weights_behind_links_are_in_files_too(folder: Path, tmp_path: Path):
    for file in folder.iterdir():  # as the hub keeps what it has downloaded
        (tmp_path / file.name).symlink_to(file)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    files = WeightFiles(tmp_path, resident=1 << 20, scratch=tmp_path)
    assert all(files.hold(parameter) for parameter in model.parameters())


def both_sims(folder: Path):
    """Return the sim of the folder, and that of the same model in memory."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    example = {"input_ids": torch.arange(2, 18).reshape(1, -1)}
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    return qsdk.quantize(folder, None, CONFIG), qsdk.quantize(model, example, CONFIG, dynamic_shapes=axes)


def state_of(sim):
    return [sim.run(batch).logits for batch in DATA], sim.encodings, sim.unwrap().state_dict()


@pytest.mark.slow
def test_a_sim_of_a_folder_is_the_sim_of_its_model_after_every_verb(folder: Path):
    before = digests(folder)
    sims = both_sims(folder)
    own = {name: value.clone() for name, value in sims[0].unwrap().state_dict().items()}
    steps = {
        "calibrate": lambda sim: qsdk.calibrate(sim, DATA, progress=False),
        "rotate": lambda sim: qsdk.rotate(sim, DATA, progress=False),
        "awq": lambda sim: qsdk.awq(sim, DATA, progress=False),
        "gptq": lambda sim: qsdk.gptq(sim, DATA, progress=False),
        "training": train,
    }
    for step in steps.values():
        for sim in sims:
            step(sim)
        (logits, encodings, weights), (expected, in_memory, theirs) = map(state_of, sims)
        assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))
        assert encodings == in_memory
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    given = sims[0].given.originals(sims[0].model)
    assert len(given) > 5
    assert all(torch.equal(value, own[f"{path}.{name}"]) for (path, name), value in given.items())
    assert digests(folder) == before


def train(sim) -> None:
    with sim.training() as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-2))
        for batch in DATA:
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_weights_that_a_verb_changed_lie_in_files(calibrated):
    files = calibrated.weight_files
    weight = calibrated.model.model.layers[0].mlp.down_proj.weight
    assert files.hold(weight)
    assert not files.hold(weight.clone())
    first = weight.data_ptr()
    qsdk.gptq(calibrated, DATA, progress=False)
    assert files.hold(weight)
    assert weight.data_ptr() != first


@pytest.mark.slow
def test_a_walk_that_fails_leaves_a_sim_of_a_folder_as_it_was(calibrated):
    sim = calibrated
    before, places = sim.run(DATA[0]).logits, [x.data_ptr() for x in sim.model.parameters()]
    bad = [*DATA, {"input_ids": torch.full((1, 12), VOCABULARY + 5)}]
    with pytest.raises(qsdk.QsdkError):
        qsdk.gptq(sim, bad, progress=False)
    assert [x.data_ptr() for x in sim.model.parameters()] == places
    assert torch.equal(sim.run(DATA[0]).logits, before)


def test_released_pages_are_read_again(tmp_path: Path):
    values = np.arange(1 << 20, dtype=np.float32)
    values.tofile(tmp_path / "weights.bin")
    mapped = torch.from_file(str(tmp_path / "weights.bin"), size=len(values), dtype=torch.float32)
    mapped[:1000] = -1  # a change in memory, which must survive
    files = WeightFiles(tmp_path, resident=1 << 20, scratch=tmp_path)
    assert files.hold(mapped)
    assert mapped_ranges([str(tmp_path)])
    release_pages([str(tmp_path)])
    assert torch.equal(mapped[:1000], torch.full((1000,), -1.0))
    assert torch.equal(mapped[1000:], torch.from_numpy(values[1000:]))


def test_no_room_for_changed_weights_is_said_with_the_remedy(tmp_path: Path):
    files = WeightFiles(tmp_path, resident=1 << 20, scratch=tmp_path / "nowhere")
    with pytest.raises(qsdk.ModelError, match=r"no room for 400 bytes of changed weights.*TMPDIR"):
        files.empty_like(torch.zeros(100))


class TwoInOne(nn.Module):
    """A model whose two weights are views of one tensor, as sharded and bucketed parameters are."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2, 4, 4)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first.weight.data, self.second.weight.data = whole[0], whole[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.slow
def test_writing_one_of_two_weights_in_one_storage_keeps_what_the_user_gave():
    sim = qsdk.quantize(TwoInOne(), torch.randn(2, 4), qsdk.w8a8(), in_place=True)
    own = sim.model.first.weight.detach().clone()
    sim.store_floats({"first:weight": np.ones((4, 4), np.float32)})
    assert torch.equal(sim.given.originals(sim.model)["first", "weight"], own)
