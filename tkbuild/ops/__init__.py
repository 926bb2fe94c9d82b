"""The public operators, by family; a drop-in for release 2.1 of TileKernels: ``import tkbuild.ops as tile_kernels``.

Importing this defines ``torch.ops.tkbuild`` from the installed kernel wheels. It touches no device, starts no process
and writes nothing.
"""

from tkbuild.collector import collector_paused

with collector_paused():
    from tkbuild.ops import config, engram, mhc, modeling, moe, quant, rand, transform, transpose
    from tkbuild.ops.config import (
        get_amax_clamp_for_quant,
        get_deterministic_algorithms,
        get_device_num_sms,
        get_max_smem_per_sm,
        get_num_sms,
        get_pdl,
        get_token_alignment,
        set_amax_clamp_for_quant,
        set_num_sms,
        set_pdl,
        set_token_alignment,
        use_deterministic_algorithms,
    )
    from tkbuild.ops.modeling.mhc.gradients import register_autograd
    from tkbuild.runtime.torch_ops import register_torch_ops

    register_autograd(register_torch_ops())

__all__ = [
    "config",
    "engram",
    "get_amax_clamp_for_quant",
    "get_deterministic_algorithms",
    "get_device_num_sms",
    "get_max_smem_per_sm",
    "get_num_sms",
    "get_pdl",
    "get_token_alignment",
    "mhc",
    "modeling",
    "moe",
    "quant",
    "rand",
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "transform",
    "transpose",
    "use_deterministic_algorithms",
]
