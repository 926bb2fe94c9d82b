namespace lanes {
// The lanes of the warp in front of this one, a bit each.
__device__ __forceinline__ unsigned before() {
  unsigned mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}
}  // namespace lanes
