"""Integer formulas for data and initial weights, easy to repeat in any language.

All arithmetic is on u64 and wraps modulo 2^64.  Trainyard has the same formulas in Rust; run this
file to print test vectors for them.

Tokens (language models)
    n = step * batch + row                       global index of the sequence
    x = splitmix64_mix((n + 1) * GOLDEN + seed)
    for t in 0 ..= seq:                          seq + 1 tokens per sequence
        x = x * LCG_A + LCG_C                    Knuth's MMIX generator
        r = x >> 33                              31 random bits
        tok[t] = (r >> 2) % vocab                if t == 0 or r % 4 == 0     (25 % noise)
               = (5 * tok[t-1] + 7) % vocab      otherwise                   (learnable rule)
    inputs = tok[0..seq], targets = tok[1..=seq]

Images (the CNN)
    x as above; each of the 784 pixels advances the generator once:
        pixel = (x >> 40) * 2^-24                in [0, 1)
    then one more advance: label = (x >> 33) % 10

splitmix64_mix(z)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)

Initial weights: element i (row-major) of the parameter called `name`
    key = fnv1a64(name) ^ (seed * GOLDEN)
    z   = splitmix64_mix(key + (i + 1) * GOLDEN)
    w   = f32(((z >> 40) * 2^-23 - 1) * bound)   computed in f64, rounded once to f32
    bound = 0.02 * sqrt(3) for every language-model matrix (standard deviation 0.02);
    norm weights are 1; bound = 1/sqrt(fan_in) for CNN weights and biases.
"""

import math

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LCG_A = np.uint64(6364136223846793005)
LCG_C = np.uint64(1442695040888963407)
LM_BOUND = 0.02 * math.sqrt(3.0)


def _start(step: int, batch: int, seed: int) -> np.ndarray:
    n = np.arange(step * batch, (step + 1) * batch, dtype=np.uint64)
    return _splitmix64_mix((n + np.uint64(1)) * GOLDEN + np.uint64(seed))


def token_batch(step: int, batch: int, seq: int, vocab: int, seed: int):
    """Global batch of one step: (inputs, targets), both int64 of shape [batch, seq]."""
    x = _start(step, batch, seed)
    v = np.uint64(vocab)
    tok = np.empty((batch, seq + 1), dtype=np.uint64)
    for t in range(seq + 1):
        x = x * LCG_A + LCG_C
        r = x >> np.uint64(33)
        fresh = (r >> np.uint64(2)) % v
        if t == 0:
            tok[:, 0] = fresh
        else:
            rule = (np.uint64(5) * tok[:, t - 1] + np.uint64(7)) % v
            tok[:, t] = np.where(r % np.uint64(4) == 0, fresh, rule)
    tok = torch.from_numpy(tok.astype(np.int64))
    return tok[:, :-1].contiguous(), tok[:, 1:].contiguous()


def image_batch(step: int, batch: int, seed: int):
    """Global batch of one step: (images [batch, 1, 28, 28] f32, labels [batch] int64)."""
    x = _start(step, batch, seed)
    pixels = np.empty((batch, 784), dtype=np.float32)
    for t in range(784):
        x = x * LCG_A + LCG_C
        pixels[:, t] = (x >> np.uint64(40)).astype(np.float64) * 2.0**-24
    x = x * LCG_A + LCG_C
    labels = ((x >> np.uint64(33)) % np.uint64(10)).astype(np.int64)
    return torch.from_numpy(pixels).view(batch, 1, 28, 28), torch.from_numpy(labels)


def _fnv1a64(name: str) -> int:
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & (2**64 - 1)
    return h


def _splitmix64_mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform_weight(name: str, shape, bound: float, seed: int, start: int = 0) -> torch.Tensor:
    """Of a parameter of which a rank has a part, `start` elements are before it."""
    count = math.prod(shape)
    key = np.uint64(_fnv1a64(name) ^ ((seed * int(GOLDEN)) & (2**64 - 1)))
    z = _splitmix64_mix(key + np.arange(start + 1, start + count + 1, dtype=np.uint64) * GOLDEN)
    w = ((z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0) * bound
    return torch.from_numpy(w.astype(np.float32)).view(*shape)


@torch.no_grad()
def init_parameters(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter by the formula above.  Works on a full model or on any part of it
    (a pipeline stage, one rank's experts), because the formula depends on names and places only."""
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        owner_name, _, leaf = name.rpartition(".")
        owner = modules[owner_name]
        if "norm" in owner_name.rsplit(".", 1)[-1]:
            p.fill_(1.0)
        elif isinstance(owner, torch.nn.Conv2d) or owner_name in ("fc1", "fc2"):
            bound = 1.0 / math.sqrt(owner.weight[0].numel())
            p.copy_(uniform_weight(name, p.shape, bound, seed))
        else:
            before = getattr(owner, "first", 0) * p[0].numel()  # of experts on other ranks
            p.copy_(uniform_weight(name, p.shape, LM_BOUND, seed, before))


def _checksum(values) -> str:
    h = 0xCBF29CE484222325
    for v in values:
        h = ((h ^ int(v)) * 0x100000001B3) & (2**64 - 1)
    return f"{h:016x}"


def _bits(x: torch.Tensor) -> list[int]:
    return x.flatten().numpy().view(np.uint32).tolist()


def main() -> None:
    """Test vectors."""
    x, y = token_batch(step=0, batch=1, seq=8, vocab=1024, seed=1)
    print("tokens of sequence 0, seq 8, vocab 1024, seed 1:", x[0].tolist() + y[0, -1:].tolist())
    steps = [token_batch(step, 8, 256, 4096, 7) for step in range(3)]
    tokens = torch.cat([torch.cat([x, y[:, -1:]], dim=1).flatten() for x, y in steps])
    print("tokens of 3 steps, batch 8, seq 256, vocab 4096, seed 7: checksum", _checksum(tokens.tolist()))
    for name in ("model.embed_tokens.weight", "model.layers.7.mlp.down_proj.weight"):
        w = uniform_weight(name, (512, 1408), LM_BOUND, seed=7)
        bits = _bits(w)
        print(f"{name}, 512 x 1408, seed 7: first bits {bits[0]:08x} {bits[1]:08x}, checksum {_checksum(bits)}")
    images, labels = image_batch(step=0, batch=4, seed=7)
    values = [v for image, label in zip(images, labels) for v in [*_bits(image), int(label)]]
    print("images of step 0, batch 4, seed 7: checksum", _checksum(values))


if __name__ == "__main__":
    main()
