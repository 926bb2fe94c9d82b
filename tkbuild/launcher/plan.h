// A launch plan in compiled form (tkbuild/DESIGN.md, section 3): read from JSON once, immutable afterwards.
#pragma once

#include "arena.h"
#include "dtypes.h"
#include "expr.h"

namespace tkbuild {

inline constexpr int kMaxArgs = 64;
inline constexpr int kMaxRank = 8;
inline constexpr int kMaxParams = 128;
inline constexpr int kMaxTensorMaps = 8;
inline constexpr int kMaxTensorMapRank = 5;
inline constexpr int kMaxLaunches = 16;

enum class Role { kIn, kOut, kInout, kWorkspace };
enum class Programmatic { kOff, kSetting, kOn };

// One entry of a shape or of strides.
struct Extent {
  enum class Kind { kConstant, kDim, kExpr };
  Kind kind;
  int slot;       // kDim: bound by its first appearance, compared afterwards
  int64_t value;  // kConstant
  Expr expr;      // kExpr: compared once all dims are bound
};

struct Arg {
  const char* name;
  bool is_tensor;
  const Dtype* dtype;

  // tensors
  Role role;
  bool optional;
  bool folds;  // takes a tensor of more dimensions, or one fewer: the first ones count as one
  int rank;
  Span<Extent> shape;
  Span<Extent> strides;  // in elements; empty: C-contiguous
  int64_t align_bytes;

  // scalars and options
  int slot;
  bool is_float;  // the slot holds the bits of a double
  int64_t low;    // integers: the range of the dtype
  int64_t high;
};

// An Extent of kind kExpr, by where it stands.
struct DeferredExtent {
  int arg;
  int axis;
  bool is_stride;
};

struct DimRange {
  int slot;
  int64_t low;
  int64_t high;
};

struct Check {
  Expr require;
  const char* text;
  const char* because;
};

// What cuTensorMapEncodeTiled takes. Extents in elements, strides in bytes.
struct TensorMap {
  int arg;
  int dtype;
  int rank;
  Expr dims[kMaxTensorMapRank];
  Expr strides[kMaxTensorMapRank];  // rank - 1 of them
  Expr box[kMaxTensorMapRank];
  Expr element_strides[kMaxTensorMapRank];
  int interleave;
  int swizzle;
  int l2_promotion;
  int oob_fill;
};

struct Param {
  enum class Kind { kPointer, kTensorMap, kInt, kFloat32, kFloat64 };
  Kind kind;
  int index;          // kPointer: of the arg; kTensorMap: of the map; floats: slot, or -1 where `value` counts
  Expr value;         // kInt, and floats given as an integer
  const char* dtype;  // of the kernel parameter, for messages
  int64_t low;
  int64_t high;
};

struct Launch {
  const char* function;
  Span<Param> params;
  Expr grid[3];     // in blocks
  Expr block[3];    // in threads
  Expr cluster[3];  // in blocks
  Expr dynamic_smem_bytes;
  bool cooperative;
  Programmatic programmatic;
};

struct TargetArch {
  const char* name;  // sm_90a
  int major;
  int minor;
  char suffix;  // 'a', 'f' or 0
};

struct Plan {
  const char* variant;
  TargetArch arch;
  Scope scope;
  int num_sms_slot;  // -1: not used
  Span<Arg> args;
  bool has_out;  // a tensor of role out
  Span<DeferredExtent> deferred;
  Span<int> dim_slots;
  Span<DimRange> dim_ranges;
  Span<Check> checks;
  Span<TensorMap> tensor_maps;
  Span<Launch> launches;
};

// Null with an IntegrityError raised. The plan lives in the arena.
const Plan* ReadPlan(Arena& arena, const char* json, size_t size);

// Whether code for `arch` runs on a device: 'a' targets fit one compute capability, 'f' and plain ones fit the later
// minor versions of theirs too.
bool RunsOn(const TargetArch& arch, int major, int minor);

}  // namespace tkbuild
