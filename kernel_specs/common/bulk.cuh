// Bulk copies from global to shared memory, each of which arrives at a barrier there, and back.
namespace bulk {
__device__ __forceinline__ unsigned shared_address(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }

// `count` barriers, one behind the other. The calling thread may start copies right away; others wait once the CTA has synchronised.
__device__ __forceinline__ void initialise(unsigned barriers, int count, int arrivals) {
  for (int i = 0; i < count; ++i) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barriers + 8 * i), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier, unsigned copied_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(copied_bytes) : "memory");
}
// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy(unsigned shared, const char* global, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  asm volatile("{ .reg .pred done;\n"
               "again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra again%=; }" :: "r"(barrier), "r"(parity) : "memory");
}

// What the calling thread wrote to shared memory is seen by copies that start behind the CTA's next barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What is stored leaves L2 first.
__device__ __forceinline__ void store_streamed(char* global, unsigned shared, unsigned bytes) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, first; }"
               :: "l"(global), "r"(shared), "r"(bytes) : "memory");
}
// Waits until the calling thread's stores have read what they store.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\n"
               "cp.async.bulk.wait_group.read 0;" ::: "memory");
}
}  // namespace bulk
