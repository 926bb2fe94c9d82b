// What the gates of experts share: scores, picks, places of experts, and the row of a token. A CTA has one token. Needs keys.cuh,
// and kCapacity (experts that fit), kQuads (= kCapacity / 128) and kMaxSharedExperts.
namespace gate {
// ---- scores of one token, four neighbouring experts a thread

enum Scoring { kSigmoid, kSqrtSoftplus, kSoftmax };

// The functions of the four scores of a thread have no branches, so that the scores are computed side by side; the compiler's
// square root and division branch for numbers out of the range in which these steps round correctly.

__device__ __forceinline__ float sqrt_of(float x) {
  const bool is_small = x < 0x1p-100f;
  const float scaled = __fmul_rn(x, is_small ? 0x1p64f : 1.0f);
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scaled));
  const float guess = __fmul_rn(scaled, inverse);
  const float root = __fmaf_rn(__fmaf_rn(-guess, guess, scaled), __fmul_rn(inverse, 0.5f), guess);
  return x > 0.0f && x < INFINITY ? __fmul_rn(root, is_small ? 0x1p-32f : 1.0f) : x;
}

// sqrt(x > 20 ? x : log1p(exp(x))).
__device__ __forceinline__ float sqrt_softplus(float x) {
  const float exponential = expf(fminf(x, 20.0f));
  __builtin_assume(__float_as_uint(exponential) < 0x7F800000u);  // log1pf branches for other numbers
  const float logarithm = log1pf(exponential);
  return sqrt_of(x <= 20.0f ? logarithm : x);
}

// 1 / (1 + exp(-x)) of four numbers.
__device__ __forceinline__ void sigmoid(float (&x)[4]) {
  bool is_tiny = false;
  float divisor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    divisor[i] = __fadd_rn(1.0f, expf(-x[i]));
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor[i]));
    x[i] = __fmaf_rn(inverse, __fmaf_rn(-divisor[i], inverse, 1.0f), inverse);
    is_tiny = is_tiny || !(divisor[i] < 0x1p125f);
  }
  if (!is_tiny) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fdiv_rn(1.0f, divisor[i]);
}

// What the CTA of a token shares. A lane that picks has the keys of 4 * kQuads neighbouring experts.
struct Shared {
  float score[kCapacity];
  unsigned key[kCapacity];
  int count[kCapacity + kMaxSharedExperts];
  unsigned short picked[kWarp];
};

