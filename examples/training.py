"""Trains a small language model with an Engram gate and hyper-connections twice: with tkbuild's layers and with the references.

    python examples/training.py --losses examples/training_losses.json      on a GPU with the kernel wheels, about a minute
    python examples/training.py --plot examples/training_losses.svg --losses examples/training_losses.json     anywhere with matplotlib

Both models start from the same weights and see the same batches. The references are those that the kernels are verified against,
in float64 between bfloat16 tensors, differentiated by torch; so the two losses differ by what rounding makes of them, and by no more.
The text is drawn from a fixed random source in which two bytes decide on the next one, which is what an Engram looks up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from tkbuild import ops, reference

VOCABULARY, SOURCE_CHOICES = 64, 4
WIDTH, STREAMS, BLOCKS, HEADS = 512, 4, 2, 8
MIXES = STREAMS * (STREAMS + 2)
BATCH, LENGTH = 8, 256
NGRAM, TABLES, ROWS, TABLE_WIDTH = 3, 2, 4099, 64
EPS, GATE_CLAMP = 1e-6, 1e-6
BF16 = torch.bfloat16


class OurLayers:
    """The layers of ``tkbuild.ops.modeling``."""

    expand = staticmethod(ops.modeling.mhc.expand_from_embedding)
    hash = staticmethod(ops.engram.engram_hash)
    post = staticmethod(ops.modeling.mhc.mhc_post)

    @staticmethod
    def gate(x: torch.Tensor, kv: torch.Tensor, weight_x: torch.Tensor, weight_k: torch.Tensor) -> torch.Tensor:
        return ops.modeling.engram.engram_gate(x, kv, weight_x.to(BF16), weight_k.to(BF16), GATE_CLAMP, EPS)

    @staticmethod
    def pre(
        x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return ops.modeling.mhc.mhc_pre(x, fn, scale, base, post_mult_value=2.0)

    @staticmethod
    def head(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return ops.modeling.mhc.mhc_head(x, fn, scale, base)


class ReferenceLayers:
    """The same from ``tkbuild.reference``, in float64 between tensors of the same dtypes."""

    @staticmethod
    def expand(x: torch.Tensor) -> torch.Tensor:
        return x[..., None, :].expand(*x.shape[:-1], STREAMS, -1).contiguous()

    @staticmethod
    def hash(ids: torch.Tensor, multipliers: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return reference.engram.ngram_hash(ids, multipliers, sizes, offsets, None)

    @staticmethod
    def gate(x: torch.Tensor, kv: torch.Tensor, weight_x: torch.Tensor, weight_k: torch.Tensor) -> torch.Tensor:
        keys_and_value = kv.double().view(-1, STREAMS + 1, WIDTH)
        weight = weight_x.to(BF16).double() * weight_k.to(BF16).double()
        streams = x.double().flatten(0, -3)
        (out,) = reference.engram.gate_fwd(
            streams, keys_and_value[:, :-1], keys_and_value[:, -1], weight, *[None] * 5, eps=EPS, clamp_value=GATE_CLAMP
        )
        return out.to(BF16).view(x.shape)

    @staticmethod
    def pre(
        x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        streams = x.double().flatten(0, -3)
        settings = {"mhc_post_mult_value": 2.0, "mhc_pre_eps": EPS}
        pre, post, comb = reference.mhc.pre_split_mixes(mixes(streams, fn), scale.double(), base.double(), **settings)
        comb = reference.mhc.sinkhorn(comb.view(-1, STREAMS, STREAMS), repeat=10, eps=EPS)
        layer_input = reference.mhc.pre_apply_mix(streams, pre).to(BF16)
        lead = x.shape[:-2]
        return layer_input.view(*lead, WIDTH), (post.view(*lead, STREAMS, 1), comb.view(*lead, STREAMS, STREAMS))

    @staticmethod
    def post(out: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        flat = (out.double().flatten(0, -2), x.double().flatten(0, -3), post.flatten(0, -3)[..., 0], comb.flatten(0, -3))
        return reference.mhc.post(*flat).to(BF16).view(x.shape)

    @staticmethod
    def head(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        streams = x.double().flatten(0, -3)
        mix = reference.mhc.head_compute_mix(mixes(streams, fn), scale.double(), base.double(), mhc_pre_eps=EPS)
        return reference.mhc.pre_apply_mix(streams, mix).to(BF16).view(*x.shape[:-2], WIDTH)


def mixes(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """The products of whole tokens with the rows of ``fn``, normalised by the tokens' root mean square."""
    rows = streams.flatten(1)
    return rows @ fn.double().T * torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + EPS)


