// Rows that whole warps share. Included behind memory.cuh.
namespace rows {
// Within 3 ulp, and without the call that the correctly rounded root takes, which costs registers beside a whole row.
__device__ __forceinline__ float root(float x) { return x > 0.0f ? x * rsqrtf(x) : x; }

template <int kCount>
struct Warps {};

// Calls `function` with the least power of two of warps, of kWarpColumns columns each, that cover a row, at most kMaxRowWarps.
template <int kMaxRowWarps, int kWarpColumns, class Function>
__device__ __forceinline__ void with_row_warps(int columns, const Function& function) {
  if constexpr (kMaxRowWarps > 1) {
    if (columns <= kMaxRowWarps / 2 * kWarpColumns) return with_row_warps<kMaxRowWarps / 2, kWarpColumns>(columns, function);
  }
  function(Warps<kMaxRowWarps>());
}

// A thread's place: the warps of a CTA are dealt out to groups of kRowWarps, each of which works on a row of its own.
template <int kRowWarps, int kCtaWarps>
struct Place {
  static constexpr int kThreads = 32 * kRowWarps, kGroups = kCtaWarps / kRowWarps;
  int thread, group;

  __device__ __forceinline__ Place() : thread(threadIdx.x % kThreads), group(0) {
    // All lanes of a warp agree; the shuffle tells the compiler.
    if (kGroups > 1) group = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kThreads, 0);
  }

  // Waits for the other warps of the group. Barrier 0 is that of the whole CTA.
  __device__ __forceinline__ void sync() const {
    if (kThreads == 32) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" :: "r"(group + 1), "n"(kThreads) : "memory");
    }
  }

  // Sums over the threads of the group, in an order that is the same everywhere. `slots`: kSums floats for each warp of the CTA; a
  // caller may use them again after one other call with slots of its own.
  template <int kSums>
  __device__ __forceinline__ void sum(float (&values)[kSums], float* slots) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) values[i] += __shfl_xor_sync(0xFFFFFFFFu, values[i], step);
    }
    if constexpr (kRowWarps == 1) return;
    float* own = slots + group * kRowWarps * kSums;
    if (thread % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) own[thread / 32 * kSums + i] = values[i];
    }
    sync();
#pragma unroll
    for (int i = 0; i < kSums; ++i) values[i] = own[i];
    // Not all at once: they would take more registers than a row.
#pragma unroll 3
    for (int warp = 1; warp < kRowWarps; ++warp) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) values[i] += own[warp * kSums + i];
    }
  }
};
}  // namespace rows
