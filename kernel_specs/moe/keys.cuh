// What the gates share: loads, keys that order like scores, groups of experts.
namespace gate {
using i64 = long long;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarp = 32;
constexpr unsigned kNoExpert = 0;  // the key of what is never picked
constexpr unsigned kNan = 1;       // below every number, minus infinity included

// ---- loads; volatile, so that none moves ahead of the wait for the previous kernel. Zero where not `inside`.

struct Quad {
  unsigned words[4];
};

template <bool kPastL1 = false>
__device__ __forceinline__ Quad load_16_if(bool inside, const void* from) {
  Quad v;
  if constexpr (kPastL1) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 " @p ld.global.L1::no_allocate.v4.u32 { %0, %1, %2, %3 }, [%5]; }"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "r"(int(inside)), "l"(from));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 " @p ld.global.v4.u32 { %0, %1, %2, %3 }, [%5]; }"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "r"(int(inside)), "l"(from));
  }
  return v;
}
__device__ __forceinline__ unsigned load_4_if(bool inside, const void* from) {
  unsigned v;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; mov.b32 %0, 0; @p ld.global.u32 %0, [%2]; }"
               : "=r"(v) : "r"(int(inside)), "l"(from));
  return v;
}
__device__ __forceinline__ float load_float_if(bool inside, const float* from) {
  return __uint_as_float(load_4_if(inside, from));
}
__device__ __forceinline__ i64 load_8_if(bool inside, const void* from) {
  i64 v;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; mov.b64 %0, 0; @p ld.global.u64 %0, [%2]; }"
               : "=l"(v) : "r"(int(inside)), "l"(from));
  return v;
}
// The flag of a token; `absent` where there are no flags.
__device__ __forceinline__ bool flag_of(const void* flags, i64 token, bool absent) {
  unsigned v = absent;
  if (flags != nullptr) asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(static_cast<const char*>(flags) + token));
  return v != 0;
}

// ---- keys

// Unsigned keys that order like the scores. Adding +0 gives both zeros one key, and all NaN the bits 0x7FFFFFFF, with which adding
// kFirst overflows to kNan.
constexpr unsigned kFirst = 2;
__device__ __forceinline__ unsigned key_of(float score) {
  const unsigned bits = __float_as_uint(__fadd_rn(score, 0.0f));
  return (bits ^ (unsigned(int(bits) >> 31) | 0x80000000u)) + kFirst;
}
// Some NaN for the key of NaN.
__device__ __forceinline__ float score_of(unsigned key) {
  const unsigned bits = key - kFirst;
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

// ---- groups of experts; the lanes of a group are neighbours

// A lane's place: lane `sub` of the 1 << log2_lanes of `group`, the most with which all groups, up to 32, fit into a warp.
struct GroupLane {
  int log2_lanes, group, sub;

  __device__ __forceinline__ GroupLane(int lane, int num_groups)
      : log2_lanes(__clz(num_groups - 1) - 27), group(lane >> log2_lanes), sub(lane & (lanes() - 1)) {}
  __device__ __forceinline__ int lanes() const { return 1 << log2_lanes; }
};

struct TopTwo {
  unsigned first = kNoExpert, second = kNoExpert;

  __device__ __forceinline__ void add(unsigned key) {
    second = max(second, min(first, key));
    first = max(first, key);
  }
  __device__ __forceinline__ void merge(int lanes) {
    for (int step = 1; step < lanes; step *= 2) {
      const unsigned other_first = __shfl_xor_sync(kFullWarp, first, step);
      const unsigned other_second = __shfl_xor_sync(kFullWarp, second, step);
      second = max(max(second, other_second), min(first, other_first));
      first = max(first, other_first);
    }
  }
  // The key of the sum of the two. Without a second one that of the first.
  __device__ __forceinline__ unsigned sum() const {
    return second == kNoExpert ? first : key_of(__fadd_rn(score_of(first), score_of(second)));
  }
};

// How many groups stand before this one: those with a larger key, and those with an equal one and a smaller number.
__device__ __forceinline__ int rank_of_group(unsigned key, int group, int num_groups, int lanes) {
  int rank = 0;
#pragma unroll 4
  for (int other = 0; other < num_groups; ++other) {
    const unsigned other_key = __shfl_sync(kFullWarp, key, other * lanes);
    rank += other_key > key || (other_key == key && other < group);
  }
  return rank;
}
}  // namespace gate
