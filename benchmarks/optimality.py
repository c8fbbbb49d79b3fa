"""How far plans are from the exact optimum: random small steps against Checkmate's integer program.

    python benchmarks/optimality.py [--graphs 60] [--time-limit 20] [--jobs 2] [--json FILE]

Steps are chains of random layers with up to 40 ops (forward and backward); every op is a module call. In half of them
the layers are called one after the other by the model itself ("flat"), in the others by blocks of two to four layers,
which do nothing else ("blocks"); *without blocks* is the plan for the same ops and budget if the model itself
called all layers. Each is planned at three budgets: the smallest that a plan meets, and 30 %
and 60 % of the way to the plain peak. Costs are FLOPs plus bytes moved, as shares of the plain step. The oracle may run
any op of forward again at any time of backward; it has no regions. *Hooks* is the optimum of schedules that run ops
again only where backward reads a saved tensor, as all must that run in eager mode: an autograd node reads first and may
run several ops then. Cases that the oracle does not solve within the time limit are listed, not counted.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from judge import machine
from rich.console import Console
from rich.table import Table

from autoremat._ledger import expand, peak_bytes
from autoremat.solve import Planner
from oracle import Checkmate
from strategies import build_step

MAX_OPS = 40
TINY = 1e-9
SHARES = (0.0, 0.3, 0.6)
KINDS = ("linear", "gelu", "norm", "attention", "linear")


def random_step(rng, shape):
    def block():
        return [(rng.choice(KINDS), rng.randrange(3), rng.randint(1, 8)) for _ in range(rng.randint(2, 4))]

    while True:
        kinds = [block(), block()]
        chosen = [rng.choice(kinds) for _ in range(rng.randint(2, 4))]
        if shape == "flat":
            blocks = tuple((f"h.{i}", (leaf,)) for i, leaf in enumerate(leaf for block in chosen for leaf in block))
        else:
            blocks = tuple((f"h.{i}", tuple(("call", (leaf,), 0) for leaf in block)) for i, block in enumerate(chosen))
        graph = build_step(blocks, loss_bytes=rng.randint(2, 10))
        num_ops = sum(op.phase != "optimizer" and not op.is_view for op in graph.ops)
        if num_ops <= MAX_OPS and Planner(graph, op_cost=costs(graph), price=pricer(graph)).plan(1).cost > 0:
            return graph, num_ops


def costs(graph):
    return [float(op.flops + op.moved_bytes) for op in graph.ops]


def pricer(graph):
    return lambda specs: peak_bytes(graph, expand(graph, specs))


def without_blocks(graph):
    """The same step with every layer called by the model itself."""
    layers = [c for c in graph.calls if c.parent == -1 or not any(other.parent == c.index for other in graph.calls)]
    place = {call.index: position for position, call in enumerate(layers)}
    calls, makers = [], {}
    for position, call in enumerate(layers):
        links = tuple((s, makers[s]) for s in call.inputs if s in makers)
        calls.append(dataclasses.replace(call, index=position, parent=0 if position else -1, links=links))
        makers |= dict.fromkeys(call.outputs if position else (), position)
    return dataclasses.replace(
        graph,
        calls=tuple(calls),
        ops=tuple(dataclasses.replace(op, call=place.get(op.call, 0)) for op in graph.ops),
        saved=tuple(dataclasses.replace(r, call=place.get(r.call, 0)) for r in graph.saved),
    )


def planner_of(graph):
    return Planner(graph, op_cost=costs(graph), price=pricer(graph))


def solve(graph, num_ops, *, time_limit_s):
    op_cost = costs(graph)
    total = sum(op_cost)
    planner, oracle = planner_of(graph), Checkmate(graph, op_cost)
    free = planner_of(without_blocks(graph))
    for share in SHARES:
        budget = planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))
        solution = planner.plan(budget)
        start = time.perf_counter()
        optimum = of_hooks = oracle.optimum(budget, time_limit_s=time_limit_s)
        if optimum is not None and optimum < solution.cost - TINY * total:
            of_hooks = Checkmate(graph, op_cost, where_read=True).optimum(budget, time_limit_s=time_limit_s)
        yield {
            "num_ops": num_ops,
            "share": share,
            "bound": solution.bound / total,
            "optimum": None if optimum is None else optimum / total,
            "optimum_of_hooks": None if of_hooks is None else of_hooks / total,
            "plan": solution.cost / total,
            "plan_without_blocks": free.plan(budget).cost / total if free.smallest_bytes <= budget else None,
            "oracle_s": time.perf_counter() - start,
        }


def cases(num_graphs):
    rng = random.Random(0)
    for number in range(num_graphs):
        shape = ("flat", "blocks")[number % 2]
        yield number, shape, *random_step(rng, shape)


def rows_of(case, *, time_limit_s):
    number, shape, graph, num_ops = case
    return [{"graph": number, "shape": shape, **row} for row in solve(graph, num_ops, time_limit_s=time_limit_s)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with multiprocessing.Pool(options.jobs) as pool:
        for found in pool.imap(functools.partial(rows_of, time_limit_s=options.time_limit), cases(options.graphs)):
            rows += found
            if options.json:
                options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", "utf-8")
    solved = [row for row in rows if row["optimum"] is not None]
    table = Table(title=f"{options.graphs} steps of up to {MAX_OPS} ops, three budgets each; points of a step")
    for name in (
        "layers",
        "budget",
        "solved",
        "plan - optimum: mean",
        "worst",
        "plan - hooks: mean",
        "worst",
        "without blocks: mean",
        "worst",
        "optimum - bound: mean",
        "exactly optimal",
    ):
        table.add_column(name, justify="right")
    for shape, share in [(shape, share) for shape in ("flat", "blocks", None) for share in (*SHARES, None)]:
        asked = [row for row in rows if shape in (None, row["shape"]) and share in (None, row["share"])]
        group = [row for row in asked if row["optimum"] is not None]
        if not group:
            continue
        above = [row["plan"] - row["optimum"] for row in group]
        hooked = [row["plan"] - row["optimum_of_hooks"] for row in group if row["optimum_of_hooks"] is not None]
        without = [
            row["plan_without_blocks"] - row["optimum"] for row in group if row["plan_without_blocks"] is not None
        ]
        below = [row["optimum"] - row["bound"] for row in group]
        table.add_row(
            shape or "all",
            "all" if share is None else f"{share:.0%}",
            f"{len(group)} of {len(asked)}",
            f"{100 * statistics.mean(above):.2f}",
            f"{100 * max(above):.2f}",
            f"{100 * statistics.mean(hooked):.2f}",
            f"{100 * max(hooked):.2f}",
            f"{100 * statistics.mean(without):.2f}",
            f"{100 * max(without):.2f}",
            f"{100 * statistics.mean(below):.2f}",
            f"{sum(gap < TINY for gap in above)}",
        )
    Console(width=150).print(table)
    orders = ([row["bound"], row["optimum"], row["optimum_of_hooks"] or row["optimum"], row["plan"]] for row in solved)
    wrong = [order for order in orders if any(a > b + 1e-6 for a, b in pairwise(order))]
    print(f"bound <= optimum <= plan in {len(solved) - len(wrong)} of {len(solved)} cases")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
