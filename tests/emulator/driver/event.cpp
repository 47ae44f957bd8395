// Events: points in streams, and waiting for them from other streams.
#include <memory>
#include <mutex>

#include "capture.h"
#include "context.h"
#include "stream.h"

namespace driver {
namespace {

struct Event {
  unsigned flags;
  std::mutex lock;
  std::shared_ptr<Point> point;      // null until it is recorded
  std::shared_ptr<Capture> capture;  // set while its last record is part of a capture
  size_t captured_point = 0;

  std::shared_ptr<Point> last_point() {
    std::lock_guard guard(lock);
    return point;
  }
};

constexpr unsigned kNoTiming = 2;

}  // namespace
}  // namespace driver

using namespace driver;

API CUresult cuEventCreate(void** handle, unsigned flags) {
  ENTER();
  *handle = new Event{flags, {}, {}, {}};
  return SUCCESS;
}
API CUresult cuEventDestroy_v2(void* handle) {
  delete static_cast<Event*>(handle);
  return SUCCESS;
}
API CUresult cuEventRecord(void* handle, void* stream_handle) {
  ENTER();
  Stream* stream = find_stream(stream_handle);
  if (!stream) return INVALID_HANDLE;
  auto* event = static_cast<Event*>(handle);
  std::lock_guard guard(event->lock);
  event->capture = stream->capture;
  if (stream->capture) {
    event->captured_point = stream->capture->record(stream->branch);
    return SUCCESS;
  }
  event->point = std::make_shared<Point>();
  stream->enqueue([point = event->point] { point->reach(); });
  return SUCCESS;
}
API CUresult cuEventQuery(void* handle) {
  ENTER();
  const auto point = static_cast<Event*>(handle)->last_point();
  return !point || point->reached() ? SUCCESS : NOT_READY;
}
API CUresult cuEventSynchronize(void* handle) {
  ENTER();
  if (const auto point = static_cast<Event*>(handle)->last_point()) point->wait();
  return sticky();
}
API CUresult cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  ENTER();
  auto *first = static_cast<Event*>(from), *second = static_cast<Event*>(to);
  if ((first->flags | second->flags) & kNoTiming) return INVALID_HANDLE;
  const auto a = first->last_point(), b = second->last_point();
  if (!a || !b) return INVALID_HANDLE;
  if (!a->reached() || !b->reached()) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(b->when() - a->when()).count();
  return SUCCESS;
}
API CUresult cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  return cuEventElapsedTime(milliseconds, from, to);
}
API CUresult cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  ENTER();
  Stream* stream = find_stream(stream_handle);
  if (!stream) return INVALID_HANDLE;
  auto* event = static_cast<Event*>(handle);
  std::lock_guard guard(event->lock);
  if (const auto& capture = event->capture) {
    if (capture->ended) return INVALID_VALUE;
    if (!stream->capture) {  // the wait is what makes a second stream part of a capture
      stream->capture = capture;
      stream->branch = capture->branches++;
      capture->members.push_back(stream);
    }
    if (stream->capture != capture) return CAPTURE_ISOLATION;
    capture->wait(stream->branch, event->captured_point);
    return SUCCESS;
  }
  if (stream->capture) return CAPTURE_ISOLATION;
  if (event->point && !event->point->reached()) stream->enqueue([point = event->point] { point->wait(); });
  return SUCCESS;
}
