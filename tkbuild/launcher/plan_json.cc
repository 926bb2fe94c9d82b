#include "plan_json.h"

#include <stdarg.h>
#include <stdio.h>

#include "errors.h"

namespace tkbuild {

Where::Where(const char* parent, const char* format, ...) {
  va_list args;
  va_start(args, format);
  const int used = snprintf(text_, sizeof(text_), "%s", parent);
  if (used >= 0 && used < static_cast<int>(sizeof(text_))) {
    vsnprintf(text_ + used, sizeof(text_) - static_cast<size_t>(used), format, args);
  }
  va_end(args);
}

bool Bad(const char* where, const char* expected) {
  return Fail(kIntegrityError, "%s: expected %s; reinstall the kernel wheel, or build it with this version of tkbuild",
              where, expected);
}

bool CheckKeys(const Json& object, const char* where, const char* const* keys, int count) {
  if (!object.Is(Json::Type::kObject)) return Bad(where, "an object");
  for (const Json* member = object.first; member != nullptr; member = member->next) {
    bool known = false;
    for (int i = 0; i < count; ++i) known = known || strcmp(keys[i], member->key) == 0;
    if (!known) return Fail(kIntegrityError, "%s: unknown key '%s'; upgrade tkbuild", where, member->key);
  }
  return true;
}

bool ReadString(const Json& object, const char* key, const char* where, const char** out) {
  const Json* found = object.Find(key);
  if (found == nullptr || !found->Is(Json::Type::kString)) return Bad(Where(where, ".%s", key), "a string");
  *out = found->text;
  return true;
}

bool ReadInt(const Json& object, const char* key, const char* where, int64_t low, int64_t high, int* out) {
  const Json* found = object.Find(key);
  if (found == nullptr || !found->Is(Json::Type::kInt) || found->number < low || found->number > high) {
    const Where expected("", "an integer from %lld to %lld", static_cast<long long>(low), static_cast<long long>(high));
    return Bad(Where(where, ".%s", key), expected);
  }
  *out = static_cast<int>(found->number);
  return true;
}

bool ReadBool(const Json& object, const char* key, const char* where, bool* out) {
  const Json* found = object.Find(key);
  if (found != nullptr && !found->Is(Json::Type::kBool)) return Bad(Where(where, ".%s", key), "true or false");
  *out = found != nullptr && found->number != 0;
  return true;
}

bool ReadArray(const Json& object, const char* key, const char* where, int limit, bool required, const Json** out) {
  static constexpr Json kEmpty = {Json::Type::kArray, 0, 0, nullptr, nullptr, nullptr, nullptr};
  const Json* found = object.Find(key);
  if (found == nullptr && !required) found = &kEmpty;
  if (found == nullptr || !found->Is(Json::Type::kArray) || found->size > limit) {
    return Bad(Where(where, ".%s", key), Where("", "an array of at most %d entries", limit));
  }
  *out = found;
  return true;
}

bool ReadDtype(const Json& object, const char* where, const Dtype** out) {
  const char* name = nullptr;
  if (!ReadString(object, "dtype", where, &name)) return false;
  *out = FindDtype(name);
  return *out != nullptr || Fail(kIntegrityError, "%s.dtype: unknown dtype '%s'; upgrade tkbuild", where, name);
}

}  // namespace tkbuild
