"""What GGUF files of stories15M are worth in llama.cpp: gptq's codes in Q4_0 and Q5_0 beside llama.cpp's own types.

One JSON line: perplexity of 64 stories of 128 tokens that the float model told, computed by llama.cpp on one thread,
over that of the float file, and bits per weight of the quantized tensors. `tool_*` are made by llama.cpp's own kernels
(`ggml_quantize_chunk`) from the float file: `tool_q4_0`, and `tool_q4_k_m` by the rule of its Q4_K_M, which takes Q5_0
and Q8_0 in place of Q4_K and Q6_K where 256 does not divide the rows, as those of 288. `gptq_*` are sims, calibrated on
32 other stories; all keep the embedding in Q8_0, as the rule does.
`python benchmarks/gguf_files.py --stories 8` is quicker.
"""

import argparse
import ctypes
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import llama_cpp
import zoo_text

FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def kind_in_q4_k_m(name: str, layers: int, columns: int) -> str:
    """Return the type that llama.cpp's Q4_K_M gives a tensor."""
    kind = "Q6_K" if name == "token_embd.weight" else "Q4_K"
    if name.startswith("blk.") and (".attn_v." in name or ".ffn_down." in name):
        layer = int(name.split(".")[1])
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        kind = "Q6_K" if more else "Q4_K"
    return kind if columns % 256 == 0 else FALLBACK[kind]


def requantized(source: Path, target: Path, *, q4_k_m: bool) -> float:
    """Write a float file again with the tool's own kernels, and return the bits per weight of its matrices."""
    library = ctypes.CDLL(str(import_module("xllamacpp.xllamacpp").__file__))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    reader = gguf.GGUFReader(source)
    layers = int(reader.fields["llama.block_count"].contents())
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    stored, weights = 0, 0
    for tensor in reader.tensors:
        values = np.ascontiguousarray(tensor.data, np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        rows, columns = values.shape
        name = "Q8_0" if tensor.name == "token_embd.weight" else "Q4_0"
        kind = gguf.GGMLQuantizationType[kind_in_q4_k_m(tensor.name, layers, columns) if q4_k_m else name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.empty((rows, columns // block * size), np.uint8)
        library.ggml_quantize_chunk(int(kind), values.ctypes.data, data.ctypes.data, 0, rows, columns, None)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
        stored, weights = stored + data.nbytes, weights + values.size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 8 * stored / weights


def perplexity(path: Path, told: torch.Tensor) -> float:
    with llama_cpp.llama_cpp(path) as opened:
        logits = torch.stack([torch.from_numpy(opened.logits(story[:-1].numpy())) for story in told])
    return zoo_text.perplexity(logits, told)


def gptq_file(model: Any, heard: list[Any], weight: str, path: Path) -> float:
    """Write the file of a sim after gptq, and return the bits of its weights."""
    config = qsdk.weight_only(weight, block_size=32).for_dialect("gguf")
    sim = qsdk.quantize(model, heard[0], config)
    qsdk.calibrate(sim, [], progress=False)
    qsdk.gptq(sim, heard, progress=False)
    return float(qsdk.export(sim, path, format="gguf").summary["bits_per_weight"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=int, default=64)
    given = parser.parse_args()
    llama = zoo_text.stories()
    told = zoo_text.told(zoo_text.NextToken(llama), given.stories, 128)
    heard = [{"input_ids": part} for part in zoo_text.told(zoo_text.NextToken(llama), 32, 128, seed=1).split(4)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "float.gguf")
        sim = qsdk.quantize(llama, heard[0], qsdk.weight_only("float32"))
        qsdk.export(sim, path, format="gguf")
        exact = perplexity(path, told)
        result: dict[str, Any] = {"float": round(exact, 4)}
        for name, made in (
            ("tool_q4_0", lambda file: requantized(path, file, q4_k_m=False)),
            ("tool_q4_k_m", lambda file: requantized(path, file, q4_k_m=True)),
            ("gptq_q4_0", lambda file: gptq_file(llama, heard, "int4", file)),
            ("gptq_q5_0", lambda file: gptq_file(llama, heard, "int5", file)),
        ):
            file = Path(folder, f"{name}.gguf")
            bits = made(file)
            result[name] = {"bits": round(bits, 3), "over_float": round(perplexity(file, told) / exact, 4)}
            print(name, result[name], file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
