"""A check for verbs that share nothing among ranks: all of them must end with the same sim."""

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from qsdk.algorithms import ranks
from qsdk.core.errors import DataError, QsdkError
from qsdk.verbs.doors.choose import Sim, door_of

P = ParamSpec("P")
R = TypeVar("R")


def same_on_ranks(verb: Callable[P, R]) -> Callable[P, R]:
    """Return a verb of a sim that compares the sims of all ranks when it is through, where `torchrun` started several.

    The verb itself looks at its own rank's data alone. With other data on each rank the sims would drift apart without
    a word, and the layers that the ranks share in `gptq` would belong to different models.
    """

    @wraps(verb)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        """Run the verb, and compare the ranks."""
        if ranks.world_size() == 1:
            return verb(*args, **kwargs)
        given: Any = args[0] if args else kwargs["sim"]
        sim: Sim = given
        before, failure = sim.snapshot(weights=True), None
        try:
            result = verb(*args, **kwargs)
        except QsdkError as error:
            failure = error
        found = ranks.all_gather(_digest(sim) if failure is None else None)
        if failure is None and len(set(found)) == 1:
            return result
        sim.restore(before)
        if failure is not None:
            raise failure
        name = getattr(verb, "__name__", "the verb")
        raise DataError(
            f"after {name} the ranks would hold different sims: it looks at its own rank's data alone; give every rank "
            f"the same data for {name}, or call it in one process and pass the sim on with qsdk.save"
        )

    return checked


def _digest(sim: Sim) -> str:
    """Return a digest of the stored values and encodings of a sim."""
    digest = hashlib.sha256()
    stored = door_of(sim).stored_values()
    for name in sorted(stored):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(stored[name]).tobytes())
    for site, encoding in sorted(sim.encodings_where_ready().items()):
        digest.update(f"{site} {encoding.dtype.name}".encode())
        digest.update(encoding.scale.tobytes() + encoding.zero_point.tobytes())
    return digest.hexdigest()