class HyperConnection(nn.Module):
    """The mixes of one layer: 4 before it, 4 and 4 x 4 behind it, or 4 before the head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.randn(rows, STREAMS * WIDTH) / (STREAMS * WIDTH) ** 0.5)
        self.scale = nn.Parameter(torch.full((3 if rows == MIXES else 1,), 0.1))
        self.base = nn.Parameter(
            torch.cat([torch.zeros(min(rows, 2 * STREAMS)), *([3 * torch.eye(STREAMS).flatten()] * (rows == MIXES))])
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.fn, self.scale, self.base


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inner(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(attended.transpose(1, 2).flatten(2))


class Engram(nn.Module):
    """Rows of hashed tables, looked up by the last tokens, which a gate adds to the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding((NGRAM - 1) * TABLES * ROWS, TABLE_WIDTH)
        self.to_kv = nn.Linear((NGRAM - 1) * TABLES * TABLE_WIDTH, (STREAMS + 1) * WIDTH, bias=False)
        self.weight_x, self.weight_k = nn.Parameter(torch.ones(STREAMS, WIDTH)), nn.Parameter(torch.ones(STREAMS, WIDTH))
        sizes = torch.full((1, NGRAM - 1, TABLES), ROWS, dtype=torch.int32)
        self.register_buffer("multipliers", torch.randint(1, 100_000, (1, NGRAM)) * 2 + 1)
        self.register_buffer("sizes", sizes)
        self.register_buffer("offsets", ops.engram.make_offsets(sizes))

    def forward(self, layers: OurLayers | ReferenceLayers, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(tokens, (NGRAM - 1, 0))
        windows = torch.stack([padded[:, NGRAM - 1 - i : padded.shape[1] - i] for i in range(NGRAM)], dim=-1)
        rows = layers.hash(windows.reshape(-1, NGRAM).int(), self.multipliers, self.sizes, self.offsets)[0]
        found = self.table(rows.long()).flatten(1)
        kv = self.to_kv(found).to(BF16).view(*tokens.shape, -1)
        return layers.gate(x, kv, self.weight_x, self.weight_k)


class Model(nn.Module):
    """Embedding, Engram, blocks of attention and a multilayer perceptron with hyper-connections around both, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.engram = Engram()
        parts: list[nn.Module] = []
        for _ in range(BLOCKS):
            parts.append(Attention())
            parts.append(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
        self.parts = nn.ModuleList(parts)
        self.connections = nn.ModuleList(HyperConnection(MIXES) for _ in parts)
        self.last = HyperConnection(STREAMS)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, layers: OurLayers | ReferenceLayers, tokens: torch.Tensor) -> torch.Tensor:
        x = layers.expand(self.embedding(tokens).to(BF16))
        x = self.engram(layers, tokens, x)
        for part, connection in zip(self.parts, self.connections, strict=True):
            layer_input, (post, comb) = layers.pre(x, *connection.tensors())
            out = part(nn.functional.rms_norm(layer_input.float(), (WIDTH,)))
            x = layers.post(out.to(BF16), x, post.float(), comb.float())
        return self.out(nn.functional.rms_norm(layers.head(x, *self.last.tensors()).float(), (WIDTH,)))


def batches(seed: int, steps: int, device: str) -> torch.Tensor:
    """Token sequences (steps, BATCH, LENGTH + 1): each token is one of a few that the two before it allow."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY, SOURCE_CHOICES), generator=generator)
    tokens = torch.randint(VOCABULARY, (steps * BATCH, LENGTH + 1), generator=generator)
    choices = torch.randint(SOURCE_CHOICES, tokens.shape, generator=generator)
    for i in range(2, LENGTH + 1):
        tokens[:, i] = allowed[tokens[:, i - 2], tokens[:, i - 1], choices[:, i]]
    return tokens.view(steps, BATCH, LENGTH + 1).to(device)


def train(layers: OurLayers | ReferenceLayers, seed: int, data: torch.Tensor) -> list[float]:
    """Return the loss of each step, in nats a token."""
    torch.manual_seed(seed)
    model = Model().to(data.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for tokens in data:
        logits = model(layers, tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def plot(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tkbuild"  # the same file from the same losses
    import matplotlib.pyplot as plt

    figure, (curves, difference) = plt.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    curves.plot(losses["references"], label="references, float64 between bfloat16 tensors", linewidth=3, alpha=0.4)
    curves.plot(losses["tkbuild"], label="tkbuild's layers", linewidth=1)
    curves.set_ylabel("loss (nats a token)")
    curves.legend()
    difference.plot([a - b for a, b in zip(losses["tkbuild"], losses["references"], strict=True)], linewidth=1)
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", type=Path, required=True, help="JSON file of the losses: written, or with --plot read")
    parser.add_argument("--plot", type=Path, help="SVG file to draw the losses to")
    parser.add_argument("--steps", type=int, default=400, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text")
    given = parser.parse_args()
    if given.plot:
        if not given.losses.is_file():
            parser.error(f"{given.losses} is no file; train first, without --plot")
        return plot(json.loads(given.losses.read_text()), given.plot)
    if given.steps < 1:
        parser.error("--steps is less than 1")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; training needs one, --plot does not")
    given.losses.touch()  # tells now, not after the training, if it cannot be written
    data = batches(given.seed, given.steps, "cuda")
    losses = {"tkbuild": train(OurLayers(), given.seed, data), "references": train(ReferenceLayers(), given.seed, data)}
    given.losses.write_text(json.dumps({name: [round(x, 5) for x in values] for name, values in losses.items()}) + "\n")
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    last = {name: sum(values[-20:]) / len(values[-20:]) for name, values in losses.items()}
    print(f"losses at the end: {last}; furthest apart in a step: {apart:.4f}")  # noqa: T201
    return None


if __name__ == "__main__":
    main()
