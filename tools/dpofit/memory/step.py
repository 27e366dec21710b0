"""The event program of a job: load, init, a first and a steady step, evaluation, a save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dpofit.memory.badam import widened
from dpofit.memory.bucket import Reducer
from dpofit.memory.engine import OUTSIDE, Engine
from dpofit.memory.frozen_parts import KL, reference
from dpofit.memory.job import Job
from dpofit.memory.layerwise import StepInBackward
from dpofit.memory.overlay import Decisions, Taker, decide, lay
from dpofit.memory.own_optimizers import layerwise, update_for
from dpofit.memory.part import Part
from dpofit.memory.parts import evaluation, micro_batch
from dpofit.memory.program import Event, Phase, Program, Repeat
from dpofit.memory.reduction import (
    accumulate,
    late_reducer,
    partition_reducer,
    reduced_at_the_end,
    reduction_ends,
    unbucketed_reduction,
)
from dpofit.memory.spec import BF16, FP32
from dpofit.memory.states import (
    State,
    base_weight_bytes,
    optimizer_states,
    weight_states,
)
from dpofit.memory.tape import OUTERMOST, WRAPPER
from dpofit.memory.tensors import trained_tensors
from dpofit.memory.tiled import LEAF
from dpofit.memory.update import (
    Items,
    allocate,
    comes_and_goes,
    end,
    first_unfused_step,
    forwarded_twice,
    optimizer_update,
    zero_grad,
)
from dpofit.memory.zero import ZeroSizes, reference_coordinator, zero_sizes
from dpofit.memory.zero3 import LAYER_STRIDE, NO_LEAVES, Leaves, ModuleIds, persistent_elements


@dataclass(frozen=True, slots=True)
class Plan:
    """What DeepSpeed does at each mark of a first and of a steady step: the same at every length."""

    sizes: ZeroSizes | None
    first: Decisions
    steady: Decisions
    persistent: tuple[State, ...]  # each ZeRO-3 engine's parameters that are never partitioned


def plan_steps(job: Job) -> Plan:
    """Work out the coordinator and the gradient buckets once for all lengths of `job`."""
    sizes = zero_sizes(job) if job.recipe.zero else None
    parts = micro_batch(job)
    steady = _decide(job, sizes, parts, traced=True)
    persistent = tuple(_persistent(_engines(job, sizes, ModuleIds(OUTSIDE), traced=False)))
    if job.recipe.gradient_accumulation > 1:  # a step is shown by its later micro-batches: in the first they're traced
        return Plan(sizes, steady, steady, persistent)
    return Plan(sizes, _decide(job, sizes, parts, traced=False), steady, persistent)


def _decide(job: Job, sizes: ZeroSizes | None, parts: list[Part], traced: bool) -> Decisions:
    ids = ModuleIds(OUTSIDE)
    reducer: Taker | None = None
    if sizes and job.zero_stage == 3:
        reducer = Reducer(sizes.reduce_bucket, job.world_size)
    elif sizes and job.zero_stage in (1, 2):
        reducer = partition_reducer(job, sizes, ids)
    elif layerwise(job.recipe):
        tensors = {tensor.name: tensor for tensor in trained_tensors(job)}
        updates = {name: update_for(job.recipe, one, job.trained_bytes) for name, one in tensors.items()}
        reducer = StepInBackward({name: update.temporary for name, update in updates.items()}, ids)
    return decide(parts, _engines(job, sizes, ids, traced), reducer, ids, job.zero_stage > 0 and job.zero.overlap_comm)


def build_program(job: Job, plan: Plan) -> Program:
    """Everything one rank allocates, in order; host events are this rank's too, `save` is rank 0's."""
    sizes = plan.sizes
    parts = micro_batch(job)
    lasting, lazy = _optimizer_split(job, sizes)
    phases = [
        Phase("load", 0, tuple(_load(job))),
        Phase("init", 0, tuple(_init(job, plan, lasting))),
        *_reference_pass(job, sizes),
        *_step(job, sizes, parts, 1, plan.first, lazy),
        *_step(job, sizes, parts, 2, plan.steady, []),
    ]
    if job.recipe.evaluates:
        ids, eval_parts = ModuleIds(OUTSIDE), evaluation(job)
        laid = lay(eval_parts, decide(eval_parts, _engines(job, sizes, ids, traced=False), None, ids))
        phases.append(Phase("eval", 2, tuple(laid["eval"])))
    if job.recipe.saves:
        phases.append(Phase("save", 2, tuple(_save(job))))
    return Program(tuple(phases))


def _reference_pass(job: Job, sizes: ZeroSizes | None) -> list[Phase]:
    """cached_reference's forwards over the data before step 1, at the longest rows: the first, and a later one, for
    which ZeRO-3 fetches ahead. By the policy itself, whose engine has the weights, or by a given ref_model, which is
    loaded for it and goes again."""
    if not job.has_reference or job.reference_in_step:
        return []
    given = job.recipe.ref_model is not None
    pieces = job.recipe.long_context - ({"cached_reference"} if given else set())
    asked = replace(job, recipe=replace(job.recipe, long_context=pieces))
    parts, ids = reference(asked), ModuleIds(OUTSIDE)
    overlap = job.zero_stage > 0 and job.zero.overlap_comm
    loaded: list[Event] = []
    if given:
        states = [state for state in weight_states(asked) if state.category == "reference"]
        loaded += allocate([*states, *_persistent(_scoring(asked, sizes, ids, traced=False))])
    items: Items = [*loaded]
    for traced in (False, True) if job.zero_stage == 3 else (False,):
        decisions = decide(parts, _scoring(asked, sizes, ids, traced), None, ids, overlap)
        items += [*lay(parts, decisions)["reference_forward"], *map(end, decisions.kept)]
    return [Phase("reference_forward", 0, (*items, *map(end, loaded)))]


def _scoring(job: Job, sizes: ZeroSizes | None, ids: ModuleIds, traced: bool) -> list[Engine]:
    """The engine of that pass. No backward stands between its forwards: each is a step to the coordinator."""
    name = "reference" if job.reference_copy else "policy"
    of_pass = (engine for engine in _engines(job, sizes, ids, traced) if engine.name.removesuffix(KL) == name)
    return [replace(engine, traced=traced or engine.traced, twice=False, later=False) for engine in of_pass]


def steady_step(job: Job, plan: Plan) -> Program:
    """One steady step alone, for a mix of lengths."""
    return Program(tuple(_step(job, plan.sizes, micro_batch(job), 2, plan.steady, [])))


def _load(job: Job) -> Items:
    items: Items = list(allocate(weight_states(job)))
    if job.zero_stage == 3:
        # zero.Init builds each module whole on the GPU, then keeps its slice (partition_parameters.py Init)
        items += comes_and_goes("load_module", job.model.embedding_parameters * BF16, "load")
    elif job.recipe.zero is not None and job.own_trained_parameters:
        # LLaMA-Factory upcasts trainable weights to fp32 before DeepSpeed casts them to bf16
        items += comes_and_goes("load_fp32", job.own_trained_parameters * BF16, "load")
    if job.recipe.pissa_init:
        # peft 0.18.1 tuners/lora/layer.py pissa_init, weight by weight: in fp32 the weight, B @ A and their difference
        # beside each other; the decomposition's own workspace is not known
        largest = max(linear.in_features * linear.out_features for linear in job.model.linears)
        items += comes_and_goes("pissa", largest * 3 * FP32, "load")
    return items


def _optimizer_split(job: Job, sizes: ZeroSizes | None) -> tuple[list[State], list[State]]:
    """(at init, at the first optimizer step): the optimizer's moments are made when first used."""
    states = optimizer_states(job, sizes)
    lazy = [state for state in states if state.tag.startswith("moments")]
    return [state for state in states if not state.tag.startswith("moments")], lazy


