"""Hypothesis strategies: random training steps as `StepGraph`s, without torch.

`Tape` behaves like eager execution with autograd: forward ops save tensors, backward unpacks and releases them in
reverse order. `step_graphs()` draws models made of repeated random blocks that nest, with dropout by in-place ops,
in-place activations, views, multi-output ops, batch statistics and ops whose results nobody needs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis import strategies as st

from autoremat._step_graph import BEFORE_STEP, ModuleCall, Op, Phase, SavedTensor, StepGraph, Storage

Recipe: TypeAlias = "tuple[tuple[str, Any, int], ...]"
"""What a block does: (kind of instruction, which earlier value it reads or the nested recipe, size)."""

TRANSFORMER: Recipe = (
    ("norm", 0, 4),
    ("call", (("linear", 0, 12), ("attention", 1, 4), ("linear", 0, 4), ("dropout", 0, 4)), 0),
    ("add", 2, 4),
    ("norm", 0, 4),
    ("call", (("linear", 0, 16), ("gelu", 0, 16), ("linear", 0, 4), ("dropout", 0, 4)), 0),
    ("add", 2, 4),
)
"""Shaped like a block of GPT-2, sizes in units of a quarter of the residual stream."""

LEAVES = ("linear", "gelu", "relu_", "dropout", "view", "norm", "attention", "add", "batch_norm", "dead")


@dataclass
class Tape:
    """Records a step as a dispatch mode and saved-tensor hooks would."""

    unit_bytes: int = 1
    ops: list[Op] = field(default_factory=list)
    storages: list[dict[str, Any]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    nodes: list[tuple[int, list[int], int]] = field(default_factory=list)
    """What runs in backward: (index of the forward op, its records, index of a parameter or -1)."""
    numbers: dict[str, int] = field(default_factory=dict)
    micro_step: int = 0

    def storage(self, num_bytes: int, cause: str, born: int | None = None) -> int:
        index = len(self.storages)
        born = len(self.ops) if born is None else born
        self.storages.append(
            {
                "index": index,
                "num_bytes": num_bytes * self.unit_bytes,
                "cause": cause,
                "born": born,
                "last_ref": born + 1,
            }
        )
        return index

    def before(self, num_bytes: int, cause: str) -> int:
        """A storage that is there before the step and stays."""
        index = self.storage(num_bytes, cause, BEFORE_STEP)
        self.storages[index]["last_ref"] = None
        return index

    def use(self, storage: int, clock: int) -> None:
        """Somebody other than autograd refers to a storage up to this clock."""
        last = self.storages[storage]["last_ref"]
        self.storages[storage]["last_ref"] = None if last is None else max(last, clock)

    def op(
        self,
        name: str,
        inputs: tuple[int, ...],
        sizes: tuple[int, ...] = (),
        *,
        phase: Phase = "forward",
        same: tuple[int, ...] = (),
        cause: str = "activation",
        unpacked: tuple[int, ...] = (),
        **more: Any,
    ) -> tuple[int, ...]:
        """Run an op: new outputs of these sizes after outputs that share storages in ``same``.

        What it reads from autograd (``unpacked``) is not referred to by anybody else.
        """
        index = len(self.ops)
        new = tuple(self.storage(size, cause) for size in sizes)
        call = more.pop("call", self.stack[-1] if self.stack else 0)
        moved = sum(self.storages[s]["num_bytes"] for s in (*inputs, *new))
        if more.get("is_view"):
            moved = 0
        self.ops.append(
            Op(
                index=index,
                phase=phase,
                name=f"aten.{name}.default",
                call=call,
                inputs=inputs,
                outputs=(*same, *new),
                moved_bytes=moved,
                **more,
            )
        )
        for s in (*inputs, *new, *same):
            if s not in unpacked:
                self.use(s, index + 1)
        return new

    def save(self, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = (), parameter: int = -1) -> None:
        """Autograd saves tensors of the last op and will run its backward."""
        index = len(self.ops) - 1
        records = []
        for s, packed in [*((s, index) for s in inputs), *((s, index + 1) for s in outputs)]:
            records.append(len(self.saved))
            self.saved.append(
                {"storage": s, "call": self.stack[-1], "packed": packed, "unpacked": None, "released": None}
            )
        self.nodes.append((index, records, parameter))

    def enter(self, path: str, class_name: str, inputs: tuple[int, ...]) -> int:
        index = len(self.calls)
        self.calls.append(
            {
                "index": index,
                "path": path,
                "number": self.numbers.get(path, 0),
                "micro_step": self.micro_step,
                "class_name": class_name,
                "parent": self.stack[-1] if self.stack else -1,
                "start": len(self.ops),
                "end": -1,
                "inputs": inputs,
                "links": self._links(inputs),
            }
        )
        self.numbers[path] = self.numbers.get(path, 0) + 1
        self.stack.append(index)
        return index

    def _links(self, inputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Arguments that earlier calls returned, unchanged since."""
        return tuple(
            (s, c["index"])
            for s in inputs
            for c in self.calls
            if s in c.get("outputs", ()) and self._is_as_returned(s, c)
        )

    def _is_as_returned(self, storage: int, call: dict[str, Any]) -> bool:
        return not any(storage in op.mutates for op in self.ops[call["end"] :])

    def leave(self, *outputs: int) -> None:
        """Return from the innermost call; its arguments and results were referred to up to here."""
        call = self.calls[self.stack.pop()]
        call |= {"end": len(self.ops), "outputs": outputs}
        for s in (*call["inputs"], *outputs):
            self.use(s, len(self.ops))

    def backward(self) -> None:
        """Run the nodes in reverse: each reads its saved tensors and a gradient, and makes a gradient."""
        gradient: int | None = None
        for forward, records, parameter in reversed(self.nodes):
            clock = len(self.ops)
            like = self.ops[forward].outputs[0]
            inputs = tuple(dict.fromkeys(self.saved[r]["storage"] for r in records))
            carried = () if gradient is None else (gradient,)
            for r in records:
                self.saved[r] |= {"unpacked": clock, "released": clock + 1}
            size = self.storages[like]["num_bytes"] // self.unit_bytes
            call, flops = self.ops[forward].call, 2 * self.ops[forward].flops
            (gradient,) = self.op(
                "backward",
                (*inputs, *carried),
                (size,),
                phase="backward",
                cause="temporary",
                unpacked=inputs,
                call=call,
                flops=flops,
            )
            if parameter >= 0:
                self._parameter_gradient(parameter, gradient, call)
        self.nodes.clear()

    def _parameter_gradient(self, parameter: int, gradient: int, call: int) -> None:
        size = self.storages[parameter]["num_bytes"] // self.unit_bytes
        fresh = self.op("backward", (gradient,), (size,), phase="backward", cause="gradient", call=call)
        self.storages[fresh[0]]["last_ref"] = None

    def graph(self, **more: Any) -> StepGraph:
        """The finished step."""
        end = len(self.ops)
        for item in self.storages:
            item["last_ref"] = end if item["last_ref"] is None else item["last_ref"]
        for record in self.saved:
            record["released"] = end if record["released"] is None else record["released"]
        return StepGraph(
            ops=tuple(self.ops),
            storages=tuple(Storage(**item) for item in self.storages),
            saved=tuple(SavedTensor(**item) for item in self.saved),
            calls=tuple(ModuleCall(**item) for item in self.calls),
            model="Random",
            **more,
        )


