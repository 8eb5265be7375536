"""Memory and time from a checkpoint folder to 4-bit files, for decoders of TinyLlama's shape with random weights.

One JSON line at the end, and each row on stderr as it is done. Per number of layers (6, 11 and 22, the last of 1.1
billion parameters, in bfloat16): the bytes of the weights, the largest resident size of the process, both in MiB, and
the processor time over that of the fewest layers. Each runs in a process of its own; the weights are written by another
one. Targets: at most 1536 MiB by round-to-nearest and 4096 MiB by gptq on 8 x 512 tokens, whatever the number of
layers, and time in proportion to them.

`python benchmarks/checkpoint_folder.py gptq 6 11` measures gptq with 6 and 11 layers, `rtn-genai` and `gptq-genai`
write a folder for onnxruntime-genai in the place of an ONNX file, with its last check, whose runtime is a process of
its own and not counted. `phases` says for each part of the way the largest size that was sampled while it ran.
"""

import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAYERS = (6, 11, 22)
#: functions of the package that are a part of the way, the inner one of two counts
PHASES = (
    "quantize_folder",
    "calibrate",
    "gptq",
    "traced",
    "lower",
    "in_float32",
    "fuse",
    "write_files",
    "check_folder",
)
TOKENS = {"rtn": (1, 64), "gptq": (8, 512)}


def write_checkpoint(folder: str, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder, max_shard_size="600MB")


@contextmanager
def sampled_phases() -> Iterator[dict[str, int]]:
    """Resident MiB at most, by the part that the calling thread was in; sampled every 20 ms."""
    caller, done, found = threading.get_ident(), threading.Event(), dict[str, int]()

    def sample() -> None:
        while not done.wait(0.02):
            frame = sys._current_frames().get(caller)
            while frame is not None and frame.f_code.co_name not in PHASES:
                frame = frame.f_back
            name = "between" if frame is None else frame.f_code.co_name
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
            found[name] = max(resident, found.get(name, 0))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def quantize(folder: str, out: str, name: str) -> None:
    """Print the largest resident size in MiB and the processor time in seconds."""
    import torch

    import qsdk

    torch.set_num_threads(1)
    method, _, form = name.partition("-")
    batches, length = TOKENS[method]
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(0, 32000, (1, length))} for _ in range(batches)]
    begun = time.process_time()
    config, options = qsdk.w4a16(block_size=32), {"verbs": ["gptq"] if method == "gptq" else [], "data": data}
    if form:
        config, options = config.for_dialect(form), {**options, "format": form}
    with sampled_phases() as phases:
        qsdk.quantize_checkpoint(folder, out, config, max_memory=200 << 20, progress=False, **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"peak_mib": peak, "phases": phases, "seconds": time.process_time() - begun}))


def in_process(*arguments: object) -> str:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(method: str = "rtn", *layers: str) -> None:
    rows = {}
    for count in [int(number) for number in layers] or LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder, "checkpoint")
            in_process("write", checkpoint, count)
            weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) >> 20
            measured = json.loads(in_process("quantize", checkpoint, Path(folder, "out"), method).splitlines()[-1])
            rows[count] = {"weights_mib": weights, **measured}
            print(f"{method}, {count} layers: {rows[count]}", file=sys.stderr, flush=True)
    least = min(rows)
    for row in rows.values():
        row["time"] = round(row["seconds"] / rows[least]["seconds"], 2)
    for row in rows.values():
        del row["seconds"]
    print(json.dumps({"method": method, "layers": rows}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", folder, count]:
            write_checkpoint(folder, int(count))
        case ["quantize", folder, out, method]:
            quantize(folder, out, method)
        case arguments:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the folder goes, as at the end
            main(*arguments)
