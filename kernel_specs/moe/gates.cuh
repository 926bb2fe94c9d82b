// What the gates of experts share: scores, picks, places of experts, and the row of a token. Needs keys.cuh, and kCapacity (experts
// that fit), kManyTokens (of a CTA) and kMaxSharedExperts.
{% include "lanes.cuh" %}
namespace gate {
constexpr int kQuads = kCapacity / 128;  // runs of four neighbouring experts of a lane that picks
constexpr int kLaneExperts = 4 * kQuads;

__device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }

// A token has kWarps warps, of which the first one picks, and a CTA has kTokens tokens. A thread scores kOwn neighbouring experts.
template <int kWarps, int kTokens_>
struct Form {
  static_assert(kWarps == 1 || kTokens_ == 1, "a token of several warps has a CTA");
  static constexpr int kTokens = kTokens_, kThreads = kWarps * kWarp, kOwn = kCapacity / kThreads;
  static constexpr bool kIsWarp = kWarps == 1;

  static __device__ __forceinline__ int token_of_cta() { return kTokens == 1 ? 0 : threadIdx.x / kWarp; }
  static __device__ __forceinline__ int thread() { return kTokens == 1 ? threadIdx.x : lane(); }
  static __device__ __forceinline__ bool picks() { return kIsWarp || threadIdx.x < kWarp; }
  static __device__ __forceinline__ void sync() {
    if constexpr (kIsWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};
using Few = Form<kQuads, 1>;  // the time of one token counts
using Many = Form<1, kManyTokens>;  // the number of instructions does: no warp waits for another one's picks

// ---- scores of the experts of a thread

enum Scoring { kSigmoid, kSqrtSoftplus, kSoftmax };

// The functions have no branch for a single score, so that scores are computed side by side; the compiler's square root and
// division branch for numbers out of the range in which these steps round correctly.

// Of a number from 2**-100 on, if it is finite.
__device__ __forceinline__ float sqrt_in_range(float x) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float guess = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-guess, guess, x), __fmul_rn(inverse, 0.5f), guess);
}
__device__ __forceinline__ float sqrt_of(float x) {
  const bool is_small = x < 0x1p-100f;
  const float root = sqrt_in_range(__fmul_rn(x, is_small ? 0x1p64f : 1.0f));
  return x > 0.0f && x < INFINITY ? __fmul_rn(root, is_small ? 0x1p-32f : 1.0f) : x;
}

__device__ __forceinline__ float log1p_of_exp(float x) {
  const float exponential = expf(x);
  __builtin_assume(__float_as_uint(exponential) < 0x7F800000u);  // log1pf branches for other numbers
  return log1pf(exponential);
}

// sqrt(x > 20 ? x : log1p(exp(x))) of all numbers.
template <int kCount>
__device__ __forceinline__ void sqrt_softplus(float (&x)[kCount]) {
  constexpr float kLimit = 20.0f;
  bool is_ordinary = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) is_ordinary = is_ordinary && fabsf(x[i]) <= kLimit;
  if (is_ordinary) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = sqrt_in_range(log1p_of_exp(x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float logarithm = log1p_of_exp(fminf(x[i], kLimit));
      x[i] = sqrt_of(x[i] <= kLimit ? logarithm : x[i]);
    }
  }
}

// 1 / (1 + exp(-x)) of all numbers.
template <int kCount>
__device__ __forceinline__ void sigmoid(float (&x)[kCount]) {
  bool is_tiny = false;
  float divisor[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    divisor[i] = __fadd_rn(1.0f, expf(-x[i]));
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor[i]));
    x[i] = __fmaf_rn(inverse, __fmaf_rn(-divisor[i], inverse, 1.0f), inverse);
    is_tiny = is_tiny || !(divisor[i] < 0x1p125f);
  }
  if (!is_tiny) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __fdiv_rn(1.0f, divisor[i]);
}

