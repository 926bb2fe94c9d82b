// The part of the CUDA driver API that the launcher calls, found in libcuda.so.1 at first use, and what is known of
// each device. Declared here because neither the CUDA toolkit nor a GPU is needed to build the launcher.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "sync.h"

namespace tkbuild {

inline constexpr int kMaxDevices = 64;

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUfunction = struct CUfunc_st*;
using CUkernel = struct CUkern_st*;
using CUlibrary = struct CUlib_st*;
using CUstream = struct CUstream_st*;

enum CUresultCode : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_STUB_LIBRARY = 34,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_ASSERT = 710,
  CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
};

enum CUfunction_attribute : int {
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

enum CUlaunchAttributeID : int {
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  uint32_t padding;
  union {
    char bytes[64];
    int flag;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned dynamic_smem_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56);

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

// name in libcuda.so.1, result and parameters
#define TKBUILD_DRIVER_FUNCTIONS(X)                                                                                 \
  X(cuInit, (unsigned flags))                                                                                       \
  X(cuDriverGetVersion, (int* version))                                                                             \
  X(cuGetErrorName, (CUresult result, const char** name))                                                           \
  X(cuGetErrorString, (CUresult result, const char** text))                                                         \
  X(cuDeviceGetCount, (int* count))                                                                                 \
  X(cuDeviceGet, (CUdevice * device, int ordinal))                                                                  \
  X(cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device))                              \
  X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                               \
  X(cuCtxGetCurrent, (CUcontext * context))                                                                         \
  X(cuCtxPushCurrent_v2, (CUcontext context))                                                                       \
  X(cuCtxPopCurrent_v2, (CUcontext * context))                                                                      \
  X(cuLibraryLoadData,                                                                                              \
    (CUlibrary * library, const void* code, void* jit_options, void** jit_option_values, unsigned jit_option_count, \
     void* library_options, void** library_option_values, unsigned library_option_count))                           \
  X(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name))                                   \
  X(cuKernelSetAttribute, (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device))            \
  X(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                                                  \
  X(cuLaunchKernelEx, (const CUlaunchConfig* config, CUfunction function, void** params, void** extra))             \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                                    \
    (int* blocks, CUfunction function, int block_threads, size_t dynamic_smem_bytes))                               \
  X(cuOccupancyMaxActiveClusters, (int* clusters, CUfunction function, const CUlaunchConfig* config))               \
  X(cuTensorMapEncodeTiled, (CUtensorMap * map, int dtype, uint32_t rank, void* address, const uint64_t* dims,      \
                             const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,         \
                             int interleave, int swizzle, int l2_promotion, int oob_fill))

struct Driver {
#define TKBUILD_DECLARE(name, parameters) CUresult(*name) parameters;
  TKBUILD_DRIVER_FUNCTIONS(TKBUILD_DECLARE)
#undef TKBUILD_DECLARE
  // Absent before CUDA 12.4; loads a function that the driver would otherwise load at its first launch.
  CUresult (*cuFuncLoad)(CUfunction function);
};

// Opens libcuda.so.1 without initialising CUDA. Null with an error raised.
const Driver* OpenDriver();
// Opens and initialises. Null with an error raised; a later call tries again.
const Driver* InitDriver();

// Raises a LaunchError for a failed driver call and returns false; `subject` says for what it was made.
bool FailDriver(const Driver& driver, CUresult result, const char* call, const char* subject);

struct Device {
  int ordinal;
  CUdevice handle;
  int sm_count;
  int major;
  int minor;
  // The primary context, retained for the life of the process, as torch does; null until needed.
  Atomic<CUcontext> context;
};

// Facts of a device, asked once; makes no context. Null with an error raised.
Device* GetDevice(const Driver& driver, int ordinal);
// Retains the primary context of the device if that has not happened yet.
bool RetainContext(const Driver& driver, Device* device);

// The number of devices; 0 when there is a driver but no device.
bool CountDevices(int* count);

// The process-wide limit of persistent kernels; 0: none.
void SetNumSmsLimit(int limit);
int NumSms(const Device& device);

// Makes a context current in this thread and gives the previous one back at the end.
class ContextScope {
 public:
  explicit ContextScope(const Driver& driver) : driver_(driver) {}
  ~ContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  CUresult Enter(CUcontext context) {
    CUcontext current = nullptr;
    const CUresult result = driver_.cuCtxGetCurrent(&current);
    if (result != CUDA_SUCCESS || current == context) return result;
    const CUresult push = driver_.cuCtxPushCurrent_v2(context);
    pushed_ = push == CUDA_SUCCESS;
    return push;
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace tkbuild
