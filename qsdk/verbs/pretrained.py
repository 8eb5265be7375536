"""The verb `load_pretrained`: a sim from the folder that `sim.model.save_pretrained` of a Hugging Face model wrote."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.sims.sim_file import read_sim
from qsdk.verbs.doors.module_sims import SIM_FILE
from qsdk.verbs.doors.read_checkpoint import read_model, require_known_attention
from qsdk.verbs.files import module_sim_of
from torch_bridge.sim import QuantSim


def load_pretrained(
    folder: str | os.PathLike[str], example: Any = None, *, model: nn.Module | None = None, **options: Any
) -> QuantSim:
    """Return the sim of a Hugging Face model that `sim.model.save_pretrained(folder)` wrote.

    The folder is an ordinary checkpoint, with the sim beside it in `sim.qsdk`: the outputs are those of the saved sim,
    bit for bit.

    Args:
        folder: of the checkpoint.
        example: as for `quantize`; None for the one that the sim was quantized with, which the file holds.
        model: the float model, read by yourself; None to read it with transformers, in the class that its config names.
        options: for `from_pretrained` of that class, such as `device_map=`.

    Raises:
        FileFormatError: the folder holds no sim, or it is damaged.
        ConfigError: transformers is not installed or lacks the class, or there are options beside a model.
        ModelError: the weights are not those that the sim was saved with, or the model is another one.

    Examples:
        >>> import tempfile, torch, qsdk, transformers
        >>> config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        >>> model, ids = transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(8)[None]}
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, ids), [ids], progress=False)
        >>> sim.model.save_pretrained(folder := tempfile.mkdtemp())
        >>> bool((qsdk.load_pretrained(folder).run(ids).logits == sim.run(ids).logits).all())
        True
    """
    path = Path(folder) / SIM_FILE
    if not path.is_file():
        raise FileFormatError(
            f"{os.fspath(folder)} holds no {SIM_FILE}; write it with sim.model.save_pretrained(folder), outside of a "
            "training block, or quantize the float model anew"
        )
    file = read_sim(path)
    if model is None:
        known = file.facts.get("attn_implementation")
        if "attn_implementation" not in options:
            require_known_attention(known, os.fspath(path), "if you trust it, pass attn_implementation=")
        instead = "pass the float model: qsdk.load_pretrained(folder, model=MyModel.from_pretrained(folder))"
        known_options = {"attn_implementation": known} if known else {}
        model = read_model(Path(folder), instead, {**known_options, **options})
    elif options:
        raise ConfigError(f"{', '.join(options)}: options are for reading the model, which is given; leave them out")
    return module_sim_of(file, model, os.fspath(path), example)
