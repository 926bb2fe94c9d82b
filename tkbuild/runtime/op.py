"""The way of a call: tensors and values in, the variant chosen and its outputs allocated, one launch.

What depends on dtypes, shapes and values only is worked out once and kept; the launcher checks strides, alignment and
devices on every call.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from tkbuild.errors import ArgumentError, LaunchError, NoVariantError, PackageError
from tkbuild.expr import Expr
from tkbuild.launchplan import default_strides, strides
from tkbuild.runtime.fold import fold
from tkbuild.runtime.launcher import LaunchFunction, native
from tkbuild.runtime.registry import InstalledVariant, install_kernels, registry
from tkbuild.runtime.select import Request, select_or_raise
from tkbuild.signature import ArgSpec, KernelSignature

#: Call plans kept per kernel; a serving process meets far fewer shapes, and one that does not starts over.
_MAX_CALL_PLANS = 8192

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

Tensors = Sequence["torch.Tensor | None"]
Result = Any


def _empty_strided_cuda(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# What torch.empty_strided does without parsing a device and keywords, and without the dispatcher: 0.9 us instead of 1.8 us on
# the host of an H200, timed alone. The code that torch's own compiler generates calls it; not a public name.
_empty_on_current_device = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided_cuda)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _as_strided(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return tensor.detach().as_strided(size, stride, tensor.storage_offset() + offset)


#: A view of ``size`` and ``stride``, ``offset`` elements behind the first one, that autograd does not know: half the time of a slice.
#: From the same place as the function above.
view_of: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _as_strided)


def is_traced(tensor: Any) -> bool:
    """Whether a call with ``tensor`` goes through ``torch.ops``: while torch compiles, and for a subclass of a tensor."""
    return is_compiling() or type(tensor) not in _PLAIN_TENSORS


def allocator(like: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return what makes uninitialised tensors on the device of ``like``, as fast as torch can: a function of size, dtype and strides.

    They are contiguous unless strides are given. Strides reach as far as the elements do: what lies behind the last one is not allocated.
    """
    if is_traced(like) or not like.is_cuda or like.get_device() != _current_device():
        return functools.partial(_empty_on, like.device)
    return _empty_quickly


