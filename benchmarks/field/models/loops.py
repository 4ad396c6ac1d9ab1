"""Loops as people write them for themselves, and their models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.models.recommenders import layers
from benchmarks.field.models.task import Batch, FieldModel, Loss, Task, drawn


def language_batch(rows: int, length: int, vocabulary: int) -> list[Batch]:
    ids = drawn(rows, length + 1, below=vocabulary)
    return [{"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}]


# ---- a GPT in the style of nanoGPT ----------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Causal attention with queries, keys and values out of one matmul."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads, self.dropout = heads, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width)))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), SelfAttention(width, heads, dropout), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT whose head shares the weight of its embedding; returns logits and loss."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(places))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def second(run: Any, batch: Batch) -> Tensor:
    """Return the loss, where a model returns its logits with it."""
    return run(**batch)[1]


def nano_gpt(is_small: bool, dtype: torch.dtype) -> Task:
    if is_small:
        return Task(GPT(256, 32, 64, 2, 4, 0.1).to(dtype), language_batch(2, 32, 256), second)
    return Task(GPT(50304, 1024, 768, 12, 12, 0.1).to(dtype), language_batch(12, 1024, 50304), second)


# ---- recurrent ------------------------------------------------------------------------------------------------------


class LSTMLanguageModel(nn.Module):
    """An LSTM between an embedding and a linear head."""

    def __init__(self, vocabulary: int, width: int, depth: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.into, self.head = nn.Linear(width, width), nn.Linear(width, vocabulary)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(F.gelu(self.into(self.lstm(self.embed(idx))[0])))


def next_tokens(run: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(run(batch["idx"]).flatten(0, 1).float(), batch["targets"].flatten())


def lstm(is_small: bool, dtype: torch.dtype) -> Task:
    if is_small:
        return Task(LSTMLanguageModel(256, 64, 1).to(dtype), language_batch(2, 8, 256), next_tokens)
    return Task(LSTMLanguageModel(32000, 1024, 2).to(dtype), language_batch(64, 128, 32000), next_tokens)


# ---- tables, vectors, pictures --------------------------------------------------------------------------------------


def regressed(run: Any, batch: Batch) -> Tensor:
    return F.mse_loss(run(batch["x"]).squeeze(-1).float(), batch["y"].float())


def table_of_numbers(rows: int, small_rows: int) -> Any:
    """Return an MLP on rows of numbers, with batch norm where there is more than one row, to one number."""

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        # ReLUs of units near zero flip: with one row and few units, one of them is much of a gradient
        count, into, width = (small_rows, 40, 64 if small_rows > 1 else 512) if is_small else (rows, 200, 2048)
        model = nn.Sequential(layers(into, width, width), *([nn.BatchNorm1d(width)] if count > 1 else []),
                              layers(width, width), nn.Linear(width, 1))  # fmt: skip
        return Task(model.to(dtype), [{"x": drawn(count, into), "y": drawn(count, seed=2)}], regressed)

    return make


class VAE(nn.Module):
    """A variational autoencoder of flat pictures; the noise is given."""

    def __init__(self, into: int, width: int, latent: int):
        super().__init__()
        self.encoder, self.to_latent = layers(into, width, width), nn.Linear(width, 2 * latent)
        self.decoder = layers(latent, width, width, into, last=True)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.to_latent(self.encoder(x)).chunk(2, dim=-1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def evidence(run: Any, batch: Batch) -> Tensor:
    made, mean, log_variance = run(batch["x"], batch["noise"])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).float().sum(-1).mean()
    return F.binary_cross_entropy_with_logits(made.float(), batch["x"].float().sigmoid()) + 1e-3 * divergence


def vae(is_small: bool, dtype: torch.dtype) -> Task:
    rows, into, width, latent = (16, 48, 64, 8) if is_small else (4096, 784, 2048, 64)
    batch = {"x": drawn(rows, into), "noise": drawn(rows, latent, seed=2)}
    return Task(VAE(into, width, latent).to(dtype), [batch], evidence)


def reconstructed(run: Any, batch: Batch) -> Tensor:
    return F.mse_loss(run(batch["x"]).float(), batch["x"].float())


def autoencoder(is_small: bool, dtype: torch.dtype) -> Task:
    """Convolutions down and up again, in the layout of channels last."""
    width, rows, side = (8, 2, 16) if is_small else (64, 64, 128)
    model = nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.GELU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GELU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
    )  # fmt: skip
    model = model.to(dtype).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return Task(model, [{"x": drawn(rows, 3, side, side)}], reconstructed)


class Stack(nn.Module):
    """Linear layers as a module of one's own: torch compiles no `nn.Sequential` in place."""

    def __init__(self, *widths: int):
        super().__init__()
        self.net = layers(*widths, last=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class GAN(nn.Module):
    """A generator and a discriminator, each compiled by itself."""

    def __init__(self, latent: int, width: int, out: int):
        super().__init__()
        self.generator = Stack(latent, width, width, out)
        self.discriminator = Stack(out, width, width, 1)


def adversarial(run: GAN, batch: Batch) -> Tensor:
    """Return both losses: the generator's gradients pass through the discriminator, its own are of detached fakes."""
    fake = run.generator(batch["noise"])
    real = F.softplus(-run.discriminator(batch["x"]).float()).mean()
    fooled = F.softplus(run.discriminator(fake.detach()).float()).mean()
    return real + fooled + F.softplus(-run.discriminator(fake).float()).mean()


def gan(is_small: bool, dtype: torch.dtype) -> Task:
    rows, latent, width, out = (16, 8, 64, 48) if is_small else (2048, 128, 2048, 3072)
    batch = {"x": drawn(rows, out), "noise": drawn(rows, latent, seed=2)}
    return Task(GAN(latent, width, out).to(dtype), [batch], adversarial, ("generator", "discriminator"))


# ---- physics --------------------------------------------------------------------------------------------------------


class Field(nn.Module):
    """A function of place and time, as a net of smooth layers."""

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, 1)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Residual(nn.Module):
    """The residual of Burgers' equation, with derivatives by forward mode within the model."""

    def __init__(self, width: int):
        super().__init__()
        self.field = Field(width)

    def forward(self, x: Tensor) -> Tensor:
        along, later = torch.zeros_like(x), torch.zeros_like(x)
        along[:, 0], later[:, 1] = 1.0, 1.0

        def slope(x: Tensor) -> Tensor:
            return torch.func.jvp(self.field, (x,), (along,))[1]

        u, rate = torch.func.jvp(self.field, (x,), (later,))[:2]
        first, second = torch.func.jvp(slope, (x,), (along,))[:2]
        return rate + u * first - 0.01 / math.pi * second


