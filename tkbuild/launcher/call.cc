#include "call.h"

#include "cuda_driver.h"
#include "errors.h"

namespace tkbuild {
namespace {

// --- messages ---

Text ShapeText(const DLTensor& tensor) {
  Text text;
  text.Add("(");
  for (int i = 0; i < tensor.ndim; ++i) text.Add("%s%lld", i == 0 ? "" : ", ", static_cast<long long>(tensor.shape[i]));
  text.Add(")");
  return text;
}

const char* TypeName(const TVMFFIAny& value) {
  switch (value.type_index) {
    case kTVMFFINone:
      return "None";
    case kTVMFFIBool:
      return "bool";
    case kTVMFFIInt:
      return "int";
    case kTVMFFIFloat:
      return "float";
    case kTVMFFIRawStr:
    case kTVMFFISmallStr:
    case kTVMFFIStr:
      return "str";
    case kTVMFFIByteArrayPtr:
    case kTVMFFISmallBytes:
    case kTVMFFIBytes:
      return "bytes";
    case kTVMFFIDLTensorPtr:
    case kTVMFFITensor:
      return "a tensor";
    default:
      return "an object of another type";
  }
}

[[gnu::cold]] bool FailExtent(const Plan& plan, const Arg& arg, const DLTensor& tensor, int axis, bool is_stride,
                              const Expr& expr, int64_t got, int64_t expected) {
  const Text shape = ShapeText(tensor);
  Text wanted;
  if (!expr.IsConstant()) wanted.Add("%s = ", expr.text);
  return Fail(kArgumentError, "%s: %s: %s of dimension %d is %lld, expected %s%lld; its shape is %s", plan.variant,
              arg.name, is_stride ? "stride" : "size", axis, static_cast<long long>(got), wanted.c_str(),
              static_cast<long long>(expected), shape.c_str());
}

[[gnu::cold]] bool FailContiguous(const Plan& plan, const Arg& arg, const DLTensor& tensor, int axis,
                                  int64_t expected) {
  const Text shape = ShapeText(tensor);
  return Fail(
      kArgumentError,
      "%s: %s: stride of dimension %d is %lld, expected %lld (C-contiguous); its shape is %s: pass %s.contiguous()",
      plan.variant, arg.name, axis, static_cast<long long>(tensor.strides[axis]), static_cast<long long>(expected),
      shape.c_str(), arg.name);
}

[[gnu::cold]] bool FailType(const Plan& plan, const Arg& arg, const TVMFFIAny& value) {
  return Fail(kArgumentError, "%s: %s: got %s, expected %s%s%s", plan.variant, arg.name, TypeName(value),
              arg.is_tensor ? "a CUDA tensor of dtype " : "", arg.dtype->name, arg.optional ? " or None" : "");
}

[[gnu::cold]] bool FailDtype(const Plan& plan, const Arg& arg, DLDataType got) {
  Text name;
  if (const char* known = DtypeName(got)) {
    name.Add("%s", known);
  } else {
    name.Add("? (DLPack code %d, %d bits, %d lanes)", got.code, got.bits, got.lanes);
  }
  return Fail(kArgumentError, "%s: %s: dtype %s, expected %s", plan.variant, arg.name, name.c_str(), arg.dtype->name);
}

// --- checks of one tensor ---

const DLTensor* AsTensor(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
  // A tensor object is its header followed by the DLTensor.
  if (value.type_index == kTVMFFITensor) return reinterpret_cast<const DLTensor*>(value.v_obj + 1);
  return nullptr;
}

class Binder {
 public:
  Binder(const Plan& plan, Call* call) : plan_(plan), call_(*call) {}

  bool Bind(const TVMFFIAny* args) {
    call_.device = -1;
    for (int i = 0; i < plan_.args.size; ++i) {
      const Arg& arg = plan_.args[i];
      call_.tensors[i] = nullptr;
      if (!(arg.is_tensor ? BindTensor(arg, args[i], i) : BindScalar(arg, args[i]))) return false;
    }
    ZeroUnboundDims();
    call_.empty = plan_.has_out ? any_out_empty_ : all_empty_;
    return BindNumSms() && CheckDeferred() && CheckDimRanges() && CheckRequirements();
  }

