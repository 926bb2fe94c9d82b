// What the CTAs of a cluster do together. Included behind memory.cuh.
namespace cluster {
// Stores into the place of `shared` in the memory of CTA `rank` of the cluster.
__device__ __forceinline__ void store_remote(const float4* shared, unsigned rank, float4 v) {
  const unsigned own = unsigned(__cvta_generic_to_shared(shared));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], { %1, %2, %3, %4};" :: "r"(remote), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Waits for all threads of all CTAs, and for what they have stored.
__device__ __forceinline__ void sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
}  // namespace cluster
