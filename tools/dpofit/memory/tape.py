"""A tape of operators on shapes: what each allocates, what autograd saves, what backward allocates and frees.

It plays the part of torch's eager autograd with reference counts: a storage is freed when the last holder (a Python
name, a saved tensor, a gradient in flight) lets go. Nodes run backward in reverse order of creation, which is the
engine's order for a sequential model (torch/csrc/autograd/engine.cpp: ready queue sorted by sequence number).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dpofit.memory.program import Event, Space


class Storage:
    """Bytes on one device, alive while `holders` > 0. `shift` is the layer it belongs to, relative to the tape's.
    `view`: autograd holds it through a view (a 2-d matmul seen as 3-d), so nothing is added to it in place."""

    __slots__ = ("category", "holders", "shift", "size_bytes", "space", "tag", "view")

    def __init__(self, tag: str, size_bytes: int, category: str, space: Space = "gpu", shift: int = 0) -> None:
        self.tag, self.size_bytes, self.category = tag, size_bytes, category
        self.space, self.shift, self.holders = space, shift, 1
        self.view = False


class Value:
    """A tensor in the graph: its storage, whether it needs a gradient, and the gradient in flight."""

    __slots__ = ("grad", "needs_grad", "storage")

    def __init__(self, storage: Storage, needs_grad: bool) -> None:
        self.storage, self.needs_grad = storage, needs_grad
        self.grad: Storage | None = None


@dataclass(slots=True)
class Node:
    """One operator of the backward graph."""

    output: Value
    saved: list[Storage]
    backward: Callable[[Storage], None]


class Mark(NamedTuple):
    """A point where something outside the tape acts on a module's parameters: `pre`, `post` a forward, `pre_backward`,
    `post_backward`, or `grad` when a weight's gradient has appeared (`elements` of it, `size_bytes`)."""

    kind: str
    module: str
    elements: int = 0
    size_bytes: int = 0


BARE = "bare"  # a module without parameters: what matters is that its hooks prefetch
OUTERMOST, WRAPPER = "root", "wrapper"  # the whole model; what stands between it and the model's own (peft, trl)


class Tape:
    """Records allocations, frees and marks of one stretch of a step."""

    def __init__(self, prefix: str = "", grad: bool = True, recomputes: bool = False) -> None:
        self.prefix, self.grad, self.recomputes = prefix, grad, recomputes
        self.nodes: list[Node] = []
        self.weight_casts: list[Storage] | None = None  # autocast's cache, when it outlives the tape's operators
        self.kept_gradients: list[tuple[Mark, Storage]] | None = None  # weights' gradients, when not handed over yet
        self.sums: dict[str, tuple[Mark, Storage]] | None = None  # fp32, of gradients that come in parts, by module
        self.muted = False  # modules inside have no hooks of their own
        self.casts_cached = False  # autocast has the weights' copies already
        self._after: list[Callable[[], None]] = []  # what follows the node that runs, when it has let go
        self._kept: list[Storage] = []  # what contexts hold as attributes, to the end of the graph
        self._records: list[tuple[Storage, int] | Mark] = []
        self._serial: dict[str, int] = {}

    def new(self, tag: str, size_bytes: int, category: str, space: Space = "gpu") -> Storage:
        """Allocate; the caller holds it."""
        serial = self._serial[tag] = self._serial.get(tag, 0) + 1
        storage = Storage(self.prefix + (tag if serial == 1 else f"{tag}~{serial}"), size_bytes, category, space)
        self._records.append((storage, 1))
        return storage

    def hold(self, storage: Storage) -> Storage:
        storage.holders += 1
        return storage

    def drop(self, *storages: Storage | None) -> None:
        """Let go; the last holder's drop frees."""
        for storage in storages:
            if storage is None:
                continue
            storage.holders -= 1
            assert storage.holders >= 0, storage.tag
            if storage.holders == 0:
                self._records.append((storage, -1))

    def temporary(self, tag: str, size_bytes: int, category: str = "workspace") -> None:
        """Allocated and freed inside one kernel or expression."""
        self.drop(self.new(tag, size_bytes, category))

    def mark(self, kind: str, module: str, elements: int = 0, size_bytes: int = 0) -> None:
        if not self.muted or kind == "grad":
            self._records.append(Mark(kind, module, elements, size_bytes))

    def weight_gradient(self, gradient: Storage, module: str, elements: int) -> None:
        """A weight's gradient, whole and in the weight's dtype, to whoever reads the mark; it frees it."""
        if self.kept_gradients is not None:
            self.kept_gradients.append((Mark("grad", module, elements, gradient.size_bytes), gradient))
            return
        gradient.tag = f"grad.{module}"  # the parameter's own, whichever pass made it
        self.mark("grad", module, elements, gradient.size_bytes)

    def add_to_sum(self, gradient: Storage, mark: Mark) -> None:
        """An fp32 part of a weight's gradient: the first becomes the sum, the others are added to it."""
        assert self.sums is not None
        if mark.module in self.sums:
            self.drop(gradient)
        else:
            self.sums[mark.module] = (mark, gradient)

    def cut(self) -> list[Event | Mark]:
        """The records since the last cut, as events; storages of no bytes leave none."""
        records, self._records = self._records, []
        out: list[Event | Mark] = []
        for record in records:
            if isinstance(record, Mark):
                out.append(record)
            elif record[0].size_bytes:
                storage, sign = record
                size_bytes = sign * storage.size_bytes
                out.append(Event(storage.tag, size_bytes, storage.category, storage.space, "compute", storage.shift))
        return out

    # graph
    def node(
        self,
        output: Value,
        saved: list[Storage],
        backward: Callable[[Storage], None],
        module: str | None = None,
    ) -> None:
        """Register the backward of `output`; takes a hold on each saved storage."""
        if not (self.grad and output.needs_grad):
            return
        for storage in saved:
            self.hold(storage)
        if module is None:
            self.nodes.append(Node(output, saved, backward))
            return

        def hooked(gradient: Storage) -> None:
            self.mark("pre_backward", module)
            backward(gradient)
            self.mark("post_backward", module)

        self.nodes.append(Node(output, saved, hooked))

    def keep(self, storage: Storage) -> None:
        """Hold until the graph goes, when all of it has run backward."""
        self._kept.append(self.hold(storage))

    def give(self, value: Value, gradient: Storage) -> None:
        """Hand a gradient (held for the receiver) to `value`. A second one is added in place when nobody else holds
        the first and it is no view, else into a new storage (torch/csrc/autograd/input_buffer.cpp accumulate)."""
        if not value.needs_grad:
            self.drop(gradient)
        elif value.grad is None:
            value.grad = gradient
        elif value.grad.holders == 1 and not value.grad.view:
            self.drop(gradient)
        else:
            total = self.new("grad_sum", value.grad.size_bytes, "activation_grads")
            self.drop(value.grad, gradient)
            value.grad = total

    def after_node(self, act: Callable[[], None]) -> None:
        """A weight's AccumulateGrad is a node of its own: the one that made the gradient has let go of all it held."""
        self._after.append(act)

    def run_backward(self, until: int = 0) -> None:
        """Run nodes, last first, down to index `until`. A node that got no gradient only lets go of what it saved."""
        while len(self.nodes) > until:
            node = self.nodes.pop()
            gradient, node.output.grad = node.output.grad, None
            if gradient is not None:
                node.backward(gradient)
            self.drop(*node.saved)
            self.drop(gradient)
            while self._after:
                self._after.pop(0)()
        if not self.nodes:
            self.drop(*self._kept)
            self._kept = []
