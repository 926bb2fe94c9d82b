"""Small kernel-wheel folders for tests: manifests with made-up cubins."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_toolkit import make_cubin

from tkbuild.expr import Expr
from tkbuild.launchplan import make_launch_plan
from tkbuild.manifest import CHECKS_NAME, MANIFEST_NAME, Manifest, VariantRecord
from tkbuild.signature import ArgSpec, AxisSpec, CheckSpec, Choose, DtypeRule, KernelSignature, OptionSpec, ScalarSpec

FACTS = {
    "tensor_maps": [],
    "launches": [
        {
            "function": "kernel_kernel",
            "params": [{"pointer": "x"}, {"pointer": "out"}, {"value": "T", "dtype": "int32"}],
            "grid": ["T", 1, 1],
            "block": [128, 1, 1],
            "cluster": [1, 1, 1],
            "dynamic_smem_bytes": 0,
            "cooperative": False,
            "programmatic": False,
        }
    ],
}


def expr(text: str) -> Expr:
    return Expr.parse(text)


def cast_signature() -> KernelSignature:
    """A row-wise cast: dtype from the input, a named block, column-major scales by option, a chosen capacity."""
    return KernelSignature(
        kernel="quant.cast",
        summary="Cast rows.",
        source="test",
        op="quant_cast",
        axes=(
            AxisSpec("in_dtype", "dtype", "", ("bfloat16", "float32")),
            AxisSpec("block", "int", "b", (32, 128)),
            AxisSpec("cap", "int", "c", (256, 1024), Choose("at_least", expr("H"))),
        ),
        args=(
            ArgSpec("x", "in", DtypeRule("in_dtype"), (expr("T"), expr("H")), (expr("ld"), expr("1"))),
            ArgSpec("out", "out", DtypeRule("float8_e4m3fn"), (expr("T"), expr("H"))),
            ArgSpec("sf", "out", DtypeRule("float32"), (expr("T"), expr("ceildiv(H, block)"))),
        ),
        scalars=(ScalarSpec("round_sf", "int32", 0),),
        options=(OptionSpec("col_major", "bool", False),),
        checks=(CheckSpec(expr("H % 64 == 0"), "H % 64 == 0", "hidden must be a multiple of 64"),),
    )


def write_provider(
    root: Path,
    signature: KernelSignature,
    arch: str = "sm_90a",
    leave_out: Sequence[str] = (),
    profiles: Any = None,
    code: bytes = b"",
    **changes: Any,
) -> Path:
    """Write a folder as `tkbuild package` does, with every combination of axis values but those of ``leave_out``."""
    root.mkdir(parents=True, exist_ok=True)
    variants, files = [], {}
    for values in itertools.product(*(axis.values for axis in signature.axes)):
        axes = dict(zip((axis.name for axis in signature.axes), values, strict=True))
        identifier = "-".join([signature.kernel, *map(str, values), arch])
        if identifier in leave_out:
            continue
        content = make_cubin(arch) + identifier.encode() + code
        digest = hashlib.sha256(content).hexdigest()
        name = f"{digest[:16]}.cubin"
        (root / name).write_bytes(content)
        files[name] = {"sha256": digest, "bytes": len(content)}
        plan = make_launch_plan(signature, variant=identifier, arch=arch, axes=axes, launch_facts=FACTS)
        variants.append(VariantRecord(identifier, signature.kernel, axes, name, digest, plan))
    checks = json.dumps({"kernels": {}, "profiles": profiles or {}}).encode()
    (root / CHECKS_NAME).write_bytes(checks)
    files[CHECKS_NAME] = {"sha256": hashlib.sha256(checks).hexdigest(), "bytes": len(checks)}
    manifest = Manifest(
        **{
            "name": f"tkbuild-kernels-{arch.replace('_', '')}",
            "version": "0.1.0",
            "arch": arch,
            "toolchain": {},
            "kernels": {signature.kernel: signature},
            "variants": tuple(variants),
            "files": files,
            **changes,
        }
    )
    write_json(root / MANIFEST_NAME, manifest.to_json())
    return root


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), "utf-8")
