"""The gated MLP under `tiled_mlp` on the tape: tiles of the sequence one after the other, recomputed in backward.

Models dpofit.train.longdpo.tiled_mlp. Two tiles are written out, the second beside what the first has left; all later
ones are like the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dpofit.memory.ops import Ops
from dpofit.memory.spec import FP32, LayerSpec
from dpofit.memory.tape import Mark, Storage, Tape, Value
from dpofit.models.shape import Linear
from dpofit.train.longdpo import TILE_TOKENS

LEAF = "mlp"  # under ZeRO-3 the module whose hooks answer for all inside it


def tile_tokens(tokens: int) -> int:
    """Tokens of one tile: equal ones, as few as the largest size allows."""
    return -(-tokens // -(-tokens // TILE_TOKENS))


def tiled_mlp(spec: LayerSpec, tape: Tape, x: Value, gate: Linear, up: Linear, down: Linear) -> Value:
    """One layer's MLP, between the leaf's `pre` and `post` marks; the caller holds `x`. Returns the output, held."""
    if spec.tokens <= TILE_TOKENS:
        return _whole(spec, tape, x, gate, up, down)
    tile = replace(spec, rows=1, tokens_per_row=tile_tokens(spec.tokens))
    ops = Ops(tile, tape)
    trained = any(linear.name in spec.trained for linear in (gate, up, down)) or spec.lora is not None
    needs_grad = tape.grad and (x.needs_grad or trained)
    if needs_grad and tape.recomputes:  # the layer only adds the values, which nobody reads
        output = Value(tape.new("mlp.stand_in", 0, "activations"), True)
    else:
        output = Value(_tiles_forward(tape, ops, x, (gate, up, down), spec.tokens), needs_grad)

    def backward(grad: Storage) -> None:
        size = x.storage.size_bytes
        grad_x = tape.new("mlp.grad_in", size, "activation_grads") if x.needs_grad else None
        sums: dict[str, tuple[Mark, Storage]] = {}
        outer, tape.weight_casts = tape.weight_casts, []
        for _ in range(2):
            part = _part(x, tile.tokens, spec.tokens, x.needs_grad)
            for mark, gradient in _tile_backward(tape, ops, part, grad, (gate, up, down), sums):
                tape.add_to_sum(tape.new("mlp.grad_sum", mark.elements * FP32, "gradients"), mark)
                tape.drop(gradient)
            tape.sums = None
            tape.casts_cached = True
        finals = []
        for mark, total in sums.values():
            finals.append(tape.new("mlp.grad_weight", mark.size_bytes, "gradients"))
            tape.drop(total)
        for (mark, _), final in zip(sums.values(), finals, strict=True):
            tape.weight_gradient(final, mark.module, mark.elements)
        tape.drop(*tape.weight_casts)  # autocast's cache ends with the node's own context
        tape.weight_casts, tape.casts_cached = outer, False
        if grad_x is not None:
            tape.give(x, grad_x)
        tape.mark("post_backward", LEAF)

    tape.node(output, [x.storage], backward)
    return output


def _whole(spec: LayerSpec, tape: Tape, x: Value, gate: Linear, up: Linear, down: Linear) -> Value:
    """A row no longer than one tile: the stock MLP, still one leaf."""
    start = len(tape.nodes)
    with _quiet(tape):
        output = Ops(spec, tape).gated_mlp(x, gate, up, down)

    def quietly(backward: Callable[[Storage], None], last: bool) -> Callable[[Storage], None]:
        def run(grad: Storage) -> None:
            with _quiet(tape):
                backward(grad)
            if last:
                tape.mark("post_backward", LEAF)

        return run

    for index, node in enumerate(tape.nodes[start:]):
        node.backward = quietly(node.backward, last=index == 0)
    return output


def _tiles_forward(tape: Tape, ops: Ops, x: Value, linears: tuple[Linear, Linear, Linear], tokens: int) -> Storage:
    """Without a graph; a tile's result stays until the next one's is there."""
    grad, tape.grad = tape.grad, False
    with _quiet(tape):
        part = _part(x, ops.spec.tokens, tokens, False)
        first = ops.gated_mlp(part, *linears).storage
        output = tape.new("mlp.out", first.size_bytes // ops.spec.tokens * tokens, "activations")
        tape.casts_cached = True
        second = ops.gated_mlp(part, *linears).storage
        tape.casts_cached = False
        tape.drop(first, second)
    tape.grad = grad
    return output


def _part(x: Value, tile: int, tokens: int, needs_grad: bool) -> Value:
    """A view of one tile of `x`: bytes of its own for what reads their number, none on the tape."""
    view = Storage("mlp.tile", x.storage.size_bytes * tile // tokens, x.storage.category)
    view.holders += 1  # never freed
    return Value(view, needs_grad)


def _tile_backward(
    tape: Tape,
    ops: Ops,
    part: Value,
    grad: Storage,
    linears: tuple[Linear, Linear, Linear],
    sums: dict[str, tuple[Mark, Storage]],
) -> list[tuple[Mark, Storage]]:
    """One tile's forward with a graph, and autograd.grad over it. Linear layers' gradients go into `sums`; those that
    autograd.grad gives, held."""
    nodes, tape.nodes = tape.nodes, []
    gradients: list[tuple[Mark, Storage]] = []
    tape.kept_gradients, tape.sums = gradients, sums
    with _quiet(tape):
        y = ops.gated_mlp(part, *linears)
        y.grad = tape.hold(grad)  # a view of the tile's part
        tape.run_backward()
        tape.drop(y.storage, part.grad)
    tape.kept_gradients = None
    tape.nodes = nodes
    return gradients


@contextmanager
def _quiet(tape: Tape) -> Iterator[None]:
    before, tape.muted = tape.muted, True
    yield
    tape.muted = before