// The numbers from `first` on of a row of num_routed, zeros where there are none.
template <int kCount>
__device__ __forceinline__ void load_experts(float (&numbers)[kCount], const float* row, bool given, int first, int num_routed) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const Quad quad = load_16_if(given && first + i < num_routed, row + first + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) numbers[i + j] = __uint_as_float(quad.words[j]);
  }
}
template <int kCount>
__device__ __forceinline__ void store_experts(float* row, const float (&numbers)[kCount], int first, int num_routed) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 quad = make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
    if (first + i < num_routed) *reinterpret_cast<float4*>(row + first + i) = quad;
  }
}

// The number of an expert, as small as it can be.
template <bool kFitsByte> struct ExpertNumber { using Type = unsigned char; };
template <> struct ExpertNumber<false> { using Type = unsigned short; };

// What the threads of a token share.
struct alignas(16) Shared {
  float score[kCapacity];
  unsigned key[kCapacity];
  int count[kCapacity + kMaxSharedExperts];
  ExpertNumber<(kCapacity <= 256)>::Type picked[kWarp];
  // Of the warp that picks: scores of slots, the largest key of each lane, and what may be picked.
  alignas(16) float slot_score[kWarp];
  unsigned lane_key[kWarp], candidate_key[kWarp];
  unsigned short candidate[kWarp];
};

// ---- picks

// Four keys in descending order, and in the bytes of `places`, lowest first, the low bytes of their experts.
struct Sorted {
  unsigned key[4];
  unsigned places;

  template <int kFirst> __device__ __forceinline__ void order_neighbours() {
    constexpr unsigned kSwap = kFirst == 0 ? 0x3201u : kFirst == 1 ? 0x3120u : 0x2310u;
    const unsigned a = key[kFirst], b = key[kFirst + 1];
    // Equal keys are not exchanged and only neighbours ever are, so the order of ties is kept.
    if (b > a) places = __byte_perm(places, 0, kSwap);
    key[kFirst] = max(a, b);
    key[kFirst + 1] = min(a, b);
  }
  __device__ __forceinline__ void sort(const unsigned* keys, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = keys[i];
    places = 0x03020100u + 0x01010101u * (first & 0xFF);
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

template <int kCount>
__device__ __forceinline__ void store_keys(Shared& shared, const unsigned (&key)[kCount], int first) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    *reinterpret_cast<uint4*>(shared.key + first + i) = make_uint4(key[i], key[i + 1], key[i + 2], key[i + 3]);
  }
}
// The keys of a lane that picks.
__device__ __forceinline__ void load_keys(unsigned (&key)[kLaneExperts], const Shared& shared) {
#pragma unroll
  for (int i = 0; i < kLaneExperts; i += 4) {
    const uint4 quad = *reinterpret_cast<const uint4*>(shared.key + lane() * kLaneExperts + i);
    key[i] = quad.x, key[i + 1] = quad.y, key[i + 2] = quad.z, key[i + 3] = quad.w;
  }
}

// Turns the scores and biases of the threads of a token into the keys of the lanes that pick, and waits for what they share.
template <class Form>
__device__ __forceinline__ void share_keys(
    Shared& shared, unsigned (&key)[kLaneExperts], const float (&score)[Form::kOwn], const float (&bias)[Form::kOwn], int num_routed) {
  const int first = Form::thread() * Form::kOwn;
  unsigned own[Form::kOwn];
#pragma unroll
  for (int i = 0; i < Form::kOwn; ++i) own[i] = first + i < num_routed ? key_of(__fadd_rn(score[i], bias[i])) : kNoExpert;
  if constexpr (Form::kIsWarp) {
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) key[i] = own[i];
    Form::sync();
  } else {
    store_keys(shared, own, first);
    Form::sync();
    load_keys(key, shared);
  }
}

