// Rows of 64 bfloat16 columns on their way through shared memory: 128 bytes each, 16-byte vectors swapped by row, so that a row's vectors
// and eight rows' vectors of the same columns lie in different banks. Slots start at multiples of 128 bytes.
{% include "../common/copies.cuh" %}
namespace norm_fn {
using memory::end_copies;
using memory::wait_for_copies;
constexpr int kRowBytes = 128;

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// 16 bytes, past the L1 cache; zeros instead where `inside` is false.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Where the vector lies that a lane copies: of row lane / 8 + 4 * i.
__device__ __forceinline__ unsigned vector_offset(int lane, int i) {
  return (lane / 8 + 4 * i) * kRowBytes + ((lane % 8) ^ ((lane / 8 + 4 * i) % 8)) * 16;
}
// Of a vector of the first 16 columns; those of 16 columns on are 32 bytes away by exclusive or.
__device__ __forceinline__ unsigned matrix_offset(int row, int vector) { return row * kRowBytes + (vector ^ (row % 8)) * 16; }

// A matrix of 16 rows by 16 columns as pairs of columns: with g = lane / 4 and t = lane % 4 a lane has rows g and g + 8 of columns 2 t and
// 2 t + 1, then of columns 2 t + 8 and 2 t + 9.
__device__ __forceinline__ unsigned row_matrix_offset(int lane) { return matrix_offset(lane % 16, lane / 16); }
__device__ __forceinline__ void load_matrix(unsigned (&pairs)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(from) : "memory");
}

// The same transposed, as pairs of rows: columns g and g + 8 of rows 2 t and 2 t + 1, then of rows 2 t + 8 and 2 t + 9.
__device__ __forceinline__ unsigned transposed_offset(int lane) { return matrix_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2); }
__device__ __forceinline__ void load_transposed(unsigned (&pairs)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void store_transposed(unsigned to, const unsigned (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
      :: "r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}
}  // namespace norm_fn
