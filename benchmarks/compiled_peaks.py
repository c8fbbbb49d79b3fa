"""Why a compiled peak is not the eager one: what is alive at the peak of backward in each, by size.

    python benchmarks/compiled_peaks.py [--only NAME]

The models and schedules of `compiled.py`, with the same inputs. Eager: the ledger's step at its highest moment.
Compiled (whole ops): the backward graph that AOTAutograd's partitioner made, walked through op by op, each tensor freed
after its last use, as the runtime does. Parameters, buffers and random states are left out. Both peaks are those that
`compiled.py` measures, to within some kilobytes.
"""

import argparse
import functools
from collections import Counter

import torch
from compile_budgets import warning_once
from compiled import MODELS, SCHEDULES, build
from rich.console import Console
from rich.table import Table
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_iter

import autoremat as ar
from autoremat._ledger import alive_at, expand, moments
from autoremat._regions import resolve

SMALLEST_BYTES = 2**17
"""Smaller tensors are summed up."""


def eager_alive(graph, plan):
    """Bytes of each storage that is alive at the highest moment of an eager step, by the op that makes it."""
    schedule = expand(graph, resolve(graph, plan))
    points = [point for point, _ in moments(graph, schedule)]
    copies = alive_at(graph, schedule, points.index(max(points)))
    found = Counter()
    for index, number in copies.items():
        storage = graph.storages[index]
        if storage.cause not in ("parameter", "buffer"):
            maker = graph.ops[storage.born].name if storage.born >= 0 else storage.cause
            found[storage.num_bytes, maker.removeprefix("aten.").split(".")[0]] += number
    return found


def backward_graph(model, batch):
    """The backward that the compiler makes of a step."""
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return boxed_nop(graph, _inputs)

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(ignore_logging_functions={warning_once}):
        torch.compile(model, backend=backend, fullgraph=True)(**batch).loss.backward()
    return graphs[-1]


def compiled_alive(graph):
    """The same for a backward graph: bytes of each storage at its highest moment, by the op that makes it."""
    nodes = list(graph.graph.nodes)
    stored = {
        node: {_key(x): x for x in tree_iter(node.meta.get("val")) if isinstance(x, torch.Tensor)} for node in nodes
    }
    last = {key: i for i, node in enumerate(nodes) for n in (node, *node.all_input_nodes) for key in stored[n]}
    alive, highest, at_peak = {}, 0, {}
    for i, node in enumerate(nodes):
        is_parameter = node.op == "placeholder" and node.name.startswith("primals")
        for key, tensor in stored[node].items():
            if not is_parameter:
                alive.setdefault(key, (_bytes(tensor), node.name.rstrip("0123456789_")))
        total = sum(num_bytes for num_bytes, _ in alive.values())
        if node.op == "call_function" and total > highest:
            highest, at_peak = total, dict(alive)
        for key in [key for key in alive if last[key] <= i and node.op != "placeholder"]:
            del alive[key]
    return Counter(at_peak.values())


def _bytes(tensor):
    """Size of a tensor's storage; 0 for a random state, whose size is a symbol."""
    num_bytes = tensor.untyped_storage().nbytes()
    return num_bytes if isinstance(num_bytes, int) else 0


def _key(tensor):
    return tensor.untyped_storage()._cdata


def by_size(found):
    """Tensors of each size with what makes them; what is small in one line."""
    sizes = {}
    for (num_bytes, maker), number in found.items():
        is_small = num_bytes < SMALLEST_BYTES
        line = sizes.setdefault(0 if is_small else num_bytes, [0, 0, Counter()])
        line[0] += number
        line[1] += number * num_bytes
        line[2][maker] += 0 if is_small else number
    return sizes


def table_of(name, eager, compiled):
    table = Table("bytes each", "eager", "compiled", "difference", "eager: made by", "compiled: made by", title=name)
    ours, theirs = by_size(eager), by_size(compiled)
    nothing = [0, 0, Counter()]
    for size in sorted({*ours, *theirs}, reverse=True):
        (a, a_bytes, a_makers), (b, b_bytes, b_makers) = ours.get(size, nothing), theirs.get(size, nothing)
        makers = [", ".join(f"{m} {n}" for m, n in sorted(c.items()) if n) for c in (a_makers, b_makers)]
        table.add_row(f"{size:,}" if size else "smaller", str(a), str(b), f"{b_bytes - a_bytes:+,}", *makers)
    totals = [sum(size * number for (size, _), number in found.items()) for found in (eager, compiled)]
    table.add_row("all", f"{totals[0]:,}", f"{totals[1]:,}", f"{totals[1] - totals[0]:+,}", "", "")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    options = parser.parse_args()
    for name in [options.only] if options.only else MODELS:
        for schedule in SCHEDULES:
            model, batch = build(MODELS[name])
            graph = ar.trace(model, batch, optimizer=None)
            plan = ar.classic(graph, schedule)
            eager = eager_alive(graph, plan)
            ar.apply(model, plan)
            compiled = compiled_alive(backward_graph(model, batch))
            Console(width=190).print(table_of(f"{name}, {schedule}", eager, compiled))


if __name__ == "__main__":
    main()
