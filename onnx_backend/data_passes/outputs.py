"""The outputs of an ONNX sim and of its float model, batch by batch."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from onnx_backend.lower import lower
from onnx_backend.runtime.feeds import as_feeds, run_session
from onnx_backend.runtime.session import bounded_session
from onnx_backend.sim import OnnxSim
from qsdk.core.planning.plan import Plan


def outputs(sim: OnnxSim, batches: Iterable[Any], *, in_float: bool) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yield the floating-point outputs of each batch, in order, of the simulation or of the float model.

    Raises:
        DataError: a batch that the model does not take.
    """
    session = _in_float(sim) if in_float else None
    for number, batch in enumerate(batches):
        where = f"batch {number}"
        if session is None:
            found = sim.run(batch)
        else:
            found = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        yield [np.asarray(y, np.float32) for y in found if np.issubdtype(y.dtype, np.floating)]


def _in_float(sim: OnnxSim) -> ort.InferenceSession:
    exact = lower(sim.traced().model, Plan({}, ()), {})
    return bounded_session(exact.model, exact.large, sim.in_memory, providers=sim.providers)