def new_empty(
    like: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return one tensor of ``allocator(like)``."""
    return allocator(like)(size, dtype, strides)


def _empty_on(
    device: torch.device, size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    if strides is None:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


def _empty_quickly(size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    size = tuple(size)  # torch.Size is refused
    return _empty_on_current_device(size, contiguous_strides(size) if strides is None else strides, dtype)


@functools.lru_cache(_MAX_CALL_PLANS)
def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(extent, 1) for extent in size[place + 1 :]) for place in range(len(size)))


@dataclass(frozen=True)
class Allocation:
    """One output: a view of ``size`` and ``stride`` at the start of ``storage_elems`` elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_elems: int

    @property
    def fills_storage(self) -> bool:
        """Whether the view reaches to the end of its storage, which is so for most outputs."""
        span = 0 if 0 in self.size else 1 + sum((extent - 1) * step for extent, step in zip(self.size, self.stride, strict=True))
        return span == self.storage_elems

    def make(self, device: torch.device) -> torch.Tensor:
        """Allocate the output."""
        if self.fills_storage:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return torch.empty((self.storage_elems,), dtype=self.dtype, device=device).as_strided(self.size, self.stride)

    def maker(self, device: torch.device) -> Callable[[], torch.Tensor]:
        """Return what allocates the output while ``device`` is the current one, as fast as torch can."""
        if self.fills_storage and device.type == "cuda":
            return functools.partial(_empty_on_current_device, self.size, self.stride, self.dtype)
        return functools.partial(self.make, device)


@dataclass(frozen=True)
class CallPlan:
    """All that a call needs and its key decides."""

    launch: LaunchFunction
    device: torch.device
    outs: tuple[Allocation, ...]
    make_outs: tuple[Callable[[], torch.Tensor], ...]
    options: tuple[bool | int, ...]

    def allocate(self) -> tuple[torch.Tensor, ...]:
        """Return fresh outputs on the plan's device."""
        if _current_device() == self.device.index:
            return tuple([make() for make in self.make_outs])
        return tuple([out.make(self.device) for out in self.outs])


class KernelOp:
    """One kernel as a callable.

    A call gives the ``in`` and ``inout`` tensors in the spec's order; ``static`` the values of the axes it must name,
    then of the options; ``scalars`` the kernel's scalars. It returns the ``out`` tensors: one, or a tuple.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        #: The op in ``torch.ops`` and its keyword names, set when it is registered; traced calls go through it.
        self.dispatched: Callable[..., Result] | None = None
        self.keywords: tuple[str, ...] = ()
        self.dtype_keywords: tuple[str, ...] = ()
        self._plans: dict[Any, CallPlan] = {}

    @functools.cached_property
    def signature(self) -> KernelSignature:
        """The kernel's signature. Raises: NoVariantError when no installed kernel wheel has the kernel, PackageError for a clash of two."""
        found = registry().signatures.get(self.kernel)
        if found is None:
            check_clash(self.kernel)
            raise NoVariantError(_not_installed(self.kernel), kernel=self.kernel, available=sorted(registry().signatures))
        _check_order(found)
        return found

    def __call__(
        self,
        tensors: tuple[Any, ...],
        static: tuple[Any, ...] = (),
        scalars: tuple[Any, ...] = (),
        outs: tuple[torch.Tensor, ...] | None = None,
    ) -> Result:
        """Launch on the current stream of the tensors' device; allocates the outputs unless ``outs`` gives them.

        Raises: ArgumentError, NoVariantError, LaunchError, DriverNotFoundError.
        """
        if is_traced(tensors[0]):
            return self._dispatch(tensors, static + scalars, outs)
        return self.launch(tensors, static, scalars, outs)

    def launch(
        self,
        tensors: tuple[Any, ...],
        static: tuple[Any, ...],
        scalars: tuple[Any, ...],
        outs: tuple[torch.Tensor, ...] | None = None,
    ) -> Result:
        """Like a call, but of whatever type the tensors are: what ``torch.ops`` arrives at."""
        if self._is_simple:
            first = tensors[0]
            key: Any = (static, self._deciding_scalars(scalars), first.dtype, first.shape, first.get_device())
        else:
            key = self._key(tensors, static, scalars)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(tensors, static, scalars)
        if outs is None:
            outs = plan.allocate()
        plan.launch(*tensors, *outs, *scalars, *plan.options)
        return outs[0] if len(outs) == 1 else outs or None

    def _dispatch(self, tensors: tuple[Any, ...], values: tuple[Any, ...], outs: tuple[torch.Tensor, ...] | None) -> Result:
        """Call the op in ``torch.ops``, which tracing, fake tensors and tensor subclasses understand."""
        if self.dispatched is None:
            check_clash(self.kernel)
            raise NoVariantError(_not_installed(self.kernel), kernel=self.kernel)
        keywords = dict(zip(self.keywords, values, strict=True))
        for name in self.dtype_keywords:
            keywords[name] = getattr(torch, keywords[name])
        try:
            result = self.dispatched(*tensors, **keywords)
        except RuntimeError:
            check_types(self.signature, values)  # of which torch says less
            raise
        if outs is None:
            return result
        for place, (out, value) in enumerate(zip(outs, result if isinstance(result, tuple) else (result,), strict=True)):
            folds = out.dim() != value.dim() and out.numel() == value.numel() and self._folds(place)
            if out.dtype != value.dtype or not (folds or out.shape == value.shape):  # copy_ would convert and broadcast
                raise ArgumentError(
                    f"{self.kernel}: an output buffer is {out.dtype} {tuple(out.shape)}, expected {value.dtype} {tuple(value.shape)}",
                    kernel=self.kernel,
                )
            out.copy_(value.reshape(out.shape) if folds else value)
        return outs[0] if len(outs) == 1 else outs

    def _folds(self, place: int) -> bool:
        """Whether output number ``place`` may have more dimensions, or one fewer, than the op makes."""
        known = registry().signatures.get(self.kernel)
        return known is not None and [arg for arg in known.args if arg.role == "out"][place].folds

    def _key(self, tensors: tuple[Any, ...], static: tuple[Any, ...], scalars: tuple[Any, ...]) -> Any:
        facts = [None if (t := tensors[place]) is None else read(t) for place, read in self._deciding]
        return (static, self._deciding_scalars(scalars), tensors[0].get_device(), *facts)

    @functools.cached_property
    def _deciding(self) -> tuple[tuple[int, Callable[[torch.Tensor], Any]], ...]:
        """Which tensors decide the variant or the outputs, and what of each does: dtype, shape, both, or strides as well.

        A shape whose names earlier tensors have bound decides nothing: the launcher refuses another.
        """
        given = [(place, arg) for place, arg in enumerate(self.signature.args) if arg.role != "out"]
        found: list[tuple[int, Callable[[torch.Tensor], Any]]] = []
        bound: set[str] = set()
        for position, (place, arg) in enumerate(given):
            names = {name for expr in arg.shape for name in expr.names()}
            has_dtype = place in self.signature.inferred_axes.values()
            has_shape = bool(names & self._planned_names - bound)
            if not arg.optional:
                bound |= {str(expr.node) for expr in arg.shape if expr.is_name}
            if self._needs_strides:
                found.append((position, _layout))
            elif has_dtype or has_shape:
                found.append((position, {(1, 0): _dtype, (0, 1): _shape, (1, 1): _dtype_and_shape}[has_dtype, has_shape]))
        return tuple(found)

    @functools.cached_property
    def _deciding_scalars(self) -> Callable[[tuple[Any, ...]], Any]:
        """What takes those that decide the variant or the outputs out of a call's scalars."""
        places = [place for place, scalar in enumerate(self.signature.scalars) if scalar.name in self._planned_names]
        return operator.itemgetter(*places) if places else _nothing

    @functools.cached_property
    def _needs_strides(self) -> bool:
        given = [arg for arg in self.signature.args if arg.role in ("in", "inout")]
        return bool(self._planned_names & {str(expr.node) for arg in given for expr in arg.strides or () if expr.is_name})

    @functools.cached_property
    def _is_simple(self) -> bool:
        """Whether dtype, shape and device of the first tensor and the values decide everything."""
        given = [arg for arg in self.signature.args if arg.role != "out"]
        alone = len(given) == 1 or self._deciding == ((0, _dtype_and_shape),)
        return alone and not given[0].optional and not self._needs_strides

    @functools.cached_property
    def _planned_names(self) -> frozenset[str]:
        """The names that decide the variant and the outputs."""
        signature = self.signature
        exprs: list[Expr] = [axis.choose.of for axis in signature.axes if axis.choose]
        for arg in signature.args:
            if arg.role == "out":
                exprs += [*arg.shape, *(arg.alloc.strides if arg.alloc else strides(arg))]
                exprs += [arg.alloc.elems] if arg.alloc else []
        return frozenset().union(*(expr.names() for expr in exprs))

    def _plan(self, tensors: Tensors, static: tuple[Any, ...], scalars: tuple[Any, ...]) -> CallPlan:
        signature = self.signature
        device = _device_of(signature, tensors)
        values = bind(signature, tensors, static, scalars)
        axes = call_axes(signature, tensors, static)
        request = Request(
            axes=axes,
            chosen={axis.name: axis.choose.of.evaluate({**values, **axes}) for axis in signature.axes if axis.choose},
            capability=native().compute_capability(device.index),
            device=str(device),
        )
        variant = select_or_raise(signature, registry().variants.get(self.kernel, ()), request)
        check_driver(variant, native().driver_version())
        if len(self._plans) >= _MAX_CALL_PLANS:
            self._plans.clear()
        outs = allocations(signature, {**values, **variant.axes})
        return CallPlan(
            launch=load(variant),
            device=device,
            outs=outs,
            make_outs=tuple(out.maker(device) for out in outs),
            options=tuple(static[len(signature.given_axes) :]),
        )


def _nothing(_scalars: tuple[Any, ...]) -> None:
    return None


_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")
_dtype_and_shape = operator.attrgetter("dtype", "shape")


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


@functools.cache
def kernel_op(kernel: str) -> KernelOp:
    """Return the process's ``KernelOp`` of ``kernel``; nothing is looked up before its first call."""
    return KernelOp(kernel)


_LOADED: dict[str, LaunchFunction] = {}


def load(variant: InstalledVariant) -> LaunchFunction:
    """Return the launch function of ``variant``, reading and checking its cubin at the first call; touches no device.

    Raises: IntegrityError when the cubin is damaged or for another arch than the manifest says.
    """
    key = f"{variant.root}/{variant.id}"
    found = _LOADED.get(key)
    if found is None:
        found = _LOADED.setdefault(key, native().load(variant.record.plan, variant.cubin()))
    return found


def check_driver(variant: InstalledVariant, driver: tuple[int, int]) -> None:
    """Raises: LaunchError when ``driver`` supports an older major version of CUDA than the one that made the cubin.

    Within a major version machine code runs on any driver; across it the driver may not read the cubin.
    """
    made_by = variant.toolkit.split(".")[0]
    if made_by.isdigit() and driver[0] < int(made_by):
        raise LaunchError(
            f"{variant.id} was built by CUDA {variant.toolkit}, the driver supports CUDA {driver[0]}.{driver[1]}; "
            f"install a driver for CUDA {made_by} or later",
            variant=variant.id,
            toolkit=variant.toolkit,
            driver=driver,
        )


def bind(signature: KernelSignature, tensors: Tensors, static: Sequence[Any], scalars: Sequence[Any]) -> dict[str, Any]:
    """Return the values of dims, strides, scalars and options of a call.

    Raises: ArgumentError for a wrong number of values, a wrong rank, and a shape that contradicts another. Strides and
    alignment are left to the launcher.
    """
    given = [arg for arg in signature.args if arg.role in ("in", "inout", "workspace")]
    names = signature.static_names
    for what, wanted, got in (("tensors", given, tensors), ("values", names, static), ("scalars", signature.scalars, scalars)):
        if len(wanted) != len(got):
            raise ArgumentError(f"{signature.kernel}: {len(got)} {what}, expected {len(wanted)}", kernel=signature.kernel)
    check_types(signature, (*static, *scalars))
    values: dict[str, Any] = dict(zip(names, static, strict=True))
    values |= {spec.name: value for spec, value in zip(signature.scalars, scalars, strict=True)}
    bound = {dim.name for dim in signature.bound_dims}
    for arg, tensor in zip(given, tensors, strict=True):
        if tensor is not None:
            _bind_tensor(signature, arg, tensor, values, bound)
    return values


# torch's symbolic values are none of Python's numbers.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "dtype": ((str,), "the name of a dtype"),
    "float": ((numbers.Real, torch.SymInt, torch.SymFloat), "a number"),
    "int": ((numbers.Integral, torch.SymInt), "a whole number"),
    "bool": ((numbers.Integral, torch.SymInt, torch.SymBool), "True or False"),
}


