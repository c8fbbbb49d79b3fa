"""torch.compile's ``activation_memory_budget`` as rows of a frontier: its partitioner, with each of its solvers.

The step is compiled as a whole (``fullgraph=True``: a graph break is an error, not an eager fallback). The graphs that
the partitioner makes run op by op: what the backend ``aot_eager_decomp_partition`` does, with the min-cut partitioner
as inductor configures it. Inductor would fuse elementwise work, which keeps fewer temporaries alive; it decides nothing
about what is stored. FLOPs are those of the two graphs' ops.
"""

import contextlib
import functools

import torch
import torch._dynamo
from judge import flops_of
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Node
from transformers.utils.logging import warning_once

SETTINGS = (
    *((budget, "dp") for budget in (1.0, 0.7, 0.5, 0.2, 0.0)),
    *((budget, "ilp") for budget in (0.7, 0.5, 0.2)),
    *((budget, "greedy") for budget in (0.5, 0.2)),
)


def backend(counts, *, decompose=True):
    """A backend that runs the partitioned graphs as they are, and appends the FLOPs of each to `counts`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph_module, inputs):
        counts.append(sum(map(_flops, graph_module.graph.nodes)))
        return boxed_nop(graph_module, inputs)

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    table = select_decomp_table if decompose else None
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, decompositions=table)


def _flops(node):
    if node.op != "call_function":
        return 0
    target, args = node.target, list(node.args)
    if not hasattr(target, "_schema"):  # recomputed attention runs inside an op that keeps or sets the random state
        position = next((i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload)), None)
        if position is None:
            return 0
        target, args = args[position], args[position + 1 :]
    args = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    return flops_of(target.__name__.split(".")[0], args, node.meta.get("val"))


@contextlib.contextmanager
def compiled(model, budget=1.0, solver="dp", *, decompose=True):
    """The model compiled under a budget, and the list that gets the FLOPs of its graphs."""
    torch._dynamo.reset()
    counts = []
    changed = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
    quiet = {"ignore_logging_functions": {warning_once}}  # it would break the graph
    with config.patch(enable_autograd_cache=False, **changed), torch._dynamo.config.patch(**quiet):
        yield torch.compile(model, backend=backend(counts, decompose=decompose), fullgraph=True), counts
    torch._dynamo.reset()
