// Dtype names of launch plans, and what DLPack and kernel parameters make of them.
#pragma once

#include <dlpack/dlpack.h>
#include <stdint.h>

namespace tkbuild {

struct Dtype {
  const char* name;
  DLDataType dlpack;
};

// Null when no dtype has the name.
const Dtype* FindDtype(const char* name);
// Null for one that launch plans cannot hold.
const char* DtypeName(DLDataType dlpack);

inline bool SameDtype(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

bool IsFloat(const Dtype& dtype);
// The values an integer or bool dtype holds; false for others.
bool IntRange(const Dtype& dtype, int64_t* low, int64_t* high);

}  // namespace tkbuild
