#pragma once
#include "../simt/simt.h"

namespace driver {

constexpr int kMaxDynamicShared = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSharedBytes = 48 << 10;    // without asking
constexpr int kMostSharedBytes = 166912;  // for the asking, on sm_80, unless a test says otherwise

int most_shared_bytes();

struct Function {
  const shim::Kernel* kernel;
  int shared_limit = kSharedBytes;
};

}  // namespace driver
