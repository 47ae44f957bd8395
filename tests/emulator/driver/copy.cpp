// Copies and fills. As on a device, bytes are read and written when the stream gets there, not when the call is made.
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "capture.h"
#include "context.h"
#include "memory.h"
#include "stream.h"

namespace driver {
namespace {

enum class Side { Device, Host };

CUresult copy(Stream* stream, void* to, Side to_side, const void* from, Side from_side, size_t bytes) {
  if (meets(Fault::Copy)) return UNKNOWN;
  if (to_side == Side::Device && !holds(Kind::Device, to, bytes)) return INVALID_VALUE;
  if (from_side == Side::Device && !holds(Kind::Device, from, bytes)) return INVALID_VALUE;
  const auto move = [=](const void* source) {
    if (sticky()) return;
    const bool gone = (to_side == Side::Device && !holds(Kind::Device, to, bytes)) ||
                      (from_side == Side::Device && !holds(Kind::Device, from, bytes));
    if (gone) return break_context(ILLEGAL_ADDRESS, "a copy from or to memory that has been freed");
    memcpy(to, source, bytes);
  };
  if (from_side == Side::Host && !holds(Kind::Pinned, from, bytes)) {
    // A pageable source has been read when the call returns.
    const char* first = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    stream->submit([=] { move(staged->data()); });
    return SUCCESS;
  }
  const bool pageable_target = to_side == Side::Host && !holds(Kind::Pinned, to, bytes);
  if (pageable_target && stream->capture) return CAPTURE_UNSUPPORTED;
  stream->submit([=] { move(from); });
  if (pageable_target) stream->synchronise();  // ... and a pageable target written
  return SUCCESS;
}

CUresult copy_on(void* handle, void* to, Side to_side, const void* from, Side from_side, size_t bytes, bool wait) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  const CUresult result = copy(stream, to, to_side, from, from_side, bytes);
  if (wait) stream->synchronise();
  return result ? result : sticky();
}

void* address(CUdeviceptr p) { return reinterpret_cast<void*>(p); }

}  // namespace
}  // namespace driver

using namespace driver;

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void* stream) {
  return copy_on(stream, address(to), Side::Device, from, Side::Host, bytes, false);
}
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
  return copy_on(stream, to, Side::Host, address(from), Side::Device, bytes, false);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
  return copy_on(stream, address(to), Side::Device, address(from), Side::Device, bytes, false);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_on(nullptr, address(to), Side::Device, from, Side::Host, bytes, true);
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return copy_on(nullptr, to, Side::Host, address(from), Side::Device, bytes, true);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_on(nullptr, address(to), Side::Device, address(from), Side::Device, bytes, true);
}

// One copy after the other; the attributes say in which order sources may be read, and any order is allowed.
API CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, void*, size_t*, size_t,
                                size_t* failed, void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!handle || !stream) return INVALID_VALUE;  // the null stream is refused
  if (stream->capture) return CAPTURE_UNSUPPORTED;
  const auto side = [](CUdeviceptr p) { return holds(Kind::Device, address(p), 1) ? Side::Device : Side::Host; };
  for (size_t i = 0; i < count; i++) {
    *failed = i;
    if (!bytes[i]) return INVALID_VALUE;
    const CUresult result = copy(stream, address(to[i]), side(to[i]), address(from[i]), side(from[i]), bytes[i]);
    if (result) return result;
  }
  return SUCCESS;
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (!holds(Kind::Device, address(to), bytes)) return INVALID_VALUE;
  stream->submit([=] {
    if (sticky()) return;
    if (!holds(Kind::Device, address(to), bytes)) return break_context(ILLEGAL_ADDRESS, "a fill of memory that has been freed");
    memset(address(to), value, bytes);
  });
  return SUCCESS;
}
API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
  const CUresult result = cuMemsetD8Async(to, value, bytes, nullptr);
  if (!result) find_stream(nullptr)->synchronise();
  return result;
}
