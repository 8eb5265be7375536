"""The float type of a marked tensor, and the pair that quantizes it: the runtimes' pairs compute in float32.

A float16 tensor whose scales are float16 too has a pair of its own type, which ONNX Runtime computes in float32 as well
(measured; from opset 23 on the attribute `precision` says so, before it no file can). All others are cast to float32 in
front of the pair and back behind it, and these casts record their site.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, helper

from onnx_backend.dialects.dialect import Dialect
from onnx_backend.proto.graph_queries import unique
from onnx_backend.proto.nodes import attributes, set_metadata
from onnx_backend.qdq.graph_editor import GraphEditor
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES
from qsdk.core.numerics.encoding import Encoding

_PAIRS: Mapping[Dialect, tuple[str, ...]] = MappingProxyType(
    {"onnxruntime": ("float16",), "onnx": ("float16", "bfloat16")}
)


def type_of_mark(mark: NodeProto) -> str:
    """Return the float type of the tensor that a mark marks: float32, float16, bfloat16 or float64."""
    return str(attributes(mark).get("dtype", FLOAT32))


def array_type(dtype: str) -> np.dtype[Any]:
    """Return the NumPy (or ml_dtypes) type of a float type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(FLOAT_CODES[dtype]))


def pair_type(dtype: str, encoding: Encoding, dialect: Dialect) -> str:
    """Return the float type of the pair that quantizes a tensor: its own if that holds every scale, else float32.

    Args:
        dtype: of the tensor.
        encoding: of the site.
        dialect: ONNX Runtime has no pairs of bfloat16.
    """
    if dtype not in _PAIRS.get(dialect, ()) or not encoding.dtype.is_integer or encoding.dtype.narrows_container:
        return FLOAT32
    with np.errstate(over="ignore"):
        narrow = encoding.scale.astype(array_type(dtype)).astype(np.float32)
    return dtype if np.array_equal(narrow, encoding.scale) else FLOAT32


def scales_as(scale: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return scales in the float type of their pair."""
    return scale.astype(array_type(dtype))


def widen(at: GraphEditor, site: str, source: str, dtype: str) -> str:
    """Cast a tensor to float32 for its pair; return the new tensor, or the given one where it is float32."""
    if dtype == FLOAT32:
        return source
    wide = unique(f"{site}/float32", at.taken)
    set_metadata(at.add("Cast", [source], wide, f"{site}/widen", to=FLOAT_CODES[FLOAT32]), cast_of=site)
    return wide


def dequantize_to(at: GraphEditor, site: str, inputs: list[str], name: str, dtype: str, **options: Any) -> NodeProto:
    """Add the DequantizeLinear of a site whose result is the tensor `name` of a type that its scale may not have.

    Args:
        at: the editor.
        site: its name.
        inputs: codes, scale and, if any, zero point.
        name: of the tensor that readers read.
        dtype: float32 for no cast; else the type to which the float32 result is cast.
        options: attributes of the DequantizeLinear.
    """
    wide = name if dtype == FLOAT32 else unique(f"{site}/dequantized32", at.taken)
    dequantize = at.add("DequantizeLinear", inputs, wide, f"{site}/dequantize", **options)
    if dtype != FLOAT32:
        set_metadata(at.add("Cast", [wide], name, f"{site}/narrow", to=FLOAT_CODES[dtype]), cast_of=site)
    return dequantize
