"""Rules: the choices they make, and the places they apply to."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from typing import Any, Literal, TypedDict, get_args

from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, DType, ElementType, dtype_named, element_type_named, int32
from qsdk.core.numerics.spec import Dynamic
from qsdk.core.site import names_of, without_calls

Shape = tuple[int | str | None, ...]
CacheScales = Literal["tensor", "head", "channel", "token"]
#: what layers multiply whose weights alone are quantized
Compute = Literal["float32", "int8"]
FixedRange = tuple[float, float] | Literal["observed"]

#: the float types that a tensor of a model can have
TensorDType = Literal["float32", "float16", "bfloat16", "float64"]
TENSOR_DTYPES: tuple[str, ...] = get_args(TensorDType)


#: class of PyTorch -> the ONNX types of the ops that it becomes
OF_TORCH: Mapping[str, tuple[str, ...]] = {
    "Linear": ("Gemm", "MatMul"),
    **{f"Conv{n}d": ("Conv",) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": ("ConvTranspose",) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": ("BatchNormalization",) for n in (1, 2, 3)},
    "LayerNorm": ("LayerNormalization",),
    "GroupNorm": ("GroupNormalization",),
    "RMSNorm": ("RMSNormalization",),
    "Embedding": ("Gather",),
    "ReLU": ("Relu",),
    "GELU": ("Gelu",),
}


@dataclass(frozen=True)
class Place:
    """The facts about a place in a model that rules look at."""

    owners: tuple[str, ...]
    op_types: tuple[str, ...] = ()
    dtype: str = "float32"
    shape: Shape | None = None
    sites: tuple[str, ...] = ()


class Choices(TypedDict, total=False):
    """The choices that a rule can make, by name and type; `QuantConfig` has a field for each, and says what it means.

    From this follow the keywords of `override`, what a file of JSON may hold, and its schema.
    """

    weight: ElementType | str | None
    activation: ElementType | str | None
    bias: DType | str | None
    input: DType | str | None
    output: DType | str | None
    kv_cache: DType | str | None
    kv_cache_scales: CacheScales | None
    block_size: int | None
    per_channel: bool | None
    symmetric_weights: bool | None
    symmetric_activations: bool | None
    dynamic_activations: Dynamic | None
    per_channel_activations: bool | None
    two_level_scales: bool | None
    fixed_range: FixedRange | None
    tie: bool | None
    supergroup: bool | None
    scale_bits: int | None
    compute: Compute | None


class Conditions(TypedDict, total=False):
    """The conditions that a rule can set beside its pattern, and whether it may match nothing."""

    op_type: str | Sequence[str] | None
    shape: Shape | Sequence[int | None] | None
    tensor_dtype: DType | TensorDType | None
    optional: bool


class RuleKeywords(Conditions, Choices, total=False):
    """The keywords of `override`."""


CHOICES = tuple(Choices.__annotations__)
CONDITIONS = ("op_type", "shape", "tensor_dtype")
DTYPE_CHOICES = ("bias", "input", "output", "kv_cache")
ELEMENT_CHOICES = ("weight", "activation")  # which may be formats of blocks
_REPLACEABLE = ("weight", "activation", "bias", "input", "output")
#: choices that have a few values, as a user writes them
ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "kv_cache_scales": get_args(CacheScales),
    "dynamic_activations": (True, False, "token", *BLOCK_FORMATS),
    "compute": get_args(Compute),
}


@dataclass(frozen=True)
class Rule:
    """The choices for the places that meet every condition; each choice can be read as an attribute, None if not made.

    Attributes:
        pattern: a shell glob over owners, or, with a colon, over whole sites (`conv1:weight`).
        choices: name of `Choices` -> value, for the choices it makes.
        op_type: globs over ONNX types, or classes of PyTorch; one must match.
        shape: of the tensor; None stands for any dimension.
        tensor_dtype: of the tensor in the float model.
        optional: it may match nothing.
        accepted: it comes from a saved sim, which was made with it, so it need not reach anything. Not written.
    """

    pattern: str
    choices: Mapping[str, Any] = field(hash=False)  # equal rules have equal hashes without it
    op_type: tuple[str, ...] | None = None
    shape: Shape | None = None
    tensor_dtype: str | None = None
    optional: bool = False
    accepted: bool = field(default=False, compare=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name in CHOICES:
            return self.choices.get(name)
        raise AttributeError(f"a rule has no {name}; its choices are {', '.join(CHOICES)}")

    def __str__(self) -> str:
        where = [f"{name}={_text(getattr(self, name))}" for name in CONDITIONS if getattr(self, name) is not None]
        choices = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        return f"{self.pattern!r}{' with ' + ', '.join(where) if where else ''} -> {choices}"

    @property
    def is_specific(self) -> bool:
        """Return whether the rule selects its places by more than a bare `*`."""
        return bool(self.pattern.strip("*")) or self.op_type is not None or self.shape is not None

    @property
    def conditional(self) -> bool:
        """Return whether the rule has conditions besides its pattern."""
        return any(getattr(self, name) is not None for name in CONDITIONS)

    def fits(self, place: Place) -> bool:
        """Return whether the conditions hold at a place; the pattern is not checked."""
        return (
            self.fits_op_type(place.op_types)
            and (self.shape is None or _fits_shape(self.shape, place.shape))
            and self.tensor_dtype in (None, place.dtype)
        )

    def fits_op_type(self, op_types: Iterable[str]) -> bool:
        """Return whether the rule applies to one of the op types."""
        if self.op_type is None:
            return True
        wanted = [name for given in self.op_type for name in (given, *OF_TORCH.get(given, ()))]
        return any(fnmatchcase(result, name) for result in op_types for name in wanted)

    def replaces(self, earlier: "Rule") -> bool:
        """Return whether this rule decides all that an earlier one does, wherever that one applies.

        A pattern reaches what the same pattern does, and the name of an owner or a site that it matches. A bare `*`
        replaces no rule for a named place, since a dtype that was named there counts for more in a few decisions.
        """
        mine, theirs = self.pattern, earlier.pattern
        literal = not set("*?[").intersection(theirs) and (":" in mine) == (":" in theirs)
        reached = mine == theirs or (literal and fnmatchcase(theirs, mine))
        met = all(getattr(self, name) in (None, getattr(earlier, name)) for name in CONDITIONS)
        chosen = set(self.choices) & set(_REPLACEABLE)
        chosen |= {"input", "output"} if "activation" in chosen else set()
        specific = self.is_specific or not earlier.is_specific
        return (
            reached and met and specific and not (self.optional or earlier.optional) and chosen >= set(earlier.choices)
        )


def with_rule(rules: Iterable[Rule], last: Rule) -> tuple[Rule, ...]:
    """Return the rules with one more at the end, and without those before it that decide nothing any more."""
    return (*(rule for rule in rules if not last.replaces(rule)), last)


def make_rule(pattern: str, options: Mapping[str, Any], *, optional: bool = False) -> Rule:
    """Return a rule from what a user wrote: dtypes by name, one op type or several, sequences of any kind."""
    if not isinstance(pattern, str):
        raise ConfigError(
            f"a rule names its places by a text such as 'layer1.*', got a {type(pattern).__name__}; write the name "
            "that model.named_modules() gives it"
        )
    given = {name: value for name, value in options.items() if value is not None}
    chosen = with_dtypes({name: given[name] for name in CHOICES if name in given})
    if not chosen:
        raise ConfigError(f"the rule for {pattern!r} overrides nothing; give weight=, activation= or another choice")
    where = f"rule {pattern!r}"
    require_bias(chosen.get("bias"), where)
    require_allowed(chosen, where)
    if "fixed_range" in chosen:
        chosen["fixed_range"] = as_fixed_range(chosen["fixed_range"], f" ({where})")
    op_type, shape, tensor_dtype = (given.get(name) for name in CONDITIONS)
    return Rule(
        pattern,
        chosen,
        (op_type,) if isinstance(op_type, str) else _as_tuple(op_type),
        _as_tuple(shape),
        None if tensor_dtype is None else _tensor_dtype(tensor_dtype, pattern),
        optional=optional,
    )


def _as_tuple(given: Any) -> Any:
    return None if given is None else tuple(given)


def with_dtypes(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices with dtypes in place of their names; activations in blocks are said in one way of the two."""
    result = dict(choices)
    if str(result.get("dynamic_activations")) in BLOCK_FORMATS:
        result["activation"] = result.pop("dynamic_activations")
    for name in (*ELEMENT_CHOICES, *DTYPE_CHOICES):
        if result.get(name) is not None:
            result[name] = (element_type_named if name in ELEMENT_CHOICES else dtype_named)(result[name])
    return result


