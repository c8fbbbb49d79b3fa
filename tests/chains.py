"""Chains of blocks for spans and nesting, and plans over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from autoremat._plan import CallName, Region
from autoremat._replay import Extent


class Block(nn.Module):
    """A residual block that saves several times its output."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=None):
        out = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (out if scale is None else out * scale)


class Chain(nn.Module):
    """Blocks called in a loop by a forward that knows nothing of regions.

    ``link`` says what the loop hands from one block to the next: the output itself ("same"), in a tuple with a keyword
    ("tuple"), a view of it ("view"), or something computed from it ("glue").
    """

    def __init__(self, num_blocks: int, width: int = 16, dropout: float = 0.0, link: str = "same"):
        super().__init__()
        self.h = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.link = link

    def forward(self, x):
        scale = torch.full((), 0.5)
        for block in self.h:
            match self.link:
                case "same":
                    x = block(x)
                case "tuple":
                    (x,) = (block(x, scale=scale),)
                case "view":
                    x = block(x).view(x.shape)
                case "glue":
                    x = block(x) * 1.5
        return x.sum()


class Thin(nn.Module):
    """A block of two ops."""

    def forward(self, x):
        return torch.tanh(x.sin())


class ThinChain(nn.Module):
    """As many blocks as a test of depth needs, at little cost."""

    def __init__(self, num_blocks: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.h = nn.ModuleList(Thin() for _ in range(num_blocks))

    def forward(self, x):
        x = x * self.scale
        for block in self.h:
            x = block(x)
        return x.sum()


def span(first: int, last: int, children: Sequence[Region] = (), name: str = "h") -> Region:
    """A region over blocks ``first`` to ``last``, both included."""
    then = tuple(CallName(f"{name}.{i}") for i in range(first + 1, last + 1))
    return Region(f"{name}.{first}", then=then, children=tuple(children))


def uniform(num_blocks: int, size: int) -> tuple[Region, ...]:
    """One level of spans of equal size."""
    return tuple(span(i, min(i + size, num_blocks) - 1) for i in range(0, num_blocks, size))


def nested(first: int, last: int, arity: int, *, whole: bool = False) -> tuple[Region, ...]:
    """Spans that are cut into ``arity`` spans each, down to single blocks; ``whole`` puts one around everything."""
    size = last - first + 1
    if size == 1:
        return (span(first, last),)
    edges = [first + size * i // arity for i in range(arity + 1)]
    pieces = [(a, b - 1) for a, b in itertools.pairwise(edges) if b > a]
    parts = tuple(span(a, b, nested(a, b, arity) if b > a else ()) for a, b in pieces)
    return (span(first, last, parts),) if whole else parts


def random_regions(choose, first, last, depth):
    """Spans over some of these blocks, inside each other to a depth; ``choose`` is a ``random.Random``."""
    found, at = [], first
    while at <= last:
        size = choose.randint(1, last - at + 1)
        if choose.random() < 0.7:
            inner = random_regions(choose, at, at + size - 1, depth - 1) if depth else []
            found.append(span(at, at + size - 1, [r for r in inner if len(r.calls) < size]))
        at += size
    return found


def with_random_saves(choose, graph, spec):
    """The same region with a few stored outputs, here and in the regions inside it."""
    born = [s.index for s in graph.storages if s.born in Extent(graph, spec.calls)]
    kept = frozenset(choose.sample(born, choose.randint(0, min(3, len(born)))))
    children = tuple(with_random_saves(choose, graph, child) for child in spec.children)
    return type(spec)(spec.call, kept, spec.then, children)


def functions_in(regions):
    """Paths of the functions between modules that these regions and those inside them call."""
    inner = itertools.chain.from_iterable(functions_in(region.children) for region in regions)
    return [call.path for region in regions for call in region.calls if call.path.endswith("()")] + list(inner)
