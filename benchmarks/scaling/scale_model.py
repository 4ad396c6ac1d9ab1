"""The scale model: seconds and bytes that training takes on a GPU, from the inputs of scale_inputs.py.

FSDP2 gathers a unit (embedding, layer, head) while the one before it computes, and reduces its gradients while the next
one does. docs/scale.md has the formulae, how far they are from what was measured, and what they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.scaling.scale_inputs import BF16, FP32, GIB, H200, HOST, Job, Machine, Model, System
from benchmarks.scaling.scale_vision import Vision

# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers and reduces as one, in seconds: an embedding, a layer, a head. gathers: how often a step."""

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    gathers: int = 2


def collective(total: float, ranks: int, machine: Machine) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, `total` bytes on each of `ranks` GPUs, by rings.

    A GPU receives total · (ranks-1)/ranks. Between hosts there are as many rings as a host has GPUs, each on a network
    link of its own, so that a host takes in `HOST` · infiniband.
    """
    hosts = -(-ranks // HOST)
    rate = machine.nvlink if hosts == 1 else min(machine.nvlink, HOST * machine.infiniband)
    hops = (ranks - hosts) * machine.hop_nvlink + (hosts - 1) * machine.hop_network
    return total * (ranks - 1) / ranks / (rate * 1e9) + hops * 1e-6


def replicas_reduced(total: float, job: Job, machine: Machine) -> float:
    """Seconds of the all-reduce between hosts that hybrid sharding adds: each GPU's shard, on its own link."""
    hosts = job.gpus // job.shards
    return 2 * (hosts - 1) * (total / job.shards / hosts / (machine.infiniband * 1e9) + machine.hop_network * 1e-6)


def sharded(
    count: int, wire: int, forward: float, backward: float, job: Job, machine: Machine, recast: bool = False
) -> Unit:
    """Return a unit of `count` parameters with its collectives; copies that FSDP2 makes around them count as compute.

    Bytes of copies: a shard is cast to what goes over the wire (`recast`: read once more, for its amax), and what has
    arrived is copied apart; a gradient is copied into an FP32 buffer, and the shard that has been reduced is scaled.
    """
    n = job.shards
    if job.gpus == 1 or not count:
        return Unit(forward, backward)
    copies = count * ((job.parameter + wire) / n + 2 * wire) / (machine.memory * 1e12)
    amax = count * job.parameter / n / (machine.memory * 1e12) if recast else 0.0
    gradients = count * (BF16 + FP32 + 2 * FP32 / n) / (machine.memory * 1e12)
    reduce = collective(count * FP32, n, machine) + replicas_reduced(count * FP32, job, machine)
    gather = collective(count * wire, n, machine)
    return Unit(forward + copies + amax, backward + copies + gradients, gather, reduce)


def layer(job: Job, system: System, machine: Machine, vision: Vision | None = None) -> Unit:
    """Return a block, of the model or of a tower. Attention's backward has two and a half times forward's FLOPs."""
    model: Model | Vision = vision or job.model
    tokens = patches(job, vision) if vision else job.tokens
    length = vision.patches if vision else job.sequence
    rate = machine.fp8 if system.fp8 else machine.bf16
    matmul = 2 * tokens * model.layer / (rate * 1e12)
    attention = 4 * tokens * length * model.pairs * model.width / (machine.attention * 1e12)
    cast_forward, cast_backward = (model.layer * n for n in system.cast_bytes(job))
    bandwidth = machine.memory * 1e12
    forward = matmul + attention + (tokens * system.forward.of(model) + cast_forward) / bandwidth
    backward = 2 * matmul + 2.5 * attention + (tokens * system.backward.of(model) + cast_backward) / bandwidth
    if system.gathers_fp8(job):
        backward += system.gather_overhead
    if job.checkpoint == "full":
        last = 2 * tokens * model.last / (rate * 1e12)
        backward += forward - last  # torch stops once all that backward needs is there
    return sharded(model.layer, system.gather, forward, backward, job, machine, recast=system.gathers_fp8(job))


def patches(job: Job, vision: Vision) -> int:
    """Rows of a tower on one GPU."""
    return job.batch * vision.images * vision.patches


def vision_units(job: Job, system: System, machine: Machine, vision: Vision) -> list[Unit]:
    """Return the blocks of a tower, and its projector, in BF16. Of a frozen tower there is no backward."""
    block = layer(job, system, machine, vision)
    if vision.frozen:
        block = replace(block, backward=0.0, reduce=0.0, gathers=1)
    matmuls = 2 * job.batch * vision.images * vision.tokens * vision.projected / (machine.bf16 * 1e12)
    return [*[block] * vision.layers, sharded(vision.projected, BF16, matmuls, 2 * matmuls, job, machine)]


def units(job: Job, system: System, machine: Machine) -> list[Unit]:
    """Return all of a model, in forward's order. The head stays in BF16; logits move 6 bytes forward, 10 backward."""
    before = vision_units(job, system, machine, job.vision) if job.vision else []
    layers = [*before, *[layer(job, system, machine)] * job.model.layers]
    if not job.model.vocabulary:
        return layers
    matmul = 2 * job.tokens * job.model.table / (machine.bf16 * 1e12)
    logits = job.tokens * job.model.vocabulary / (machine.memory * 1e12)
    head = sharded(job.model.table, BF16, matmul + 6 * logits, 2 * matmul + 10 * logits, job, machine)
    embedding = sharded(0 if job.model.tied else job.model.table, BF16, 0.0, 0.0, job, machine)
    return [embedding, *layers, head]


def together(compute: float, communication: float, overlap: float) -> float:
    """Seconds of both at once: the longer, and of the shorter what does not overlap."""
    return max(compute, communication) + (1 - overlap) * min(compute, communication)