def check_types(signature: KernelSignature, values: Sequence[Any]) -> None:
    """Raises: ArgumentError for a value of another type than its axis, option or scalar; ``values`` are in this order."""
    kinds = [(axis.name, axis.type) for axis in signature.given_axes]
    kinds += [(spec.name, spec.dtype.rstrip("0123456789").removeprefix("u")) for spec in (*signature.options, *signature.scalars)]
    for (name, kind), value in zip(kinds, values, strict=True):
        types, wanted = _KINDS[kind]
        if not isinstance(value, types):
            raise ArgumentError(
                f"{signature.kernel}: {name} is {value!r}, expected {wanted}", kernel=signature.kernel, argument=name
            )


def _bind_tensor(signature: KernelSignature, arg: ArgSpec, tensor: torch.Tensor, values: dict[str, Any], bound: set[str]) -> None:
    folded = fold(arg, tensor.shape, tensor.stride())
    if folded is None:
        wanted = f"{len(arg.shape)}: ({', '.join(map(str, arg.shape))})"
        raise ArgumentError(
            f"{signature.kernel}: {arg.name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected dimensions that "
            f"count as {wanted}"
            if arg.folds
            else f"{signature.kernel}: {arg.name} has {tensor.dim()} dimensions, expected {wanted}",
            kernel=signature.kernel,
            argument=arg.name,
        )
    shape, steps = folded
    for position, (expr, extent) in enumerate(zip(arg.shape, shape, strict=True)):
        name = str(expr)
        if expr.is_name and name in bound and name not in values:
            values[name] = extent
        elif expr.names() <= values.keys() and (wanted := expr.evaluate(values)) != extent:
            raise ArgumentError(
                f"{signature.kernel}: {arg.name}.shape[{position}] is {extent}, expected {name} = {wanted}",
                kernel=signature.kernel,
                argument=arg.name,
            )
    for expr, stride in zip(arg.strides or (), steps, strict=False):
        if expr.is_name and str(expr) in bound:
            values.setdefault(str(expr), stride)


