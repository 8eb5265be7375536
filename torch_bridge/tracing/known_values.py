"""Promotion of types in torch's exporter that takes the values which a captured program has noted at its nodes.

The exporter runs every node of a program once more, to see whether an operand has another dtype than its op computes
in. That takes a sixth of a trace, and only nodes that it changes have other values than before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from torch_bridge.tracing.exporter_modules import type_promotion

_NEEDED = ("_set_current_node", "_maybe_promote_node", "run_node")


@contextmanager
def known_values_taken() -> Iterator[None]:
    """Let torch's exporter run those nodes alone inside the block whose types it promotes.

    It takes its own way where the installed torch lacks a function that this builds on.
    """
    interpreter = getattr(type_promotion, "_TypePromotionInterpreter", None)
    rule_of = getattr(type_promotion, "get_type_promotion_rule", None)
    if rule_of is None or not all(hasattr(interpreter, name) for name in _NEEDED):
        yield
        return
    assert interpreter is not None
    whole = interpreter.run_node

    def run_node(self: Any, node: fx.Node) -> Any:
        if node.op != "call_function" or node.meta.get("val") is None:
            return whole(self, node)
        with self._set_current_node(node):
            if rule := rule_of(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]  # a node that was changed has been run, and has a new one since

    interpreter.run_node = run_node
    try:
        yield
    finally:
        interpreter.run_node = whole
