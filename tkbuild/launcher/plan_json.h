// Typed reading of a launch plan's JSON, with the place of each fault in the message.
#pragma once

#include "dtypes.h"
#include "json.h"

namespace tkbuild {

// The place in a launch plan that is being read: "quant.cast-...: launch plan: args[2].dtype".
class Where {
 public:
  [[gnu::format(printf, 3, 4)]] Where(const char* parent, const char* format, ...);
  operator const char*() const { return text_; }  // NOLINT: a Where is text

 private:
  char text_[256];
};

// Each of these returns false with an IntegrityError raised.
[[gnu::cold]] bool Bad(const char* where, const char* expected);
bool ReadString(const Json& object, const char* key, const char* where, const char** out);
bool ReadInt(const Json& object, const char* key, const char* where, int64_t low, int64_t high, int* out);
bool ReadDtype(const Json& object, const char* where, const Dtype** out);
// Absent means false.
bool ReadBool(const Json& object, const char* key, const char* where, bool* out);
// Absent, unless `required`, means an empty array.
bool ReadArray(const Json& object, const char* key, const char* where, int limit, bool required, const Json** out);

bool CheckKeys(const Json& object, const char* where, const char* const* keys, int count);

// A key that is not known may be a launch fact that this launcher would ignore, so it is refused.
template <int kCount>
bool OnlyKeys(const Json& object, const char* where, const char* const (&keys)[kCount]) {
  return CheckKeys(object, where, keys, kCount);
}

}  // namespace tkbuild