def _init(job: Job, plan: Plan, lasting: list[State]) -> Items:
    items: Items = [end(event) for event in allocate(weight_states(job)) if event.category == "load"]
    zero, sizes = job.recipe.zero, plan.sizes
    if zero is not None and zero.stage == 0:  # initialize_optimizer_states: a first step on gradients of zero
        return [*allocate(lasting), *first_unfused_step(job)]
    if zero is not None and sizes is not None:
        share = math.ceil(job.trained_parameters / job.world_size)
        group = min(share, sizes.sub_group) if zero.stage == 3 else share
        if zero.stage < 3:  # trained weights are flattened on the host: stage_1_and_2.py:374-414
            items += comes_and_goes("flatten", 2 * job.trained_parameters * BF16, "load", "host_pageable")
        if zero.offload_optimizer == "none":
            items += comes_and_goes("master_copy", group * FP32, "optimizer")  # converted, then cloned: stage3.py:963
        else:
            items += comes_and_goes("master_copy", group * FP32, "optimizer", "host_pageable")
        if zero.stage == 3 and zero.offload_param == "none":
            # defragment (stage3.py:647-675) moves the shards through host memory when the GPU is short of none
            items += comes_and_goes("defragment", math.ceil(job.trained_parameters / job.world_size) * BF16, "load",
                           "gpu" if zero.offload_optimizer == "none" else "host_pageable")  # fmt: skip
    items += allocate(lasting)
    items += allocate(list(plan.persistent))
    return items