 private:
  bool BindTensor(const Arg& arg, const TVMFFIAny& value, int index) {
    const DLTensor* tensor = AsTensor(value);
    if (tensor == nullptr) return (value.type_index == kTVMFFINone && arg.optional) || FailType(plan_, arg, value);
    if (!SameDtype(tensor->dtype, arg.dtype->dlpack)) return FailDtype(plan_, arg, tensor->dtype);
    if (tensor->ndim != arg.rank && arg.folds) tensor = Fold(arg, *tensor, &call_.folded[index]);
    if (tensor->ndim != arg.rank) {
      const Text shape = ShapeText(*tensor);
      return Fail(kArgumentError, "%s: %s: %d dimensions, expected %d%s; its shape is %s", plan_.variant, arg.name,
                  tensor->ndim, arg.rank, arg.folds ? ", or more whose sizes and strides let the first ones count as one" : "",
                  shape.c_str());
    }
    call_.tensors[index] = tensor;
    return CheckDevice(arg, *tensor) && BindShape(arg, *tensor) && CheckPointer(arg, *tensor) &&
           BindStrides(arg, *tensor) && CheckOverlap(arg, *tensor);
  }

  // The tensor with its first dimensions as one, of size 1 if there are none; and where the argument ends in a constant size, with as
  // many of the last ones as one as make it up. The tensor itself where its dimensions or strides do not allow that.
  static const DLTensor* Fold(const Arg& arg, const DLTensor& tensor, Folded* folded) {
    int dim = tensor.ndim - 1;
    int64_t dense = 1;
    bool empty = false;
    for (int i = 0; i < tensor.ndim; ++i) empty = empty || tensor.shape[i] == 0;
    for (int axis = arg.rank - 1; axis >= 0; --axis) {
      const Extent& extent = arg.shape[axis];
      if (axis > 0 && dim < 0) return &tensor;
      int64_t size = 1, stride = dense;
      for (bool first = true; dim >= 0; first = false, --dim) {
        const bool joins = axis == arg.rank - 1 && extent.kind == Extent::Kind::kConstant && size < extent.value;
        const bool wanted = axis == 0 || first || joins;
        if (!wanted) break;
        const int64_t own = tensor.shape[dim], step = tensor.strides != nullptr ? tensor.strides[dim] : dense;
        if (own > 1 && size > 1 && step != size * stride && !empty) return &tensor;
        if (own > 1 && size <= 1) stride = step;
        size *= own;
        if (own > 1) dense *= own;
      }
      folded->shape[axis] = size;
      folded->strides[axis] = stride;
    }
    if (dim >= 0) return &tensor;
    folded->tensor = tensor;
    folded->tensor.ndim = arg.rank;
    folded->tensor.shape = folded->shape;
    folded->tensor.strides = folded->strides;
    return &folded->tensor;
  }

  bool CheckDevice(const Arg& arg, const DLTensor& tensor) {
    if (tensor.device.device_type != kDLCUDA) {
      return Fail(kArgumentError, "%s: %s: is not on a CUDA device (DLPack device type %d); move it to one",
                  plan_.variant, arg.name, static_cast<int>(tensor.device.device_type));
    }
    if (call_.device < 0) call_.device = tensor.device.device_id;
    if (tensor.device.device_id == call_.device) return true;
    return Fail(kArgumentError, "%s: %s: is on cuda:%d, expected cuda:%d, where the arguments before it are",
                plan_.variant, arg.name, tensor.device.device_id, call_.device);
  }

  bool BindShape(const Arg& arg, const DLTensor& tensor) {
    empty_ = false;
    for (int axis = 0; axis < arg.rank; ++axis) {
      const int64_t size = tensor.shape[axis];
      empty_ = empty_ || size == 0;
      if (size < 0) {
        return Fail(kArgumentError, "%s: %s: size of dimension %d is negative: %lld", plan_.variant, arg.name, axis,
                    static_cast<long long>(size));
      }
      if (!BindExtent(arg, tensor, axis, false, arg.shape[axis], size)) return false;
    }
    all_empty_ = all_empty_ && empty_;
    any_out_empty_ = any_out_empty_ || (empty_ && arg.role == Role::kOut);
    return true;
  }

  bool BindExtent(const Arg& arg, const DLTensor& tensor, int axis, bool is_stride, const Extent& extent, int64_t got) {
    if (extent.kind == Extent::Kind::kConstant) {
      return got == extent.value || FailExtent(plan_, arg, tensor, axis, is_stride, extent.expr, got, extent.value);
    }
    if (extent.kind == Extent::Kind::kExpr) return true;
    const uint64_t bit = uint64_t{1} << extent.slot;
    int64_t& bound = call_.slots[extent.slot];
    if ((bound_ & bit) == 0) {
      bound_ |= bit;
      bound = got;
    }
    return got == bound || FailExtent(plan_, arg, tensor, axis, is_stride, extent.expr, got, bound);
  }

