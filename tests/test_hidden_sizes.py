"""Which hidden sizes each kernel takes: the README's table against the checks of the specs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tkbuild.kernelspec import KernelSpec
from tkbuild.specs import load_specs

ROOT = Path(__file__).parents[1]
HIDDEN = (8, 16, 24, 32, 64, 96, 100, 576, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 7680, 8192, 8200, 16384)
ROW = re.compile(r"\| (?P<kernels>`[^|]*`) \| multiples of (?P<step>\d+)(?:, at most (?P<most>\d+))? \|(?P<axes>[^|]*)\|")


def table() -> list[tuple[str, int, int | None, dict[str, str]]]:
    rows = []
    for match in ROW.finditer((ROOT / "README.md").read_text("utf-8")):
        axes = dict(re.findall(r"(\w+)=(\w+)", match["axes"]))
        for kernel in re.findall(r"`([\w.]+)`", match["kernels"]):
            rows.append((kernel, int(match["step"]), int(match["most"]) if match["most"] else None, axes))
    return rows


def takes(spec: KernelSpec, hidden: int, axes: dict[str, str]) -> bool:
    """Whether the spec's bounds and checks on the hidden size alone accept it, for every value of the other axes.

    axes: values of axes, or of scalars.
    """
    bounds = {dim.name: dim for dim in spec.signature.bound_dims}["H"]
    if bounds.max is not None and hidden > bounds.max:
        return False
    names = [axis.name for axis in spec.signature.axes]
    choices = [[one for one in axis.values if str(one) == axes.get(axis.name, str(one))] for axis in spec.signature.axes]
    scalars = {name: int(value) for name, value in axes.items() if name not in names}
    for values in itertools.product(*choices):
        known = {**scalars, **dict(zip(names, values, strict=True)), "H": hidden}
        for check in spec.signature.checks:
            if "H" in check.require.names() and check.require.names() <= known.keys() and not check.require.evaluate(known):
                return False
    return True


@pytest.mark.parametrize(("kernel", "step", "most", "axes"), table())
def test_the_table_says_what_the_spec_takes(kernel: str, step: int, most: int | None, axes: dict[str, str]) -> None:
    spec = load_specs(ROOT / "kernel_specs")[kernel]
    for hidden in HIDDEN:
        assert takes(spec, hidden, axes) == (hidden % step == 0 and (most is None or hidden <= most)), hidden


def test_every_kernel_with_hidden_columns_is_in_the_table() -> None:
    specs = load_specs(ROOT / "kernel_specs")
    with_hidden = {name for name, spec in specs.items() if any(dim.name == "H" for dim in spec.signature.bound_dims)}
    assert {kernel for kernel, *_ in table()} == with_hidden
