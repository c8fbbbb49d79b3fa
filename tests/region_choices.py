"""Regions to try: the paths of a zoo case, with nothing stored or with the outputs of costly ops stored."""

from autoremat._replay import RegionSpec, random_states, replay

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


def slack_bytes(graph, specs):
    """None, but where a region skips draws: the states passing through count from its start on, not from the draw."""
    passing = [random_states(graph, graph.calls[s.call], replay(graph, s))[1] for s in specs]
    return graph.rng_state_bytes if any(count > 1 for count in passing) else 0
