// Raising errors towards the caller of an FFI function.
#pragma once

namespace tkbuild {

// The runtime maps these kinds to exception classes.
inline constexpr char kArgumentError[] = "ArgumentError";              // what the caller passed does not fit
inline constexpr char kLaunchError[] = "LaunchError";                  // the driver or the device refuses
inline constexpr char kDriverNotFoundError[] = "DriverNotFoundError";  // libcuda.so.1 is missing, a stub, or too old
inline constexpr char kIntegrityError[] = "IntegrityError";            // a launch plan or cubin is damaged or foreign

// Raises an error in this thread and returns false, so that callers can write `return Fail(...)`. Text beyond
// kMaxMessageBytes is cut.
[[gnu::format(printf, 2, 3)]] [[gnu::cold]] bool Fail(const char* kind, const char* format, ...);

// A message part of bounded length, built piece by piece without allocation.
class Text {
 public:
  [[gnu::format(printf, 2, 3)]] Text& Add(const char* format, ...);
  const char* c_str() const { return text_; }

 private:
  char text_[512] = {0};
  unsigned size_ = 0;
};

}  // namespace tkbuild
