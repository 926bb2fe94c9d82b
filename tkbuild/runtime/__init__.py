"""The serving side: find installed kernels, choose, load and launch them. It never compiles and never writes.

kernels()              what is installed
load(variant_id)       one variant's launch function
preload(patterns)      map variants onto a device now, so that later launches can be captured in a CUDA graph
require(patterns)      fail now if a kernel or a profile's variants are missing
set_num_sms, set_pdl   process-wide settings, which act at launch
"""

try:
    from tkbuild.runtime.api import (
        Coverage,
        get_num_sms,
        get_pdl,
        kernels,
        load,
        preload,
        require,
        set_num_sms,
        set_pdl,
    )
except ImportError as exc:
    # Here and not in __main__: ``python -m`` imports a package before it looks for the package's __main__.
    from tkbuild.runtime.missing import end_command_without_torch

    end_command_without_torch(exc)
    raise

__all__ = ["Coverage", "get_num_sms", "get_pdl", "kernels", "load", "preload", "require", "set_num_sms", "set_pdl"]
