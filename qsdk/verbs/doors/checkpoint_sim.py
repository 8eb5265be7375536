"""A sim of the model in a checkpoint folder, whose weights stay in their files."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsdk.core.config.config import QuantConfig
from qsdk.verbs.doors.quantize_module import quantize_module
from qsdk.verbs.doors.read_checkpoint import default_example, read_model
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import as_example
from torch_bridge.weight_files import WeightFiles

#: Bytes of the weights' files that may be in memory at a time.
RESIDENT = 128 << 20


def quantize_folder(
    folder: str | os.PathLike[str],
    example: Any,
    config: QuantConfig,
    *,
    dynamic_shapes: Any = None,
    fold_batch_norm: bool = True,
    scratch: Path | None = None,
) -> QuantSim:
    """Return the sim of the model in a checkpoint folder of the transformers library.

    Weights are read when they are needed, and their pages given back to the system; those that a verb changes lie in
    files of their own. The memory that a model takes does not grow with its weights, but with its scales. An exported
    file takes and gives float32 where the model has bfloat16 or float16, because NumPy knows no bfloat16.

    Args:
        folder: with `config.json` and safetensors files.
        example: inputs to trace the model with; None for tokens, in any number of rows of any length.
        config: what is quantized, and how.
        dynamic_shapes: see `qsdk.quantize`.
        fold_batch_norm: see `qsdk.quantize`.
        scratch: folder for changed weights; None for the system's temporary folder.

    Raises:
        FileFormatError: the folder has no readable config.
        ConfigError: transformers is not installed, or lacks the class of the model.
        ModelError: the checkpoint is incomplete, or the model takes other inputs than tokens and no example is given.
    """
    path = Path(folder)
    model = read_model(path, "read it yourself, and give quantize the module", {"dtype": "auto"}).eval()
    files = WeightFiles(path, resident=RESIDENT, scratch=scratch)
    if example is None:
        example, axes = default_example(model, path, step=config.has_kv_cache)
        dynamic_shapes = axes if dynamic_shapes is None else dynamic_shapes
    given = replace(as_example(example), float32_edges=True)
    options = {"dynamic_shapes": dynamic_shapes, "fold_batch_norm": fold_batch_norm}
    sim = quantize_module(model, given, config, in_place=True, **options)
    sim.weight_files = files
    return sim
