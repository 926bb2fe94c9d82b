#include <tvm/ffi/extra/c_env_api.h>

#include "kernel.h"

namespace tkbuild {
namespace {

constexpr int64_t kMaxGrid[3] = {INT32_MAX, 65535, 65535};
constexpr int64_t kMaxBlock[3] = {1024, 1024, 64};
constexpr int64_t kMaxCluster = 16;
constexpr const char* kGridNames[3] = {"grid.x", "grid.y", "grid.z"};
constexpr const char* kBlockNames[3] = {"block.x", "block.y", "block.z"};
constexpr const char* kClusterNames[3] = {"cluster.x", "cluster.y", "cluster.z"};
constexpr int kMaxAttributes = 3;

Atomic<int> g_pdl;
Atomic<int64_t> g_launch_count;

int64_t Product(const int64_t (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

CUlaunchAttribute& Append(CUlaunchConfig* config, CUlaunchAttributeID id) {
  CUlaunchAttribute& attribute = config->attributes[config->attribute_count++];
  memset(&attribute, 0, sizeof(attribute));
  attribute.id = id;
  return attribute;
}

bool WantsProgrammatic(Programmatic programmatic) {
  return programmatic == Programmatic::kOn || (programmatic == Programmatic::kSetting && GetPdl());
}

void AddAttributes(const Launch& launch, const int64_t (&cluster)[3], CUlaunchConfig* config) {
  if (Product(cluster) > 1) {
    Append(config, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).value.cluster = {
        static_cast<unsigned>(cluster[0]), static_cast<unsigned>(cluster[1]), static_cast<unsigned>(cluster[2])};
  }
  if (launch.cooperative) Append(config, CU_LAUNCH_ATTRIBUTE_COOPERATIVE).value.flag = 1;
  if (WantsProgrammatic(launch.programmatic)) {
    Append(config, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).value.flag = 1;
  }
}

}  // namespace

// The kernel parameters of one launch, from where the driver copies them.
struct Kernel::ParamStorage {
  CUtensorMap maps[kMaxTensorMaps];
  uint64_t values[kMaxParams];
  void* pointers[kMaxParams];
};

void SetPdl(bool enabled) { g_pdl.Store(enabled ? 1 : 0); }
bool GetPdl() { return g_pdl.Load() != 0; }
int64_t LaunchCount() { return g_launch_count.Load(); }

bool Kernel::Invoke(const TVMFFIAny* args, int count) {
  Call call;
  if (!BindCall(*plan_, args, count, &call)) return false;
  if (call.empty) return true;
  OnDevice* on = call.device >= 0 && call.device < kMaxDevices ? on_device_[call.device].Load() : nullptr;
  if (on == nullptr) on = PrepareOn(call.device);
  if (on == nullptr) return false;
  ContextScope scope(*on->driver);
  if (const CUresult result = scope.Enter(on->device->context.Load())) return FailCall(*on, result, "cuCtxPushCurrent");
  const CUstream stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, call.device));
  for (int i = 0; i < plan_->launches.size; ++i) {
    if (!LaunchOne(i, call, stream, on)) return false;
  }
  return true;
}

bool Kernel::LaunchOne(int index, const Call& call, CUstream stream, OnDevice* on) {
  const Launch& launch = plan_->launches[index];
  LoadedLaunch& loaded = on->launches[index];
  Geometry geometry{};
  if (!EvaluateGrid(launch, call, &geometry)) return false;
  if (Product(geometry.grid) == 0) return true;
  ParamStorage params;
  if (!EvaluateBlock(launch, call, &geometry) || !FillParams(launch, call, *on, &params)) return false;
  if (geometry.dynamic_smem_bytes > loaded.dynamic_smem_bytes.Load()) {
    LockGuard lock(mutex_);
    const bool granted = geometry.dynamic_smem_bytes <= loaded.dynamic_smem_bytes.Load();
    if (!granted && !GrantSharedMemory(*on, &loaded, geometry.dynamic_smem_bytes)) return false;
  }
  return Submit(launch, geometry, stream, params.pointers, *on, &loaded);
}

bool Kernel::Submit(const Launch& launch, const Geometry& geometry, CUstream stream, void** params, const OnDevice& on,
                    LoadedLaunch* loaded) const {
  CUlaunchAttribute attributes[kMaxAttributes];
  CUlaunchConfig config;
  for (int i = 0; i < 3; ++i) {
    config.grid[i] = static_cast<unsigned>(geometry.grid[i]);
    config.block[i] = static_cast<unsigned>(geometry.block[i]);
  }
  config.dynamic_smem_bytes = static_cast<unsigned>(geometry.dynamic_smem_bytes);
  config.stream = stream;
  config.attributes = attributes;
  config.attribute_count = 0;
  AddAttributes(launch, geometry.cluster, &config);
  if (launch.cooperative && !CheckResidency(launch, on, loaded, geometry, config)) return false;
  const CUresult result = on.driver->cuLaunchKernelEx(&config, loaded->function, params, nullptr);
  if (result == CUDA_SUCCESS) {
    g_launch_count.Add(1);
    return true;
  }
  Text subject = Subject(on);
  subject.Add(", function %s, grid (%u, %u, %u), block (%u, %u, %u), %u bytes of dynamic shared memory",
              launch.function, config.grid[0], config.grid[1], config.grid[2], config.block[0], config.block[1],
              config.block[2], config.dynamic_smem_bytes);
  return FailDriver(*on.driver, result, "cuLaunchKernelEx", subject.c_str());
}

// --- sizes ---

bool Kernel::FailSize(const Expr& expr, const char* what, int64_t low, int64_t high, int64_t got) const {
  return Fail(kArgumentError, "%s: %s = %s is %lld, expected a value from %lld to %lld; split the call", plan_->variant,
              what, expr.text, static_cast<long long>(got), static_cast<long long>(low), static_cast<long long>(high));
}

bool Kernel::EvaluateGrid(const Launch& launch, const Call& call, Geometry* out) const {
  for (int i = 0; i < 3; ++i) {
    if (!EvaluateSize(launch.grid[i], call, kGridNames[i], 0, kMaxGrid[i], &out->grid[i])) return false;
    if (out->grid[i] == 0) return true;  // not launched, whatever the other sizes
  }
  return true;
}

bool Kernel::EvaluateBlock(const Launch& launch, const Call& call, Geometry* out) const {
  for (int i = 0; i < 3; ++i) {
    if (!EvaluateSize(launch.block[i], call, kBlockNames[i], 1, kMaxBlock[i], &out->block[i]) ||
        !EvaluateSize(launch.cluster[i], call, kClusterNames[i], 1, kMaxCluster, &out->cluster[i])) {
      return false;
    }
    if (out->grid[i] % out->cluster[i] != 0) {
      return Fail(kArgumentError, "%s: %s is %lld, expected a multiple of %s = %lld", plan_->variant, kGridNames[i],
                  static_cast<long long>(out->grid[i]), kClusterNames[i], static_cast<long long>(out->cluster[i]));
    }
  }
  return EvaluateSize(launch.dynamic_smem_bytes, call, "dynamic_smem_bytes", 0, INT32_MAX, &out->dynamic_smem_bytes);
}

// --- parameters ---

bool Kernel::FillParams(const Launch& launch, const Call& call, const OnDevice& on, ParamStorage* storage) const {
  unsigned encoded = 0;
  for (int i = 0; i < launch.params.size; ++i) {
    const Param& param = launch.params[i];
    storage->pointers[i] = &storage->values[i];
    if (param.kind == Param::Kind::kPointer) {
      const DLTensor* tensor = call.tensors[param.index];
      storage->values[i] = tensor != nullptr ? reinterpret_cast<uint64_t>(DataPointer(*tensor)) : 0;
    } else if (param.kind == Param::Kind::kTensorMap) {
      CUtensorMap* map = &storage->maps[param.index];
      storage->pointers[i] = map;
      if ((encoded >> param.index & 1) != 0) continue;
      if (!EncodeTensorMap(plan_->tensor_maps[param.index], call, on, map)) return false;
      encoded |= 1u << param.index;
    } else if (!FillValue(param, call, &storage->values[i])) {
      return false;
    }
  }
  return true;
}

// The driver reads as many of the eight bytes as the parameter has; all supported hosts are little-endian.
bool Kernel::FillValue(const Param& param, const Call& call, uint64_t* out) const {
  int64_t integer = 0;
  double number = 0;
  if (param.index >= 0) {
    memcpy(&number, &call.slots[param.index], sizeof(number));
  } else {
    if (!EvaluateFor(*plan_, param.value, call, "kernel parameter", &integer)) return false;
    number = static_cast<double>(integer);
  }
  *out = 0;
  if (param.kind == Param::Kind::kFloat64) {
    memcpy(out, &number, sizeof(number));
  } else if (param.kind == Param::Kind::kFloat32) {
    const float narrow = static_cast<float>(number);
    memcpy(out, &narrow, sizeof(narrow));
  } else if (integer < param.low || integer > param.high) {
    return Fail(kArgumentError, "%s: kernel parameter %s is %lld, which %s cannot hold; split the call", plan_->variant,
                param.value.text, static_cast<long long>(integer), param.dtype);
  } else {
    *out = static_cast<uint64_t>(integer);
  }
  return true;
}

bool Kernel::EncodeTensorMap(const TensorMap& map, const Call& call, const OnDevice& on, CUtensorMap* out) const {
  const Arg& arg = plan_->args[map.arg];
  const DLTensor* tensor = call.tensors[map.arg];
  memset(out, 0, sizeof(*out));
  if (tensor == nullptr) return true;  // an absent optional tensor: the kernel does not use its map
  uint64_t dims[kMaxTensorMapRank];
  uint64_t strides[kMaxTensorMapRank];
  uint32_t box[kMaxTensorMapRank];
  uint32_t element_strides[kMaxTensorMapRank];
  for (int i = 0; i < map.rank; ++i) {
    int64_t value = 0;
    if (!EvaluateSize(map.dims[i], call, "tensor map size", 1, int64_t{UINT32_MAX} + 1, &value)) return false;
    dims[i] = static_cast<uint64_t>(value);
    if (!EvaluateSize(map.box[i], call, "tensor map box", 1, 256, &value)) return false;
    box[i] = static_cast<uint32_t>(value);
    if (!EvaluateSize(map.element_strides[i], call, "tensor map element stride", 1, 8, &value)) return false;
    element_strides[i] = static_cast<uint32_t>(value);
    if (i + 1 == map.rank) break;
    if (!EvaluateSize(map.strides[i], call, "tensor map stride in bytes", 0, (int64_t{1} << 40) - 1, &value))
      return false;
    strides[i] = static_cast<uint64_t>(value);
  }
  const CUresult result = on.driver->cuTensorMapEncodeTiled(
      out, map.dtype, static_cast<uint32_t>(map.rank), DataPointer(*tensor), dims, strides, box, element_strides,
      map.interleave, map.swizzle, map.l2_promotion, map.oob_fill);
  if (result == CUDA_SUCCESS) return true;
  Text subject = Subject(on);
  subject.Add(", tensor map of %s at %p, rank %d, sizes (", arg.name, DataPointer(*tensor), map.rank);
  for (int i = 0; i < map.rank; ++i)
    subject.Add("%s%llu", i == 0 ? "" : ", ", static_cast<unsigned long long>(dims[i]));
  subject.Add("), strides (");
  for (int i = 0; i + 1 < map.rank; ++i)
    subject.Add("%s%llu", i == 0 ? "" : ", ", static_cast<unsigned long long>(strides[i]));
  return FailDriver(*on.driver, result, "cuTensorMapEncodeTiled", subject.Add(") bytes").c_str());
}

// --- cooperative launches: all blocks must be resident at once, or the grid barrier waits for ever ---

bool Kernel::BlocksPerSm(const OnDevice& on, LoadedLaunch* loaded, const CUlaunchConfig& config, int64_t* out) const {
  // Threads per block, blocks per SM and shared memory in one word, so that threads agree on which belong together.
  const uint64_t threads = uint64_t{config.block[0]} * config.block[1] * config.block[2];
  const uint64_t key = threads << 48 | config.dynamic_smem_bytes;
  const uint64_t known = loaded->occupancy.Load();
  constexpr uint64_t kKeyMask = 0xFFFF0000FFFFFFFF;
  if ((known & kKeyMask) == key) {
    *out = static_cast<int64_t>(known >> 32 & 0xFFFF);
    return true;
  }
  int blocks = 0;
  if (const CUresult result = on.driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, loaded->function, static_cast<int>(threads), config.dynamic_smem_bytes)) {
    return FailCall(on, result, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  }
  loaded->occupancy.Store(key | static_cast<uint64_t>(blocks) << 32);
  *out = blocks;
  return true;
}

bool Kernel::CheckResidency(const Launch& launch, const OnDevice& on, LoadedLaunch* loaded, const Geometry& geometry,
                            const CUlaunchConfig& config) const {
  const int64_t cluster = Product(geometry.cluster);
  int64_t resident = 0;
  if (cluster > 1) {
    int clusters = 0;
    if (const CUresult result = on.driver->cuOccupancyMaxActiveClusters(&clusters, loaded->function, &config)) {
      return FailCall(on, result, "cuOccupancyMaxActiveClusters");
    }
    resident = clusters * cluster;
  } else {
    if (!BlocksPerSm(on, loaded, config, &resident)) return false;
    resident *= on.device->sm_count;
  }
  const int64_t blocks = Product(geometry.grid);
  if (blocks <= resident) return true;
  return Fail(kLaunchError,
              "%s on cuda:%d: function %s synchronises its whole grid of %lld blocks, but at most %lld can be resident "
              "on the %d SMs; lower set_num_sms",
              plan_->variant, on.device->ordinal, launch.function, static_cast<long long>(blocks),
              static_cast<long long>(resident), on.device->sm_count);
}

}  // namespace tkbuild
