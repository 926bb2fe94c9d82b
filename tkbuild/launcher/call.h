// One call: its arguments checked against the plan, and the values that the plan's names take in it.
#pragma once

#include <tvm/ffi/c_api.h>

#include "plan.h"

namespace tkbuild {

// A tensor as an argument of fewer or more dimensions sees it.
struct Folded {
  DLTensor tensor;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];
};

struct Call {
  int64_t slots[kMaxSlots];
  Folded folded[kMaxArgs];
  const DLTensor* tensors[kMaxArgs];  // null for a None
  int device;                         // of all tensors
  bool empty;                         // nothing to launch
};

inline void* DataPointer(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// False with an ArgumentError raised. Allocates nothing; asks the driver only for the SM count, if the plan uses it.
bool BindCall(const Plan& plan, const TVMFFIAny* args, int count, Call* call);

[[gnu::cold]] bool FailEvaluation(const Plan& plan, const Expr& expr, const char* what, EvalStatus status);

// Evaluates an expression of the plan; `what` names it in the ArgumentError of a failure.
inline bool EvaluateFor(const Plan& plan, const Expr& expr, const Call& call, const char* what, int64_t* out) {
  const EvalStatus status = expr.Evaluate(call.slots, out);
  return __builtin_expect(status == EvalStatus::kOk, true) || FailEvaluation(plan, expr, what, status);
}

}  // namespace tkbuild
