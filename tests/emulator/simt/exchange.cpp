// What shuffles, votes and reductions of a warp hand from lane to lane.
#include "../shim/runtime.h"

namespace shim {

template <class F> static void each_lane(uint32_t mask, F f) {
  for (uint32_t left = mask; left; left &= left - 1) f(__builtin_ctz(left));
}

void exchange_nothing(Thread* const*, uint32_t) {}

// A lane outside of the mask has nothing to offer: CUDA leaves the result undefined, here it is all ones, a NaN.
void exchange_shuffle(Thread* const* lanes, uint32_t mask) {
  each_lane(mask, [&](int i) {
    Thread* t = lanes[i];
    t->received = mask >> t->wanted & 1 ? lanes[t->wanted]->offered : ~0ull;
  });
}

void exchange_ballot(Thread* const* lanes, uint32_t mask) {
  uint32_t votes = 0;
  each_lane(mask, [&](int i) { votes |= uint32_t(lanes[i]->offered != 0) << i; });
  each_lane(mask, [&](int i) { lanes[i]->received = votes; });
}

void exchange_match(Thread* const* lanes, uint32_t mask) {
  each_lane(mask, [&](int i) {
    uint32_t same = 0;
    each_lane(mask, [&](int j) { same |= uint32_t(lanes[j]->offered == lanes[i]->offered) << j; });
    lanes[i]->received = same;
  });
}

template <class Combine> static void exchange_reduce(Thread* const* lanes, uint32_t mask, Combine combine) {
  uint32_t total = uint32_t(lanes[__builtin_ctz(mask)]->offered);
  each_lane(mask & (mask - 1), [&](int i) { total = combine(total, uint32_t(lanes[i]->offered)); });
  each_lane(mask, [&](int i) { lanes[i]->received = total; });
}
void exchange_add(Thread* const* lanes, uint32_t mask) {
  exchange_reduce(lanes, mask, [](uint32_t a, uint32_t b) { return a + b; });
}
void exchange_min(Thread* const* lanes, uint32_t mask) {
  exchange_reduce(lanes, mask, [](uint32_t a, uint32_t b) { return b < a ? b : a; });
}
void exchange_max(Thread* const* lanes, uint32_t mask) {
  exchange_reduce(lanes, mask, [](uint32_t a, uint32_t b) { return a < b ? b : a; });
}

}  // namespace shim
