// Accesses to global memory, and conversions of bfloat16, that the kernels share. Loads are volatile: a programmatic launch may
// overlap the kernel before, so none of them may be taken for one of constant memory.
namespace memory {
using i64 = long long;

// Read once: leaves no copy in the L1 cache.
__device__ __forceinline__ uint4 load_streamed(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 { %0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 { %0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ unsigned load_4(const void* from) {
  unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ float load_float(const float* from) { return __uint_as_float(load_4(from)); }
__device__ __forceinline__ i64 load_8(const void* from) {
  i64 v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
// Element `at` of a mask, which may be null: nothing is set.
__device__ __forceinline__ bool is_set(const void* mask, i64 at) {
  if (mask == nullptr) return false;
  unsigned v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(static_cast<const char*>(mask) + at));
  return v != 0;
}
__device__ __forceinline__ void store_streamed(void* to, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], { %1, %2, %3, %4};" :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ float4 floats(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ uint4 words(float4 v) {
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

// Two bfloat16, the first one in the low half.
__device__ __forceinline__ unsigned to_bf16x2(float first, float second) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ float2 from_bf16x2(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

// Eight elements side by side, of bfloat16 or float32.
struct Eight {
  float at[8];
};
__device__ __forceinline__ Eight from_bf16(uint4 v) {
  const unsigned pairs[] = {v.x, v.y, v.z, v.w};
  Eight result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = from_bf16x2(pairs[i]);
    result.at[2 * i] = pair.x, result.at[2 * i + 1] = pair.y;
  }
  return result;
}
__device__ __forceinline__ uint4 to_bf16(const Eight& v) {
  return make_uint4(to_bf16x2(v.at[0], v.at[1]), to_bf16x2(v.at[2], v.at[3]), to_bf16x2(v.at[4], v.at[5]), to_bf16x2(v.at[6], v.at[7]));
}
__device__ __forceinline__ Eight eight(float4 a, float4 b) { return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}; }
}  // namespace memory