// In rounds. One warp: the experts with the num_topk largest keys, in descending order, to shared.picked. At least num_topk keys
// are no kNoExpert. Experts stand in the order of lanes, so the first lane that holds the largest key, and in it the first quad,
// has the smallest index.
__device__ __forceinline__ void pick_in_rounds(Shared& shared, const unsigned (&key)[kLaneExperts], int num_topk) {
  const int first = lane() * kLaneExperts;
  const unsigned before = lanes::before();
  Sorted quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) quads[q].sort(key + 4 * q, first + 4 * q);
#pragma unroll 1
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
      if (taken) shared.picked[i] = __byte_perm(quads[q].places, (first + 4 * q) >> 8, 0x5540);
      quads[q].pop_if(taken);
      left = left && !taken;
    }
  }
  __syncwarp();
}

// ---- picks by counting, which takes fewer steps one after the other than rounds

// Four keys of shared memory, at once: the compiler would load some of them only when others are used.
__device__ __forceinline__ uint4 load_quad(const uint4* from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(unsigned(__cvta_generic_to_shared(from))) : "memory");
  return v;
}
// Adds to `counts` whether the four keys are larger than `key`. The compiler makes three instructions of a condition that is added.
__device__ __forceinline__ void count_above(int (&counts)[4], const uint4& keys, unsigned key) {
  asm("{ .reg .pred p, q, r, s; setp.gt.u32 p, %4, %8; setp.gt.u32 q, %5, %8; setp.gt.u32 r, %6, %8; setp.gt.u32 s, %7, %8;"
      " @p add.s32 %0, %0, 1; @q add.s32 %1, %1, 1; @r add.s32 %2, %2, 1; @s add.s32 %3, %3, 1; }"
      : "+r"(counts[0]), "+r"(counts[1]), "+r"(counts[2]), "+r"(counts[3]) : "r"(keys.x), "r"(keys.y), "r"(keys.z), "r"(keys.w), "r"(key));
}
__device__ __forceinline__ int sum_of(const int (&counts)[4]) { return (counts[0] + counts[1]) + (counts[2] + counts[3]); }

// -1 if the key is below, else 0; with a carry, as of conditions the compiler makes a chain.
__device__ __forceinline__ int minus_if_below(unsigned key, unsigned least) {
  int v;
  asm("{ .reg .u32 t; sub.cc.u32 t, %1, %2; subc.s32 %0, 0, 0; }" : "=r"(v) : "r"(key), "r"(least));
  return v;
}

template <int kBit>
__device__ __forceinline__ unsigned ballot_of_bit(int value) {
  unsigned lanes;
  asm volatile("{ .reg .pred p; .reg .b32 t; and.b32 t, %1, %2; setp.ne.b32 p, t, 0; vote.sync.ballot.b32 %0, p, 0xFFFFFFFF; }"
               : "=r"(lanes) : "r"(value), "n"(kBit));
  return lanes;
}
// The sum over the lanes of `mask` of numbers up to kMost.
template <int kMost, int kBit = 1>
__device__ __forceinline__ int sum_over(unsigned mask, int value) {
  if constexpr (kBit > kMost) {
    return 0;
  } else {
    return __popc(ballot_of_bit<kBit>(value) & mask) * kBit + sum_over<kMost, 2 * kBit>(mask, value);
  }
}

constexpr int kMostCandidates = kWarp - kMaxSharedExperts;  // the last lanes have the shared experts
constexpr int kMostCounted = 16;

// One warp: the experts with the num_topk largest keys, if few can be among them. Candidates have keys from the num_topk-th largest
// of the lanes' largest keys on: mostly one or two more than num_topk. Each gets a lane of its own, which counts those before it,
// and that is its slot if it is picked. `look_up` is called before, with the number of the lane's shared expert, which exists if
// there are as many. Returns false if there are too many candidates.
template <class Slot, class LookUp>
__device__ __forceinline__ bool pick_by_counting(
    Shared& shared, const unsigned (&key)[kLaneExperts], int num_topk, Slot& own, const LookUp& look_up) {
  if (num_topk > kMostCounted) return false;
  const int lane = gate::lane();
  unsigned top = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) top = max(top, max(max(key[4 * q], key[4 * q + 1]), max(key[4 * q + 2], key[4 * q + 3])));
  shared.lane_key[lane] = top;
  shared.candidate_key[lane] = kNoExpert;
  __syncwarp();
  const uint4* lane_keys = reinterpret_cast<const uint4*>(shared.lane_key);
  uint4 tops[kWarp / 4];
