// Streams: a queue and a worker thread each, so that what CUDA may run at the same time does.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda.h"

namespace driver {

using Operation = std::function<void()>;

// What an event stands for after it has been recorded: a point in a stream that is reached or not.
class Point {
 public:
  void reach();
  void wait();
  bool reached();
  std::chrono::steady_clock::time_point when();

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

struct Capture;

class Stream {
 public:
  Stream();
  ~Stream();  // after everything in the queue has run

  void enqueue(Operation operation);
  // Into the queue, or into the graph that the stream is capturing.
  void submit(Operation operation);
  void synchronise();
  bool idle();

  // While a stream is held its operations wait, except the one that is already running, which is waited for.
  void hold();
  void release(bool all);

  std::shared_ptr<Capture> capture;
  unsigned branch = 0;  // which strand of the capture it is

 private:
  void work();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool busy_ = false, stopping_ = false;
  int holds_ = 0;
  std::thread worker_;
};

// nullptr if there is no such stream. The null stream and the two special handles are one stream, which waits for no other:
// streams that are not created as non-blocking are not imitated.
Stream* find_stream(void* handle);
void synchronise_all();

}  // namespace driver
