"""Mixtures of experts as they run: which rows of data each matrix of a stack multiplies, and routing to all of them."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.site import owner_of
from torch_bridge.torch_values.parameters import Key, storage_key
from torch_bridge.workarounds.export_forms import is_grouped_product

#: called with (site of the stack, rows [S, K] or [S, 1, K], number of the expert of each row, int64 [S])
StackCallback = Callable[[str, Tensor, Tensor], None]

_TAKES = frozenset({"__getitem__", "index_select"})
_PRODUCTS = frozenset({"bmm", "matmul", "__matmul__"})


class ExpertReads:
    """Calls back before rows of data are multiplied with the matrices of their experts.

    Either one function does that for sorted rows, or the matrices are taken from the stack first, one for each row.
    """

    def __init__(self, keys: Callable[[], Mapping[Key, str]], on_stack: StackCallback) -> None:
        """Look for the stacks at these keys (see `storage_key`) of weight sites."""
        self._keys, self._on_stack = keys, on_stack
        self._taken: dict[Key, tuple[weakref.ref[Tensor], str, Tensor]] = {}  # matrices, their stack and numbers

    def is_read_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call takes matrices from a stack that is looked for, or multiplies with them."""
        name = getattr(func, "__name__", "")
        if is_grouped_product(func):
            return self._keys().get(storage_key(args[1])) is not None
        if name in _TAKES:
            return isinstance(args[0], Tensor) and args[0].dim() == 3 and storage_key(args[0]) in self._keys()
        tensors = [x for x in args[:2] if isinstance(x, Tensor)] if name in _PRODUCTS and self._taken else []
        return any(self._known(x) is not None for x in tensors)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call back if this is a product, and run the function."""
        if is_grouped_product(func):
            ends = kwargs["offs"] if "offs" in kwargs else args[2]
            at = torch.arange(len(args[0]), device=ends.device)
            numbers = torch.searchsorted(ends.long(), at, right=True)
            self._on_stack(self._keys()[storage_key(args[1])], args[0], numbers)
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _TAKES:
            result, numbers = func(*args, **kwargs), args[-1]
            if isinstance(result, Tensor) and isinstance(numbers, Tensor) and numbers.dtype == torch.int64:
                self._taken = {key: held for key, held in self._taken.items() if held[0]() is not None}
                self._taken[storage_key(result)] = weakref.ref(result), self._keys()[storage_key(args[0])], numbers
            return result
        left, right = args[0], args[1]
        known = self._known(right)
        stack, numbers = known or self._known(left) or ("", right)
        self._on_stack(stack, left if known else right.mT, numbers)
        return func(*args, **kwargs)

    def _known(self, matrices: Tensor) -> tuple[str, Tensor] | None:
        held = self._taken.get(storage_key(matrices))
        return None if held is None or held[0]() is None else held[1:]


class CountTokens(TorchFunctionMode):
    """A mode that counts the rows of data that each expert of the stacks multiplies."""

    def __init__(self, stacks: Mapping[str, Tensor]) -> None:
        """Count at these stacks, by site; `counts` has the result, int64 [experts] of each site."""
        super().__init__()
        keys = {storage_key(stack): site for site, stack in stacks.items()}
        self.counts = {site: torch.zeros(len(stack), dtype=torch.int64) for site, stack in stacks.items()}
        self._reads = ExpertReads(lambda: keys, self._count)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and count what it multiplies."""
        if self._reads.is_read_by(func, args, kwargs or {}):
            return self._reads.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, site: str, rows: Tensor, numbers: Tensor) -> None:
        counts = self.counts[site]
        counts += torch.bincount(numbers.flatten().cpu(), minlength=len(counts))


@contextmanager
def routing_to_all(
    model: nn.Module, stacks: Collection[str], note: Callable[[Sequence[str], Tensor], None]
) -> Iterator[None]:
    """Route every token to all experts inside the block, with a weight of 0 where its router did not choose them.

    So the model computes what it computed. `note` is called with the sites of a module's stacks and with what its
    router has chosen, bool [tokens, experts].

    Experts are called as in transformers: with the tokens [T, K], the numbers of their experts [T, k], and weights.
    """
    owners: dict[str, list[str]] = {}
    for site in stacks:
        owners.setdefault(owner_of(site), []).append(site)

    def to_all(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sites: list[str], count: int) -> Any:
        """Return the arguments of a call of experts with the numbers and weights of all of them for every token."""
        names = [*list(kwargs)[: max(3 - len(args), 0)]]
        tokens, numbers, weights = (*args, *(kwargs[name] for name in names))[:3]
        with torch._C.DisableTorchFunction():
            every = torch.arange(count, device=numbers.device).expand(len(tokens), count)
            spread = weights.new_zeros(len(tokens), count).scatter(1, numbers, weights)
            picked = torch.zeros(len(tokens), count, dtype=torch.bool, device=numbers.device).scatter(1, numbers, True)
        note(sites, picked)
        given = (tokens, every.contiguous(), spread)
        return given[: len(args)], {**kwargs, **dict(zip(names, given[len(args) :], strict=True))}

    with ExitStack() as hooks:
        for owner, sites in owners.items():
            module = model.get_submodule("" if owner == "self" else owner)
            count = len(getattr(module, sites[0].rpartition(":")[2]))

            def before(module: nn.Module, args: Any, kwargs: Any, sites: list[str] = sites, count: int = count) -> Any:
                return to_all(module, args, kwargs, sites, count)

            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def mark_unrouted(numbers: Tensor, routed: Tensor) -> Tensor:
    """Return the numbers of experts by row, plus their count where the router had not chosen the expert for the token.

    Rows are in order of the experts, or of the tokens; `routed` is bool [tokens, experts].
    """
    count = routed.shape[1]
    in_order = bool((numbers.diff() >= 0).all())
    return numbers + count * (~(routed.T if in_order else routed)).flatten().to(numbers)