#pragma unroll
  for (int q = 0; q < kWarp / 4; ++q) tops[q] = load_quad(lane_keys + q);
  int above[4] = {};
#pragma unroll
  for (int q = 0; q < kWarp / 4; ++q) count_above(above, tops[q], top);
  const unsigned least = max(__reduce_min_sync(kFullWarp, sum_of(above) < num_topk ? top : ~0u), kNoExpert + 1);
  int before[kLaneExperts + 1];  // how many candidates of the lane are before each of its experts
  before[0] = 0;
#pragma unroll
  for (int i = 0; i < kLaneExperts; i += 4) {
    const int a = minus_if_below(key[i], least) + 1, b = minus_if_below(key[i + 1], least) + 1;
    const int c = minus_if_below(key[i + 2], least) + 1, d = minus_if_below(key[i + 3], least) + 1;
    before[i + 1] = before[i] + a;
    before[i + 2] = before[i] + (a + b);
    before[i + 3] = before[i] + (a + b + c);
    before[i + 4] = before[i] + ((a + b) + (c + d));
  }
  const int base = sum_over<kLaneExperts>(lanes::before(), before[kLaneExperts]);
  const int end = base + before[kLaneExperts];
  if (__any_sync(kFullWarp, end > kMostCandidates)) return false;
  const bool are_many = __any_sync(kFullWarp, end > kMostCounted);
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    if (key[i] < least) continue;
    shared.candidate_key[base + before[i]] = key[i];
    shared.candidate[base + before[i]] = lane * kLaneExperts + i;
  }
  __syncwarp();
  const uint4* keys = reinterpret_cast<const uint4*>(shared.candidate_key);
  const unsigned mine = shared.candidate_key[lane];
  const int candidate = shared.candidate[lane];
  const int quad = lane / 4;
  const uint4 quad_keys = load_quad(keys + quad);
  uint4 first_keys[kMostCounted / 4];
#pragma unroll
  for (int q = 0; q < kMostCounted / 4; ++q) first_keys[q] = load_quad(keys + q);
  const bool exists = mine != kNoExpert;
  own.expert = exists ? candidate : -1;
  own.slot = -1;
  look_up(lane - kMostCandidates);
  // Of equal keys the first goes before: keys of earlier quads count if they are equal, too, and so do earlier ones of the quad.
  int rank[4] = {lane % 4 > 0 && quad_keys.x == mine, lane % 4 > 1 && quad_keys.y == mine,
                 lane % 4 > 2 && quad_keys.z == mine, 0};
#pragma unroll
  for (int q = 0; q < kMostCounted / 4; ++q) count_above(rank, first_keys[q], mine - (q < quad));
  if (are_many) {
#pragma unroll
    for (int q = kMostCounted / 4; q < kWarp / 4; ++q) count_above(rank, keys[q], mine - (q < quad));
  }
  const int num_before = sum_of(rank);
  if (exists) own.slot = num_before < num_topk ? num_before : -1;
  return true;
}

// ---- places of experts

template <int kBytes>
__device__ __forceinline__ void copy_async(int* to, const int* from) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(target), "l"(from), "n"(kBytes) : "memory");
}

// The map from logical to physical experts, if there is one. Counts of copies are limited to what a row has.
struct Places {
  const int *map, *counts;
  int columns, first;  // `first`: what a token adds to its number times kStep
  static constexpr unsigned kStep = 23333;

  __device__ __forceinline__ int limited(int count) const { return min(max(count, 1), columns); }

