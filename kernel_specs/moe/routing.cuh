// Reading and counting expert ids, which the routing kernels share. Included into their CUDA source.
{% include "lanes.cuh" %}
{% include "predicated.cuh" %}
namespace routing {
using i64 = long long;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kBatch = 8;  // ids a thread has in flight

// ---- predicated accesses, beside those of predicated.cuh and like them
using predicated::load_int;

// -1 where there is no such id.
__device__ __forceinline__ i64 load_id(bool inside, const i64* from) {
  i64 id;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; mov.b64 %0, -1; @p ld.global.b64 %0, [%2]; }"
               : "=l"(id) : "r"(int(inside)), "l"(from));
  return id;
}
// Zeros where there are no such counts.
__device__ __forceinline__ int4 load_counts(bool inside, const int* from) {
  int4 v;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
               " @p ld.global.v4.b32 { %0, %1, %2, %3 }, [%5]; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(int(inside)), "l"(from));
  return v;
}

// ---- chunks: the flat ids are dealt out in increasing order, one chunk to a CTA. There are fewer than 2**31 ids.

struct Chunk {
  unsigned first, last;
  __device__ __forceinline__ Chunk(unsigned num_ids, unsigned chunk, unsigned num_chunks) {
    const unsigned size = ((num_ids + num_chunks - 1) / num_chunks + 31) & ~31u;
    const i64 begin = i64(chunk) * size;
    first = unsigned(min(begin, i64(num_ids)));
    last = unsigned(min(begin + size, i64(num_ids)));
  }
};

// Calls use(index, id) for the ids from first on, before last, that name one of num_groups groups.
template <int kThreads, class Use>
__device__ __forceinline__ void for_each_id(const i64* ids, unsigned first, unsigned last, int num_groups, const Use& use) {
  for (unsigned at = first + threadIdx.x; at < last; at += kThreads * kBatch) {
    i64 id[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) id[b] = load_id(at + b * kThreads < last, ids + at + b * kThreads);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (static_cast<unsigned long long>(id[b]) < unsigned(num_groups)) use(at + b * kThreads, int(id[b]));
    }
  }
}

// The counts of a chunk's ids, in shared memory. Some ids are on their way while the counts are cleared or added to.
template <int kThreads>
__device__ __forceinline__ void count_chunk(int* counts, const i64* ids, const Chunk& chunk, int num_groups) {
  constexpr int kAhead = 4;
  i64 next[kAhead];
  const auto load = [&](unsigned first) {
#pragma unroll
    for (int b = 0; b < kAhead; ++b) {
      const unsigned at = first + b * kThreads + threadIdx.x;
      next[b] = load_id(at < chunk.last, ids + at);
    }
  };
  load(chunk.first);
  for (int g = threadIdx.x; g < num_groups; g += kThreads) counts[g] = 0;
  __syncthreads();
  for (unsigned first = chunk.first; first < chunk.last;) {
    i64 id[kAhead];
#pragma unroll
    for (int b = 0; b < kAhead; ++b) id[b] = next[b];
    first += kThreads * kAhead;
    if (first < chunk.last) load(first);
#pragma unroll
    for (int b = 0; b < kAhead; ++b) {
      if (static_cast<unsigned long long>(id[b]) < unsigned(num_groups)) atomicAdd(counts + int(id[b]), 1);
    }
  }
  __syncthreads();
}
}  // namespace routing