def _persistent(engines: list[Engine]) -> list[State]:
    """Parameters too small to be released."""
    return [
        State(f"{engine.name}.persistent", persistent_elements(engine.parameters, engine.config) * BF16, "gathered")
        for engine in engines
        if not engine.name.endswith(KL)
    ]


def _engines(job: Job, sizes: ZeroSizes | None, ids: ModuleIds, traced: bool) -> list[Engine]:
    """The ZeRO-3 engines; a LoRA run with a reference forwards one engine twice a step, which undoes its trace."""
    if job.zero_stage != 3 or sizes is None:
        return []
    twice, hooked = forwarded_twice(job), job.embedding_needs_grad
    parameters = _parameters(job, ids, adapters=True)
    leaves = _leaves(job, ids, parameters)
    later = job.recipe.gradient_accumulation > 1
    slices = job.world_size if job.zero.offload_param == "cpu" else 1
    coordinator, unbroken = sizes.coordinator(), traced and not twice
    policy = Engine("policy", parameters, coordinator, unbroken, twice, leaves, traced, later, hooked, slices)
    found = [policy]
    if job.reference_copy:
        alone = _parameters(job, ids, adapters=False)
        leaves = _leaves(job, ids, alone)
        found.append(
            Engine("reference", alone, reference_coordinator(job), traced, leaves=leaves, in_host_memory=slices)
        )
    if job.passes > 1 and not job.adapters_switched_off:  # each a step to the coordinator, traced by the one before
        found += [replace(engine, name=f"{engine.name}{KL}", traced=True, twice=False) for engine in found]
    return found


