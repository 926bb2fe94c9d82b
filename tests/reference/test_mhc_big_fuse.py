"""The reference of the fused inference path, against its parts and values written out by hand."""

from __future__ import annotations

import math

import torch

from tkbuild.reference.mhc import pre_big_fuse, sinkhorn


def test_values_by_hand() -> None:
    # sqrsum / (m H) + eps = 4, so mixes are out_mul / 2, over two splits.
    out_mul = torch.zeros(2, 1, 24)
    out_mul[0, 0, 0], out_mul[1, 0, 0] = 1.0, 3.0  # pre[0]: 2 * scale 0.5 + base
    out_mul[1, 0, 5] = 2.0  # post[1]: 1 * scale 3 + base
    sqrsum = torch.tensor([[20.0], [10.0]])
    scale, base = torch.tensor([0.5, 3.0, 1.0]), torch.zeros(24)
    base[0], base[5] = math.log(3.0) - 1.0, -3.0
    residual = torch.zeros(1, 4, 2, dtype=torch.bfloat16)
    residual[0, 0], residual[0, 1] = torch.tensor([4.0, 8.0]), torch.tensor([2.0, 0.0])
    post, comb, layer_input = pre_big_fuse(
        out_mul,
        sqrsum,
        scale,
        base,
        residual,
        rms_eps=0.25,
        mhc_pre_eps=0.25,
        mhc_sinkhorn_eps=0.0,
        mhc_post_mult_value=2.0,
        sinkhorn_repeat=1,
    )
    torch.testing.assert_close(layer_input.float(), torch.tensor([[1.0 * 4 + 0.75 * 2, 1.0 * 8]]))
    torch.testing.assert_close(post, torch.full((1, 4), 1.0))
    torch.testing.assert_close(comb, torch.full((1, 16), 0.25))


def test_comb_is_sinkhorn_of_its_mixes() -> None:
    generator = torch.Generator().manual_seed(1)
    out_mul, base = torch.randn(1, 6, 24, generator=generator), torch.randn(24, generator=generator)
    residual = torch.randn(6, 4, 8, generator=generator).bfloat16()
    given = {"rms_eps": 0.0, "mhc_pre_eps": 0.0, "mhc_sinkhorn_eps": 1e-3, "mhc_post_mult_value": 1.0, "sinkhorn_repeat": 4}
    _, comb, _ = pre_big_fuse(out_mul, torch.full((1, 6), 32.0), torch.tensor([1.0, 1.0, 2.0]), base, residual, **given)
    wanted = sinkhorn((out_mul[0, :, 8:] * 2 + base[8:]).view(6, 4, 4), repeat=4, eps=1e-3)
    torch.testing.assert_close(comb, wanted.view(6, 16))
