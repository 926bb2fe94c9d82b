// Copies of 16 bytes on their way into shared memory, past the L1 cache; only the thread that made one may read it, when it has waited for it.
namespace memory {
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last kPending ends.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }
}  // namespace memory
