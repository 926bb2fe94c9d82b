#include "cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include "errors.h"

namespace tkbuild {
namespace {

constexpr int kOldestDriver = 12000;  // cuLibraryLoadData came with CUDA 12.0

Mutex g_mutex;  // guards the first fill of everything below
Driver g_driver_table;
Atomic<const Driver*> g_opened;
Atomic<const Driver*> g_initialised;
Atomic<int> g_init_pid;
Device g_device_table[kMaxDevices];
Atomic<Device*> g_devices[kMaxDevices];
Atomic<int> g_num_sms_limit;

// Null when every function was found, else the name of one that was not.
const char* ResolveFunctions(void* library, Driver* driver) {
#define TKBUILD_RESOLVE(name, parameters)                                         \
  driver->name = reinterpret_cast<decltype(driver->name)>(dlsym(library, #name)); \
  if (driver->name == nullptr) return #name;
  TKBUILD_DRIVER_FUNCTIONS(TKBUILD_RESOLVE)
#undef TKBUILD_RESOLVE
  driver->cuFuncLoad = reinterpret_cast<decltype(driver->cuFuncLoad)>(dlsym(library, "cuFuncLoad"));
  return nullptr;
}

bool FailTooOld(const Driver& driver, const char* missing) {
  int version = 0;
  if (driver.cuDriverGetVersion != nullptr) driver.cuDriverGetVersion(&version);
  return Fail(kDriverNotFoundError,
              "the NVIDIA driver supports CUDA %d.%d and lacks %s; expected CUDA %d.%d or newer: update the driver",
              version / 1000, version % 1000 / 10, missing, kOldestDriver / 1000, kOldestDriver % 1000 / 10);
}

const Driver* OpenLocked() {
  if (const Driver* driver = g_opened.Load()) return driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    Fail(kDriverNotFoundError,
         "libcuda.so.1 cannot be loaded (%s); expected the NVIDIA driver: install it, or start the container with GPU "
         "access (--gpus)",
         dlerror());
    return nullptr;
  }
  if (const char* missing = ResolveFunctions(library, &g_driver_table)) {
    FailTooOld(g_driver_table, missing);
    return nullptr;
  }
  g_opened.Store(&g_driver_table);
  return &g_driver_table;
}

const Driver* InitLocked() {
  if (const Driver* driver = g_initialised.Load()) return driver;
  const Driver* driver = OpenLocked();
  if (driver == nullptr) return nullptr;
  const CUresult result = driver->cuInit(0);
  if (result == CUDA_ERROR_STUB_LIBRARY) {
    Fail(kDriverNotFoundError,
         "libcuda.so.1 is the stub of a CUDA toolkit; expected the NVIDIA driver: take the stubs "
         "folder out of LD_LIBRARY_PATH");
    return nullptr;
  }
  if (result != CUDA_SUCCESS) {
    FailDriver(*driver, result, "cuInit", "CUDA");
    return nullptr;
  }
  g_init_pid.Store(getpid());
  g_initialised.Store(driver);
  return driver;
}

// What to do next about an error; empty when the name of the error says it all.
const char* Hint(CUresult result) {
  if (result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED) {
    const int pid = g_init_pid.Load();
    return pid != 0 && pid != getpid() ? "; CUDA was in use before this process was forked: start workers by spawn, or "
                                         "fork before the first launch"
                                       : "";
  }
  if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
    return "; a kernel that was not preloaded on this device cannot be captured: call preload before the capture";
  }
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "; free memory of the device";
    case CUDA_ERROR_NO_DEVICE:
      return "; no GPU is visible: look at CUDA_VISIBLE_DEVICES and at the container's GPU access";
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
      return "; the cubin is for another GPU, or of a newer CUDA toolkit than the driver supports: update the driver "
             "or "
             "install the kernel wheel of this GPU";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_LAUNCH_FAILED:
      return "; an earlier kernel on this device failed: run again with CUDA_LAUNCH_BLOCKING=1, or under "
             "compute-sanitizer";
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
      return "; the block needs more registers, threads or shared memory than the device has";
    default:
      return "";
  }
}

bool FillDevice(const Driver& driver, int ordinal, Device* device) {
  const struct {
    CUdevice_attribute attribute;
    int* value;
  } facts[] = {{CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &device->sm_count},
               {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &device->major},
               {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &device->minor}};
  Text subject;
  subject.Add("cuda:%d", ordinal);
  device->ordinal = ordinal;
  if (const CUresult result = driver.cuDeviceGet(&device->handle, ordinal)) {
    return FailDriver(driver, result, "cuDeviceGet", subject.c_str());
  }
  for (const auto& fact : facts) {
    if (const CUresult result = driver.cuDeviceGetAttribute(fact.value, fact.attribute, device->handle)) {
      return FailDriver(driver, result, "cuDeviceGetAttribute", subject.c_str());
    }
  }
  return true;
}

}  // namespace

const Driver* OpenDriver() {
  if (const Driver* driver = g_opened.Load()) return driver;
  LockGuard lock(g_mutex);
  return OpenLocked();
}

const Driver* InitDriver() {
  if (const Driver* driver = g_initialised.Load()) return driver;
  LockGuard lock(g_mutex);
  return InitLocked();
}

bool FailDriver(const Driver& driver, CUresult result, const char* call, const char* subject) {
  const char* name = nullptr;
  const char* text = nullptr;
  int version = 0;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  driver.cuDriverGetVersion(&version);
  return Fail(kLaunchError, "%s: %s failed: %s (%d), %s; driver for CUDA %d.%d%s", subject, call,
              name != nullptr ? name : "unknown error", result, text != nullptr ? text : "no description",
              version / 1000, version % 1000 / 10, Hint(result));
}

Device* GetDevice(const Driver& driver, int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    Fail(kArgumentError, "cuda:%d: expected a device from 0 to %d", ordinal, kMaxDevices - 1);
    return nullptr;
  }
  if (Device* device = g_devices[ordinal].Load()) return device;
  LockGuard lock(g_mutex);
  if (Device* device = g_devices[ordinal].Load()) return device;
  if (!FillDevice(driver, ordinal, &g_device_table[ordinal])) return nullptr;
  g_devices[ordinal].Store(&g_device_table[ordinal]);
  return &g_device_table[ordinal];
}

bool RetainContext(const Driver& driver, Device* device) {
  if (device->context.Load() != nullptr) return true;
  LockGuard lock(g_mutex);
  if (device->context.Load() != nullptr) return true;
  CUcontext context = nullptr;
  if (const CUresult result = driver.cuDevicePrimaryCtxRetain(&context, device->handle)) {
    Text subject;
    subject.Add("cuda:%d", device->ordinal);
    return FailDriver(driver, result, "cuDevicePrimaryCtxRetain", subject.c_str());
  }
  device->context.Store(context);
  return true;
}

bool CountDevices(int* count) {
  const Driver* driver = OpenDriver();
  if (driver == nullptr) return false;
  *count = 0;
  if (g_initialised.Load() == nullptr && driver->cuInit(0) == CUDA_ERROR_NO_DEVICE) return true;
  if (InitDriver() == nullptr) return false;
  if (const CUresult result = driver->cuDeviceGetCount(count)) {
    return FailDriver(*driver, result, "cuDeviceGetCount", "CUDA");
  }
  return true;
}

void SetNumSmsLimit(int limit) { g_num_sms_limit.Store(limit); }

int NumSms(const Device& device) {
  const int limit = g_num_sms_limit.Load();
  return limit > 0 && limit < device.sm_count ? limit : device.sm_count;
}

}  // namespace tkbuild
