"""Checkpoint folders of tiny decoders, as users download them: config, safetensors shards, perhaps a tokenizer."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from tiny_decoders import decoder
from torch import Tensor


def write_checkpoint(folder: Path, kind: str = "Llama", *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write the checkpoint of a tiny decoder in several shards, and return its folder."""
    decoder(kind, **changes).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return name -> digest of every file in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def token_rows(count: int, length: int, vocabulary: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return batches of one row of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, vocabulary, (1, length), generator=generator)} for _ in range(count)]