  bool CheckPointer(const Arg& arg, const DLTensor& tensor) {
    if (empty_) return true;
    const uintptr_t address = reinterpret_cast<uintptr_t>(DataPointer(tensor));
    if (address == 0) return Fail(kArgumentError, "%s: %s: has no memory", plan_.variant, arg.name);
    if ((address & static_cast<uintptr_t>(arg.align_bytes - 1)) == 0) return true;
    return Fail(kArgumentError, "%s: %s: address %p, expected a multiple of %lld bytes; pass %s.clone()", plan_.variant,
                arg.name, reinterpret_cast<void*>(address), static_cast<long long>(arg.align_bytes), arg.name);
  }

  // What the strides would be if the tensor were C-contiguous is kept beside them: DLPack may leave strides out, and
  // the stride of a dimension of size 0 or 1 means nothing.
  bool BindStrides(const Arg& arg, const DLTensor& tensor) {
    uint64_t contiguous = 1;
    for (int axis = arg.rank - 1; axis >= 0; --axis) {
      const int64_t size = tensor.shape[axis];
      const int64_t dense = static_cast<int64_t>(contiguous);
      const int64_t stride = tensor.strides != nullptr ? tensor.strides[axis] : dense;
      const bool matters = size > 1 && !empty_;
      if (arg.strides.size == 0) {
        if (matters && stride != dense) return FailContiguous(plan_, arg, tensor, axis, dense);
      } else if (!matters) {
        BindWeakly(arg.strides[axis], dense);
      } else if (!BindStride(arg, tensor, axis, stride)) {
        return false;
      }
      if (size > 1) contiguous *= static_cast<uint64_t>(size);
    }
    return true;
  }

  // Another argument may still bind the name to a stride that matters.
  void BindWeakly(const Extent& extent, int64_t dense) {
    if (extent.kind != Extent::Kind::kDim) return;
    const uint64_t bit = uint64_t{1} << extent.slot;
    if (((bound_ | weak_) & bit) != 0) return;
    weak_ |= bit;
    call_.slots[extent.slot] = dense;
  }

  bool BindStride(const Arg& arg, const DLTensor& tensor, int axis, int64_t stride) {
    if (stride < 0 || (stride == 0 && arg.role != Role::kIn)) {
      return Fail(kArgumentError, "%s: %s: stride of dimension %d is %lld, expected %s", plan_.variant, arg.name, axis,
                  static_cast<long long>(stride),
                  stride < 0 ? "no negative stride" : "elements that do not overlap, since it is written");
    }
    return BindExtent(arg, tensor, axis, true, arg.strides[axis], stride);
  }

  // No two elements of a written tensor may share memory. Sufficient, and met by all layouts of nested dimensions: in order of
  // their strides, each dimension steps over what the smaller ones span.
  bool CheckOverlap(const Arg& arg, const DLTensor& tensor) {
    if (arg.role == Role::kIn || arg.strides.size == 0 || empty_ || tensor.strides == nullptr) return true;
    bool done[kMaxRank] = {};
    int64_t span = 1;
    for (int round = 0; round < arg.rank; ++round) {
      int next = -1;
      for (int axis = 0; axis < arg.rank; ++axis) {
        if (done[axis] || tensor.shape[axis] <= 1) continue;
        if (next < 0 || tensor.strides[axis] < tensor.strides[next]) next = axis;
      }
      if (next < 0) return true;
      if (tensor.strides[next] < span) {
        return Fail(kArgumentError, "%s: %s: stride of dimension %d is %lld, expected at least %lld: its elements overlap, and it is written",
                    plan_.variant, arg.name, next, static_cast<long long>(tensor.strides[next]), static_cast<long long>(span));
      }
      span += (tensor.shape[next] - 1) * tensor.strides[next];
      done[next] = true;
    }
    return true;
  }

  // Names that only an absent optional tensor would bind.
  void ZeroUnboundDims() {
    for (const int slot : plan_.dim_slots) {
      if ((((bound_ | weak_) >> slot) & 1) == 0) call_.slots[slot] = 0;
    }
  }

  // --- checks of the whole call ---

  bool BindScalar(const Arg& arg, const TVMFFIAny& value) {
    int64_t& slot = call_.slots[arg.slot];
    const bool integral = value.type_index == kTVMFFIInt || value.type_index == kTVMFFIBool;
    if (arg.is_float) {
      if (!integral && value.type_index != kTVMFFIFloat) return FailType(plan_, arg, value);
      const double number = integral ? static_cast<double>(value.v_int64) : value.v_float64;
      memcpy(&slot, &number, sizeof(slot));
      return true;
    }
    if (!integral) return FailType(plan_, arg, value);
    slot = value.v_int64;
    if (slot >= arg.low && slot <= arg.high) return true;
    return Fail(kArgumentError, "%s: %s: got %lld, expected a value from %lld to %lld (%s)", plan_.variant, arg.name,
                static_cast<long long>(slot), static_cast<long long>(arg.low), static_cast<long long>(arg.high),
                arg.dtype->name);
  }

