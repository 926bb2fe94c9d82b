// A stand-in for libcuda.so.1: keeps the rules of the driver API that the launcher depends on, writes down each call,
// and can be told to fail. It also makes tensors that claim to be on a CUDA device.

#include <dlpack/dlpack.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101, kInvalidContext = 201,
              kInvalidHandle = 400, kNotFound = 500;
constexpr int kDefaultSmem = 48 * 1024, kMaxSmem = 227 * 1024;

struct Context {
  int device;
};
struct Kernel {
  std::string name;
  std::map<int, int> smem;
};
struct Function {
  Kernel* kernel;
  int device;
};
struct Library {
  int id;
};
struct DeviceFacts {
  int major, minor, sms;
};
struct Failure {
  int countdown, code;
};
struct Attribute {
  int id;
  uint32_t padding;
  union {
    char bytes[64];
    int flag;
    unsigned dims[3];
  } value;
};
struct Config {
  unsigned grid[3], block[3], smem;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

std::mutex g_mutex;
std::string g_log;
bool g_recording = true;
int g_version = 13000;
int g_blocks_per_sm = 2;
int g_libraries = 0;
pid_t g_init_pid = 0;
std::vector<DeviceFacts> g_devices = {{9, 0, 132}, {9, 0, 78}, {10, 0, 148}};
Context g_contexts[64];
std::map<std::string, Failure> g_failures;
std::map<std::string, std::vector<int>> g_param_sizes;
std::vector<Function*> g_functions;
thread_local std::vector<Context*> t_stack;

void Log(const char* format, ...) {
  if (!g_recording) return;
  char line[4096];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof(line), format, args);
  va_end(args);
  std::lock_guard<std::mutex> lock(g_mutex);
  g_log += line;
  g_log += '\n';
}

int Current() { return t_stack.empty() || t_stack.back() == nullptr ? -1 : t_stack.back()->device; }

// The code that a call was told to fail with, else 0.
int Enter(const char* name) {
  if (!g_recording) return 0;
  if (g_init_pid != 0 && g_init_pid != getpid()) return kNotInitialized;
  if (strcmp(name, "cuInit") != 0 && g_init_pid == 0) return kNotInitialized;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = g_failures.find(name);
  return found != g_failures.end() && --found->second.countdown == 0 ? found->second.code : 0;
}

std::string Hex(const void* data, int size) {
  std::string text;
  char digits[3];
  for (int i = 0; i < size; ++i) {
    snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char*>(data)[i]);
    text += digits;
  }
  return text;
}

template <typename T>
std::string Join(const T* values, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(values[i]);
  return text;
}

}  // namespace

// --- control, for tests ---

EXPORT const char* fake_log() { return g_log.c_str(); }
EXPORT void fake_clear() { g_log.clear(); }
// 0: neither records nor fails, for measurements of the launcher alone.
EXPORT void fake_record(int on) { g_recording = on != 0; }
EXPORT void fake_version(int version) { g_version = version; }
EXPORT void fake_blocks_per_sm(int blocks) { g_blocks_per_sm = blocks; }
EXPORT void fake_no_devices() { g_devices.clear(); }
EXPORT void fake_fail(const char* call, int countdown, int code) { g_failures[call] = {countdown, code}; }
EXPORT void fake_param_sizes(const char* function, const int* sizes, int count) {
  g_param_sizes[function].assign(sizes, sizes + count);
}
// The context that is current in this thread: of a device, or none for -1.
EXPORT void fake_set_current(int device) {
  t_stack.clear();
  if (device < 0) return;
  g_contexts[device].device = device;
  t_stack.push_back(&g_contexts[device]);
}
EXPORT int fake_current() { return Current(); }

