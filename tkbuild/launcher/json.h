// JSON as a tree in an arena. Numbers are 64-bit integers: launch plans hold no others.
#pragma once

#include "arena.h"

namespace tkbuild {

struct Json {
  enum class Type { kNull, kBool, kInt, kString, kArray, kObject };

  Type type;
  int size;           // children of an array or object
  int64_t number;     // kInt, kBool
  const char* text;   // kString
  const char* key;    // name of this member in its object
  const Json* first;  // first child
  const Json* next;   // next sibling

  bool Is(Type wanted) const { return type == wanted; }
  const Json* Find(const char* name) const;
};

// The root, or null with an IntegrityError raised. Duplicate keys and text after the value are errors.
const Json* ParseJson(Arena& arena, const char* text, size_t size);

}  // namespace tkbuild