class Blocks:
    """Runs recipes on a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.weight = tape.before(3, "parameter")
        self.statistics = tape.before(1, "buffer")

    def call(self, path: str, recipe: Recipe, x: int) -> int:
        """Run a recipe as a module call on the value ``x``; returns the value that it ends with."""
        self.tape.enter(path, f"Block{len(recipe)}", (x,))
        values = [x]
        for position, (kind, choice, size) in enumerate(recipe):
            if kind == "call":
                values.append(self.call(f"{path}.{position}", choice, values[-1]))
            else:
                source = values[-1 - choice % min(3, len(values))]
                values.append(getattr(self, f"_{kind.rstrip('_')}")(source, values[-1], size))
        self.tape.leave(values[-1])
        return values[-1]

    def _linear(self, x: int, _last: int, size: int) -> int:
        (y,) = self.tape.op("addmm", (self.weight, x), (size,), flops=10 * size)
        self.tape.save(inputs=(x,), parameter=self.weight)
        return y

    def _gelu(self, x: int, _last: int, size: int) -> int:
        (y,) = self.tape.op("gelu", (x,), (size,))
        self.tape.save(inputs=(x,))
        return y

    def _relu(self, x: int, _last: int, size: int) -> int:
        (y,) = self.tape.op("mul", (x,), (size,), flops=1)
        self.tape.op("relu_", (y,), same=(y,), mutates=(y,))
        self.tape.save(outputs=(y,))
        return y

    def _dropout(self, x: int, _last: int, size: int) -> int:
        (mask,) = self.tape.op("empty_like", (x,), (size,))
        self.tape.op("bernoulli_", (mask,), same=(mask,), mutates=(mask,), is_random=True)
        self.tape.op("div_", (mask,), same=(mask,), mutates=(mask,))
        (y,) = self.tape.op("mul", (x, mask), (size,))
        self.tape.save(inputs=(mask,))
        return y

    def _view(self, x: int, _last: int, _size: int) -> int:
        self.tape.op("view", (x,), same=(x,), is_view=True)
        return x

    def _norm(self, x: int, _last: int, size: int) -> int:
        y, mean = self.tape.op("native_layer_norm", (x,), (size, 1))
        self.tape.save(inputs=(x,), outputs=(mean,))
        return y

    def _attention(self, x: int, last: int, size: int) -> int:
        y, logsumexp, _ = self.tape.op("sdpa", (x, last), (size, 1, 1), flops=7 * size, workspace_bytes=size)
        self.tape.save(inputs=tuple(dict.fromkeys((x, last))), outputs=(y, logsumexp))
        return y

    def _add(self, x: int, last: int, size: int) -> int:
        (y,) = self.tape.op("add", tuple(dict.fromkeys((x, last))), (size,))
        self.tape.save()
        return y

    def _batch_norm(self, x: int, _last: int, size: int) -> int:
        y, mean = self.tape.op(
            "native_batch_norm", (x, self.statistics), (size, 1), mutates=(self.statistics,), flops=1
        )
        self.tape.save(inputs=(x,), outputs=(mean,))
        return y

    def _dead(self, x: int, _last: int, size: int) -> int:
        self.tape.op("argmax", (x,), (size,), flops=size)
        return x


def build_step(
    blocks: tuple[tuple[str, Recipe], ...],
    *,
    num_micro_steps: int = 1,
    loss_bytes: int = 4,
    rng_state_bytes: int = 0,
    unit_bytes: int = 1,
) -> StepGraph:
    """A model that runs these named blocks in order, then a loss, backward and an optimizer.

    Args:
        blocks: Path and recipe of each.
        num_micro_steps: How many times forward and backward run.
        loss_bytes: Size of each of the loss's three tensors.
        rng_state_bytes: As in `StepGraph`.
        unit_bytes: All sizes are multiples of this.
    """
    tape = Tape(unit_bytes=unit_bytes)
    body = Blocks(tape)
    for micro_step in range(num_micro_steps):
        tape.micro_step = micro_step
        tape.numbers.clear()
        x = tape.before(2, "input")
        root = tape.enter("", "Model", (x,))
        for path, recipe in blocks:
            x = body.call(path, recipe, x)
        tape.leave(x)
        tape.stack.append(root)
        (probabilities,) = tape.op("log_softmax", (x,), (loss_bytes,))
        tape.save(outputs=(probabilities,))
        tape.op("nll_loss", (probabilities,), (1,))
        tape.save(inputs=(probabilities,))
        tape.stack.pop()
        tape.backward()
    tape.op("adam", (body.weight,), (2,), phase="optimizer", mutates=(body.weight,), cause="temporary")
    return tape.graph(accumulate=num_micro_steps, rng_state_bytes=rng_state_bytes)


def _instructions(max_bytes: int) -> st.SearchStrategy[tuple[str, Any, int]]:
    return st.tuples(st.sampled_from(LEAVES), st.integers(0, 2), st.integers(1, max_bytes))


def recipes(*, max_ops: int = 6, max_bytes: int = 6, nested: bool = True) -> st.SearchStrategy[Recipe]:
    """Random block recipes, with module calls inside if ``nested``."""
    leaf = _instructions(max_bytes)
    flat = st.lists(leaf, min_size=1, max_size=max_ops).map(tuple)
    if not nested:
        return flat
    inner = st.tuples(st.just("call"), flat, st.just(0))
    return st.lists(st.one_of(leaf, leaf, inner), min_size=1, max_size=max_ops).map(tuple)


@st.composite
def step_graphs(
    draw: st.DrawFn, *, max_blocks: int = 4, max_ops: int = 6, nested: bool = True, max_micro_steps: int = 2
) -> StepGraph:
    """Random steps: up to three kinds of block, repeated, under names such as ``h.0`` and ``g.1``."""
    kinds = draw(st.lists(recipes(max_ops=max_ops, nested=nested), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=max_blocks))
    blocks = tuple(("hgf"[kind] + f".{position}", kinds[kind]) for position, kind in enumerate(order))
    return build_step(
        blocks,
        num_micro_steps=draw(st.integers(1, max_micro_steps)),
        loss_bytes=draw(st.integers(1, 12)),
        rng_state_bytes=draw(st.sampled_from((0, 0, 1))),
    )


def scaled(graph: StepGraph, factor: int) -> StepGraph:
    """The same step with every storage ``factor`` times as large."""
    storages = tuple(dataclasses.replace(s, num_bytes=s.num_bytes * factor) for s in graph.storages)
    return dataclasses.replace(graph, storages=storages)