def call_axes(signature: KernelSignature, tensors: Tensors, static: Sequence[Any]) -> dict[str, Any]:
    """Return the values of the axes that the call names and of those that a tensor's dtype decides.

    Raises: ArgumentError for a dtype that the kernel's spec does not have.
    """
    axes: dict[str, Any] = {axis.name: value for axis, value in zip(signature.given_axes, static, strict=False)}
    given = {arg.name: tensor for arg, tensor in zip(given_args(signature), tensors, strict=True)}
    for name, position in signature.inferred_axes.items():
        arg = signature.args[position]
        tensor = given[arg.name]
        assert tensor is not None
        axes[name] = _value_for_dtype(signature, arg, dtype_name(tensor.dtype))
    return axes


def _value_for_dtype(signature: KernelSignature, arg: ArgSpec, dtype: str) -> str:
    rule = arg.dtype
    axis = next(axis for axis in signature.axes if axis.name == rule.name)
    for value in axis.values:
        if rule.resolve({axis.name: value}) == dtype:
            return str(value)
    known = ", ".join(rule.resolve({axis.name: value}) for value in axis.values)
    raise ArgumentError(
        f"{signature.kernel}: {arg.name} is {dtype}, expected one of {known}", kernel=signature.kernel, argument=arg.name
    )


