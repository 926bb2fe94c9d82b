// Loads without a branch, so that a thread issues all of its loads before it uses the first; volatile, so that none moves ahead of the
// wait for the previous kernel.
namespace predicated {
__device__ __forceinline__ int load_int(bool inside, const int* from, int otherwise) {
  int value;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; mov.b32 %0, %3; @p ld.global.b32 %0, [%2]; }"
               : "=r"(value) : "r"(int(inside)), "l"(from), "r"(otherwise));
  return value;
}
// The words keep what they held where not `inside`.
__device__ __forceinline__ void load_16(unsigned* v, bool inside, const char* from) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p ld.global.v4.b32 { %0, %1, %2, %3 }, [%5]; }"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(int(inside)), "l"(from));
}
__device__ __forceinline__ void load_32(unsigned* v, bool inside, const char* from) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %8, 0; @p ld.global.v8.b32 { %0, %1, %2, %3, %4, %5, %6, %7 }, [%9]; }"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
               : "r"(int(inside)), "l"(from));
}
}  // namespace predicated
