"""Text from an exported decoder, with ONNX Runtime and NumPy alone.

    pip install onnxruntime numpy tokenizers
    python examples/generate_text.py decoder.onnx --tokens 1,9038,2501,263,931 --count 64
    python examples/generate_text.py decoder.onnx --tokenizer tokenizer.json --text "Once upon a time"

The file is one that `qsdk.export` has written for an example with a cache, or with `kv_cache=` in the config: it takes
the keys and values of earlier tokens as `past_key_values.0.key` and so on, and gives those of all as `present.0.key`,
as floats or, after `qsdk.export(..., cache="integer")`, as integers.
The first run takes the whole prompt and an empty cache, each later one a single token.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

PAST, PRESENT = "past_key_values", "present"
TYPES = {"float": np.float32, "float16": np.float16, "int8": np.int8, "uint8": np.uint8, "int16": np.int16}


def open_decoder(path: str) -> ort.InferenceSession:
    """Open a file at the default level: lower ones dequantize every weight for each token."""
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def next_tokens(session: ort.InferenceSession, prompt: Sequence[int]) -> Iterator[int]:
    """Yield the most likely token after the prompt, then the one after that, without end."""
    inputs = {one.name: one for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    if "input_ids" not in inputs or not any(name.startswith(PAST) for name in inputs):
        raise SystemExit(f"this is no decoder with a cache: it takes {', '.join(inputs)}; see the top of this program")
    cache = {
        name: np.zeros((1, one.shape[1], 0, one.shape[3]), TYPES[one.type[len("tensor(") : -1]])
        for name, one in inputs.items()
        if name.startswith(PAST)
    }
    tokens, step = list(prompt), list(prompt)
    while True:
        feeds: dict[str, Any] = {
            "input_ids": np.array([step], np.int64),
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(len(tokens) - len(step), len(tokens))[None],
        }
        feeds = {name: value for name, value in feeds.items() if name in inputs}
        results = dict(zip(names, session.run(None, {**feeds, **cache}), strict=True))
        cache = {name: results[name.replace(PAST, PRESENT, 1)] for name in cache}
        step = [int(results["logits"][0, -1].argmax())]
        tokens += step
        yield step[0]


def generate(path: str, prompt: Sequence[int], count: int) -> list[int]:
    """Return the prompt with `count` more tokens."""
    found = next_tokens(open_decoder(path), prompt)
    return [*prompt, *(next(found) for _ in range(count))]


def main() -> None:
    """Read the arguments and print what the file generates."""
    parser = argparse.ArgumentParser(description="generate text with an exported decoder")
    parser.add_argument("model", help="the exported file")
    parser.add_argument("--tokens", help="the prompt as numbers, such as 1,9038,2501")
    parser.add_argument("--text", help="the prompt as text; needs --tokenizer")
    parser.add_argument("--tokenizer", help="tokenizer.json of the checkpoint; needs the package tokenizers")
    parser.add_argument("--count", type=int, default=32, help="how many tokens to generate (32)")
    given = parser.parse_args()
    if (given.tokens is None) == (given.text is None) or (given.text is not None and given.tokenizer is None):
        parser.error("give --tokens, or --text and --tokenizer")
    if given.tokens is not None:
        print(*generate(given.model, [int(token) for token in given.tokens.split(",")], given.count), sep=",")
        return
    from tokenizers import Tokenizer  # only those who give text need it

    tokenizer = Tokenizer.from_file(given.tokenizer)
    print(tokenizer.decode(generate(given.model, tokenizer.encode(given.text).ids, given.count)))


if __name__ == "__main__":
    main()
