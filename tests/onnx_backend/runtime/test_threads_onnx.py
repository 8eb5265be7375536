"""An ONNX sim in several threads: what another thread changes meanwhile is there afterwards, in whole."""

from copy import deepcopy
from threading import Thread

import numpy as np
from in_threads import in_threads
from integer_comparison import noise
from integer_models import Net

from qsdk import calibrate, quantize, w8a8


def network():
    net = Net()
    x = net.input(["n", 8])
    net.output(net.op("Relu", net.op("MatMul", x, net.const(noise((8, 8), 0.3)))), ["n", 8])
    return net.model()


def test_every_thread_gets_what_it_gets_alone_though_nothing_is_built_yet():
    sim, batches = deepcopy(quantize(network(), None, w8a8())), [noise((16, 8), seed=number) for number in range(8)]
    calibrate(sim, batches, progress=False)
    alone = [sim(x)[0] for x in batches]
    state = sim.snapshot()
    sim.restore(state)  # drops the session
    for found in in_threads([lambda: [sim(x)[0] for x in batches]] * 8):
        assert not isinstance(found, Exception), found
        assert all(np.array_equal(a, b) for a, b in zip(alone, found, strict=True))


def test_a_session_that_is_built_while_the_encodings_change_does_not_outlive_them(monkeypatch):
    """The change waits for the session of the old encodings, which it then drops."""
    x = noise((16, 8))
    sim = quantize(network(), None, w8a8())
    calibrate(sim, [x * 2], progress=False)
    wide, wanted = sim.snapshot(), sim(x)[0]
    calibrate(sim, [x], progress=False)
    narrow = sim(x)[0]
    assert not np.array_equal(narrow, wanted)
    sim.restore(sim.snapshot())  # drops the session
    build, found = sim.qdq_model, []

    def building(*args):
        """Build while another thread restores the wide encodings."""
        made = build(*args)
        thread = Thread(target=lambda: sim.restore(wide))
        thread.start()
        thread.join(0.2)
        found.append(thread)
        return made

    monkeypatch.setattr(sim, "qdq_model", building)
    assert np.array_equal(sim(x)[0], narrow)  # begun before the change
    found[0].join()
    monkeypatch.undo()
    assert np.array_equal(sim(x)[0], wanted)
