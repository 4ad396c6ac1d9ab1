"""The zoo: small models of every family that must train in FP8, each with the number of FP8 matmuls it has.

A builder returns a `Case`. The number counts matmuls before any are merged, and is derived from the architecture:
three for a linear layer (output, grad_input, grad_weight), two for one whose input needs no gradient, none for the
output head. Weights are as the libraries draw them, but for biases and norms: what starts as all zeros or ones would
hide a mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

VOCABULARY, WIDTH, INNER, LAYERS, BATCH, LENGTH = 256, 64, 128, 1, 4, 16
DEEP = 2  # layers of qwen2, gpt2 and `Blocks`, where what goes from one to the next is to be seen


@dataclass
class Case:
    """A model, one batch, and what is known of it.

    loss: of the model's output, outside the compiled graph. matmuls: FP8 matmuls of a training step, unmerged.
    skip: patterns for the option `skip`. heads: modules that the compiler must leave by itself (output heads).
    kept: reasons with which other matmuls are left, and how many.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    matmuls: int
    skip: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kept: dict[str, int] = field(default_factory=dict)

    def left_weights(self) -> list[nn.Parameter]:
        """The weights whose matmuls stay as they are."""
        names = (*self.heads, *self.skip)
        modules = (m for name, m in self.model.named_modules() if any(f".{name}".endswith(f".{n}") for n in names))
        return [p for m in modules for p in m.parameters()]


Builder = Callable[[], Case]
ZOO: dict[str, Builder] = {}


def _case(build: Builder) -> Builder:
    ZOO[build.__name__] = build
    return build


def unsettled(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model in training, with noise added to every vector: no bias is zero, no norm the identity."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).train()


def linears(model: nn.Module) -> int:
    """How many linear layers the model has, its output head included."""
    return sum(isinstance(m, (nn.Linear, Conv1D)) for m in model.modules())


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
    """Normal BF16 activations."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def next_token(labels: Tensor) -> Callable[[Any], Tensor]:
    """Cross-entropy of a model's logits with `labels`, in FP32."""
    return lambda out: F.cross_entropy(_logits(out).flatten(0, -2).float(), labels.flatten())


def squared_error(target: Tensor) -> Callable[[Any], Tensor]:
    """Mean squared error in FP32."""
    return lambda out: F.mse_loss(out.float(), target.float())


def _logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def language_model(config: transformers.PretrainedConfig, kind: Callable[..., nn.Module]) -> Case:
    """A causal or masked language model in BF16 and its batch; three matmuls for each linear but the head."""
    torch.manual_seed(0)
    model = unsettled(kind(config))
    matmuls = 3 * (linears(model) - 1)
    return Case(model, {"input_ids": tokens()}, next_token(tokens(seed=3)), matmuls, heads=("lm_head",))


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


@_case
def llama() -> Case:
    return language_model(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False), transformers.LlamaForCausalLM
    )


@_case
def llama_eager_attention() -> Case:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, attn_implementation="eager")
    case = language_model(config, transformers.LlamaForCausalLM)
    # scores, and weights times values: two matmuls with two gradients each, in every layer
    case.kept = {"neither operand comes from an nn.Parameter": 6 * LAYERS}
    return case


@_case
def qwen2() -> Case:
    sizes = SIZES | {"num_hidden_layers": DEEP}
    return language_model(
        transformers.Qwen2Config(**sizes, num_key_value_heads=2, use_cache=False), transformers.Qwen2ForCausalLM
    )


@_case
def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=DEEP, n_head=4, n_positions=LENGTH, use_cache=False,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return language_model(config, transformers.GPT2LMHeadModel)


@_case
def mixtral() -> Case:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, use_cache=False, num_local_experts=2, num_experts_per_tok=2,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    # Both experts take every token: a router's choice that FP8 noise flips would leave no gradient to compare.
    case = language_model(config, transformers.MixtralForCausalLM)
    case.skip = ("mlp.gate",)  # a router, which is no nn.Linear and so is not among the linears either
    case.matmuls += 6 * LAYERS  # gate_up and down in every layer
    return case


@_case
def vit() -> Case:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4, image_size=32,
        patch_size=8, num_labels=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = unsettled(transformers.ViTForImageClassification(config))
    labels = tokens(1, BATCH, seed=3) % 16
    # + 2: the patch embedding, a convolution, whose pixels need no gradient; - 3: the classifier is the head
    matmuls = 3 * linears(model) + 2 - 3
    return Case(model, {"pixel_values": noise(BATCH, 3, 32, 32)}, next_token(labels), matmuls, heads=("classifier",))


@_case
def t5() -> Case:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=INNER, num_layers=LAYERS, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu", initializer_factor=0.3,
    )  # fmt: skip
    # T5 does not divide its attention scores by sqrt(d_kv) and embeds with a standard deviation of 1: at factor 1 its
    # gradients are so sensitive that BF16 itself reaches 22 dB only, and fake-quantized FP8 11 dB.
    model = unsettled(transformers.T5ForConditionalGeneration(config))
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(seed=4)}
    case = Case(model, inputs, next_token(tokens(seed=3)), 3 * (linears(model) - 1), heads=("lm_head",))
    # self-attention, whose bias is learned, runs as two matmuls with two gradients each, in encoder and decoder
    case.kept = {"neither operand comes from an nn.Parameter": 6 * 2 * LAYERS}
    return case


