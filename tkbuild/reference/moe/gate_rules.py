"""Rules that the gates share: the order of scores, scoring functions, places of experts, random experts."""

from __future__ import annotations

import torch

SIGMOID, SQRT_SOFTPLUS, SOFTMAX = range(3)
NO_EXPERT_KEY = 0
"""Below the key of every score."""

MAX_SLOTS = 32
STEP = 23333
"""What one token adds to the turns through the copies of an expert."""

_NAN_KEY = 1
_WORD_MASK = 0xFFFFFFFF
_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


def ranking_keys(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that order like float32 ``scores``: both zeros are equal, NaN is below every number."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(scores.isnan(), _NAN_KEY, torch.where(bits < 0, ~bits, bits + 2**31))


def ranked(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the ``count`` largest keys of each row, in descending order, ties to the smaller place."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def scores_of(logits: torch.Tensor, scoring: int) -> torch.Tensor:
    """Return what the scoring function makes of ``logits`` (T, R)."""
    if scoring == SIGMOID:
        return 1.0 / (1.0 + torch.exp(-logits))
    if scoring == SQRT_SOFTPLUS:
        return torch.where(logits > 20.0, logits, torch.log1p(torch.exp(logits))).sqrt()
    largest = torch.where(logits.isnan(), -torch.inf, logits).amax(-1, keepdim=True)
    terms = torch.exp(logits - largest)
    return terms / terms.sum(-1, keepdim=True)


def flags_or(flags: torch.Tensor | None, absent: bool, rows: torch.Tensor) -> torch.Tensor:
    """Return ``flags`` as a column, one for each row of ``rows``; ``absent`` everywhere if there are none."""
    if flags is None:
        return torch.full((rows.shape[0], 1), absent, device=rows.device)
    return flags.view(-1, 1)


def fixed_experts(given: torch.Tensor, num_routed: int) -> torch.Tensor:
    """Return the experts ``given`` by a caller, -1 for numbers that are none."""
    return torch.where((given >= 0) & (given < num_routed), given, -1)


def with_shared(
    experts: torch.Tensor, weights: torch.Tensor, num_routed: int, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``experts`` and ``weights`` (T, k) with the slots of the shared experts behind: R, R + 1, ..., of weight 1."""
    shared = num_routed + torch.arange(num_shared, device=experts.device).expand(experts.shape[0], num_shared)
    return torch.cat((experts, shared), -1), torch.cat((weights, torch.ones_like(shared, dtype=weights.dtype)), -1)


def limited_counts(to_physical_map: torch.Tensor, logical_count: torch.Tensor) -> torch.Tensor:
    """Return how many copies each expert has: ``logical_count``, but at least 1 and at most the columns of the map."""
    return logical_count.long().clamp(1, to_physical_map.shape[1])


def physical_experts(
    experts: torch.Tensor, to_physical_map: torch.Tensor | None, logical_count: torch.Tensor | None, ep_rank: int
) -> torch.Tensor:
    """Return the copies of ``experts`` (T, slots) that the tokens take; they take turns. -1 stays -1."""
    if to_physical_map is None or logical_count is None:
        return experts
    known = experts.clamp(min=0)
    turns = ep_rank + torch.arange(experts.shape[0], device=experts.device).view(-1, 1) * STEP
    columns = turns % limited_counts(to_physical_map, logical_count)[known]
    return torch.where(experts < 0, experts, to_physical_map[known, columns].long())


def philox(seed: int, sequences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two words of Philox4x32-10 with key ``seed`` and counters (0, 0, sequence), all as int64.

    seed: 32 bits.  sequences: below 2**63. Source: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    counter = [torch.zeros_like(sequences), torch.zeros_like(sequences), sequences & _WORD_MASK, sequences >> 32]
    key = [seed, 0]
    for _ in range(_PHILOX_ROUNDS):
        (low0, high0), (low1, high1) = (_product(factor, counter[2 * i]) for i, factor in enumerate(_PHILOX_FACTORS))
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & _WORD_MASK for word, step in zip(key, _PHILOX_STEPS, strict=True)]
    return counter[0], counter[1]


def _product(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low and the high 32 bits of ``factor`` times ``words``."""
    low_part, high_part = factor * (words & 0xFFFF), factor * (words >> 16)
    high = (high_part + (low_part >> 16)) >> 16
    return (low_part + ((high_part & 0xFFFF) << 16)) & _WORD_MASK, high


def random_experts(
    num_tokens: int, num_slots: int, limit: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``num_slots`` different numbers below ``limit`` for each token, and float32 weights in (0, 1].

    Slot j of token t draws from sequence 32 t + j: the weight, and a number that is taken modulo limit - j.
    """
    slots = torch.arange(num_slots, device=device)
    sequences = torch.arange(num_tokens, device=device).view(-1, 1) * MAX_SLOTS + slots
    first, second = philox(seed, sequences)
    return _made_unique(second % (limit - slots)), first.float() * 2.0**-32 + 2.0**-33


def _made_unique(numbers: torch.Tensor) -> torch.Tensor:
    """Fix the smallest number of a row that waits, the first of equal ones; those that wait behind it move up by one; repeat."""
    slots = torch.arange(numbers.shape[1], device=numbers.device)
    waits = torch.ones_like(numbers, dtype=torch.bool)
    for _ in range(numbers.shape[1]):
        least = torch.where(waits, numbers, 2**62).amin(-1, keepdim=True)
        holder = torch.where(waits & (numbers == least), slots, MAX_SLOTS).amin(-1, keepdim=True)
        waits = waits & (slots != holder)
        numbers = numbers + (waits & (slots > holder)).long()
    return numbers
