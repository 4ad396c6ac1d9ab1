"""`prepare_fsdp`: FSDP2 gathers weights as FP8, and compiled blocks multiply with what was gathered.

    fp8compile.prepare_fsdp(model)                                   # 1. weights of linears become ShardedWeights
    for block in model.blocks: block.compile(backend="fp8")          # 2. blocks are compiled
    for block in model.blocks: fully_shard(block, mp_policy=policy)  # 3. and sharded
    fully_shard(model, mp_policy=policy)

A weight is cast where it is sharded, with the scale of the whole weight, so half (of FP32: a quarter) of the bytes go
over the wire; the passes multiply with the gathered payload itself (`passes/matmul/gathered_weights.py`), and no rank
ever holds the weight in BF16. Parameters, their gradients, optimizers and checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile.distributed.sharded_weight import ShardedWeight
from fp8compile.distributed.weight_cast import WeightCast
from fp8compile.distributed.weight_scales import WeightScales
from fp8compile.errors import OptionError, ShardingError, unknown_name
from fp8compile.formats import ALIGNMENT, E4M3
from fp8compile.option_values import read_option
from fp8compile.options import matching
from fp8compile.passes.matmul.output_heads import HEADS
from fp8compile.passes.matmul.select_matmuls import FLOATS
from fp8compile.torch_hooks.local_parts import local_part, sharded_like

GRANULARITIES = ("tensor", "block(128)")


def prepare_fsdp(
    model: nn.Module,
    granularity: str = "tensor",
    *,
    skip: str | Sequence[str] = (),
    lm_head: bool = False,
    power_of_two: bool = False,
    keep_casts: bool = False,
) -> nn.Module:
    """Let FSDP2 gather the weights of the linears of `model` as FP8 (E4M3); return `model`, changed in place.

    Call it before `fully_shard`. Weights [N, K] of `nn.Linear`s are taken whose sizes are multiples of 16; not those of
    output heads (unless `lm_head`), those that are embedding tables as well, and those in modules that `skip` names
    (patterns as for the backend's option of that name; give both the same). FP32, BF16 and FP16 parameters, frozen or
    not; on the meta device too. A `copy.deepcopy` of a prepared model or module is prepared, with scales of its own.

    granularity: "tensor", or "block(128)" for the recipe "blockwise": one scale for each 128×128 elements.
    power_of_two: round scales up to powers of two.
    keep_casts: keep each shard in FP8 until its weight changes, for one byte an element of the shard: all shards are
    cast once a step, by one kernel. Only for weights that nobody writes to through `.data` or in the tensors of a
    `state_dict()`: torch does not count such writes, and what was kept would be gathered. Optimizers, in-place
    operations on parameters and `load_state_dict` are counted. False: each is cast anew whenever it is gathered, for
    forward and for backward of every microbatch; so are shards in a CPU's memory (offloading) in any case.

    Once a step, when the first weight after it is gathered, one all-reduce makes all scales (4 bytes a scale).
    Matmuls with a weight that is gathered so run in FP8 whatever the cost model says: its rounding has been paid for.
    Where one cannot (an option or the recipe leaves it in BF16), it multiplies with the rounded weight, and a warning
    and the plan say so.

    Raises `OptionError` for an unknown granularity, a pattern of `skip` that names no module, or a model without such
    weights; `ShardingError` for one that was sharded or prepared already, and, when the model runs, if `fully_shard`
    was not called on all of it or has sharded weights along another dimension than their rows.
    """
    if granularity not in GRANULARITIES:
        raise unknown_name("granularity of a gathered weight", granularity, GRANULARITIES)
    patterns = read_option("skip", skip)
    chosen = list(_chosen(model, patterns, lm_head))
    if not chosen:
        raise OptionError(
            "prepare_fsdp has found no weight to gather as FP8: the model has no nn.Linear (outside of heads and of "
            f"skip={list(patterns)}) with sizes that are multiples of {ALIGNMENT}"
        )
    scales = WeightScales(E4M3.name, granularity, power_of_two, keep_casts)
    made: dict[nn.Parameter, tuple[WeightCast, nn.Parameter]] = {}
    for name, module in chosen:
        weight: Any = module.weight
        if weight not in made:
            homes = [other for _, other in chosen if other.weight is weight]  # one weight may serve several modules
            cast = WeightCast(f"{name}.weight", weight.shape, homes, "weight", scales)
            scales.casts.append(cast)
            made[weight] = cast, nn.Parameter(ShardedWeight(weight.detach(), cast), weight.requires_grad)
        cast, module.weight = made[weight]
        module.register_state_dict_post_hook(_plain_state_dict)
        module.register_load_state_dict_post_hook(partial(_keep_prepared, cast))
    return model


def _chosen(model: nn.Module, skip: tuple[str, ...], lm_head: bool) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linears whose weights are gathered as FP8, with their names."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(matching((pattern,), name) for name in names):
            raise OptionError(f"prepare_fsdp: skip={pattern!r} names no module of the model")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        if isinstance(weight, (DTensor, ShardedWeight)):
            raise ShardingError(
                f"{name}.weight is sharded or prepared already: call prepare_fsdp once, on plain parameters, before "
                "fully_shard and before tensor parallelism"
            )
        is_head = bool(HEADS.search(name)) and not lm_head
        fits = all(size % ALIGNMENT == 0 for size in weight.shape) and weight.numel() > 0
        if fits and weight.dtype in FLOATS and id(weight) not in tables and not is_head and not matching(skip, name):
            yield name, module


def gathered_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of `model` that are gathered as FP8."""
    return [name for name, p in model.named_parameters() if isinstance(local_part(p), ShardedWeight)]


def _plain_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put into a state_dict what it would have without FP8. It shares its memory with the parameter, as ever."""
    value = state_dict.get(f"{prefix}weight")
    if value is not None and not isinstance(value, nn.Parameter) and isinstance(local_part(value), ShardedWeight):
        state_dict[f"{prefix}weight"] = sharded_like(value, local_part(value).data_)


def _keep_prepared(cast: WeightCast, module: nn.Module, incompatible: Any) -> None:
    """Prepare a weight again that load_state_dict(assign=True) has replaced by a plain tensor."""
    weight: Any = module.weight
    if not isinstance(local_part(weight), ShardedWeight):
        local = ShardedWeight(local_part(weight).detach(), cast)
        module.weight = nn.Parameter(sharded_like(weight, local), weight.requires_grad)
