"""Data for a rotation that turns what caches hold: a cache that was filled before it would be read wrong."""

from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

from qsdk.core.errors import DataError
from torch_bridge.torch_values.batches import as_example
from torch_bridge.torch_values.pytree import is_cache


class DataWithoutCaches:
    """Batches that are refused as they are read where they bring a filled cache."""

    def __init__(self, data: Iterable[Any]) -> None:
        """Read nothing yet."""
        self._data = data

    def __length_hint__(self) -> int:
        """Return how many batches there are, as far as the data knows."""
        return length_hint(self._data, 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            DataError: one brings a filled cache.
        """
        for number, batch in enumerate(self._data):
            if isinstance(batch, tuple | list | Mapping):
                given = as_example(batch)
                for value in (*given.args, *given.kwargs.values()):
                    if is_cache(value) and value.get_seq_length() > 0:
                        raise DataError(
                            f"batch {number} brings a cache that was filled before the rotation, which turns what "
                            "caches hold; give tokens alone, or an empty cache"
                        )
            yield batch


def without_caches(data: Iterable[Any]) -> Iterable[Any]:
    """Return data that is refused as soon as a batch brings a filled cache; it can be read again if the data can."""
    one_batch = isinstance(data, Mapping | str | bytes) or hasattr(data, "__array__")
    if one_batch or not isinstance(data, Iterable):
        return data  # whoever reads it raises the error
    checked = DataWithoutCaches(data)
    return iter(checked) if isinstance(data, Iterator) else checked
