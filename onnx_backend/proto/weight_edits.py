"""Changes to the stored tensors of a sim's model; a snapshot costs no more than what is changed after it."""

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import FLOATS, is_reference, reference
from onnx_backend.proto.graph_queries import initializers
from qsdk.core.errors import ModelError


class WeightSnapshot:
    """The stored tensors of a model at one moment: those that were changed since, copied just before."""

    def __init__(self) -> None:
        self.before: dict[str, TensorProto] = {}


class WeightEdits:
    """The stored tensors of one sim's model and the changes to them; the user's file stays as it is."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        self._snapshots: weakref.WeakSet[WeightSnapshot] = weakref.WeakSet()

    def hold(self) -> WeightSnapshot:
        """Return a snapshot for `put_back`; it copies a tensor only just before that is replaced."""
        snapshot = WeightSnapshot()
        self._snapshots.add(snapshot)
        return snapshot

    def write(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace stored float tensors, by name, by other values of the same shape, rounded to their type.

        Raises:
            ModelError: no stored float tensor has this name, or it has another shape; nothing is changed then.
        """
        stored = initializers(self._model.graph)
        written = {name: _tensor(name, value, stored.get(name)) for name, value in values.items()}
        self._replace(stored, written)

    def put_back(self, snapshot: WeightSnapshot) -> None:
        """Restore the stored tensors of a snapshot.

        Raises:
            ModelError: the snapshot is of another model.
        """
        if snapshot not in self._snapshots:
            raise ModelError(
                "the snapshot holds the weights of another sim; restore it in the sim that it was taken of"
            )
        self._replace(initializers(self._model.graph), dict(snapshot.before))

    def files_read(self) -> Iterator[Path]:
        """Yield the files that hold tensors which can be put back."""
        for snapshot in self._snapshots:
            yield from (reference(tensor)[0] for tensor in snapshot.before.values() if is_reference(tensor))

    def _replace(self, stored: Mapping[str, TensorProto], by: Mapping[str, TensorProto]) -> None:
        for name, tensor in by.items():
            lacking = [snapshot for snapshot in self._snapshots if name not in snapshot.before]
            if lacking:
                before = TensorProto()
                before.CopyFrom(stored[name])
                for snapshot in lacking:
                    snapshot.before[name] = before
            stored[name].CopyFrom(tensor)


def _tensor(name: str, value: npt.NDArray[Any], current: TensorProto | None) -> TensorProto:
    if current is None or current.data_type not in FLOATS:
        raise ModelError(f"the model stores no float tensor of the name {name!r}; only those can be changed")
    if tuple(current.dims) != value.shape:
        raise ModelError(f"{name} has the shape {tuple(current.dims)}, not {value.shape}")
    with np.errstate(over="ignore"):  # too large for a narrower type: infinite
        typed = np.ascontiguousarray(value).astype(helper.tensor_dtype_to_np_dtype(current.data_type))
    return numpy_helper.from_array(typed, name)
