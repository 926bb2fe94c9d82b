// What a cubin must look like before its bytes are given to the driver, which is not told their length.
#pragma once

#include <stddef.h>

namespace tkbuild {

// Null if `bytes` is a 64-bit ELF file whose tables and sections lie inside it, else what is wrong.
const char* FindElfDamage(const char* bytes, size_t size);

}  // namespace tkbuild
