// Sums over rows that whole warps share, in one order for every arch and SM count. Included behind formats.cuh.
namespace rms {
using quant::i64;
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

// The threads of a row, and their parts of it. A lane has up to kVectors vectors of kVector elements, 16 bytes; vector v of a lane is the
// one at v * kLanes + lane of the row, so that what a warp accesses at one time lies side by side. kSplit threads, 1 or 2, share what
// a lane has, kOwn vectors each: the halves of a warp then belong to the same 16 lanes. The warps of a CTA are dealt out to groups, each
// of which works on a row of its own.
template <int kRowWarps, int kCtaWarps, int kVector, int kVectors, int kSplit = 1>
struct Share {
  static constexpr int kLanes = 32 * kRowWarps, kThreads = kLanes * kSplit, kGroups = kCtaWarps / (kRowWarps * kSplit);
  static constexpr int kOwn = kVectors / kSplit, kWarpLanes = 32 / kSplit, kSums = kRowWarps * kSplit;
  int columns, thread, first, group;  // first: place of the thread's first vector in the row; the others are kLanes apart

  __device__ __forceinline__ explicit Share(int columns) : columns(columns), thread(threadIdx.x % kThreads), group(0) {
    first = thread;
    if constexpr (kSplit > 1) first = thread % 32 / kWarpLanes * (kOwn * kLanes) + thread / 32 * kWarpLanes + thread % kWarpLanes;
    // All lanes of a warp agree; the shuffle tells the compiler.
    if (kGroups > 1) group = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x) / kThreads, 0);
  }
  // Rows of several warps have more than half of the columns that their lanes have room for.
  __device__ __forceinline__ bool has(int vector) const {
    return (kSplit == 1 && kRowWarps > 1 && 2 * vector < kVectors) || (vector * kLanes + first) * kVector < columns;
  }

  // Waits for the other warps of the group. Barrier 0 is that of the whole CTA. The numbers are constants: for one in a register the
  // compiler sets 16 aside, and the CTAs of an SM have 64 together.
  template <int kFirst = 0>
  __device__ __forceinline__ void sync() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else if (kFirst + 1 == kGroups || group == kFirst) {
      asm volatile("bar.sync %0, %1;" :: "n"(kFirst + 1), "n"(kThreads) : "memory");
    } else if constexpr (kFirst + 1 < kGroups) {
      sync<kFirst + 1>();
    }
  }

  // A thread's part of a sum: what its vectors add to it, in their order. Where threads share a lane, the addends are kept apart.
  struct Addends {
    float values[kSplit > 1 ? kOwn : 1] = {};
    __device__ __forceinline__ void add(int vector, float value) {
      if constexpr (kSplit > 1) {
        values[vector] = value;
      } else {
        values[0] = __fadd_rn(values[0], value);
      }
    }
  };

  // The sum over the vectors of each lane in their order, then over the lanes of the row as a binary tree, neighbours first. `slots`: a
  // float for each warp of the CTA; a caller may use them again after one other call with slots of its own.
  __device__ __forceinline__ float sum(const Addends& addends, float* slots) const {
    float value = addends.values[0];
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int v = 1; v < kOwn; ++v) value = __fadd_rn(value, addends.values[v]);
      // The first half of a warp goes on with what the second one has.
#pragma unroll
      for (int v = 0; v < kOwn; ++v) value = __fadd_rn(value, __shfl_down_sync(0xFFFFFFFFu, addends.values[v], kWarpLanes));
    }
#pragma unroll
    for (int step = 1; step < kWarpLanes; step *= 2) value = __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    if constexpr (kSums == 1) return value;
    float* row = slots + group * kSums;
    if (thread % 32 == 0) row[thread / 32] = value;
    sync();
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      const float2 pair = reinterpret_cast<const float2*>(__builtin_assume_aligned(row, 4 * kSums))[i / 2];
      sums[i / 2] = __fadd_rn(pair.x, pair.y);
    }
#pragma unroll
    for (int count = kSums / 2; count > 1; count /= 2) {
#pragma unroll
      for (int i = 0; i < count; i += 2) sums[i / 2] = __fadd_rn(sums[i], sums[i + 1]);
    }
    return sums[0];
  }
};

// 1 / value, correctly rounded as by __frcp_rn, for a number of columns: without its branch to a path for what is no normal
// number.
__device__ __forceinline__ float reciprocal(int value) {
  const float x = value;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, -__fmaf_rn(x, r, -1.0f), r);
}

// Element i of words of two bfloat16 or of one float32.
template <bool kBf16>
__device__ __forceinline__ float element(const unsigned (&words)[4], int i) {
  if constexpr (kBf16) {
    return i % 2 ? quant::bf16_high(words[i / 2]) : quant::bf16_low(words[i / 2]);
  } else {
    return __uint_as_float(words[i]);
  }
}

// Elements i and i + 1, i even, rounded to the dtype.
template <bool kBf16>
__device__ __forceinline__ void set_elements(unsigned (&words)[4], int i, float first, float second) {
  if constexpr (kBf16) {
    words[i / 2] = quant::to_bf16x2(first, second);
  } else {
    words[i] = __float_as_uint(first), words[i + 1] = __float_as_uint(second);
  }
}

template <bool kPastL1 = false>
__device__ __forceinline__ void load_vector(unsigned (&words)[4], const char* from) {
  const uint4 v = quant::load_16<kPastL1>(from);
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
template <bool kPastL1 = false>
__device__ __forceinline__ void store_vector(char* to, const unsigned (&words)[4]) {
  quant::store_16<kPastL1>(to, make_uint4(words[0], words[1], words[2], words[3]));
}

// The word of which every element is 1.
template <bool kBf16>
__device__ __forceinline__ constexpr unsigned ones() { return kBf16 ? 0x3F803F80u : 0x3F800000u; }
}  // namespace rms
