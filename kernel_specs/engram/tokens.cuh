// Tokens that the threads of a CTA or of a cluster share; a thread has 8 columns of all four streams. Included behind memory.cuh.
namespace tokens {
using memory::i64;
constexpr int kStreams = 4, kVector = 8, kMaxWarps = 32;  // of a group
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// A thread's place: the warps of a CTA are dealt out to groups, each of which works on a token of its own. CTAs of a cluster share one.
template <int kCluster, int kCtaWarps>
struct Place {
  int warps, groups, group, rank, thread, column;
  bool inside;

  __device__ __forceinline__ explicit Place(int num_cols) : rank(blockIdx.x % kCluster) {
    const int vectors = num_cols / kVector, share = (vectors + kCluster - 1) / kCluster;
    warps = (share + 31) / 32, groups = kCluster == 1 ? kCtaWarps / warps : 1;
    // All lanes of a warp agree; the shuffle tells the compiler.
    group = __shfl_sync(kAllLanes, int(threadIdx.x) / (32 * warps), 0);
    thread = int(threadIdx.x) - group * (32 * warps);
    const int vector = rank * share + thread;
    inside = group < groups && thread < share && vector < vectors;
    column = vector * kVector;
  }
};

// A copy into shared memory on its way; only the thread that made it may read it, when it has waited for it.
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last kPending ends.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }

__device__ __forceinline__ float of_stream(float value, int stream) { return __shfl_sync(kAllLanes, value, 8 * stream); }

// Sums of a warp's values of each stream; a lane gets that of stream lane / 8.
__device__ __forceinline__ float sum_of_warp(const float (&values)[kStreams]) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
  const float a = (high ? values[2] : values[0]) + __shfl_xor_sync(kAllLanes, high ? values[0] : values[2], 16);
  const float b = (high ? values[3] : values[1]) + __shfl_xor_sync(kAllLanes, high ? values[1] : values[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(kAllLanes, odd ? a : b, 8);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// How the threads of a group add up kSums values of each stream: send() and, later, total(), for one token after the other; up to kAhead
// tokens are sent before the total of the one before is asked for. The order of the sums is the same everywhere.
template <int kCluster, int kCtaWarps, int kSums, int kAhead = 0>
struct Exchange {
  // A barrier is not used for two tokens in a row, so that nobody waits at one for which others have arrived again.
  static constexpr int kBarriers = 2, kTurns = 2 * (kAhead + 1), kRows = kSums * kStreams;
  static_assert(kAhead < kBarriers);
  float* slots;  // [kTurns][kSums][kStreams][kMaxWarps]
  unsigned barriers, sent = 0, received = 0;
  const Place<kCluster, kCtaWarps>& place;

  // `shared`: kTurns * kRows * kMaxWarps floats and 8 bytes for each barrier of each warp of the CTA. All threads of the CTA call it, and
  // begin() before the first send().
  __device__ __forceinline__ Exchange(void* shared, const Place<kCluster, kCtaWarps>& where)
      : slots(static_cast<float*>(shared)), place(where) {
    const unsigned first = address_of(slots + kTurns * kRows * kMaxWarps);
    barriers = first + place.group * (kBarriers * 8);
    if (threadIdx.x == 0) {
      for (int i = 0; i < place.groups * kBarriers; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(first + i * 8), "r"(place.warps * kCluster) : "memory");
      }
      if constexpr (kCluster > 1) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (kCluster > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void begin() const {
    if constexpr (kCluster > 1) {
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
      __syncthreads();
    }
  }

  // All threads of the CTA call it behind the last total(): no CTA of a cluster ends before what others wrote into it has arrived.
  __device__ __forceinline__ void end() const {
    if constexpr (kCluster > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  }

  // `values`: a warp's sums of stream lane / 8.
  __device__ __forceinline__ void send(const float (&values)[kSums]) {
    const int lane = threadIdx.x % 32, slot = (kCluster > 1 ? place.rank : place.group) * place.warps + place.thread / 32;
    float* to = slots + (sent % kTurns * kRows + lane / 8) * kMaxWarps + slot;
    const unsigned barrier = barriers + sent % kBarriers * 8;
    if constexpr (kCluster == 1) {
      if (lane % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) to[i * (kStreams * kMaxWarps)] = values[i];
      }
      __syncwarp();
      if (lane == 0) asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" :: "r"(barrier) : "memory");
    } else {
      if (lane % 8 < kCluster) {
        const unsigned remote = of_rank(address_of(to), lane % 8);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(remote + i * (kStreams * kMaxWarps * 4)), "f"(values[i]) : "memory");
        }
      }
      __syncwarp();
      if (lane < kCluster) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(of_rank(barrier, lane)) : "memory");
      }
    }
    ++sent;
  }

  // The sums of stream lane / 8.
  __device__ __forceinline__ void total(float (&sums)[kSums]) {
    wait(barriers + received % kBarriers * 8, received / kBarriers % 2);
    const int lane = threadIdx.x % 32;
    const float* from = slots + received % kTurns * kRows * kMaxWarps + (kCluster > 1 ? 0 : place.group * place.warps) + lane;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float values[kStreams];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        values[s] = lane < place.warps * kCluster ? from[(i * kStreams + s) * kMaxWarps] : 0.0f;
      }
      sums[i] = sum_of_warp(values);
    }
    ++received;
  }

 private:
  static __device__ __forceinline__ unsigned address_of(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }
  static __device__ __forceinline__ unsigned of_rank(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
  }
  static __device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
      if constexpr (kCluster > 1) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
      } else {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
      }
    } while (done == 0);
  }
};
}  // namespace tokens