__device__ __forceinline__ void sync_cta() {
  if constexpr (kQuads == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Scores (logits for kSoftmax) and keys to shared memory; the scores also to `saved`, the token's row, if it is given.
__device__ __forceinline__ void share_scores(
    Shared& shared, const Quad& logits, const Quad& bias, bool inside, int scoring, float* saved) {
  const int first = threadIdx.x * 4;
  float score[4];
  unsigned key[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) score[i] = __uint_as_float(logits.words[i]);
  if (scoring == kSigmoid) {
    sigmoid(score);
  } else if (scoring == kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = sqrt_softplus(score[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) key[i] = inside ? key_of(__fadd_rn(score[i], __uint_as_float(bias.words[i]))) : kNoExpert;
  const float4 scores = make_float4(score[0], score[1], score[2], score[3]);
  *reinterpret_cast<float4*>(shared.score + first) = scores;
  *reinterpret_cast<uint4*>(shared.key + first) = make_uint4(key[0], key[1], key[2], key[3]);
  if (inside && saved != nullptr) *reinterpret_cast<float4*>(saved + first) = scores;
}

// ---- picks

// Four keys in descending order, and in the bytes of `places`, lowest first, where they stood.
struct Sorted {
  unsigned key[4];
  unsigned places = 0x03020100u;

  template <int kFirst> __device__ __forceinline__ void order_neighbours() {
    constexpr unsigned kSwap = kFirst == 0 ? 0x3201u : kFirst == 1 ? 0x3120u : 0x2310u;
    const unsigned a = key[kFirst], b = key[kFirst + 1];
    // Equal keys are not exchanged and only neighbours ever are, so the order of ties is kept.
    if (b > a) places = __byte_perm(places, 0, kSwap);
    key[kFirst] = max(a, b);
    key[kFirst + 1] = min(a, b);
  }
  __device__ __forceinline__ void sort() {
    order_neighbours<0>();
    order_neighbours<2>();
    order_neighbours<1>();
    order_neighbours<0>();
    order_neighbours<2>();
    order_neighbours<1>();
  }
  // Selections: a branch would be merged over the quads and put the keys into local memory.
  __device__ __forceinline__ void pop_if(bool taken) {
    key[0] = taken ? key[1] : key[0];
    key[1] = taken ? key[2] : key[1];
    key[2] = taken ? key[3] : key[2];
    key[3] = taken ? kNoExpert : key[3];
    places = taken ? places >> 8 : places;
  }
};

__device__ __forceinline__ unsigned lanes_before() {
  unsigned mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// One warp: the experts with the num_topk largest keys, in descending order, to shared.picked. At least num_topk keys are no
// kNoExpert. Experts stand in the order of lanes, so the first lane that holds the largest key, and in it the first quad, has
// the smallest index.
__device__ __forceinline__ void pick(Shared& shared, int num_topk) {
  const int lane = threadIdx.x;
  const unsigned before = lanes_before();
  Sorted quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint4 keys = *reinterpret_cast<const uint4*>(shared.key + (lane * kQuads + q) * 4);
    quads[q].key[0] = keys.x, quads[q].key[1] = keys.y, quads[q].key[2] = keys.z, quads[q].key[3] = keys.w;
    quads[q].sort();
  }
  for (int i = 0; i < num_topk; ++i) {
    unsigned top = quads[0].key[0];
#pragma unroll
    for (int q = 1; q < kQuads; ++q) top = max(top, quads[q].key[0]);
    const unsigned best = __reduce_max_sync(kFullWarp, top);
    const unsigned holders = __ballot_sync(kFullWarp, top == best);
    bool left = top == best && (holders & before) == 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const bool taken = left && quads[q].key[0] == best;
      if (taken) shared.picked[i] = static_cast<unsigned short>((lane * kQuads + q) * 4 + (quads[q].places & 3u));
      quads[q].pop_if(taken);
      left = left && !taken;
    }
  }
  __syncwarp();
}

// ---- places of experts

// The map from logical to physical experts, if there is one. Counts of copies are limited to what a row has.
struct Places {
  const int *map, *counts;
  int columns, first;  // `first`: what a token adds to its number times kStep
  static constexpr unsigned kStep = 23333;

  __device__ __forceinline__ int limited(int count) const { return min(max(count, 1), columns); }

  // All threads: what a thread loads, and later puts into shared memory.
  struct Loaded {
    Quad quad;
    int shared_expert;
  };
  __device__ __forceinline__ Loaded load_counts(int num_routed, int num_shared) const {
    const int at = threadIdx.x * 4;
    const bool given = map != nullptr;
    return {load_16_if(given && at < num_routed, counts + at),
            static_cast<int>(load_4_if(given && int(threadIdx.x) < num_shared, counts + num_routed + threadIdx.x))};
  }
  __device__ __forceinline__ void share_counts(Shared& shared, const Loaded& loaded, int num_routed, int num_shared) const {
    if (map == nullptr) return;
    const int at = threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at < num_routed) shared.count[at + i] = loaded.quad.words[i];
    }
    if (int(threadIdx.x) < num_shared) shared.count[num_routed + threadIdx.x] = loaded.shared_expert;
  }

  __device__ __forceinline__ i64 of(const Shared& shared, int logical, i64 token, bool valid) const {
    if (map == nullptr || !valid) return logical;
    const unsigned long long turn = first + static_cast<unsigned long long>(token) * kStep;
    const int column = static_cast<int>(turn % limited(shared.count[logical]));
    return static_cast<int>(load_4_if(true, map + i64(logical) * columns + column));
  }
};

// ---- the row of a token; lane j has slot j

struct Row {
  i64* idx;
  float* weights;
  i64* unmapped;  // may be null
  int num_topk, num_shared;

  __device__ __forceinline__ bool is_routed(int slot) const { return slot < num_topk; }
  __device__ __forceinline__ bool exists(int slot) const { return slot < num_topk + num_shared; }

  __device__ __forceinline__ void store(int slot, i64 expert, float weight) const {
    if (!exists(slot)) return;
    idx[slot] = expert;
    weights[slot] = weight;
  }
  __device__ __forceinline__ void store_unmapped(int slot, i64 expert) const {
    if (unmapped != nullptr && is_routed(slot)) unmapped[slot] = expert;
  }
  __device__ __forceinline__ void clear(int slot) const {
    store(slot, -1, 0.0f);
    store_unmapped(slot, -1);
  }
};

// The expert of a routed slot. Fixed routing takes what `unmapped` says; a number that is no expert gives -1.
__device__ __forceinline__ int expert_of_slot(const Shared& shared, const Row& row, int slot, bool is_fixed, int num_routed) {
  if (!row.is_routed(slot)) return -1;
  if (!is_fixed) return shared.picked[slot];
  const i64 given = load_8_if(true, row.unmapped + slot);
  return given >= 0 && given < num_routed ? static_cast<int>(given) : -1;
}
}  // namespace gate
