"""Say whether the files that qsdk writes of the benchmark networks are still the same, to the bit.

`python scripts/file_digests.py --write build/digests.json` before a change that must not change results, and
`python scripts/file_digests.py --against build/digests.json` behind it; names of networks choose a few. Digests hold
for one machine and one set of versions: the networks' weights are drawn, and trained nowhere.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from tqdm import tqdm

import qsdk

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from deployed_networks import NETWORKS, Network, settled

_CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a16": qsdk.w4a16(),
    "onnxruntime": qsdk.w8a8().for_dialect("onnxruntime"),
    "dynamic": qsdk.QuantConfig(dynamic_activations=True),
}
_TARGETS = ("standard", "onnxruntime", "portable")


def graph_digest(path: Path) -> str:
    """Return a digest of a file's graph, with all stored values, without its metadata (hashes of companions)."""
    model = onnx.load(path)
    return hashlib.sha256(model.graph.SerializeToString(deterministic=True)).hexdigest()[:16]


def digests(network: Network) -> dict[str, str]:
    """Return a digest of each file that is written of a network, or the first line of the refusal."""
    torch.manual_seed(0)
    batches = [network.batch(1, seed) for seed in range(2)]
    model = settled(network.make(), batches[0])
    found: dict[str, str] = {}

    def note(name: str, path: Path, write: Callable[[], object]) -> None:
        try:
            write()
            found[name] = graph_digest(path)
        except qsdk.QsdkError as error:
            found[name] = f"refused: {str(error).splitlines()[0][:120]}"

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, config in _CONFIGS.items():
            path = folder / f"{title.replace(' ', '_')}.onnx"
            try:
                sim = qsdk.quantize(model, batches[0], config)
                qsdk.calibrate(sim, batches, progress=False)
            except qsdk.QsdkError as error:
                found[title] = f"refused: {str(error).splitlines()[0][:120]}"
                continue
            note(title, path, lambda sim=sim, path=path: qsdk.export(sim, path, check=False))
            if path.exists():
                text = path.with_suffix(".encodings.json").read_bytes()
                found[f"{title}, encodings"] = hashlib.sha256(text).hexdigest()[:16]
        for target in _TARGETS:
            options = {"target": target, "data": [batches[0]], "progress": False}
            path = folder / f"{target}.onnx"
            note(f"integers, {target}", path, lambda p=path, o=options: qsdk.to_integer(folder / "w8a8.onnx", p, **o))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of networks; all by default")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    before = json.loads(given.against.read_text("utf-8")) if given.against else {}
    names = given.names or list(before or NETWORKS)
    now: dict[str, dict[str, str]] = {}
    for name in tqdm(names):
        now[name] = digests(NETWORKS[name])
        if given.write:  # at once: the next network may take long
            given.write.parent.mkdir(parents=True, exist_ok=True)
            given.write.write_text(json.dumps(now, indent=1), "utf-8")
    other = [
        f"{name}: {file}: {before[name].get(file)} before, {digest} now"
        for name in names
        for file, digest in now[name].items()
        if name in before and before[name].get(file) != digest
    ]
    print("\n".join(other) or f"{sum(map(len, now.values()))} files, none differs")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
