// Tokens that the threads of a CTA or of a cluster share; a thread has 8 columns of all four streams. Included behind memory.cuh and copies.cuh.
namespace tokens {
using memory::i64;
using memory::copy_16;
using memory::end_copies;
using memory::wait_for_copies;
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
// Over a cluster the values arrive by themselves (st.async): to release a store to another SM would wait for all stores of the warp, those
// to global memory too. In a CTA every lane arrives for itself, since racecheck does not see that __syncwarp orders the reads of a warp
// before the arrival of one of its lanes.
template <int kCluster, int kCtaWarps, int kSums, int kAhead = 0>
struct Exchange {
  // A barrier is not used for two tokens in a row, so that nobody waits at one for which others have arrived again.
  static constexpr int kBarriers = 2, kTurns = 2 * (kAhead + 1);
  static constexpr int kItems = kSums == 1 ? 1 : 4;  // floats in which a warp's values of a stream travel
  static constexpr int kArrivals = kCluster == 1 ? 32 : 1;  // of a warp
  static_assert(kAhead < kBarriers && (kSums == 1 || kSums == 3));
  float* slots;  // [kTurns][kStreams][kMaxWarps][kItems]
  unsigned barriers, sent = 0, received = 0;
  const Place<kCluster, kCtaWarps>& place;

  // `shared`: kTurns * kStreams * kMaxWarps * kItems floats and 8 bytes for each barrier of each warp of the CTA. All threads of the CTA
  // call it, and begin() before the first send().
  __device__ __forceinline__ Exchange(void* shared, const Place<kCluster, kCtaWarps>& where)
      : slots(static_cast<float*>(shared)), place(where) {
    const unsigned first = address_of(slots + kTurns * kStreams * kMaxWarps * kItems);
    barriers = first + place.group * (kBarriers * 8);
    if (threadIdx.x == 0) {
      for (int i = 0; i < place.groups * kBarriers; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     :: "r"(first + i * 8), "r"(place.warps * kCluster * kArrivals) : "memory");
      }
      if constexpr (kCluster > 1) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    arrive_at_cluster();
  }
  __device__ __forceinline__ void begin() const {
    if constexpr (kCluster > 1) {
      wait_for_cluster();
    } else {
      __syncthreads();
    }
  }

  // All threads of the CTA call them behind the last total(): no CTA of a cluster is gone before the others are done.
  __device__ __forceinline__ void end() const { arrive_at_cluster(); }
  __device__ __forceinline__ void wait_for_end() const { wait_for_cluster(); }

  // `values`: a warp's sums of stream lane / 8.
  __device__ __forceinline__ void send(const float (&values)[kSums]) {
    const int lane = threadIdx.x % 32, slot = first_slot() + (kCluster > 1 ? place.rank * place.warps : 0) + place.thread / 32;
    float* to = slots + ((sent % kTurns * kStreams + lane / 8) * kMaxWarps + slot) * kItems;
    const unsigned barrier = barriers + sent % kBarriers * 8;
    if constexpr (kCluster == 1) {
      if (lane % 8 == 0) {
        if constexpr (kSums == 1) {
          *to = values[0];
        } else {
          *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], 0.0f);
        }
      }
      asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" :: "r"(barrier) : "memory");
    } else {
      if (lane % 8 < kCluster) {
        const unsigned remote = of_rank(address_of(to), lane % 8), signal = of_rank(barrier, lane % 8);
        if constexpr (kSums == 1) {
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                       :: "r"(remote), "f"(values[0]), "r"(signal) : "memory");
        } else {
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4}, [%5];"
                       :: "r"(remote), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(0.0f), "r"(signal) : "memory");
        }
      }
      __syncwarp();  // the warp has read what others will write over when they know of this arrival
      if (lane < kCluster) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;"
                     :: "r"(of_rank(barrier, lane)), "n"(kStreams * kItems * 4) : "memory");
      }
    }
    ++sent;
  }

  // The sums of stream lane / 8.
  __device__ __forceinline__ void total(float (&sums)[kSums]) {
    wait(barriers + received % kBarriers * 8, received / kBarriers % 2);
    const int lane = threadIdx.x % 32;
    const float* from = slots + (received % kTurns * kStreams * kMaxWarps + first_slot() + lane) * kItems;
    float values[kSums][kStreams] = {};
    if (lane < place.warps * kCluster) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const float* of_warp = from + s * kMaxWarps * kItems;
        if constexpr (kSums == 1) {
          values[0][s] = *of_warp;
        } else {
          const float4 v = *reinterpret_cast<const float4*>(of_warp);
          values[0][s] = v.x, values[1][s] = v.y, values[2][s] = v.z;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = sum_of_warp(values[i]);
    ++received;
  }

 private:
  __device__ __forceinline__ int first_slot() const { return kCluster > 1 ? 0 : place.group * place.warps; }
  static __device__ __forceinline__ void arrive_at_cluster() {
    if constexpr (kCluster > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  static __device__ __forceinline__ void wait_for_cluster() {
    if constexpr (kCluster > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  static __device__ __forceinline__ unsigned address_of(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }
  static __device__ __forceinline__ unsigned of_rank(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
  }
  static __device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (done == 0);
  }
};
}  // namespace tokens