  bool BindNumSms() {
    if (plan_.num_sms_slot < 0) return true;
    const Driver* driver = InitDriver();
    const Device* device = driver != nullptr ? GetDevice(*driver, call_.device) : nullptr;
    if (device == nullptr) return false;
    call_.slots[plan_.num_sms_slot] = NumSms(*device);
    return true;
  }

  bool CheckDeferred() {
    for (const DeferredExtent& at : plan_.deferred) {
      const Arg& arg = plan_.args[at.arg];
      const DLTensor* tensor = call_.tensors[at.arg];
      if (tensor == nullptr || (at.is_stride && !StrideMatters(*tensor, at.axis))) continue;
      const Expr& expr = (at.is_stride ? arg.strides : arg.shape)[at.axis].expr;
      // A tensor without strides is C-contiguous by DLPack's rules.
      const int64_t got = !at.is_stride                ? tensor->shape[at.axis]
                          : tensor->strides != nullptr ? tensor->strides[at.axis]
                                                       : DenseStride(*tensor, at.axis);
      int64_t expected = 0;
      if (!EvaluateFor(plan_, expr, call_, arg.name, &expected)) return false;
      if (got != expected) return FailExtent(plan_, arg, *tensor, at.axis, at.is_stride, expr, got, expected);
    }
    return true;
  }

  static bool StrideMatters(const DLTensor& tensor, int axis) {
    for (int i = 0; i < tensor.ndim; ++i) {
      if (tensor.shape[i] == 0) return false;
    }
    return tensor.shape[axis] > 1;
  }

  static int64_t DenseStride(const DLTensor& tensor, int axis) {
    int64_t stride = 1;
    for (int i = axis + 1; i < tensor.ndim; ++i) stride *= tensor.shape[i];
    return stride;
  }

  bool CheckDimRanges() {
    for (const DimRange& range : plan_.dim_ranges) {
      const int64_t value = call_.slots[range.slot];
      if (value >= range.low && value <= range.high) continue;
      return Fail(kArgumentError, "%s: %s is %lld, expected a value from %lld to %lld", plan_.variant,
                  plan_.scope.SlotName(range.slot), static_cast<long long>(value), static_cast<long long>(range.low),
                  static_cast<long long>(range.high));
    }
    return true;
  }

  bool CheckRequirements() {
    for (const Check& check : plan_.checks) {
      int64_t holds = 0;
      if (!EvaluateFor(plan_, check.require, call_, "check", &holds)) return false;
      if (holds == 0) return FailRequirement(check);
    }
    return true;
  }

  // Names the values, so that the reader need not work them out.
  bool FailRequirement(const Check& check) {
    Text values;
    uint64_t seen = 0;
    for (const Instruction& step : check.require.code) {
      if (step.op != Op::kSlot || (seen >> step.operand & 1) != 0) continue;
      values.Add("%s%s = %lld", seen == 0 ? "" : ", ", plan_.scope.SlotName(step.operand),
                 static_cast<long long>(call_.slots[step.operand]));
      seen |= uint64_t{1} << step.operand;
    }
    return Fail(kArgumentError, "%s: requires %s, got %s%s%s", plan_.variant, check.text, values.c_str(),
                check.because[0] != '\0' ? ": " : "", check.because);
  }

  const Plan& plan_;
  Call& call_;
  uint64_t bound_ = 0;  // dims that have their value, by slot
  uint64_t weak_ = 0;   // dims whose value comes from a stride that does not matter
  bool empty_ = false;  // the tensor at hand
  bool all_empty_ = true;
  bool any_out_empty_ = false;
};

}  // namespace

bool BindCall(const Plan& plan, const TVMFFIAny* args, int count, Call* call) {
  if (count != plan.args.size) {
    return Fail(kArgumentError, "%s: got %d arguments, expected %d", plan.variant, count, plan.args.size);
  }
  return Binder(plan, call).Bind(args);
}

bool FailEvaluation(const Plan& plan, const Expr& expr, const char* what, EvalStatus status) {
  return Fail(kArgumentError, "%s: %s: %s %s", plan.variant, what, expr.text, Describe(status));
}

}  // namespace tkbuild
