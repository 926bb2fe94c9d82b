"""Turn rendered TileLang source into CUDA source and the launch facts of its host function.

The only module that imports tilelang. It needs no GPU and no driver: it lowers under the profile of the target and
refuses device queries, so that the result cannot depend on the build machine.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tilelang
import torch
from tvm.target import Target

from tkbuild.errors import LowerError

_BINARY_OPS = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Min": "min",
    "Max": "max",
    "LT": "<",
    "LE": "<=",
    "GT": ">",
    "GE": ">=",
    "EQ": "==",
    "NE": "!=",
    "And": "and",
    "Or": "or",
}
#: Truncating division equals flooring division for the sizes a launch uses, which are never negative.
_TRUNCATING_OPS = {"Div": "//", "Mod": "%"}
_TENSOR_MAP_CALL = "__tvm_tensormap_create_tiled"
_CONTROL_FLOW = ("IfThenElse", "For", "While")
_HOST_CALLS_WITHOUT_EFFECT = {"__tvm_set_device"}
_LAUNCH_FIELDS = {
    "blockIdx.x": ("grid", 0),
    "blockIdx.y": ("grid", 1),
    "blockIdx.z": ("grid", 2),
    "threadIdx.x": ("block", 0),
    "threadIdx.y": ("block", 1),
    "threadIdx.z": ("block", 2),
    "tir.cluster_dim_x": ("cluster", 0),
    "tir.cluster_dim_y": ("cluster", 1),
    "tir.cluster_dim_z": ("cluster", 2),
}
_DYNAMIC_SMEM_FIELD = "tirx.use_dyn_shared_memory"
_DEVICE_QUERIES = (
    "current_device",
    "device_count",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_available",
    "mem_get_info",
    "set_device",
    "synchronize",
)

Json = Any


@dataclass(frozen=True)
class LoweredKernel:
    """What lowering hands on.

    cuda_source: one translation unit.  launch_facts: JSON of ``tensor_maps`` and ``launches`` as in a launch plan
    (DESIGN.md section 3); each launch has ``programmatic`` true when the kernel waits for or triggers its neighbours.
    """

    cuda_source: str
    launch_facts: dict[str, Json]


def lower(source: str, *, arch: str, pass_configs: Mapping[str, Any], import_dir: Path | None = None) -> LoweredKernel:
    """Lower the ``kernel`` that ``source`` defines.

    source: a Python module that defines ``kernel``, a TileLang PrimFunc.  arch: such as ``sm_90a``.
    import_dir: a folder whose modules the source may import (the spec's ``sources``).
    Raises: LowerError, for errors in the source, in TileLang, and for host code that a launch plan cannot express.
    """
    target = Target({"kind": "cuda", "arch": arch})
    with _device_queries_refused(arch):
        kernel = _load_kernel(source, import_dir, target)
        try:
            with target, tilelang.tvm.transform.PassContext(opt_level=3, config=dict(pass_configs)):
                artifact = tilelang.lower(kernel, target=target, enable_host_codegen=False)
        except LowerError:
            raise
        except Exception as exc:
            raise LowerError(
                f"TileLang could not lower the kernel for {arch}: {type(exc).__name__}: {exc}; "
                "look at the rendered source with `tkbuild explain VARIANT --source`",
                arch=arch,
            ) from exc
    return LoweredKernel(headers_first(str(artifact.kernel_source)), extract_launch_facts(artifact.host_mod, artifact.device_mod))


def headers_first(cuda_source: str) -> str:
    """Move a prelude, which TileLang puts before its own headers, behind them, so that kernels share the headers they begin with.

    A prelude that speaks to the preprocessor of what follows stays where it is.
    """
    lines = cuda_source.splitlines(keepends=True)
    first, depth = None, 0
    for number, line in enumerate(lines):
        if line.strip() and not _is_directive(line):
            first = None
        elif first is None and depth == 0:
            first = number
        if first is not None and line.lstrip().startswith("#include"):
            last = next((i for i in range(number, len(lines)) if lines[i].strip() and not _is_directive(lines[i])), len(lines))
            prelude = lines[:first]
            if not all(map(_leaves_headers_alone, prelude)):
                return cuda_source
            return "".join([*lines[first:last], *prelude, *lines[last:]])
        depth += _nesting(line)
    return cuda_source


def _is_directive(line: str) -> bool:
    return line.lstrip().startswith("#")


def _leaves_headers_alone(line: str) -> bool:
    return not _is_directive(line) or re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif|pragma\s+unroll)\b", line) is not None


def _nesting(line: str) -> int:
    return bool(re.match(r"\s*#\s*if", line)) - bool(re.match(r"\s*#\s*endif", line))


@contextlib.contextmanager
def _device_queries_refused(arch: str) -> Iterator[None]:
    """Within the block every question to a CUDA device is an error: the target's profile is the only source of facts."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise LowerError(
            f"the template asks for a property of a CUDA device while it is lowered for {arch}; "
            "use the `target` profile or a run-time scalar instead",
            arch=arch,
        )

    saved = {name: getattr(torch.cuda, name) for name in _DEVICE_QUERIES}
    for name in _DEVICE_QUERIES:
        setattr(torch.cuda, name, refuse)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(torch.cuda, name, function)


