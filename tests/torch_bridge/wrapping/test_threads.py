"""One sim in several threads: every forward pass gives what it gives alone, or says why it cannot run."""

import copy
import pickle

import pytest
import torch
from in_threads import in_threads
from torch import Tensor, nn
from torch_models import calibrated, seeded

from qsdk import ModelError, w4a8


class Branching(nn.Module):
    """Ops of its own beside its layers, which are numbered call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))) + 1
        y = y * torch.sigmoid(y)
        return torch.tanh(self.fc(y.flatten(1))) + self.fc(y.flatten(1) * 2)


@pytest.mark.slow
def test_every_thread_gets_the_outputs_it_gets_alone():
    torch.manual_seed(0)
    sim = calibrated(Branching().eval(), seeded(4, 3, 4, 4), w4a8())
    inputs = [[seeded(4, 3, 4, 4, seed=20 * part + number) for number in range(20)] for part in range(6)]
    alone = [[sim(x) for x in part] for part in inputs]
    together = in_threads([lambda part=part: [sim(x) for x in part] for part in inputs])
    for one, other in zip(alone, together, strict=True):
        assert not isinstance(other, Exception), other
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_sim_in_a_phase_of_another_thread_is_not_run():
    torch.manual_seed(0)
    x = seeded(4, 3, 4, 4)
    sim = calibrated(Branching().eval(), x)
    want = sim(x)
    with sim.captured():
        (refused,) = in_threads([lambda: sim(x)])
        sim(x)  # its own thread runs it
    assert isinstance(refused, ModelError)
    with pytest.raises(ModelError, match=r"another thread calibrates, tunes or traces the sim .* copies of the sim"):
        raise refused
    assert torch.equal(in_threads([lambda: sim(x)])[0], want)


class Caching(nn.Module):
    """Keeps in eval mode what it computes of a parameter, and reads it twice, as position biases are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.bias is None:
            self.bias = torch.sigmoid(self.table)
        y = self.fc(x)
        for _ in range(20):  # long enough for another thread to end meanwhile
            y = torch.tanh(y)
        return y + self.bias


@pytest.mark.slow
def test_threads_do_not_clear_the_caches_of_others():
    torch.manual_seed(0)
    sim = calibrated(Caching().eval(), seeded(4, 8), w4a8())
    assert sim.runtime.caches
    inputs = [[seeded(4, 8, seed=20 * part + number) for number in range(20)] for part in range(6)]
    alone = [[sim(x) for x in part] for part in inputs]
    for _ in range(5):
        together = in_threads([lambda part=part: [sim(x) for x in part] for part in inputs])
        for one, other in zip(alone, together, strict=True):
            assert not isinstance(other, Exception), other
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    copy.deepcopy(sim)(inputs[0][0])
    pickle.loads(pickle.dumps(sim.model))