def forward_mode(run: Any, batch: Batch) -> Tensor:
    return run(batch["x"]).float().square().mean()


def double_backward(run: Any, batch: Batch) -> Tensor:
    """Return the same residual with derivatives by `autograd.grad`, through what is called in place of the model."""
    x = batch["x"].detach().requires_grad_()
    u = run(x)
    (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (seconds,) = torch.autograd.grad(slopes[:, 0].sum(), x, create_graph=True)
    residual = slopes[:, 1:] + u * slopes[:, :1] - 0.01 / math.pi * seconds[:, :1]
    return residual.float().square().mean()


def physics(kind: type[nn.Module], loss: Loss) -> Any:
    def make(is_small: bool, dtype: torch.dtype) -> Task:
        rows, width = (32, 32) if is_small else (65536, 512)
        return Task(kind(width).to(dtype), [{"x": drawn(rows, 2)}], loss)

    return make


# ---- two views, teachers --------------------------------------------------------------------------------------------


def contrasted(run: Any, batch: Batch) -> Tensor:
    """SimCLR's loss: the two views of a row belong together."""
    z = F.normalize(run(torch.cat([batch["one"], batch["other"]])).float(), dim=-1)
    rows = len(z) // 2
    logits = (z @ z.T / 0.1).masked_fill(torch.eye(2 * rows, dtype=torch.bool, device=z.device), float("-inf"))
    return F.cross_entropy(logits, torch.arange(2 * rows, device=z.device).roll(rows))


def contrastive(is_small: bool, dtype: torch.dtype) -> Task:
    rows, into, width = (12, 48, 64) if is_small else (4096, 1024, 2048)
    model = nn.Sequential(layers(into, width, width), nn.LayerNorm(width), nn.Linear(width, 128))
    return Task(model.to(dtype), [{"one": drawn(rows, into), "other": drawn(rows, into, seed=2)}], contrasted)


class Distilled(nn.Module):
    """A student, and a teacher that is frozen and runs in the same graph."""

    def __init__(self, into: int, width: int):
        super().__init__()
        self.teacher = layers(into, 2 * width, 2 * width, 64, last=True).requires_grad_(False)
        self.student = layers(into, width, width, 64, last=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x).float().softmax(-1)
        return F.kl_div(self.student(x).float().log_softmax(-1), wanted, reduction="batchmean")


def distilled(is_small: bool, dtype: torch.dtype) -> Task:
    rows, into, width = (16, 48, 64) if is_small else (8192, 1024, 2048)
    return Task(Distilled(into, width).to(dtype), [{"x": drawn(rows, into)}], lambda run, batch: run(batch["x"]))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.net = nn.Transformer(width, heads, depth, depth, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, idx: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            idx.shape[1], device=idx.device, dtype=self.head.weight.dtype
        )
        return self.head(self.net(self.embed(source), self.embed(idx), tgt_mask=mask, tgt_is_causal=True))


def translated(run: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(run(batch["source"], batch["idx"]).flatten(0, 1).float(), batch["targets"].flatten())


def torch_transformer(is_small: bool, dtype: torch.dtype) -> Task:
    rows, length, vocabulary = (2, 16, 256) if is_small else (32, 256, 32000)
    model = Translator(vocabulary, 64, 2, 4) if is_small else Translator(vocabulary, 1024, 3, 16)
    (batch,) = language_batch(rows, length, vocabulary)
    return Task(model.to(dtype), [{**batch, "source": drawn(rows, length + 8, below=vocabulary, seed=3)}], translated)


def changing_rows(is_small: bool, dtype: torch.dtype) -> Task:
    """Return an MLP whose batches have other sizes: the last of an epoch is smaller."""
    into, width = (48, 64) if is_small else (1024, 4096)
    batches = [{"x": drawn(n, into), "y": drawn(n, seed=2)} for n in ((16, 12, 7) if is_small else (8192, 6144, 1000))]
    return Task(layers(into, width, width, 1, last=True).to(dtype), batches, regressed)


MODELS = (
    FieldModel("nanoGPT's loop", "loops", nano_gpt, autocast=True, gib=25),
    FieldModel("nanoGPT's loop · dropout", "loops", nano_gpt, autocast=True, dropout=True, gib=25),
    FieldModel("LSTM language model", "loops", lstm),
    FieldModel("MLP on a table", "loops", table_of_numbers(16384, 24), autocast=True),
    FieldModel("MLP · one row", "loops", table_of_numbers(1, 1)),
    FieldModel("MLP · rows that change", "loops", changing_rows),
    FieldModel("Variational autoencoder", "loops", vae),
    FieldModel("Autoencoder of convolutions", "loops", autoencoder, autocast=True),
    FieldModel("GAN", "loops", gan),
    FieldModel("Physics · forward mode", "loops", physics(Residual, forward_mode), autocast=True),
    FieldModel("Physics · double backward", "loops", physics(Field, double_backward), autocast=True),
    FieldModel("Contrastive", "loops", contrastive),
    FieldModel("Distillation", "loops", distilled),
    FieldModel("torch's Transformer · dropout", "loops", torch_transformer, autocast=True, dropout=True, gib=20),
)
