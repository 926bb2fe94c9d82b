#include "kernel.h"

#include "elf.h"

namespace tkbuild {
namespace {

constexpr int64_t kMaxPortableCluster = 8;

bool MayExceedPortableCluster(const Launch& launch) {
  int64_t blocks = 1;
  for (const Expr& expr : launch.cluster) {
    int64_t size = 0;
    if (!expr.IsConstant()) return true;
    expr.Evaluate(nullptr, &size);
    if (size > kMaxPortableCluster) return true;
    blocks *= size;
  }
  return blocks > kMaxPortableCluster;
}

}  // namespace

Kernel* Kernel::Load(const TVMFFIByteArray& plan_json, const TVMFFIByteArray& cubin) {
  Kernel* kernel = new Kernel();
  kernel->plan_ = ReadPlan(kernel->arena_, plan_json.data, plan_json.size);
  if (kernel->plan_ != nullptr && kernel->CopyCubin(cubin)) return kernel;
  delete kernel;
  return nullptr;
}

Kernel::~Kernel() {
  free(cubin_);
  // The library stays loaded: a captured graph may still launch its kernels.
  for (const Atomic<OnDevice*>& on : on_device_) delete on.Load();
}

bool Kernel::CopyCubin(const TVMFFIByteArray& cubin) {
  if (const char* damage = FindElfDamage(cubin.data, cubin.size)) {
    return Fail(kIntegrityError, "%s: cubin of %zu bytes: %s; reinstall the kernel wheel", plan_->variant, cubin.size,
                damage);
  }
  cubin_ = static_cast<char*>(malloc(cubin.size));
  if (cubin_ == nullptr) {
    return Fail(kLaunchError, "%s: no host memory for a cubin of %zu bytes", plan_->variant, cubin.size);
  }
  memcpy(cubin_, cubin.data, cubin.size);
  return true;
}

Text Kernel::Subject(const OnDevice& on) const {
  Text text;
  text.Add("%s on cuda:%d", plan_->variant, on.device->ordinal);
  return text;
}

bool Kernel::FailCall(const OnDevice& on, CUresult result, const char* call) const {
  return FailDriver(*on.driver, result, call, Subject(on).c_str());
}

bool Kernel::Preload(int device) { return PrepareOn(device) != nullptr; }

Kernel::OnDevice* Kernel::PrepareOn(int ordinal) {
  const Driver* driver = InitDriver();
  Device* device = driver != nullptr ? GetDevice(*driver, ordinal) : nullptr;
  if (device == nullptr) return nullptr;
  if (!RunsOn(plan_->arch, device->major, device->minor)) {
    Fail(kLaunchError,
         "%s: cuda:%d has compute capability %d.%d, but the kernel is built for %s; install the kernel wheel for that "
         "GPU",
         plan_->variant, ordinal, device->major, device->minor, plan_->arch.name);
    return nullptr;
  }
  if (!RetainContext(*driver, device)) return nullptr;
  LockGuard lock(mutex_);
  if (OnDevice* on = on_device_[ordinal].Load()) return on;
  OnDevice* on = new OnDevice();
  on->driver = driver;
  on->device = device;
  if (!LoadOn(on)) {
    delete on;
    return nullptr;
  }
  on_device_[ordinal].Store(on);
  return on;
}

bool Kernel::LoadOn(OnDevice* on) {
  ContextScope scope(*on->driver);
  if (const CUresult result = scope.Enter(on->device->context.Load())) return FailCall(*on, result, "cuCtxPushCurrent");
  if (library_ == nullptr && !LoadLibrary(*on)) return false;
  for (int i = 0; i < plan_->launches.size; ++i) {
    if (!LoadLaunch(on, i)) return false;
  }
  return true;
}

bool Kernel::LoadLibrary(const OnDevice& on) {
  CUlibrary library = nullptr;
  if (const CUresult result =
          on.driver->cuLibraryLoadData(&library, cubin_, nullptr, nullptr, 0, nullptr, nullptr, 0)) {
    return FailCall(on, result, "cuLibraryLoadData");
  }
  library_ = library;
  free(cubin_);
  cubin_ = nullptr;
  return true;
}

// Attributes come before the function of the device is made, and cuFuncLoad undoes the driver's lazy loading, which
// would otherwise take place at the first launch, perhaps inside a capture.
bool Kernel::LoadLaunch(OnDevice* on, int index) {
  const Driver& driver = *on->driver;
  const Launch& launch = plan_->launches[index];
  LoadedLaunch& loaded = on->launches[index];
  if (const CUresult result = driver.cuLibraryGetKernel(&loaded.kernel, library_, launch.function)) {
    return FailDriver(driver, result, "cuLibraryGetKernel", Subject(*on).Add(", function %s", launch.function).c_str());
  }
  if (MayExceedPortableCluster(launch)) {
    if (const CUresult result = driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
                                                            loaded.kernel, on->device->handle)) {
      return FailCall(*on, result, "cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)");
    }
  }
  int64_t smem_bytes = 0;
  if (launch.dynamic_smem_bytes.IsConstant()) launch.dynamic_smem_bytes.Evaluate(nullptr, &smem_bytes);
  if (smem_bytes > 0 && !GrantSharedMemory(*on, &loaded, smem_bytes)) return false;
  if (const CUresult result = driver.cuKernelGetFunction(&loaded.function, loaded.kernel)) {
    return FailCall(*on, result, "cuKernelGetFunction");
  }
  if (driver.cuFuncLoad == nullptr) return true;
  const CUresult result = driver.cuFuncLoad(loaded.function);
  return result == CUDA_SUCCESS || FailCall(*on, result, "cuFuncLoad");
}

bool Kernel::GrantSharedMemory(const OnDevice& on, LoadedLaunch* loaded, int64_t bytes) const {
  const CUresult result = on.driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                          static_cast<int>(bytes), loaded->kernel, on.device->handle);
  if (result == CUDA_SUCCESS) {
    loaded->dynamic_smem_bytes.Store(bytes);
    return true;
  }
  Text subject = Subject(on);
  subject.Add(", %lld bytes of dynamic shared memory per block", static_cast<long long>(bytes));
  return FailDriver(*on.driver, result, "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)", subject.c_str());
}

}  // namespace tkbuild
