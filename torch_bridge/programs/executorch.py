"""ExecuTorch as a user runs it: a program lowered to XNNPACK's kernels, compiled for the sizes that it is run on."""

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, ModelError
from torch_bridge.programs.check import Loaded, grid_of
from torch_bridge.programs.write import DEQUANTIZES
from torch_bridge.torch_values.parameters import to_numpy
from torch_bridge.workarounds.decomposed_ops import QUANTIZE, QUANTIZE_CHANNELS

_INSTALL = "pip install --no-deps executorch==1.5.1 torchao==0.18.0 ruamel.yaml tabulate"


class ExecuTorch:
    """A program in ExecuTorch's runtime: whole, and cut at its sites.

    Attributes:
        title: the runtime's name and version.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._partitioner = _installed("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
        self._lower = _installed("executorch.exir").to_edge_transform_and_lower
        self._runtime = _installed("executorch.runtime").Runtime.get()
        self.title = f"ExecuTorch {version('executorch')}"
        self._whole = loaded.program.module(check_guards=False)
        self._cut, self._sites = _cut(loaded)
        self._compiled: dict[tuple[bool, Any], Any] = {}

    def codes(self, given: Sequence[Tensor], values: Mapping[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        """Return the codes that each site gets, and the outputs, where sites in front have the sim's values.

        Where a site has none, nothing can be run.
        """
        fed: list[Tensor] = []
        for site, node in self._sites.items():
            if site not in values:
                return {}, []  # what stands behind it has nothing to read
            x = torch.from_numpy(np.array(values[site]))
            fed.append(node.target(x, *grid_of(self._cut, node)))  # type: ignore[operator]
        found = self._run(self._cut, [*given, *fed], whole=False)
        arrays = [to_numpy(x) for x in found]
        return dict(zip(self._sites, arrays, strict=False)), arrays[len(self._sites) :]

    def outputs(self, given: Sequence[Tensor]) -> list[Array]:
        """Return the outputs of the whole program."""
        return [to_numpy(x) for x in self._run(self._whole, given, whole=True)]

    def _run(self, module: nn.Module, given: Sequence[Tensor], *, whole: bool) -> list[Tensor]:
        sizes = tuple(tuple(x.shape) for x in given)
        if (whole, sizes) not in self._compiled:
            self._compiled = {key: held for key, held in self._compiled.items() if key[0] != whole}
            self._compiled[whole, sizes] = self._compile(module, given)
        _, method = self._compiled[whole, sizes]
        return [x.clone() for x in method.execute([x.contiguous() for x in given])]

    def _compile(self, module: nn.Module, given: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the loaded program, which must live as long as its method does, and that."""
        try:
            with torch.no_grad():
                program = torch.export.export(module, tuple(given), strict=False)
                lowered = self._lower(program, partitioner=[self._partitioner()])
            loaded = self._runtime.load_program(lowered.to_executorch().buffer)
            return loaded, loaded.load_method("forward")
        except Exception as error:  # its passes raise what they like
            raise ModelError(f"{self.title} cannot compile the program: {error}") from error


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the runtime 'executorch' needs the package {name.partition('.')[0]}, which cannot be imported "
            f"({error}); install it: {_INSTALL}"
        ) from error


def _cut(loaded: Loaded) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """Return a program whose readers of a site read an input, and which gives the codes of each site besides.

    They go in behind the inputs and come out before the outputs, in the order of the sites that are returned, each
    with its quantize op.
    """
    module = loaded.program.module(check_guards=False)
    graph, sites = module.graph, iter(loaded.sites)
    fed: dict[fx.Node, fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    found: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target in DEQUANTIZES]:
        site, made = next(sites), node.args[0]
        if not isinstance(made, fx.Node) or made.target not in (QUANTIZE, QUANTIZE_CHANNELS):
            continue  # a stored tensor
        if made not in fed:
            with graph.inserting_after(last):
                fed[made] = last = graph.placeholder(f"codes_{len(fed)}")
            found.setdefault(site, made)
        node.replace_input_with(made, fed[made])
    graph.output_node().args = ((*fed, *tree_leaves(graph.output_node().args[0])),)
    graph.set_codegen(fx.graph.CodeGen())
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph), found
