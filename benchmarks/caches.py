"""What a cache of fewer bits costs a language model: the perplexity of stories15M with each, over that in float32.

Weights and activations are float. Calibrated on 8 stories of 128 tokens that the model told itself, measured on 8
others. `bytes` are those of keys and values between steps, with the scales of tokens, over float32's. One JSON line.
"""

import json
import sys
from pathlib import Path

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

BITS, HEAD = {"int8": 8, "int4": 4}, 48


def _config(dtype: str, keys: str, values: str) -> qsdk.QuantConfig:
    config = qsdk.weight_only("float32", kv_cache=dtype)
    return config.override("*.key", kv_cache_scales=keys).override("*.value", kv_cache_scales=values)


def main() -> None:
    model = zoo_text.stories()
    teller = zoo_text.NextToken(model).eval()
    heard = [{"input_ids": part} for part in zoo_text.told(teller, 8, 128).split(4)]
    told = zoo_text.told(teller, 8, 128, seed=2)
    exact = qsdk.analysis.perplexity(model, told, batch_size=8)
    result: dict[str, object] = {"float": round(exact, 3)}
    for dtype, bits in BITS.items():
        scales = [*((one, one) for one in ("tensor", "head", "channel", "token")), ("channel", "token")]
        for keys, values in scales:
            sim = qsdk.quantize(model, {"input_ids": told[:1, :16]}, _config(dtype, keys, values))
            qsdk.calibrate(sim, heard, progress=False)
            more = sum(one == "token" for one in (keys, values)) / 2 / HEAD
            over = round(qsdk.analysis.perplexity(sim, told, batch_size=8) / exact, 4)
            result[f"{dtype}, keys per {keys}, values per {values}"] = {
                "bytes": round(bits / 32 + more, 3),
                "over": over,
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
