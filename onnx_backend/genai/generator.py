"""A folder in onnxruntime-genai's own Generator, for another process: a file that ends it leaves the caller alive.

This file runs as a script and imports NumPy and the runtime alone. It reads a question in JSON and writes arrays.
"""

import json
import sys

import numpy as np
import onnxruntime_genai as og


def main() -> None:
    """Generate the most likely tokens after a prompt, and write them with the logits that they were chosen by."""
    asked = json.load(sys.stdin)
    model = og.Model(asked["folder"])
    options = og.GeneratorParams(model)
    prompt = asked["prompt"]
    options.set_search_options(max_length=len(prompt) + asked["count"], do_sample=False, num_beams=1, min_length=0)
    generator, tokens, logits = og.Generator(model, options), list(prompt), []
    if asked["adapter"]:
        adapters = og.Adapters(model)
        adapters.load(asked["adapter"], "adapter")
        generator.set_active_adapter(adapters, "adapter")
    generator.append_tokens(np.array([prompt], np.int32))
    for _ in range(asked["count"]):
        logits.append(np.asarray(generator.get_logits()).reshape(-1, asked["vocabulary"])[-1].astype(np.float32))
        tokens.append(int(logits[-1].argmax()))
        if len(logits) < asked["count"]:
            generator.append_tokens(np.array([tokens[-1:]], np.int32))
    np.savez(asked["result"], tokens=np.array(tokens), logits=np.array(logits))


if __name__ == "__main__":
    main()
