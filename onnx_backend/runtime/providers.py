"""Execution providers of ONNX Runtime: those that a sim runs on, and which of them computes each node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

from qsdk.core.errors import ConfigError
from qsdk.core.report import Report

CPU = "CPUExecutionProvider"
#: what `providers=` takes, in ONNX Runtime's own form
ProviderList = Sequence[str | tuple[str, Mapping[str, Any]]]

#: CUDA multiplies float32 with 10 bits of mantissa unless told otherwise, which moves values by whole steps
_EXACT_OPTIONS: Mapping[str, Mapping[str, str]] = {"CUDAExecutionProvider": {"use_tf32": "0"}}
_RECORD = "session.record_ep_graph_assignment_info"
_FORM = (
    "ONNX Runtime's list of names or (name, options) tuples, such as ['CUDAExecutionProvider', 'CPUExecutionProvider']"
)


@dataclass(frozen=True)
class Providers:
    """Execution providers in order of preference.

    Attributes:
        wanted: pairs of a name and its options, as the user gave them, with options as texts.
    """

    wanted: tuple[tuple[str, Mapping[str, str]], ...] = ((CPU, {}),)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, in order."""
        return tuple(name for name, _ in self.wanted)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names that the installed runtime lacks."""
        installed = ort.get_available_providers()
        return tuple(name for name in self.names if name not in installed)

    def for_session(self) -> list[tuple[str, dict[str, str]]]:
        """Return what a session is to be opened with: those that are installed, and at the end the CPU."""
        missing = self.missing
        found = [
            (name, {**_EXACT_OPTIONS.get(name, {}), **options}) for name, options in self.wanted if name not in missing
        ]
        return found if CPU in self.names else [*found, (CPU, {})]

    def session_entries(self) -> dict[str, str]:
        """Return the configuration entries that a session needs so that `placement` can be read from it."""
        return {} if self == CPU_ONLY else {_RECORD: "1"}

    def summary(self) -> dict[str, str]:
        """Return the facts for reports: nothing for the CPU alone."""
        if self == CPU_ONLY:
            return {}
        missing = self.missing
        names = ", ".join(f"{name} (not installed here)" if name in missing else name for name in self.names)
        return {"providers": names}

    def to_json(self) -> list[list[Any]]:
        """Return plain values, which `read_providers` takes."""
        return [[name, dict(options)] for name, options in self.wanted]


CPU_ONLY = Providers()


def chosen_providers(given: ProviderList | None) -> Providers:
    """Return the providers that a user asks for, each of which is installed and starts."""
    if given is None:
        return CPU_ONLY
    found = _parsed(given)
    if found.missing:
        raise ConfigError(
            f"providers= names {', '.join(found.missing)}, which the installed ONNX Runtime {ort.__version__} lacks; "
            f"it has {', '.join(ort.get_available_providers())}: name some of these, or install a build that has it"
        )
    _require_start(found)
    return found


def read_providers(stored: Any) -> Providers:
    """Return the providers of a saved sim, installed here or not."""
    return Providers(tuple((str(name), {str(k): str(v) for k, v in options.items()}) for name, options in stored))


def placement(session: ort.InferenceSession, providers: Providers) -> Report:
    """Return which provider computes each node of a session; nodes are those that remain after its optimizations.

    Rows `node`, `op_type`, `provider`, first those that fell back; summary `providers` (as asked for), `session` (those
    that the session has), `nodes`, `fell_back` (nodes that run on another provider than the first).
    """
    rows: list[dict[str, Any]] = []
    if providers == CPU_ONLY:
        return Report("Placement", rows, {"providers": CPU, "session": CPU, "fell_back": 0})
    for part in session.get_provider_graph_assignment_info():
        rows += [
            {"node": node.name, "op_type": node.op_type, "provider": part.ep_name or CPU} for node in part.get_nodes()
        ]
    first = providers.names[0]
    rows.sort(key=lambda row: row["provider"] == first)
    away = sum(row["provider"] != first for row in rows)
    facts = {"session": ", ".join(session.get_providers()), "nodes": len(rows), "fell_back": away}
    return Report("Placement", rows, {**providers.summary(), **facts})


def _parsed(given: Any) -> Providers:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"providers= takes {_FORM}; got {given!r}")
    wanted: list[tuple[str, Mapping[str, str]]] = []
    for entry in given:
        name, options = (entry, {}) if isinstance(entry, str) else _pair(entry)
        if name in (known for known, _ in wanted):
            raise ConfigError(f"providers= names {name} twice; name it once, with all its options")
        wanted.append((name, {str(key): str(value) for key, value in options.items()}))
    return Providers(tuple(wanted))


def _pair(entry: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Mapping):
        return entry
    raise ConfigError(f"providers= takes {_FORM}; got the entry {entry!r}")


def _require_start(providers: Providers) -> None:
    """Refuse a provider that a session would drop without an error, as one whose libraries are not found."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "start", values[:1], values[1:])
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    reason = "its libraries, or a device for it, are missing"
    got: list[str] = []
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=providers.for_session(), enable_fallback=0
        )
        got = session.get_providers()
    except Exception as error:  # the runtime's own exception types are private
        reason = str(error)
    dropped = [name for name in providers.names if name not in got]
    if dropped:
        raise ConfigError(
            f"providers= names {', '.join(dropped)}, which is installed but does not start: {reason}; put that right, "
            "or leave it out"
        )
