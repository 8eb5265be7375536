"""Memory that forwards in threads of their own have freed does not stay with the process."""

import threading

import pytest
import torch

from qsdk.core import freed_memory

MIB = 1 << 20
KEPT: list[torch.Tensor] = []


def use_and_free(count: int) -> None:
    """Allocate in a thread of its own what the C library keeps there once it is freed, and free all but the last."""
    held = [torch.ones(8 * MIB // 4)]
    held.clear()  # blocks of this size come from the thread's own memory from now on
    held = [torch.ones(MIB // 4) for _ in range(count)]
    KEPT.append(held.pop())
    held.clear()


@pytest.mark.skipif(freed_memory._TRIM is None, reason="this C library gives nothing back on request")
def test_freed_memory_is_given_back_once_the_process_has_grown():
    freed = freed_memory.FreedMemory()
    before = freed_memory._resident()
    worker = threading.Thread(target=use_and_free, args=(100,))
    worker.start()
    worker.join()
    kept = freed_memory._resident() - before
    freed.bound()
    KEPT.clear()
    assert freed_memory._resident() - before < 40 * MIB
    assert kept > 40 * MIB, "the C library kept nothing, so this shows nothing"


def test_nothing_is_given_back_while_the_process_has_not_grown(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(freed_memory, "give_back", lambda: asked.append("given back"))
    sizes = iter([100 * MIB, 120 * MIB, 90 * MIB, 121 * MIB, 123 * MIB, 91 * MIB, 124 * MIB, 92 * MIB])
    monkeypatch.setattr(freed_memory, "_resident", lambda: next(sizes))
    freed = freed_memory.FreedMemory()
    freed.bound()  # 120: 20 more
    freed.bound()  # 90: the least so far
    freed.bound()  # 121: 31 more
    assert asked == []
    freed.bound()  # 123: 33 more; 91 afterwards
    assert asked == ["given back"]
    freed.bound()  # 124: 33 more than what was left
    assert len(asked) == 2
