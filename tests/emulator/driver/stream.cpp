#include "stream.h"

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "capture.h"
#include "context.h"

namespace driver {
namespace {

std::mutex streams_lock;
// Shared, because whoever waits for all streams may still be at one that another thread destroys.
std::map<Stream*, std::shared_ptr<Stream>> streams;
std::atomic<unsigned> longest_delay_us{0};

Stream* null_stream() {
  // Never destroyed: a worker thread cannot be joined while the process is going down.
  static Stream* stream = [] {
    auto* created = new std::shared_ptr<Stream>(new Stream);
    std::lock_guard lock(streams_lock);
    streams.emplace(created->get(), *created);
    return created->get();
  }();
  return stream;
}

// A pause of random length before an operation, if a test has asked for it.
void dawdle(uint64_t& random) {
  const unsigned longest = longest_delay_us;
  if (!longest) return;
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  std::this_thread::sleep_for(std::chrono::microseconds(random % (longest + 1)));
}

}  // namespace

void Point::reach() {
  {
    std::lock_guard lock(lock_);
    reached_ = true;
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}
void Point::wait() {
  std::unique_lock lock(lock_);
  changed_.wait(lock, [&] { return reached_; });
}
bool Point::reached() {
  std::lock_guard lock(lock_);
  return reached_;
}
std::chrono::steady_clock::time_point Point::when() {
  std::lock_guard lock(lock_);
  return when_;
}

Stream::Stream() : worker_([this] { work(); }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(lock_);
    stopping_ = true;
    holds_ = 0;
  }
  changed_.notify_all();
  worker_.join();
}

void Stream::work() {
  static std::atomic<uint64_t> seeds{1};
  uint64_t random = seeds++ * 0x9e3779b97f4a7c15ull;
  for (;;) {
    Operation operation;
    {
      std::unique_lock lock(lock_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return (stopping_ && queue_.empty()) || (!queue_.empty() && !holds_); });
      if (queue_.empty()) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    dawdle(random);
    operation();
  }
}

void Stream::enqueue(Operation operation) {
  {
    std::lock_guard lock(lock_);
    queue_.push_back(std::move(operation));
  }
  changed_.notify_all();
}

void Stream::submit(Operation operation) {
  if (capture) {
    capture->run(branch, std::move(operation));
  } else {
    enqueue(std::move(operation));
  }
}

void Stream::synchronise() {
  auto point = std::make_shared<Point>();
  enqueue([point] { point->reach(); });
  point->wait();
}

bool Stream::idle() {
  std::lock_guard lock(lock_);
  return queue_.empty() && !busy_;
}

void Stream::hold() {
  std::unique_lock lock(lock_);
  holds_++;
  changed_.wait(lock, [&] { return !busy_; });
}

void Stream::release(bool all) {
  {
    std::lock_guard lock(lock_);
    holds_ = all || holds_ == 0 ? 0 : holds_ - 1;
  }
  changed_.notify_all();
}

Stream* find_stream(void* handle) {
  void* const legacy = reinterpret_cast<void*>(1);
  void* const per_thread = reinterpret_cast<void*>(2);
  if (!handle || handle == legacy || handle == per_thread) return null_stream();
  std::lock_guard lock(streams_lock);
  auto* stream = static_cast<Stream*>(handle);
  return streams.count(stream) ? stream : nullptr;
}

void synchronise_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard lock(streams_lock);
    for (const auto& [handle, stream] : streams) all.push_back(stream);
  }
  for (const auto& stream : all) stream->synchronise();
}

}  // namespace driver

using namespace driver;

API CUresult cuStreamCreateWithPriority(void** handle, unsigned, int) {
  ENTER();
  auto stream = std::make_shared<Stream>();
  std::lock_guard lock(streams_lock);
  *handle = stream.get();
  streams.emplace(stream.get(), std::move(stream));
  return SUCCESS;
}
API CUresult cuStreamCreate(void** handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }
API CUresult cuStreamDestroy_v2(void* handle) {
  Stream* stream = find_stream(handle);
  if (!stream || stream == null_stream()) return INVALID_HANDLE;
  stream->release(true);
  std::shared_ptr<Stream> last;
  {
    std::lock_guard lock(streams_lock);
    auto found = streams.find(stream);
    if (found == streams.end()) return INVALID_HANDLE;
    last = std::move(found->second);
    streams.erase(found);
  }
  // Ends here, once its queue has run, unless somebody else is waiting for it.
  return SUCCESS;
}
API CUresult cuStreamSynchronize(void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return CAPTURE_UNSUPPORTED;
  stream->synchronise();
  return sticky();
}
API CUresult cuStreamQuery(void* handle) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return CAPTURE_UNSUPPORTED;
  return stream->idle() ? SUCCESS : NOT_READY;
}
API CUresult cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  stream->submit([=] { function(argument); });
  return SUCCESS;
}

// Hooks for tests: stop and go, and pauses before each operation of every stream.
API void fakecuda_hold(void* handle) {
  if (Stream* stream = find_stream(handle)) stream->hold();
}
API void fakecuda_hold_others(void* handle) {
  Stream* kept = find_stream(handle);
  std::lock_guard lock(streams_lock);
  for (const auto& [handle, stream] : streams) {
    if (handle != kept) stream->hold();
  }
}
API void fakecuda_release(void* handle) {
  if (Stream* stream = find_stream(handle)) stream->release(false);
}
API void fakecuda_release_all() {
  std::lock_guard lock(streams_lock);
  for (const auto& [handle, stream] : streams) stream->release(true);
}
API void fakecuda_delay(unsigned longest_us) { longest_delay_us = longest_us; }
