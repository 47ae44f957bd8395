// What every call asks first: is there a context, has the device failed, is a failure planted here.
#pragma once
#include <string>

#include "cuda.h"

namespace driver {

// Failures that a test can plant. The n-th operation of the kind fails, counted from when it was planted.
enum class Fault : int { DeviceMemory, PinnedMemory, Copy, Launch, DeviceLost };
constexpr int kFaults = 5;

// Counts an operation. Whether it is the one that has to fail.
bool meets(Fault kind);

// An error that every later call returns, as after a failed kernel. The first one stays.
CUresult sticky();
void break_context(CUresult error, const std::string& what);

// For calls that need a context: an error, or SUCCESS. Also where a device can be lost.
CUresult enter(const char* call);

void log(const std::string& line);

}  // namespace driver

#define ENTER()                                                                 \
  do {                                                                          \
    if (CUresult entered_ = ::driver::enter(__func__); entered_ != SUCCESS) return entered_; \
  } while (0)
