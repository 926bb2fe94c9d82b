// A loaded variant: its launch plan, its cubin, and what the driver made of it on each device.
#pragma once

#include "arena.h"
#include "call.h"
#include "cuda_driver.h"
#include "errors.h"
#include "plan.h"
#include "sync.h"

namespace tkbuild {

class Kernel : public HeapObject {
 public:
  // Reads the plan and copies the cubin, without touching the driver. Null with an IntegrityError raised.
  static Kernel* Load(const TVMFFIByteArray& plan_json, const TVMFFIByteArray& cubin);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Makes later calls on the device capture-safe. False with an error raised.
  bool Preload(int device);
  // Checks the arguments and launches on the current stream of their device. False with an error raised.
  bool Invoke(const TVMFFIAny* args, int count);

  TVMFFIObjectHandle function = nullptr;  // the FFI function that stands for this kernel
  Kernel* next = nullptr;                 // in the list of loaded kernels

 private:
  // One launch of the plan on one device.
  struct LoadedLaunch {
    CUkernel kernel = nullptr;
    CUfunction function = nullptr;
    Atomic<int64_t> dynamic_smem_bytes;  // granted so far
    Atomic<uint64_t> occupancy;          // see BlocksPerSm
  };
  struct OnDevice : HeapObject {
    const Driver* driver = nullptr;
    Device* device = nullptr;
    LoadedLaunch launches[kMaxLaunches];
  };
  // The sizes of one launch, evaluated and checked.
  struct Geometry {
    int64_t grid[3];
    int64_t block[3];
    int64_t cluster[3];
    int64_t dynamic_smem_bytes;
  };
  struct ParamStorage;

  Kernel() = default;

  bool CopyCubin(const TVMFFIByteArray& cubin);
  Text Subject(const OnDevice& on) const;
  bool FailCall(const OnDevice& on, CUresult result, const char* call) const;

  // kernel.cc: loading
  OnDevice* PrepareOn(int device);
  bool LoadOn(OnDevice* on);
  bool LoadLibrary(const OnDevice& on);
  bool LoadLaunch(OnDevice* on, int index);
  bool GrantSharedMemory(const OnDevice& on, LoadedLaunch* loaded, int64_t bytes) const;

  // launch.cc: launching
  bool LaunchOne(int index, const Call& call, CUstream stream, OnDevice* on);
  bool Submit(const Launch& launch, const Geometry& geometry, CUstream stream, void** params, const OnDevice& on,
              LoadedLaunch* loaded) const;
  bool EvaluateSize(const Expr& expr, const Call& call, const char* what, int64_t low, int64_t high,
                    int64_t* out) const {
    if (!EvaluateFor(*plan_, expr, call, what, out)) return false;
    return (*out >= low && *out <= high) || FailSize(expr, what, low, high, *out);
  }
  [[gnu::cold]] bool FailSize(const Expr& expr, const char* what, int64_t low, int64_t high, int64_t got) const;
  bool EvaluateGrid(const Launch& launch, const Call& call, Geometry* out) const;
  bool EvaluateBlock(const Launch& launch, const Call& call, Geometry* out) const;
  bool FillParams(const Launch& launch, const Call& call, const OnDevice& on, ParamStorage* storage) const;
  bool FillValue(const Param& param, const Call& call, uint64_t* out) const;
  bool EncodeTensorMap(const TensorMap& map, const Call& call, const OnDevice& on, CUtensorMap* out) const;
  bool BlocksPerSm(const OnDevice& on, LoadedLaunch* loaded, const CUlaunchConfig& config, int64_t* out) const;
  bool CheckResidency(const Launch& launch, const OnDevice& on, LoadedLaunch* loaded, const Geometry& geometry,
                      const CUlaunchConfig& config) const;

  Arena arena_;
  const Plan* plan_ = nullptr;
  char* cubin_ = nullptr;  // until the library is loaded
  Mutex mutex_;            // guards loading
  CUlibrary library_ = nullptr;
  Atomic<OnDevice*> on_device_[kMaxDevices];
};

// The process-wide switch of `programmatic: setting`.
void SetPdl(bool enabled);
bool GetPdl();
// Launches that the driver accepted since the process started.
int64_t LaunchCount();

}  // namespace tkbuild
