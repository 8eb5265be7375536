"""The size of a sim's file, and the weights that take 4 bits so that it fits."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qsdk.core.errors import ConfigError
from qsdk.core.precision.lowering import LowerableWeight, choose_lowered
from qsdk.core.precision.sensitivity import layers_of, sensitivity_report
from qsdk.core.sims.state import put_back_on_error
from qsdk.verbs.analysis.sensitivity import noise_of_layers
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.quantize import export

_ROUNDS = 6  # of choosing again where the file turned out larger than expected


def exported_bytes(sim: Sim) -> int:
    """Return the bytes of the model that `export(prefer="size")` writes, with external data, without encodings."""
    with TemporaryDirectory() as folder:
        export(sim, Path(folder) / "model.onnx", check=False, prefer="size")
        return sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix != ".json")


def lowerable_weights(sim: Sim) -> list[str]:
    """Return the weights of 8 bits that may take fewer: those that share no encoding and are not frozen."""
    frozen = {site for site, encoding in sim.encodings.items() if encoding.frozen}
    return [
        site
        for site, d in sim.plan.decisions.items()
        if d.kind == "weight" and d.quantized and not d.tied_to and d.spec is not None and d.spec.dtype.bits == 8
        if site not in frozen
    ]


def lower_weights(
    sim: Sim, data: Iterable[Any], size: int, max_bytes: int, options: Mapping[str, Any]
) -> tuple[list[str], int, list[dict[str, Any]]]:
    """Give 4 bits to the weights of 8 that matter least at the outputs, until the file fits.

    Args:
        sim: calibrated; it has the chosen weights afterwards.
        data: batches, re-iterable.
        size: bytes of its file now.
        max_bytes: that it may have.
        options: `forward` and `progress`.

    Returns:
        The sites, the bytes of the file, and the rows of `sensitivity` that the sites were chosen by.

    Raises:
        ConfigError: it does not fit even if all of them have 4 bits, which is said with its size; or the sim was opened
            from a Q/DQ file. The sim is unchanged.
    """
    if sim.config is None:
        raise ConfigError("a Q/DQ file has its own weights; give the float model, so that fewer bits can be chosen")
    config = sim.config
    sites = lowerable_weights(sim)

    def take(chosen: Iterable[str]) -> int:
        lowered = config
        for site in chosen:
            lowered = lowered.override(site, weight="int4")
        sim.replan(lowered)
        return exported_bytes(sim)

    with put_back_on_error(sim) as before:
        smallest = take(sites)
        if smallest > max_bytes:
            raise ConfigError(
                f"max_bytes={max_bytes}: the file has {size} bytes, and {smallest} with 4 bits in every weight of "
                "8; allow that much, or give a smaller config, such as one with int2 weights"
            )
        layers = layers_of(sim.plan)
        noise, _ = noise_of_layers(sim, data, layers, exact=False, **options)
        ranking = sensitivity_report(layers, noise, {}, {}).to_dict()["rows"]
        counts = {site: value.size for site, value in sim.stored_floats(sites).items()}
        weights = [LowerableWeight(site, counts.get(site, 0) // 2, noise.alone.get(site, 0.0)) for site in sites]
        wanted = size - max_bytes
        for _ in range(_ROUNDS):
            sim.restore(before)
            chosen = choose_lowered(weights, wanted)
            found = take(sites if chosen is None else chosen)
            if found <= max_bytes:
                return (sites if chosen is None else chosen), found, ranking
            wanted += found - max_bytes
        sim.restore(before)
        return sites, take(sites), ranking
