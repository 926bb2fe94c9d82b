// Sums of the partial products of the residual with fn, and their normalisation. Needs accesses.cuh.
namespace norm_fn {
using namespace mhc;
constexpr int kMixes = 24;          // of a token: 4 pre, 4 post, 16 comb
constexpr int kParts = kMixes / 4;  // a thread has four of them

// Partial sums of the products with fn and of squares, (num_splits, rows, 24) and (num_splits, rows); rows are tokens and groups.
struct Partials {
  const float *products, *squares;
  i64 num_rows;
  int num_splits;
};

struct Sums {
  float4 products;
  float squares;
};

// The sums over the splits in increasing order, of four products of a row and of its squares. kAhead: splits on their way at one time.
template <int kAhead>
__device__ __forceinline__ Sums sum_splits(const Partials& partials, i64 row, int part) {
  const float* products = partials.products + row * kMixes + part * 4;
  const float* squares = partials.squares + row;
  Sums sums = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f};
#pragma unroll 1
  for (int first = 0; first < partials.num_splits; first += kAhead) {
    Sums loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      loaded[i] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f};
      if (first + i < partials.num_splits) {
        loaded[i] = {load_once(products), load_float(squares)};
        products += partials.num_rows * kMixes, squares += partials.num_rows;
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      sums.products.x = __fadd_rn(sums.products.x, loaded[i].products.x);
      sums.products.y = __fadd_rn(sums.products.y, loaded[i].products.y);
      sums.products.z = __fadd_rn(sums.products.z, loaded[i].products.z);
      sums.products.w = __fadd_rn(sums.products.w, loaded[i].products.w);
      sums.squares = __fadd_rn(sums.squares, loaded[i].squares);
    }
  }
  return sums;
}

// 1 / root mean square of a group.
__device__ __forceinline__ float inverse_norm(float squares, float group_size, float eps) {
  return rsqrtf(__fadd_rn(__fdividef(squares, group_size), eps));
}

// Products times `factor`, added to `sum`.
__device__ __forceinline__ float4 scaled_plus(float4 products, float factor, float4 sum) {
  return make_float4(__fmaf_rn(products.x, factor, sum.x), __fmaf_rn(products.y, factor, sum.y),
                     __fmaf_rn(products.z, factor, sum.z), __fmaf_rn(products.w, factor, sum.w));
}
}  // namespace norm_fn