def _load_kernel(source: str, import_dir: Path | None, target: Target) -> Any:
    """Run ``source`` as a module of a constant name, so that neither paths nor history reach the lowered code."""
    name = "tkbuild_rendered_kernel"
    file_name = f"<{name}>"
    # TileLang's parser reads the text of the function back through linecache.
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    module = ModuleType(name)
    module.__file__ = file_name
    sys.modules[name] = module
    if import_dir is not None:
        sys.path.insert(0, str(import_dir))
    try:
        with target:
            exec(compile(source, file_name, "exec"), module.__dict__)
    except LowerError:
        raise
    except Exception as exc:
        raise LowerError(
            f"the rendered template failed at line {_source_line(exc, file_name)}: {type(exc).__name__}: {exc}; "
            "`tkbuild explain VARIANT --source` shows it",
            source=source,
        ) from exc
    finally:
        if import_dir is not None:
            sys.path.remove(str(import_dir))
        del sys.modules[name]
    kernel = getattr(module, "kernel", None)
    if not isinstance(kernel, tilelang.tvm.tirx.PrimFunc):
        raise LowerError(f"the rendered template must define `kernel`, a T.prim_func; found {type(kernel).__name__}", source=source)
    return kernel


def _source_line(exc: BaseException, file_name: str) -> int | str:
    if isinstance(exc, SyntaxError) and exc.filename == file_name:
        return exc.lineno or "?"
    line: int | str = "?"
    traceback = exc.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file_name:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def extract_launch_facts(host_mod: Any, device_mod: Any) -> dict[str, Json]:
    """Read tensor maps and launches from TileLang's lowered host function.

    Its tail holds one ``call_packed`` per tensor map and per launch; what stands before it are argument checks, which
    the spec gives. Raises: LowerError for a host call or an expression that a launch plan has no words for.
    """
    functions = {str(var.name_hint): func for var, func in device_mod.functions.items()}
    reader = _HostReader(functions)
    for func in host_mod.functions.values():
        for node in _nodes(func.body):
            reader.visit(node)
    if not reader.launches:
        raise LowerError("the kernel launches nothing: it has no T.Kernel block")
    return {"tensor_maps": reader.tensor_maps, "launches": reader.launches}


def _nodes(root: Any) -> list[Any]:
    """The nodes of a statement or an expression, operands first. An error that a callback of TVM's raised would lose its type."""
    nodes: list[Any] = []
    tilelang.tvm.tirx.stmt_functor.post_order_visit(root, nodes.append)
    return nodes


def _callee(node: Any) -> str | None:
    """The name of what a packed call calls; None for any other node."""
    is_call = type(node).__name__ == "Call" and str(getattr(node.op, "name", "")).endswith("call_packed")
    return str(node.args[0].value) if is_call else None


