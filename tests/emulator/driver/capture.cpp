#include "capture.h"

#include "context.h"

namespace driver {

size_t Capture::record(unsigned branch) {
  items.push_back({branch, Kind::Record, {}, points});
  return points++;
}

bool Capture::joined() const {
  // Backwards: a branch counts as joined from its last record on that a joined branch waits for.
  std::vector<bool> branch_joined(branches, false), awaited(points, false);
  branch_joined[0] = true;
  for (auto item = items.rbegin(); item != items.rend(); ++item) {
    const bool is_joined = branch_joined[item->branch];
    switch (item->kind) {
      case Kind::Run:
        if (!is_joined) return false;
        break;
      case Kind::Wait:
        if (is_joined) awaited[item->point] = true;
        break;
      case Kind::Record:
        if (awaited[item->point]) branch_joined[item->branch] = true;
        break;
    }
  }
  return true;
}

namespace {

// A graph that can be launched. Its side branches have streams of their own, as the device would run them.
struct Executable {
  std::shared_ptr<Capture> graph;
  std::vector<std::unique_ptr<Stream>> sides;
};

struct Graph {
  std::shared_ptr<Capture> capture;
};

}  // namespace
}  // namespace driver

using namespace driver;

API CUresult cuStreamBeginCapture_v2(void* handle, int) {
  ENTER();
  if (!handle) return CAPTURE_UNSUPPORTED;
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return INVALID_VALUE;
  stream->capture = std::make_shared<Capture>();
  stream->capture->members.push_back(stream);
  stream->branch = 0;
  return SUCCESS;
}

API CUresult cuStreamEndCapture(void* handle, void** graph) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (!stream->capture || stream->branch != 0) return INVALID_VALUE;
  const std::shared_ptr<Capture> capture = stream->capture;
  capture->ended = true;
  for (Stream* member : capture->members) member->capture = nullptr;
  *graph = nullptr;
  if (!capture->joined()) return CAPTURE_UNJOINED;
  *graph = new Graph{capture};
  return SUCCESS;
}

API CUresult cuStreamIsCapturing(void* handle, int* status) {
  ENTER();
  Stream* stream = find_stream(handle);
  if (!stream) return INVALID_HANDLE;
  *status = stream->capture ? 1 : 0;
  return SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  ENTER();
  auto created = std::make_unique<Executable>();
  created->graph = static_cast<Graph*>(graph)->capture;
  for (unsigned branch = 1; branch < created->graph->branches; branch++) created->sides.push_back(std::make_unique<Stream>());
  *executable = created.release();
  return SUCCESS;
}

API CUresult cuGraphLaunch(void* handle, void* stream_handle) {
  ENTER();
  Stream* stream = find_stream(stream_handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return NOT_SUPPORTED;
  auto* executable = static_cast<Executable*>(handle);
  std::vector<std::shared_ptr<Point>> points(executable->graph->points);
  for (auto& point : points) point = std::make_shared<Point>();
  for (const Capture::Item& item : executable->graph->items) {
    Stream& target = item.branch == 0 ? *stream : *executable->sides[item.branch - 1];
    switch (item.kind) {
      case Capture::Kind::Run: target.enqueue(item.operation); break;
      case Capture::Kind::Record: target.enqueue([point = points[item.point]] { point->reach(); }); break;
      case Capture::Kind::Wait: target.enqueue([point = points[item.point]] { point->wait(); }); break;
    }
  }
  return SUCCESS;
}

API CUresult cuGraphUpload(void*, void*) { return SUCCESS; }
API CUresult cuGraphExecDestroy(void* executable) {
  delete static_cast<Executable*>(executable);
  return SUCCESS;
}
API CUresult cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return SUCCESS;
}
