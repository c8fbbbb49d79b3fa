"""Regions to try: the paths of a zoo case, with nothing stored or with the outputs of costly ops stored."""

from autoremat._replay import RegionSpec

KEPT = ("addmm", "mm", "convolution", "empty_like", "_scaled_dot_product_flash_attention_for_cpu")


def region_specs(graph, paths, *, keep):
    specs = []
    for call in graph.calls:
        if call.path in paths:
            kept = {
                s
                for op in graph.ops[call.start : call.end]
                if keep and op.name.split(".")[1] in KEPT
                for s in op.outputs
                if graph.storages[s].born == op.index
            }
            specs.append(RegionSpec(call.index, frozenset(kept)))
    return specs