@_case
def bert() -> Case:
    config = transformers.BertConfig(
        **dict(SIZES, tie_word_embeddings=True), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    case = language_model(config, transformers.BertForMaskedLM)
    case.heads = ("decoder",)
    return case


@_case
def whisper() -> Case:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, num_mel_bins=16,
        max_source_positions=LENGTH, max_target_positions=LENGTH, use_cache=False, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = unsettled(transformers.WhisperForConditionalGeneration(config))
    inputs = {"input_features": noise(BATCH, 16, 2 * LENGTH), "decoder_input_ids": tokens(seed=4)}
    case = Case(model, inputs, next_token(tokens(seed=3)), 3 * (linears(model) - 1), heads=("proj_out",))
    # two convolutions, of which the first has no grad_input
    case.kept = {"a convolution with padding or dilation is not a matmul": 5}
    return case


@_case
def mamba() -> Case:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, time_step_rank=16, expand=2,
        use_cache=False, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    # Half the usual 0.1: a time step's gradient is a sum over states that nearly cancels, and x, B, C and dt multiply
    # each other; at 0.1 the fake-quantized step reaches 14 dB.
    torch.manual_seed(0)
    model = unsettled(transformers.MambaForCausalLM(config))
    matmuls = 3 * (linears(model) - 1)
    labels = tokens(8 * BATCH, 4, seed=3)  # short: the scan is traced step by step
    case = Case(model, {"input_ids": tokens(8 * BATCH, 4)}, next_token(labels), matmuls, heads=("lm_head",))
    case.kept = {
        "a convolution in 128 groups is not one matmul": 3 * LAYERS,
        "neither operand comes from an nn.Parameter": 2
        * LAYERS,  # state times C, and back to the state; for C it is no matmul
    }
    return case


@_case
def transformer_encoder() -> Case:
    torch.manual_seed(0)
    # GELU: ReLU's derivative is a step, and every sign that a rounding flips is a whole gradient lost
    layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout=0.0, activation=F.gelu, batch_first=True)
    model = unsettled(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False))
    x = noise(BATCH, LENGTH, WIDTH)
    # in every layer the packed in_proj, out_proj, linear1, linear2; the first in_proj has an input without gradient
    return Case(model, {"src": x}, squared_error(noise(*x.shape, seed=3)), 3 * 4 * LAYERS - 1)


@_case
def mlp() -> Case:
    torch.manual_seed(0)
    first, second, third = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER), nn.Linear(INNER, WIDTH)
    model = unsettled(nn.Sequential(first, nn.GELU(), second, nn.GELU(), third))
    # - 1: the input needs no gradient
    return Case(model, {"input": noise(64, WIDTH)}, squared_error(noise(64, WIDTH, seed=3)), 3 * linears(model) - 1)


class Cnn(nn.Module):
    """A padded convolution, a pointwise one, a hidden linear layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Conv2d(3, 32, 3, padding=1)
        self.pointwise = nn.Conv2d(32, 64, 1)
        self.fc = nn.Linear(64 * 4, INNER)
        self.head = nn.Linear(INNER, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.pointwise(F.gelu(self.padded(x))))
        x = F.avg_pool2d(x, 4).flatten(1)
        return self.head(F.gelu(self.fc(x)))


@_case
def cnn() -> Case:
    torch.manual_seed(0)
    model = unsettled(Cnn())
    case = Case(model, {"x": noise(16, 3, 8, 8)}, next_token(tokens(1, 16, seed=3) % 16), 0, heads=("head",))
    case.matmuls = 3 + 3  # the pointwise convolution is a matmul over pixels; fc
    case.kept = {"a convolution with padding or dilation is not a matmul": 2}  # its pixels need no gradient
    return case


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedWeights(nn.Module):
    """Two blocks with the same weights in different modules, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Block(), Block()
        self.second.up.weight = self.first.up.weight
        self.to_words = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to_words.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.to_words(self.second(self.first(self.embedding(input_ids)))) * WIDTH**-0.5


@_case
def tied_weights() -> Case:
    torch.manual_seed(0)
    model = unsettled(TiedWeights())
    matmuls = 3 * (linears(model) - 1)
    return Case(model, {"input_ids": tokens()}, next_token(tokens(seed=3)), matmuls, heads=("to_words",))


class SharedModule(nn.Module):
    """One block, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


@_case
def shared_module() -> Case:
    torch.manual_seed(0)
    x = noise(BATCH, LENGTH, WIDTH)
    # two linears, three times; the norm has parameters, so that even the first use needs its input's gradient
    return Case(unsettled(SharedModule()), {"x": x}, squared_error(noise(*x.shape, seed=3)), 3 * 2 * 3)


class Blocks(nn.Module):
    """Blocks, checkpointed or not, with a graph break after the first or not, under autocast or not."""

    def __init__(
        self, checkpointed: bool = False, broken: bool = False, autocast: bool = False, depth: int = DEEP
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointed, self.broken, self.autocast = checkpointed, broken, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            return self._blocks(x)

    def _blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.broken and i == 0:
                torch._dynamo.graph_break()
        return x


def blocks(dtype: torch.dtype = torch.bfloat16, **kind: Any) -> Case:
    """`Blocks` of this kind; always the same weights."""
    torch.manual_seed(0)
    x = noise(BATCH, LENGTH, WIDTH)
    model = unsettled(Blocks(**kind), dtype)
    # every linear stands behind a norm with parameters: all three matmuls
    return Case(model, {"x": x.to(dtype)}, squared_error(noise(*x.shape, seed=3)), 3 * linears(model))


ZOO["checkpoint"] = functools.partial(blocks, checkpointed=True)
ZOO["autocast"] = functools.partial(blocks, torch.float32, autocast=True)
ZOO["graph_break"] = functools.partial(blocks, broken=True)
