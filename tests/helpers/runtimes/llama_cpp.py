"""llama.cpp, which the package xllamacpp has whole: its logits of a GGUF file, and its tokens of a text.

Structures that it takes by value are opaque here, but for the fields at their start, which have stayed where they are.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ROOM = 1024  # bytes, more than any of its structures has


class _Opaque(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint32 * (_ROOM // 4)),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.c_void_p),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("sequence_counts", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class LlamaCpp:
    """A GGUF file in llama.cpp, on one thread."""

    def __init__(self, path: Path, *, length: int = 256, threads: int = 1) -> None:
        self.library = library = ctypes.CDLL(str(import_module("xllamacpp.xllamacpp").__file__))
        self.said: list[str] = []
        self._log = _LOG(lambda _level, text, _data: self.said.append(text.decode(errors="replace")))
        library.llama_log_set(self._log, None)
        pointer = ctypes.c_void_p
        for name, result, arguments in (
            ("llama_model_default_params", _Opaque, []),
            ("llama_context_default_params", _Opaque, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Opaque]),
            ("llama_init_from_model", pointer, [pointer, _Opaque]),
            ("llama_batch_init", _Batch, [ctypes.c_int32] * 3),
            ("llama_batch_free", None, [_Batch]),
            ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
            ("llama_get_memory", pointer, [pointer]),
            ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
            (
                "llama_tokenize",
                ctypes.c_int32,
                [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool],
            ),
            ("llama_free", None, [pointer]),
            ("llama_model_free", None, [pointer]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}: {''.join(self.said)[-600:]}")
        options = library.llama_context_default_params()
        options.raw[:3] = (length, length, length)
        options.raw[6:8] = (threads, threads)
        self.context = library.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context for {path}: {''.join(self.said)[-600:]}")
        self.vocabulary = library.llama_model_get_vocab(self.model)

    def logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the logits [tokens, vocabulary] behind each of the tokens, read at once."""
        library, count = self.library, len(tokens)
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        batch = library.llama_batch_init(count, 0, 1)
        batch.count = count
        for place, token in enumerate(tokens):
            batch.tokens[place], batch.positions[place] = int(token), place
            batch.sequence_counts[place], batch.sequences[place][0], batch.wanted[place] = 1, 0, 1
        state = library.llama_decode(self.context, batch)
        library.llama_batch_free(batch)
        if state:
            raise RuntimeError(f"llama.cpp cannot compute these tokens ({state}): {''.join(self.said)[-600:]}")
        shape = (count, library.llama_vocab_n_tokens(self.vocabulary))
        return np.ctypeslib.as_array(library.llama_get_logits(self.context), shape).copy()

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text, with those that start and end a text if `special`."""
        data, found = text.encode(), (ctypes.c_int32 * (len(text.encode()) + 8))()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), found, len(found), special, True)
        return list(found[:count])

    def close(self) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)


@contextmanager
def llama_cpp(path: Path, *, length: int = 256, threads: int = 1) -> Iterator[LlamaCpp]:
    """Open a GGUF file in llama.cpp, and close it at the end."""
    opened = LlamaCpp(path, length=length, threads=threads)
    try:
        yield opened
    finally:
        opened.close()
