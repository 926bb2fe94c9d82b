#include "dtypes.h"

#include <string.h>

namespace tkbuild {
namespace {

constexpr Dtype kDtypes[] = {
    {"bfloat16", {kDLBfloat, 16, 1}},
    {"float16", {kDLFloat, 16, 1}},
    {"float32", {kDLFloat, 32, 1}},
    {"float64", {kDLFloat, 64, 1}},
    {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
    {"float8_e8m0fnu", {kDLFloat8_e8m0fnu, 8, 1}},
    {"float4_e2m1fn_x2", {kDLFloat4_e2m1fn, 4, 2}},
    {"int8", {kDLInt, 8, 1}},
    {"uint8", {kDLUInt, 8, 1}},
    {"int16", {kDLInt, 16, 1}},
    {"uint16", {kDLUInt, 16, 1}},
    {"int32", {kDLInt, 32, 1}},
    {"uint32", {kDLUInt, 32, 1}},
    {"int64", {kDLInt, 64, 1}},
    {"uint64", {kDLUInt, 64, 1}},
    {"bool", {kDLBool, 8, 1}},
};

}  // namespace

const Dtype* FindDtype(const char* name) {
  for (const Dtype& dtype : kDtypes) {
    if (strcmp(dtype.name, name) == 0) return &dtype;
  }
  return nullptr;
}

const char* DtypeName(DLDataType dlpack) {
  for (const Dtype& dtype : kDtypes) {
    if (SameDtype(dtype.dlpack, dlpack)) return dtype.name;
  }
  return nullptr;
}

bool IsFloat(const Dtype& dtype) { return dtype.dlpack.code == kDLFloat && dtype.dlpack.bits >= 32; }

bool IntRange(const Dtype& dtype, int64_t* low, int64_t* high) {
  const int bits = dtype.dlpack.bits;
  switch (dtype.dlpack.code) {
    case kDLBool:
      *low = 0;
      *high = 1;
      return true;
    case kDLInt:
      *high = static_cast<int64_t>(~uint64_t{0} >> (65 - bits));
      *low = -*high - 1;
      return true;
    case kDLUInt:
      *low = 0;
      // Expressions are signed: the upper half of uint64 cannot arise.
      *high = bits == 64 ? INT64_MAX : static_cast<int64_t>((uint64_t{1} << bits) - 1);
      return true;
    default:
      return false;
  }
}

}  // namespace tkbuild