def given_args(signature: KernelSignature) -> list[ArgSpec]:
    """The arguments of a call that are tensors, in its order."""
    return [arg for arg in signature.args if arg.role != "out"]


def allocations(signature: KernelSignature, values: Mapping[str, Any]) -> tuple[Allocation, ...]:
    """Return how the outputs of a call with ``values`` (dims, scalars, options and axes) are allocated."""
    result = []
    for arg in signature.args:
        if arg.role == "out":
            size = tuple(expr.evaluate(values) for expr in arg.shape)
            if negative := [f"{expr} = {extent}" for expr, extent in zip(arg.shape, size, strict=True) if _is_negative(extent)]:
                raise ArgumentError(
                    f"{signature.kernel}: {arg.name} would have the size {negative[0]}, expected 0 or more", kernel=signature.kernel
                )
            rule = arg.alloc.strides if arg.alloc else default_strides(arg)
            stride = tuple(expr.evaluate(values) for expr in rule)
            elems = arg.alloc.elems.evaluate(values) if arg.alloc else math.prod(size)
            dtype = getattr(torch, arg.dtype.resolve(values))
            result.append(Allocation(size, stride, dtype, elems))
    return tuple(result)


def _is_negative(extent: Any) -> bool:
    return type(extent) is int and extent < 0  # a symbolic size would be guarded


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's own spelling of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _device_of(signature: KernelSignature, tensors: Tensors) -> torch.device:
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is None or first.device.type != "cuda":
        where = "no tensor" if first is None else f"a tensor on {first.device}"
        raise ArgumentError(
            f"{signature.kernel}: {where} was given, expected CUDA tensors; tkbuild.reference has plain torch versions, with the spec's names",
            kernel=signature.kernel,
        )
    return first.device


def _check_order(signature: KernelSignature) -> None:
    roles = [arg.role == "out" for arg in signature.args]
    if roles != sorted(roles):
        raise NoVariantError(
            f"{signature.kernel}: its outputs stand before its inputs; rebuild the kernel wheel", kernel=signature.kernel
        )


def check_clash(kernel: str) -> None:
    """Raises: PackageError where installed wheels have different signatures for ``kernel``."""
    if text := registry().clashes.get(kernel):
        raise PackageError(text, kernel=kernel)


def _not_installed(kernel: str) -> str:
    have = registry().providers
    if not have:
        return f"{kernel}: no kernel wheel is installed; {install_kernels()}; or set TKBUILD_KERNELS to the module's folder of an unpacked one"
    names = ", ".join(f"{manifest.name} {manifest.version}" for _, manifest in have)
    return f"{kernel}: not in the installed kernel wheels ({names}); add it to the profile and build again"