  // Begins to copy the numbers of copies to shared memory, if there is a map. The thread that began it waits for it.
  template <class Form>
  __device__ __forceinline__ void begin_counts(Shared& shared, int num_routed, int num_shared) const {
    if (map == nullptr) return;
#pragma unroll
    for (int i = 0; i < Form::kOwn; i += 4) {
      const int at = Form::thread() * Form::kOwn + i;
      if (at < num_routed) copy_async<16>(shared.count + at, counts + at);
    }
    if (Form::thread() < num_shared) copy_async<4>(shared.count + num_routed + Form::thread(), counts + num_routed + Form::thread());
  }
  __device__ __forceinline__ void end_counts() const {
    if (map != nullptr) asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // The place of a logical expert; -1 stays. The load is not waited for.
  __device__ __forceinline__ int of(const Shared& shared, int logical, i64 token) const {
    const bool is_mapped = map != nullptr && logical >= 0;
    i64 at = 0;
    if (is_mapped) {
      const unsigned long long turn = first + static_cast<unsigned long long>(token) * kStep;
      const unsigned count = limited(shared.count[logical]);
      at = i64(logical) * columns + (turn >> 32 == 0 ? unsigned(turn) % count : unsigned(turn % count));
    }
    int place = logical;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.u32 %0, [%2]; }" : "+r"(place) : "r"(int(is_mapped)), "l"(map + at));
    return place;
  }
};

// ---- the row of a token

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

// What a lane has of the slots of a token: one, or an expert that was not picked, or nothing.
struct Slot {
  int expert, slot, place;  // -1 where there is none
  float score;
  bool is_routed;

  // Slot j for lane j. Fixed routing takes what `unmapped` says; a number that is no expert gives -1.
  __device__ __forceinline__ void take_lane(const Shared& shared, const Row& row, bool is_fixed, int num_routed) {
    expert = slot = -1;
    if (!row.is_routed(lane())) return;
    slot = lane();
    if (!is_fixed) {
      expert = shared.picked[slot];
      return;
    }
    const i64 given = load_8_if(true, row.unmapped + slot);
    if (given >= 0 && given < num_routed) expert = static_cast<int>(given);
  }
  // Begins to load where the expert is. The lane may have a shared expert instead, if there is one of that number.
  __device__ __forceinline__ void look_up(
      const Shared& shared, const Row& row, const Places& places, i64 token, int num_routed, int shared_expert) {
    is_routed = shared_expert < 0 || shared_expert >= row.num_shared;
    score = is_routed && expert >= 0 ? shared.score[expert] : 0.0f;
    if (!is_routed) {
      expert = num_routed + shared_expert;
      slot = row.num_topk + shared_expert;
    }
    place = places.of(shared, expert, token);
  }
  __device__ __forceinline__ void share_score(Shared& shared) const {
    if (is_routed && slot >= 0) shared.slot_score[slot] = score;
    __syncwarp();
  }
  __device__ __forceinline__ void store(const Row& row, i64 place, float weight, bool is_fixed) const {
    if (slot < 0) return;
    row.idx[slot] = place;
    row.weights[slot] = !is_routed ? 1.0f : expert >= 0 ? weight : 0.0f;
    if (is_routed && !is_fixed && row.unmapped != nullptr) row.unmapped[slot] = expert;
  }
};

// a / b of numbers for which no step leaves the range of normal numbers, in the steps of the compiler's division.
__device__ __forceinline__ float divide_in_range(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
  float quotient = __fmul_rn(a, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
}
// Of a score and the sum of scores, which is from 1e-20 on.
__device__ __forceinline__ float share_of(float score, float sum) {
  const bool is_in_range = sum <= 0x1p60f && (score == 0.0f || score >= 0x1p-60f);
  const float share = divide_in_range(score, sum);
  return is_in_range ? share : __fdiv_rn(score, sum);
}
}  // namespace gate
