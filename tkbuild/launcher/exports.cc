// The functions that tvm_ffi.load_module finds in the library. Each is __tvm_ffi_<name>, returns 0, or -1 with an error
// raised.

#include <tvm/ffi/c_api.h>

#include "kernel.h"

namespace tkbuild {
namespace {

constexpr int kRuntimeAbi = 2;

Mutex g_kernels_mutex;
Kernel* g_kernels = nullptr;

void AddKernel(Kernel* kernel) {
  LockGuard lock(g_kernels_mutex);
  kernel->next = g_kernels;
  g_kernels = kernel;
}

void RemoveKernel(const Kernel* kernel) {
  LockGuard lock(g_kernels_mutex);
  Kernel** link = &g_kernels;
  while (*link != nullptr && *link != kernel) link = &(*link)->next;
  if (*link != nullptr) *link = kernel->next;
}

Kernel* FindKernel(const TVMFFIAny& value) {
  if (value.type_index != kTVMFFIFunction) return nullptr;
  LockGuard lock(g_kernels_mutex);
  for (Kernel* kernel = g_kernels; kernel != nullptr; kernel = kernel->next) {
    if (kernel->function == value.v_obj) return kernel;
  }
  return nullptr;
}

int InvokeKernel(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  return static_cast<Kernel*>(self)->Invoke(args, count) ? 0 : -1;
}

void DeleteKernel(void* self) {
  Kernel* kernel = static_cast<Kernel*>(self);
  RemoveKernel(kernel);
  delete kernel;
}

bool CheckCount(const char* function, int32_t got, int32_t expected) {
  return got == expected || Fail(kArgumentError, "%s: got %d arguments, expected %d", function, got, expected);
}

bool GetBytes(const char* what, const TVMFFIAny& value, TVMFFIByteArray* out) {
  switch (value.type_index) {
    case kTVMFFIRawStr:
      *out = {value.v_c_str, strlen(value.v_c_str)};
      return true;
    case kTVMFFIByteArrayPtr:
      *out = *static_cast<const TVMFFIByteArray*>(value.v_ptr);
      return true;
    case kTVMFFISmallStr:
    case kTVMFFISmallBytes:
      *out = {value.v_bytes, value.small_str_len};
      return true;
    case kTVMFFIStr:
    case kTVMFFIBytes:
      *out = *reinterpret_cast<const TVMFFIByteArray*>(value.v_obj + 1);
      return true;
    default:
      return Fail(kArgumentError, "%s: expected str or bytes", what);
  }
}

bool GetInt(const char* what, const TVMFFIAny& value, int64_t low, int64_t high, int* out) {
  const bool fits = value.type_index == kTVMFFIInt && value.v_int64 >= low && value.v_int64 <= high;
  if (fits) *out = static_cast<int>(value.v_int64);
  return fits || Fail(kArgumentError, "%s: expected an int from %lld to %lld", what, static_cast<long long>(low),
                      static_cast<long long>(high));
}

void ReturnInt(int64_t value, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

void ReturnBool(bool value, TVMFFIAny* result) {
  ReturnInt(value ? 1 : 0, result);
  result->type_index = kTVMFFIBool;
}

const Device* GetDeviceArg(const char* what, const TVMFFIAny& value) {
  int ordinal = 0;
  if (!GetInt(what, value, 0, kMaxDevices - 1, &ordinal)) return nullptr;
  const Driver* driver = InitDriver();
  return driver != nullptr ? GetDevice(*driver, ordinal) : nullptr;
}

// load(plan_json: str, cubin: bytes) -> Function
bool Load(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVMFFIByteArray plan_json;
  TVMFFIByteArray cubin;
  if (!CheckCount("load", count, 2) || !GetBytes("load: plan_json", args[0], &plan_json) ||
      !GetBytes("load: cubin", args[1], &cubin)) {
    return false;
  }
  Kernel* kernel = Kernel::Load(plan_json, cubin);
  if (kernel == nullptr) return false;
  if (TVMFFIFunctionCreate(kernel, InvokeKernel, DeleteKernel, &kernel->function) != 0) {
    delete kernel;
    return false;
  }
  AddKernel(kernel);
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(kernel->function);
  return true;
}

// preload(function, device: int) -> None
bool Preload(const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  int device = 0;
  if (!CheckCount("preload", count, 2)) return false;
  Kernel* kernel = FindKernel(args[0]);
  if (kernel == nullptr) return Fail(kArgumentError, "preload: function: expected one that load() returned");
  return GetInt("preload: device", args[1], 0, kMaxDevices - 1, &device) && kernel->Preload(device);
}

// set_num_sms(limit: int) -> None; 0 takes the limit away
bool SetNumSms(const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  int limit = 0;
  if (!CheckCount("set_num_sms", count, 1) || !GetInt("set_num_sms: limit", args[0], 0, INT32_MAX, &limit))
    return false;
  SetNumSmsLimit(limit);
  return true;
}

// get_num_sms(device: int) -> int: the limit, or the SM count of the device if that is less
bool GetNumSms(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (!CheckCount("get_num_sms", count, 1)) return false;
  const Device* device = GetDeviceArg("get_num_sms: device", args[0]);
  if (device == nullptr) return false;
  ReturnInt(NumSms(*device), result);
  return true;
}

// set_pdl(enabled: bool) -> None
bool SetPdlFlag(const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  if (!CheckCount("set_pdl", count, 1)) return false;
  if (args[0].type_index != kTVMFFIBool) return Fail(kArgumentError, "set_pdl: enabled: expected a bool");
  SetPdl(args[0].v_int64 != 0);
  return true;
}

// get_pdl() -> bool
bool GetPdlFlag(const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  if (!CheckCount("get_pdl", count, 0)) return false;
  ReturnBool(GetPdl(), result);
  return true;
}

// driver_version() -> int, 13000 for CUDA 13.0; does not initialise CUDA
bool DriverVersion(const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  int version = 0;
  if (!CheckCount("driver_version", count, 0)) return false;
  const Driver* driver = OpenDriver();
  if (driver == nullptr) return false;
  if (const CUresult error = driver->cuDriverGetVersion(&version)) {
    return FailDriver(*driver, error, "cuDriverGetVersion", "CUDA");
  }
  ReturnInt(version, result);
  return true;
}

// device_count() -> int; 0 with a driver but no device
bool DeviceCount(const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  int devices = 0;
  if (!CheckCount("device_count", count, 0) || !CountDevices(&devices)) return false;
  ReturnInt(devices, result);
  return true;
}

// compute_capability(device: int) -> [major, minor]
bool ComputeCapability(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (!CheckCount("compute_capability", count, 1)) return false;
  const Device* device = GetDeviceArg("compute_capability: device", args[0]);
  if (device == nullptr) return false;
  TVMFFIAny parts[2];
  ReturnInt(device->major, &parts[0]);
  ReturnInt(device->minor, &parts[1]);
  // The C ABI makes arrays through this function alone.
  static constexpr char kName[] = "ffi.Array";
  const TVMFFIByteArray name = {kName, sizeof(kName) - 1};
  TVMFFIObjectHandle make_array = nullptr;
  if (TVMFFIFunctionGetGlobal(&name, &make_array) != 0) return false;
  const int status = TVMFFIFunctionCall(make_array, parts, 2, result);
  TVMFFIObjectDecRef(make_array);
  return status == 0;
}

// launch_count() -> int: launches that the driver accepted in this process
bool LaunchCountOf(const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  if (!CheckCount("launch_count", count, 0)) return false;
  ReturnInt(LaunchCount(), result);
  return true;
}

// abi() -> int: the runtime_abi of manifests
bool Abi(const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  if (!CheckCount("abi", count, 0)) return false;
  ReturnInt(kRuntimeAbi, result);
  return true;
}

}  // namespace
}  // namespace tkbuild

#define TKBUILD_EXPORT(name, function)                                                                                \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                                         TVMFFIAny* result) {                         \
    return tkbuild::function(args, count, result) ? 0 : -1;                                                           \
  }

TKBUILD_EXPORT(load, Load)
TKBUILD_EXPORT(preload, Preload)
TKBUILD_EXPORT(set_num_sms, SetNumSms)
TKBUILD_EXPORT(get_num_sms, GetNumSms)
TKBUILD_EXPORT(set_pdl, SetPdlFlag)
TKBUILD_EXPORT(get_pdl, GetPdlFlag)
TKBUILD_EXPORT(driver_version, DriverVersion)
TKBUILD_EXPORT(device_count, DeviceCount)
TKBUILD_EXPORT(compute_capability, ComputeCapability)
TKBUILD_EXPORT(launch_count, LaunchCountOf)
TKBUILD_EXPORT(abi, Abi)
