#include "errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <tvm/ffi/c_api.h>

namespace tkbuild {

constexpr int kMaxMessageBytes = 2048;

bool Fail(const char* kind, const char* format, ...) {
  char message[kMaxMessageBytes];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return false;
}

Text& Text::Add(const char* format, ...) {
  va_list args;
  va_start(args, format);
  const int written = vsnprintf(text_ + size_, sizeof(text_) - size_, format, args);
  va_end(args);
  if (written > 0) size_ += static_cast<unsigned>(written);
  if (size_ >= sizeof(text_)) size_ = sizeof(text_) - 1;
  return *this;
}

}  // namespace tkbuild