// make_tensor(address, code, bits, lanes, device_type, device_id, has_strides, *shape, *strides) -> Tensor
EXPORT int __tvm_ffi_make_tensor(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  struct Owner {
    DLManagedTensor tensor;
    std::vector<int64_t> shape, strides;
  };
  auto* owner = new Owner();
  const bool has_strides = args[6].v_int64 != 0;
  const int rank = (count - 7) / (has_strides ? 2 : 1);
  for (int i = 0; i < rank; ++i) owner->shape.push_back(args[7 + i].v_int64);
  for (int i = 0; has_strides && i < rank; ++i) owner->strides.push_back(args[7 + rank + i].v_int64);
  DLTensor& tensor = owner->tensor.dl_tensor;
  tensor.data = reinterpret_cast<void*>(args[0].v_int64);
  tensor.dtype = {static_cast<uint8_t>(args[1].v_int64), static_cast<uint8_t>(args[2].v_int64),
                  static_cast<uint16_t>(args[3].v_int64)};
  tensor.device = {static_cast<DLDeviceType>(args[4].v_int64), static_cast<int32_t>(args[5].v_int64)};
  tensor.ndim = rank;
  tensor.shape = owner->shape.data();
  tensor.strides = has_strides ? owner->strides.data() : nullptr;
  tensor.byte_offset = 0;
  owner->tensor.manager_ctx = owner;
  owner->tensor.deleter = [](DLManagedTensor* self) { delete static_cast<Owner*>(self->manager_ctx); };
  TVMFFIObjectHandle handle = nullptr;
  if (TVMFFITensorFromDLPack(&owner->tensor, 0, 0, &handle) != 0) return -1;
  result->type_index = kTVMFFITensor;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(handle);
  return 0;
}

// nothing(*args) -> None: the cost of a call by itself
EXPORT int __tvm_ffi_nothing(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return 0; }

// --- the driver API ---

EXPORT int cuInit(unsigned) {
  Log("cuInit");
  if (int code = Enter("cuInit")) return code;
  if (g_devices.empty()) return kNoDevice;
  g_init_pid = getpid();
  return 0;
}

EXPORT int cuDriverGetVersion(int* version) {
  *version = g_version;
  return 0;
}