def require_known(call: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keywords that a call does not have."""
    for name in set(given) - set(known):
        near = get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
        raise ConfigError(f"{call}() has no {name}=; {remedy}")


def require_bias(dtype: DType | None, where: str) -> None:
    """Raise an error for a bias dtype that is neither int32 nor float."""
    if dtype is not None and dtype.kind != "float" and dtype != int32:
        raise ConfigError(f"a bias is int32 or float, not {dtype} ({where})")


def require_allowed(choices: Mapping[str, Any], where: str) -> None:
    """Raise an error for a value that a choice among a few does not have."""
    for name, allowed in ALLOWED.items():
        value = choices.get(name)
        if value is not None and (type(value), value) not in [(type(one), one) for one in allowed]:
            shown = ", ".join(repr(one) if True in allowed else one for one in allowed)
            raise ConfigError(f"{name}={value!r} ({where}) is none of {shown}")


def as_fixed_range(given: Any, where: str = "") -> FixedRange:
    """Return a fixed range as a pair low < high, or "observed"."""
    if isinstance(given, str) and given == "observed":
        return "observed"
    pair = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(pair) != 2 or not -float("inf") < pair[0] < pair[1] < float("inf"):
        raise ConfigError(f"fixed_range={given!r}{where} is no range; give (low, high) with low < high, or 'observed'")
    return float(pair[0]), float(pair[1])


def _tensor_dtype(given: Any, pattern: str) -> str:
    name = given.name if isinstance(given, DType) else str(given)
    if name not in TENSOR_DTYPES:
        raise ConfigError(f"tensor_dtype={name!r} (rule {pattern!r}) is none of {', '.join(TENSOR_DTYPES)}")
    return name


def _fits_shape(wanted: Shape, found: Shape | None) -> bool:
    if found is None or len(wanted) != len(found):
        return False
    return all(want is None or want == have for want, have in zip(wanted, found, strict=True))


def _text(condition: Any) -> str:
    """Return a condition as a user would write it."""
    if isinstance(condition, tuple) and len(condition) == 1 and isinstance(condition[0], str):
        return condition[0]
    return str(condition)


class RuleMatcher:
    """The search for the rules that match a place; results for owners, sites and op types are cached."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.matched: set[int] = set()
        self._rules = rules
        self._globs = [re.compile(translate(rule.pattern)) for rule in rules]
        self._on_sites = [index for index, rule in enumerate(rules) if ":" in rule.pattern]
        self._by_owner: dict[str, frozenset[int]] = {}
        self._by_site: dict[str, frozenset[int]] = {}

    def matching(self, place: Place) -> tuple[int, ...]:
        """Return the indices of the rules that match a place, in order."""
        result = tuple(index for index in sorted(self.named(place)) if self._rules[index].fits(place))
        self.matched.update(result)
        return result

    def named(self, place: Place) -> set[int]:
        """Return the indices of the rules whose pattern matches one of a place's names."""
        result = {index for owner in place.owners for index in self.of_owner(owner)}
        if self._on_sites:
            result.update(index for site in place.sites for index in self.of_site(site))
        return result

    def of_owner(self, owner: str) -> frozenset[int]:
        """Return the indices of the rules whose pattern matches an owner."""
        if owner not in self._by_owner:
            names = names_of(owner)
            self._by_owner[owner] = frozenset(i for i in range(len(self._rules)) if self._hits(i, names))
        return self._by_owner[owner]

    def of_site(self, site: str) -> frozenset[int]:
        """Return the indices of the rules whose pattern matches a whole site, with or without its call marks."""
        if site not in self._by_site:
            owner, colon, port = site.rpartition(":")
            names = (site, without_calls(owner) + colon + port)
            self._by_site[site] = frozenset(i for i in self._on_sites if self._hits(i, names))
        return self._by_site[site]

    def _hits(self, index: int, names: Iterable[str]) -> bool:
        # a glob reads the brackets of a name as a character class, so the literal name is compared too
        pattern, glob = self._rules[index].pattern, self._globs[index]
        return any(name == pattern or glob.match(name) is not None for name in names)