class _HostReader:
    """Collects, in program order, what the host function does."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.tensor_maps: list[dict[str, Json]] = []
        self.launches: list[dict[str, Json]] = []
        self._functions = functions
        self._tensor_map_vars: dict[str, int] = {}
        self._bound: dict[Any, Any] = {}

    def visit(self, node: Any) -> None:
        kind = type(node).__name__
        if kind in ("Bind", "LetStmt"):
            self._bound[node.var] = node.value
        elif callee := _callee(node):
            self._call(callee, node.args[1:])
        elif kind in _CONTROL_FLOW and any(_callee(inner) in self._functions for inner in _nodes(node)):
            raise LowerError(
                "a T.Kernel block stands under an `if` or in a loop, which a launch plan cannot express; write the condition "
                "into its grid (a launch of no CTAs is left out), and each launch by itself"
            )

    def _call(self, callee: str, args: Sequence[Any]) -> None:
        if callee == _TENSOR_MAP_CALL:
            self._tensor_map(args)
        elif callee in self._functions:
            self.launches.append(self._launch(callee, args))
        elif callee not in _HOST_CALLS_WITHOUT_EFFECT:
            raise LowerError(f"the host function calls {callee!r}, which a launch plan cannot express", callee=callee)

    def _tensor_map(self, args: Sequence[Any]) -> None:
        descriptor, dtype, rank_node, pointer, *rest = args
        rank = int(rank_node)
        exprs = [self.expr(arg) for arg in rest]
        expected = 4 * rank + 4
        if len(exprs) == expected:  # strides[0] is the element size, which the tensor map leaves implicit
            dims, strides, box, elem_strides = (exprs[i * rank : (i + 1) * rank] for i in range(4))
        else:
            raise LowerError(
                f"a tiled tensor map of rank {rank} has {len(exprs)} fields, expected {expected}; this TileLang is not known"
            )
        interleave, swizzle, l2_promotion, oob_fill = exprs[-4:]
        self._tensor_map_vars[str(descriptor.name)] = len(self.tensor_maps)
        self.tensor_maps.append(
            {
                "arg": str(pointer.name),
                "dtype": int(dtype),
                "rank": rank,
                "dims": dims,
                "strides": strides[1:],
                "box": box,
                "elem_strides": elem_strides,
                "interleave": interleave,
                "swizzle": swizzle,
                "l2": l2_promotion,
                "oob": oob_fill,
            }
        )

    def _launch(self, callee: str, args: Sequence[Any]) -> dict[str, Json]:
        attrs = self._functions[callee].attrs
        fields = [str(field) for field in attrs["tirx.kernel_launch_params"]]
        count = len(args) - len(fields)
        launch: dict[str, Json] = {
            "function": callee,
            "params": [self._param(arg) for arg in args[:count]],
            "grid": [1, 1, 1],
            "block": [1, 1, 1],
            "cluster": [1, 1, 1],
            "dynamic_smem_bytes": 0,
            "cooperative": bool(attrs.get("use_cooperative_groups", 0)),
            "programmatic": bool(attrs.get("has_cuda_pdl_sync", 0) or attrs.get("has_cuda_pdl_trigger", 0)),
        }
        for field, arg in zip(fields, args[count:], strict=True):
            if field == _DYNAMIC_SMEM_FIELD:
                launch["dynamic_smem_bytes"] = self.expr(arg)
            elif field in _LAUNCH_FIELDS:
                key, axis = _LAUNCH_FIELDS[field]
                launch[key][axis] = self.expr(arg)
            else:
                raise LowerError(f"{callee} has the launch parameter {field!r}, which a launch plan cannot express", field=field)
        return launch

    def _param(self, node: Any) -> dict[str, Json]:
        kind = type(node).__name__
        if kind == "Var" and str(node.name) in self._tensor_map_vars:
            return {"tensor_map": self._tensor_map_vars[str(node.name)]}
        if str(node.dtype) == "handle":
            if kind != "Var":
                raise LowerError(f"a kernel parameter is the address expression {node}, expected an argument's pointer")
            return {"pointer": str(node.name)}
        return {"value": self.expr(node), "dtype": str(node.dtype)}

    def expr(self, node: Any) -> Json:
        """A TIR integer expression as JSON (DESIGN.md section 2)."""
        kind = type(node).__name__
        if kind in ("IntImm", "int"):
            return int(node)
        if kind == "Var":
            return self._variable(node)
        if kind == "Cast":
            return self.expr(node.value)
        if kind in _BINARY_OPS or kind in _TRUNCATING_OPS:
            op = _BINARY_OPS.get(kind) or _TRUNCATING_OPS[kind]
            return [op, self.expr(node.a), self.expr(node.b)]
        if kind == "Not":
            return ["not", self.expr(node.a)]
        if kind == "Select":
            return ["select", self.expr(node.condition), self.expr(node.true_value), self.expr(node.false_value)]
        if kind == "Call":
            return self._call_expr(node)
        raise LowerError(f"the host function uses {node} ({kind}), which a launch plan cannot express", node=str(node))

    def _variable(self, node: Any) -> Json:
        value = self._bound.get(node)
        # A variable bound to arithmetic is a temporary of TileLang's; one read from an argument is known by its name.
        if value is not None and _is_arithmetic(value):
            return self.expr(value)
        return str(node.name)

    def _call_expr(self, node: Any) -> Json:
        name = str(node.op.name).rsplit(".", 1)[-1]
        args = [self.expr(arg) for arg in node.args]
        if name == "if_then_else":
            return ["select", *args]
        if name in ("shift_left", "shift_right") and isinstance(args[1], int):
            return ["*" if name == "shift_left" else "//", args[0], 1 << args[1]]
        raise LowerError(f"the host function uses {node}, which a launch plan cannot express", node=str(node))


def _is_arithmetic(value: Any) -> bool:
    def is_read(node: Any) -> bool:
        kind = type(node).__name__
        return kind == "BufferLoad" or (kind == "Call" and str(node.op.name).endswith("tvm_struct_get"))

    return not any(map(is_read, _nodes(value)))
