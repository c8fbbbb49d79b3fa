"""How far plans are from the exact optimum: random small steps against Checkmate's integer program.

    python benchmarks/optimality.py [--graphs 60] [--time-limit 20] [--json FILE]

Steps are chains of random layers with up to 40 ops (forward and backward); every op is a module call. In half of them
the layers are called one after the other by the model itself ("flat"), in the others by blocks of two to four layers,
which no region may cut across ("blocks"). Each is planned at three budgets: the smallest that a plan meets, and 30 %
and 60 % of the way to the plain peak. Costs are FLOPs plus bytes moved, as shares of the plain step. The oracle may run
any op of forward again at any time of backward; it has no regions. Cases that
it does not solve within the time limit are listed, not counted.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

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


def solve(graph, num_ops, *, time_limit_s):
    op_cost = costs(graph)
    total = sum(op_cost)
    planner, oracle = Planner(graph, op_cost=op_cost, price=pricer(graph)), Checkmate(graph, op_cost)
    for share in SHARES:
        budget = planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))
        solution = planner.plan(budget)
        start = time.perf_counter()
        optimum = oracle.optimum(budget, time_limit_s=time_limit_s)
        yield {
            "num_ops": num_ops,
            "share": share,
            "bound": solution.bound / total,
            "optimum": None if optimum is None else optimum / total,
            "plan": solution.cost / total,
            "oracle_s": time.perf_counter() - start,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    rows = []
    for number in range(options.graphs):
        shape = ("flat", "blocks")[number % 2]
        found = solve(*random_step(rng, shape), time_limit_s=options.time_limit)
        rows += [{"graph": number, "shape": shape, **row} for row in found]
    solved = [row for row in rows if row["optimum"] is not None]
    table = Table(title=f"{options.graphs} steps of up to {MAX_OPS} ops, three budgets each; points of a step")
    for name in (
        "layers",
        "budget",
        "solved",
        "plan - optimum: mean",
        "worst",
        "optimum - bound: mean",
        "exactly optimal",
    ):
        table.add_column(name, justify="right")
    for shape, share in [(shape, share) for shape in ("flat", "blocks", None) for share in (*SHARES, None)]:
        asked = [row for row in rows if shape in (None, row["shape"]) and share in (None, row["share"])]
        group = [row for row in asked if row["optimum"] is not None]
        above = [row["plan"] - row["optimum"] for row in group]
        below = [row["optimum"] - row["bound"] for row in group]
        table.add_row(
            shape or "all",
            "all" if share is None else f"{share:.0%}",
            f"{len(group)} of {len(asked)}",
            f"{100 * statistics.mean(above):.2f}",
            f"{100 * max(above):.2f}",
            f"{100 * statistics.mean(below):.2f}",
            f"{sum(gap < TINY for gap in above)}",
        )
    Console(width=130).print(table)
    wrong = [row for row in solved if not row["bound"] - 1e-6 <= row["optimum"] <= row["plan"] + 1e-6]
    print(f"bound <= optimum <= plan in {len(solved) - len(wrong)} of {len(solved)} cases")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
