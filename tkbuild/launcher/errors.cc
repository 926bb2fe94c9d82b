#include "errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

namespace tkbuild {

constexpr int kMaxMessageBytes = 2048;

bool Fail(const char* kind, const char* format, ...) {
  char message[kMaxMessageBytes];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  // With a backtrace of its own making, the FFI would read the debug sections of every loaded library: a first error
  // took 1.7 s in a process with torch.
  const TVMFFIByteArray kind_bytes = {kind, strlen(kind)};
  const TVMFFIByteArray message_bytes = {message, strlen(message)};
  const TVMFFIByteArray no_backtrace = {"", 0};
  TVMFFIObjectHandle error = nullptr;
  if (TVMFFIErrorCreate(&kind_bytes, &message_bytes, &no_backtrace, &error) != 0) {
    TVMFFIErrorSetRaisedFromCStr(kind, message);
    return false;
  }
  TVMFFIErrorSetRaised(error);
  TVMFFIObjectDecRef(error);
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