def _leaves(job: Job, ids: ModuleIds, parameters: Mapping[int, tuple[int, ...]]) -> Leaves:
    """tiled_mlp makes each layer's MLP a leaf."""
    if not job.on("tiled_mlp"):
        return NO_LEAVES
    mlp = {linear.name for linear in job.model.linears[-3:]}
    members, containers, elements = {}, {}, {}
    for layer in range(job.model.layers):
        layer_id, attention, leaf = (ids.module(name, layer) for name in ("layer", "self_attn", LEAF))
        own = [module for module in parameters if module // LAYER_STRIDE == layer_id // LAYER_STRIDE]
        members[leaf] = tuple(module for module in own if ids.name(module).partition(".")[0] in mlp)
        norms = [ids.module(name, layer) for name in ("input_layernorm", "post_attention_layernorm")]
        containers[layer_id] = leaf
        for module, inside in ((layer_id, own), (leaf, members[leaf])):
            elements[module] = sum(sum(parameters[one]) for one in inside)
        elements[attention] = elements[layer_id] - elements[leaf] - sum(sum(parameters[norm]) for norm in norms)
    return Leaves(members, containers, elements)


def _parameters(job: Job, ids: ModuleIds, adapters: bool) -> dict[int, tuple[int, ...]]:
    """Elements of each parameter tensor, by module."""
    model = job.model
    parameters: dict[int, tuple[int, ...]] = {ids.module("embed_tokens", None): (model.embedding_parameters,)}
    names: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    for linear in model.linears:
        name = f"mlp.{linear.name}" if linear.name in seen else linear.name
        seen.add(linear.name)
        weight = linear.in_features * linear.out_features
        names[name] = (weight, linear.out_features) if linear.bias else (weight,)
        if adapters and job.adapters and linear.name in job.lora_targets:
            names[f"{name}.lora_A"] = (job.recipe.lora_rank * linear.in_features,)
            names[f"{name}.lora_B"] = (job.recipe.lora_rank * linear.out_features,)
            if job.recipe.use_dora:
                names[f"{name}.lora_magnitude"] = (linear.out_features,)
    names |= {norm: (width,) for norm, width in model.norms}
    for layer in range(model.layers):
        for name, counts in names.items():
            parameters[ids.module(name, layer)] = counts
    parameters[ids.module("norm", None)] = (model.hidden_size,)
    if not (job.tied_embeddings if adapters else model.tied_embeddings):
        owner = "lm_head"
        if job.fused_loss:
            # Liger reads the weight and never calls the head: to DeepSpeed an external parameter of the module around
            # (parameter_offload.py ZeROOrderedDict). The whole model's backward has no end, peft's LoraModel has none
            owner = WRAPPER if job.adapters else OUTERMOST
        parameters[ids.module(owner, None)] = (model.embedding_parameters,)
    return parameters


def _step(
    job: Job, sizes: ZeroSizes | None, parts: list[Part], step: int, decisions: Decisions, appearing: list[State]
) -> list[Phase]:
    laid = lay(parts, decisions)
    graph_ends = laid.pop("optimizer_step", [])
    phases = [Phase(name, step, tuple(items)) for name, items in laid.items() if name != "backward"]
    accumulates = job.recipe.gradient_accumulation > 1
    backward, again, partition = laid["backward"], list[Event | Repeat](), list[Event]()
    if accumulates and job.zero_stage < 2:  # reduced once, when all are there: two micro-batches are shown
        backward = [*backward, *graph_ends]
        # only the last micro-batch's graph meets the step
        again, graph_ends = accumulate(parts, late_reducer(job, sizes, decisions.ids), decisions.ids)
    reduced = again or backward
    if job.recipe.zero is not None and job.zero_stage == 0:
        reduced += unbucketed_reduction(job)
    elif job.zero_stage in (1, 2) and sizes is not None:
        if job.zero_stage == 1 and not job.zero.overlap_comm:
            reduced += reduced_at_the_end(job, sizes, decisions)
        added = accumulates and job.zero_stage == 2
        ends, partition = reduction_ends(job, [*backward, *again], kept=not added)
        reduced += ends
        if added:  # ZeRO-2 adds each micro-batch's to the first one's
            partition = [event._replace(tag=f"first.{event.tag}") for event in partition]
            phases = [
                replace(phase, items=(*partition, *phase.items)) if phase.name == "forward" else phase
                for phase in phases
            ]
    phases.append(Phase("backward", step, tuple(backward)))
    if again:
        phases.append(Phase("accumulate", step, tuple(again)))
    items: Items = []
    if job.zero_stage == 3 and sizes is not None:  # step() partitions all parameters first, stage3.py:2187
        items += [end(event) for event in decisions.kept]
    gradients = zero_grad(parts) if job.zero_stage == 0 and not layerwise(job.recipe) else []
    if job.recipe.badam is not None:
        copies, gradients = widened(gradients)
        items += copies
    items += optimizer_update(job, sizes, appearing)
    items += graph_ends
    items += map(end, partition)
    items += gradients
    phases.append(Phase("optimizer_step", step, tuple(items)))
    return phases


def _save(job: Job) -> Items:
    """LLaMA-Factory's native save (transformers 5.5.4 trainer.py save_model). ZeRO-3: modules are gathered one by one,
    the 16-bit model piles up on rank 0's host (engine.py _zero3_consolidated_16bit_state_dict); with LoRA only the
    adapters since transformers 5, before it the frozen base too (accelerate's get_state_dict). ZeRO-1/2: the whole
    model, frozen base included, is cloned on every rank's host (get_state_dict, clone_tensors_for_torch_save); stage 0
    too."""
    whole = base_weight_bytes(job) + (job.adapter_parameters + job.copied_parameters) * BF16
    if job.recipe.zero is not None and job.zero_stage < 3:
        return comes_and_goes("save_copy", whole, "save", "host_pageable")
    if job.zero_stage == 3 and not job.zero.gather_16bit_weights_on_save:
        return []  # ValueError inside save_model; the sharded DeepSpeed checkpoint is written instead
    if job.zero_stage == 3 and (not job.adapters or not job.stack.at_least("transformers", "5.0")):
        gathered = comes_and_goes("save_gather", job.model.embedding_parameters * BF16, "gathered")
        return gathered + comes_and_goes("save_rank0", whole, "save_rank0", "host_pageable")
    if job.adapters:
        return comes_and_goes("adapter_copy", job.trained_parameters * job.trained_bytes, "save", "host_pageable")
    return comes_and_goes("save_copy", job.model.parameters * BF16, "save", "host_pageable")
