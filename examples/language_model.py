"""A language model from its checkpoint folder to a file with 4-bit weights, without ever holding all of its weights.

    pip install . transformers    # in a copy of the repository
    python examples/language_model.py CHECKPOINT OUT --text texts.txt
    python examples/generate_text.py OUT/model.onnx --tokenizer OUT/tokenizer.json --text "Once upon a time"

CHECKPOINT is a folder with config.json, safetensors files and a tokenizer, as you download it. Without arguments a tiny
Llama with random weights shows the road. The last tenth of the tokens is held back: the program prints how well the
float model and the quantized one predict them. A run that is killed goes on where it was when it is started again.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import qsdk


def tiny_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a tiny Llama with random weights in bfloat16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def token_windows(folder: Path, text: Path | None, length: int) -> list[Tensor]:
    """Return windows [1, length] of the text's tokens; random ones of the tiny model without a text."""
    if text is None:
        return list(torch.randint(0, 128, (20, 1, length)))
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt")["input_ids"]
    return [ids[:, at : at + length] for at in range(0, ids.shape[1] - length + 1, length)]


def main(checkpoint: Path | None, out: Path, text: Path | None = None, length: int = 128) -> dict[str, float]:
    """Quantize and export; return the perplexities of the float and the quantized model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint or tiny_checkpoint(Path(scratch, "tiny"))
        windows = token_windows(folder, text, length)
        held_back = max(1, len(windows) // 10)
        data = [{"input_ids": ids} for ids in windows[:-held_back]]
        sim = qsdk.quantize(folder, None, qsdk.weight_only("int4", block_size=32, kv_cache="int8"))
        qsdk.calibrate(sim, data)
        qsdk.gptq(sim, data, checkpoint=out / "solved")
        score = torch.cat(windows[-held_back:])
        float_model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        found = {
            "float": qsdk.analysis.perplexity(float_model, score),
            "quantized": qsdk.analysis.perplexity(sim, score),
        }
        report = qsdk.export(sim, out / "model.onnx", external_data=True)
        if text is not None:
            AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    print(f"{report.summary['ratio']:.2f} of the bytes of float32; perplexity:", found)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="folder of the checkpoint; none for a tiny model")
    parser.add_argument("out", type=Path, nargs="?", default=Path("quantized"), help="folder to write")
    parser.add_argument("--text", type=Path, help="a text file to calibrate and score on")
    parser.add_argument("--length", type=int, default=128, help="tokens that the model reads at once")
    options = parser.parse_args()
    if options.checkpoint is not None and options.text is None:
        parser.error("give --text with a checkpoint of your own")
    if options.checkpoint is not None and not (options.checkpoint / "config.json").is_file():
        parser.error(f"{options.checkpoint} is no folder of a checkpoint: it has no config.json")
    if options.text is not None and not options.text.is_file():
        parser.error(f"there is no file {options.text}")
    main(options.checkpoint, options.out, options.text, options.length)