EXPORT int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {{1, "CUDA_ERROR_INVALID_VALUE"},
                                                   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                                   {34, "CUDA_ERROR_STUB_LIBRARY"},
                                                   {100, "CUDA_ERROR_NO_DEVICE"},
                                                   {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {200, "CUDA_ERROR_INVALID_IMAGE"},
                                                   {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                   {400, "CUDA_ERROR_INVALID_HANDLE"},
                                                   {500, "CUDA_ERROR_NOT_FOUND"},
                                                   {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}

EXPORT int cuGetErrorString(int code, const char** text) {
  *text = code == 999 ? nullptr : "text of the error";
  return 0;
}

EXPORT int cuDeviceGetCount(int* count) {
  if (int code = Enter("cuDeviceGetCount")) return code;
  *count = static_cast<int>(g_devices.size());
  return 0;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (int code = Enter("cuDeviceGet")) return code;
  if (ordinal < 0 || ordinal >= static_cast<int>(g_devices.size())) return kInvalidDevice;
  *device = ordinal + 1000;  // not the ordinal, so that mixing them up shows
  return 0;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (int code = Enter("cuDeviceGetAttribute")) return code;
  const DeviceFacts& facts = g_devices.at(static_cast<size_t>(device - 1000));
  *value = attribute == 16 ? facts.sms : attribute == 75 ? facts.major : attribute == 76 ? facts.minor : -1;
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
  Log("cuDevicePrimaryCtxRetain device=%d", device - 1000);
  if (int code = Enter("cuDevicePrimaryCtxRetain")) return code;
  g_contexts[device - 1000].device = device - 1000;
  *context = &g_contexts[device - 1000];
  return 0;
}

EXPORT int cuCtxGetCurrent(Context** context) {
  if (int code = Enter("cuCtxGetCurrent")) return code;
  *context = t_stack.empty() ? nullptr : t_stack.back();
  return 0;
}

EXPORT int cuCtxPushCurrent_v2(Context* context) {
  Log("cuCtxPushCurrent device=%d", context->device);
  if (int code = Enter("cuCtxPushCurrent_v2")) return code;
  t_stack.push_back(context);
  return 0;
}

EXPORT int cuCtxPopCurrent_v2(Context** context) {
  Log("cuCtxPopCurrent");
  if (int code = Enter("cuCtxPopCurrent_v2")) return code;
  if (t_stack.empty()) return kInvalidContext;
  *context = t_stack.back();
  t_stack.pop_back();
  return 0;
}

#ifndef FAKE_OLD_DRIVER
EXPORT int cuLibraryLoadData(Library** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  Log("cuLibraryLoadData magic=%s", Hex(code, 4).c_str());
  if (int error = Enter("cuLibraryLoadData")) return error;
  *library = new Library{++g_libraries};
  return 0;
}
#endif

EXPORT int cuLibraryGetKernel(Kernel** kernel, Library*, const char* name) {
  Log("cuLibraryGetKernel name=%s", name);
  if (int code = Enter("cuLibraryGetKernel")) return code;
  if (strncmp(name, "missing", 7) == 0) return kNotFound;
  static std::map<std::string, Kernel> kernels;
  std::lock_guard<std::mutex> lock(g_mutex);
  kernels[name].name = name;
  *kernel = &kernels[name];
  return 0;
}

EXPORT int cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int device) {
  Log("cuKernelSetAttribute name=%s device=%d attribute=%d value=%d", kernel->name.c_str(), device - 1000, attribute,
      value);
  if (int code = Enter("cuKernelSetAttribute")) return code;
  if (attribute == 8 && value > kMaxSmem) return kInvalidValue;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (attribute == 8) kernel->smem[device - 1000] = value;
  return 0;
}

EXPORT int cuKernelGetFunction(Function** function, Kernel* kernel) {
  Log("cuKernelGetFunction name=%s current=%d", kernel->name.c_str(), Current());
  if (int code = Enter("cuKernelGetFunction")) return code;
  if (Current() < 0) return kInvalidContext;
  std::lock_guard<std::mutex> lock(g_mutex);
  *function = new Function{kernel, Current()};
  g_functions.push_back(*function);  // keeps leak checkers quiet: the driver owns functions
  return 0;
}

EXPORT int cuFuncLoad(Function* function) {
  Log("cuFuncLoad name=%s", function->kernel->name.c_str());
  return Enter("cuFuncLoad");
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t smem) {
  Log("cuOccupancyMaxActiveBlocksPerMultiprocessor name=%s threads=%d smem=%zu", function->kernel->name.c_str(),
      threads, smem);
  if (int code = Enter("cuOccupancyMaxActiveBlocksPerMultiprocessor")) return code;
  *blocks = g_blocks_per_sm;
  return 0;
}

EXPORT int cuOccupancyMaxActiveClusters(int* clusters, Function*, const Config*) {
  Log("cuOccupancyMaxActiveClusters");
  if (int code = Enter("cuOccupancyMaxActiveClusters")) return code;
  *clusters = g_blocks_per_sm;
  return 0;
}

EXPORT int cuTensorMapEncodeTiled(uint64_t* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                                  const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                  int interleave, int swizzle, int l2, int oob) {
  Log("cuTensorMapEncodeTiled dtype=%d rank=%u address=%p dims=%s strides=%s box=%s elem=%s interleave=%d swizzle=%d "
      "l2=%d oob=%d",
      dtype, rank, address, Join(dims, rank).c_str(), Join(strides, rank - 1).c_str(), Join(box, rank).c_str(),
      Join(element_strides, rank).c_str(), interleave, swizzle, l2, oob);
  if (int code = Enter("cuTensorMapEncodeTiled")) return code;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) return kInvalidValue;
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return kInvalidValue;
  for (int i = 0; i < 16; ++i) map[i] = 0x1111111111111111ull * static_cast<unsigned>(i);
  map[0] = reinterpret_cast<uint64_t>(address);
  return 0;
}

EXPORT int cuLaunchKernelEx(const Config* config, Function* function, void** params, void**) {
  if (g_recording) {
    std::string bytes;
    const std::vector<int>& sizes = g_param_sizes[function->kernel->name];
    for (size_t i = 0; i < sizes.size(); ++i) bytes += (i ? "," : "") + Hex(params[i], sizes[i]);
    std::string attributes;
    for (unsigned i = 0; i < config->count; ++i) {
      const Attribute& attribute = config->attributes[i];
      attributes +=
          (i ? ";" : "") + std::to_string(attribute.id) + ":" + Join(attribute.value.dims, attribute.id == 4 ? 3 : 1);
    }
    Log("cuLaunchKernelEx name=%s current=%d stream=%p grid=%s block=%s smem=%u attributes=%s params=%s",
        function->kernel->name.c_str(), Current(), config->stream, Join(config->grid, 3).c_str(),
        Join(config->block, 3).c_str(), config->smem, attributes.c_str(), bytes.c_str());
  }
  if (int code = Enter("cuLaunchKernelEx")) return code;
  if (Current() != function->device) return kInvalidHandle;
  const auto granted = function->kernel->smem.find(function->device);
  const int limit = granted == function->kernel->smem.end() ? kDefaultSmem : granted->second;
  return static_cast<int>(config->smem) > limit ? kInvalidValue : 0;
}
