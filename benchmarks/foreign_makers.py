"""A module of another library: how it is made, and batches for it."""

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...] | dict[str, Tensor]
Shape = tuple[int, ...]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Foreign:
    """A module of a library: how to make it, and the batch of a seed."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]

    @property
    def library(self) -> str:
        """The library that it comes from."""
        return self.name.split("/", 1)[0]


class Without(types.ModuleType):
    """A library that is not needed at run time: every name in it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {"BaseModel": nn.Module, "INTERN": ()})


def shim_libraries() -> None:
    """Let torchvision be imported beside a CPU build of torch, without its compiled part."""
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        SHIMS.append(library)


def shim_torchaudio() -> None:
    """Let libraries of sounds be imported without what reads files of sounds, which these models do not call."""
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, Without(name))


NOT_NEEDED = (
    "torchaudio",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
    "torchaudio.transforms",
    "torchaudio.functional",
    "torchaudio.functional.functional",
    "librosa",
    "librosa.util",
    "librosa.filters",
    "soundfile",
    "audiotools",
    "audiotools.ml",
    "torchlibrosa",
    "pesq",
    "pystoi",
    "pb_bss_eval",
    "torch_stoi",
    "descript_audiotools",
    "resampy",
)
LIBRARIES_OF_SOUND = (
    "speechbrain",
    "asteroid",
    "encodec",
    "demucs",
    "vocos",
    "openunmix",
    "dac",
    "torchcrepe",
    "bs_roformer",
)


SHIMS: list[Any] = []


def made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker that imports `package.module:name` and calls it."""
    module, name = path.split(":")

    def make() -> nn.Module:
        shim_libraries()
        if module.startswith(LIBRARIES_OF_SOUND):
            shim_torchaudio()
        found: nn.Module = attrgetter(name)(importlib.import_module(module))(*args, **options)
        return found

    return make


def configured(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of a transformers model from its config class."""

    def make() -> nn.Module:
        shim_libraries()
        library = importlib.import_module("transformers")
        facts = getattr(library, config)(**options)
        facts._attn_implementation = "eager"
        found: nn.Module = getattr(library, model)(facts)
        return found

    return make


def normal(*shapes: Shape) -> Callable[[int], Batch]:
    """Return batches of normal tensors."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(*shape, generator=generator) for shape in shapes)

    return batch


def diffusing(*shapes: Shape, integers: bool = True) -> Callable[[int], Batch]:
    """Return batches of a noisy sample, a time step, and the shapes of what conditions it."""

    def batch(seed: int) -> Batch:
        sample, *rest = normal(*shapes)(seed)
        time = torch.tensor([37 + 11 * seed] * len(sample))
        return (sample, time if integers else time / 1000, *rest)

    return batch


def tokens(shape: Shape, below: int, *, key: str | None = None) -> Callable[[int], Batch]:
    """Return batches of token ids."""

    def batch(seed: int) -> Batch:
        ids = torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))
        return (ids,) if key is None else {key: ids}

    return batch


def keyed(batch: Callable[[int], Batch], *keys: str) -> Callable[[int], Batch]:
    """Return the batches as mappings."""
    return lambda seed: dict(zip(keys, batch(seed), strict=True))


def image(size: int = 64, channels: int = 3) -> Callable[[int], Batch]:
    """Return batches of two images."""
    return normal((2, channels, size, size))


class Positional(nn.Module):
    """Call a model whose inputs have names, and return the tuple of its outputs, in place of a class of outputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor) -> Any:
        """Give the tensors to the model in the order of `names`, or by position where it has none."""
        named = dict(zip(self.names, args, strict=False))
        found = self.model(*args[len(named) :], **named)
        return found.to_tuple() if hasattr(found, "to_tuple") else found


class Decoded(nn.Module):
    """A detector of torchvision up to its boxes and scores: levels, shared heads, anchors of their sizes, no choice."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes and scores at every anchor of one picture."""
        images = importlib.import_module("torchvision.models.detection.image_list").ImageList
        levels = list(self.detector.backbone(x).values())
        found = self.detector.head(levels)
        anchors = self.detector.anchor_generator(images(x, [tuple(x.shape[-2:])]), levels)
        return self.detector.box_coder.decode_single(found["bbox_regression"][0], anchors[0]), found["cls_logits"]


def anchored(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of a detector of torchvision with anchors."""
    return lambda: Decoded(
        made(f"torchvision.models.detection:{name}", weights=None, weights_backbone=None, **options)()
    )


def positional(name: str, make: Callable[[], nn.Module], batch: Callable[[int], Batch]) -> Foreign:
    """Return the module with positional inputs in place of named ones, and a tuple in place of its class of outputs."""
    first = batch(0)
    names = tuple(first) if isinstance(first, dict) else ()
    listed = lambda seed: tuple(dict(batch(seed)).values()) if names else batch(seed)  # noqa: E731
    return Foreign(name, lambda: Positional(make(), names), listed)
