// Accesses to global memory and conversions.
namespace mhc {
using i64 = long long;

// ---- loads, volatile so that none moves ahead of the wait for the previous kernel

// Data that is read once.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 { %0, %1, %2, %3 }, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ float4 load_once(const float* from) {
  const uint4 v = load_once(static_cast<const void*>(from));
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
// Data that other threads of the SM read as well.
__device__ __forceinline__ float4 load_cached(const float* from) {
  float4 v;
  asm volatile("ld.global.v4.f32 { %0, %1, %2, %3 }, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ float load_float(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}

// ---- stores of what no thread reads again

__device__ __forceinline__ void store_once(void* to, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], { %1, %2, %3, %4 };" :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_once(float* to, float4 v) {
  const uint4 bits = make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
  store_once(static_cast<void*>(to), bits);
}

// ---- bfloat16

__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }
__device__ __forceinline__ unsigned to_bf16x2(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
}  // namespace mhc