def passes(chain: Sequence[Unit], overlap: float) -> tuple[float, float]:
    """Seconds of forward and backward: every unit computes while its neighbours' collectives run.

    Forward: beside a unit the next one is gathered. Backward: beside it the one before is gathered, and gradients of
    the one after are reduced. The first gather of each and the last reduction run alone.
    """
    nothing = Unit()
    forward, backward = chain[0].gather, chain[-1].gather + chain[0].reduce
    for before, unit, after in zip([nothing, *chain[:-1]], chain, [*chain[1:], nothing], strict=True):
        forward += together(unit.forward, after.gather, overlap)
        gathered = before.gather * (before.gathers - 1)
        backward += together(unit.backward, gathered + after.reduce, overlap)
    return forward, backward


def optimizer(job: Job, system: System, machine: Machine) -> float:
    """Seconds of AdamW on a shard: parameter and state are read and written, the gradient is read."""
    moved = 3 * job.parameter + 2 * system.state(job)
    plain = machine.adamw_fp32 if job.parameter == FP32 else machine.adamw_bf16
    rate = machine.adamw_8bit if system.eight_bit else plain
    trained = job.model.parameters + (job.vision.trained if job.vision else 0)
    return trained / job.shards * moved / (rate * 1e12)


# ---- memory ---------------------------------------------------------------------------------------------------------


def head_bytes(job: Job, system: System) -> float:
    """Most that head and loss hold: BF16 logits and an FP32 form; in chunks those of max(width, 2048) rows.

    A chunked loss holds its FP32 sum of the weight's gradient as well (docs/loss.md).
    """
    model = job.model
    whole = (BF16 + FP32) * job.tokens * model.vocabulary
    chunks = FP32 * model.table + BF16 * max(model.width, 2048) * model.vocabulary
    return min(whole, chunks) if system.chunked_loss else whole


def peak(job: Job, system: System) -> float:
    """Bytes allocated at most on a GPU: the largest of the moments at which memory peaks.

    What a tower keeps stands beside all of the model's; in the tower's own backward the model's gradients do.
    """
    alone = language_peak(job, system)
    if job.vision is None:
        return alone
    vision, model, n = job.vision, job.model, job.shards
    at_rest = (vision.trained * system.state(job) + (vision.tower + vision.projected) * job.parameter) / n
    below = model.parameters * (2 * job.parameter + system.state(job)) / n + vision.trained * job.parameter / n
    if not vision.frozen:
        again = system.saved.of(vision) if job.checkpoint == "full" else 0.0
        running = patches(job, vision) * (again + system.working.of(vision)) + system.copy_bytes(job) * vision.layer
        fsdp = job.gpus > 1
        below += max(BF16 * vision.layer, running) + (2 * system.gather + FP32) * vision.layer if fsdp else running
    return at_rest + vision_kept(job, system, vision) + max(alone, below)


def vision_kept(job: Job, system: System, vision: Vision) -> float:
    """Bytes that a tower keeps for backward, nothing if it is frozen; and its projector: in BF16 its input and what it
    has in the middle."""
    each = BF16 * vision.width if job.checkpoint == "full" else system.saved.of(vision)
    tower = 0.0 if vision.frozen else vision.layers * patches(job, vision) * each
    return tower + job.batch * vision.images * vision.tokens * BF16 * sum(vision.projector[:2])


def language_peak(job: Job, system: System) -> float:
    """`peak` of a model without a tower."""
    model, n = job.model, job.shards
    fsdp = job.gpus > 1
    at_rest = model.parameters * (job.parameter + system.state(job)) / n
    gradients = model.parameters * job.parameter / n
    saved = job.tokens * system.saved.of(model)
    kept = job.tokens * BF16 * model.width if job.checkpoint == "full" else saved
    again = saved if job.checkpoint == "full" else 0.0
    running = again + job.tokens * system.working.of(model) + system.copy_bytes(job) * model.layer
    gathered = 2 * system.gather * model.layer if fsdp else 0  # this layer, and the next
    unreduced = BF16 * model.layer if fsdp else 0
    buffer = FP32 * model.layer if fsdp else 0
    head = BF16 * 2 * model.table if fsdp else 0  # gathered, and its gradient
    first = gathered + max(unreduced, running)  # a layer holds most before its gradients exist
    moments = (
        at_rest + model.layers * kept + head_bytes(job, system) + head,
        at_rest + model.table * job.parameter / n + model.layers * kept + first,
        at_rest + model.table * job.parameter / n + (model.layers - 1) * kept + first + buffer,
        at_rest + gradients + kept + first + buffer,
        at_rest + gradients + ((BF16 + FP32) * model.table if fsdp else 0),  # the embedding's gradient
    )
    return max(moments)


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Of one GPU. compute: seconds if links took no time; communication: seconds of all collectives, one by one."""

    seconds: float
    tokens_per_second: float
    peak: float
    compute: float
    communication: float


def predict(job: Job, system: System, machine: Machine = H200) -> Prediction:
    chain = units(job, system, machine)
    update = optimizer(job, system, machine)
    seconds = sum(passes(chain, machine.overlap)) + update
    compute = sum(u.forward + u.backward for u in chain) + update
    communication = sum(u.gathers * u.gather + u.reduce for u in chain)
    return Prediction(seconds, job.tokens / seconds, peak(job, system), compute, communication)


def largest_batch(job: Job, system: System, capacity: float, machine: Machine = H200) -> int:
    """Return the most sequences a GPU of `capacity` GiB holds, less what is reserved; 0 where not one fits."""
    free = (capacity - machine.reserve) * GIB

    def fits(batch: int) -> bool:
        return peak(replace(job, batch=batch), system) <= free

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
