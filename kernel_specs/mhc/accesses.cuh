// Accesses to global memory and conversions, under the names of this family.
{% include "../common/memory.cuh" %}
namespace mhc {
using memory::i64;
using memory::load_float;
using memory::to_bf16x2;

// A little data that is read once.
__device__ __forceinline__ float4 load_once(const float* from) { return memory::floats(memory::load_streamed(from)); }
// Data that other threads of the SM read as well, or much that is read once (see streams.cuh).
__device__ __forceinline__ float4 load_cached(const float* from) { return memory::floats(memory::load_16(from)); }

// Results, which no thread reads again.
__device__ __forceinline__ void store_once(void* to, uint4 v) { memory::store_streamed(to, v); }
__device__ __forceinline__ void store_once(float* to, float4 v) { memory::store_streamed(to, memory::words(v)); }

__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }
}  // namespace mhc
