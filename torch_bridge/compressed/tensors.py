"""The tensors of a folder in the format compressed-tensors, one layer at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ExportError
from qsdk.core.site import site_name
from torch_bridge.compressed.layers import CompressedLayer
from torch_bridge.compressed.packing import as_read, codes_of, packed, scales_of
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.wrapping.pretrained import encoding_keys


def file_tensors(
    model: nn.Module, layers: Mapping[str, CompressedLayer], quantizers: Mapping[str, Quantizer]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a model by their names in its state_dict, codes and scales in place of quantized weights.

    Args:
        model: of a sim.
        layers: path -> layer whose weight is written as codes.
        quantizers: of the sim, by site.

    Raises:
        ExportError: a reader would compute another weight than the sim, or a tensor is sharded over ranks.
    """
    own, weights = encoding_keys(model), {f"{path}.weight".lstrip("."): path for path in layers}
    state, shared, written = model.state_dict(), _tied_names(model), set[Any]()
    for name, value in state.items():
        if name in own or not isinstance(value, Tensor):
            continue
        if hasattr(value, "to_local"):
            raise ExportError(f"{name} is sharded over ranks; gather the model's parameters first")
        place = (value.data_ptr(), value.shape, value.stride())
        if name in shared and place in written:
            continue  # the reader ties it, as the model's config says
        written.add(place)
        if name in weights:
            yield _compressed(value, layers[weights[name]], quantizers)
        else:
            owner, _, port = name.rpartition(".")
            quantizer = quantizers.get(site_name(owner, port))
            used = value.detach() if quantizer is None else quantizer(value.detach())
            yield {name: used.to("cpu", copy=True).contiguous()}


@torch.no_grad()
def _compressed(weight: Tensor, layer: CompressedLayer, quantizers: Mapping[str, Quantizer]) -> dict[str, Tensor]:
    """Return the tensors of a layer, which give the weight of the sim to the last bit.

    Raises:
        ExportError: they do not.
    """
    site, prefix = site_name(layer.path, "weight"), f"{layer.path}." if layer.path else ""
    codes = codes_of(weight, layer.encoding).cpu()
    scale, zero_point = scales_of(layer.encoding, weight.dtype)
    if not torch.equal(as_read(codes, scale, zero_point), quantizers[site](weight.detach()).cpu()):
        raise ExportError(
            f"a reader of compressed-tensors would not compute the weight that the sim has at {site}: it multiplies in "
            f"{str(weight.dtype).removeprefix('torch.')}; quantize the model in the dtype that it is exported in, "
            "float32, bfloat16 or float16"
        )
    result = {"weight_scale": scale}
    bits, dense = layer.weights["num_bits"], layer.format != "pack-quantized"
    if dense:
        result["weight"] = codes
    else:
        result |= {"weight_packed": packed(codes, bits), "weight_shape": torch.tensor(weight.shape)}
    if not layer.weights["symmetric"]:
        groups = not dense and layer.weights["strategy"] != "tensor"
        result["weight_zero_point"] = packed(zero_point.T, bits).T if groups else zero_point
    if layer.inputs is not None and layer.input_encoding is not None:
        result["input_scale"], zero = scales_of(layer.input_encoding, weight.dtype)
        if not layer.inputs["symmetric"]:
            result["input_zero_point"] = zero
    return {prefix + name: tensor.contiguous() for name, tensor in result.items()}


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names that a model of transformers ties to others when it is read."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return {str(name) for name in tied}
