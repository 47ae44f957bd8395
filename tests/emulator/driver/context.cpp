// Initialisation, the one device and its one context, errors.
#include "context.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "function.h"
#include "memory.h"
#include "stream.h"

namespace driver {
namespace {

std::atomic<bool> initialised{false};
std::atomic<int> sticky_error{SUCCESS};
thread_local void* current_context = nullptr;
int primary_context;  // its address is the handle

std::mutex planted_lock;
std::array<long, kFaults> planted{};  // operations left until the failure; 0 if none is planted
std::string last_fault;
std::map<std::string, size_t> calls;  // of functions that work in a context, by name

}  // namespace

bool meets(Fault kind) {
  std::lock_guard lock(planted_lock);
  long& left = planted[int(kind)];
  return left > 0 && --left == 0;
}

CUresult sticky() { return CUresult(sticky_error.load()); }

void break_context(CUresult error, const std::string& what) {
  int none = SUCCESS;
  if (!sticky_error.compare_exchange_strong(none, error)) return;
  log("context broken: " + what);
  std::lock_guard lock(planted_lock);
  last_fault = what;
}

CUresult enter(const char* call) {
  {
    std::lock_guard lock(planted_lock);
    calls[call]++;
  }
  if (!current_context) return INVALID_CONTEXT;
  if (meets(Fault::DeviceLost)) break_context(DEVICE_UNAVAILABLE, "the device is lost");
  return sticky();
}

void log(const std::string& line) {
  static const bool on = getenv("FAKECUDA_LOG");
  if (on) fprintf(stderr, "fakecuda: %s\n", line.c_str());
}

}  // namespace driver

using namespace driver;

API CUresult cuInit(unsigned) {
  initialised = true;
  return SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) {
  *version = 12080;
  return SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return initialised ? SUCCESS : NOT_INITIALIZED;
}
API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialised) return NOT_INITIALIZED;
  *device = 0;
  return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}
API CUresult cuDeviceGetName(char* name, int room, CUdevice) {
  snprintf(name, size_t(room), "emulated device");
  return SUCCESS;
}
API CUresult cuDeviceGetUuid(char* uuid, CUdevice) {
  memset(uuid, 0xfa, 16);
  return SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(char* uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = kDeviceBytes;
  return SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  // An A100, as far as somebody may ask: block and grid limits, shared memory, multiprocessors, compute capability 8.0.
  const std::map<int, int> known = {
      {1, 1024},  {2, 1024},  {3, 1024},      {4, 64},       {5, 2147483647}, {6, 65535}, {7, 65535},
      {8, 49152}, {10, 32},   {12, 65536},    {13, 1410000}, {16, 108},       {19, 1},    {31, 1},
      {37, 5120}, {38, 41943040}, {39, 2048}, {41, 1},       {75, 8},         {76, 0},    {81, 167936},
      {82, 65536}, {83, 1},   {97, most_shared_bytes()}, {115, 1}, {122, 1}};
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(void** context, CUdevice) {
  *context = &primary_context;
  return initialised ? SUCCESS : NOT_INITIALIZED;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return SUCCESS; }
API CUresult cuCtxSetCurrent(void* context) {
  current_context = context;
  return SUCCESS;
}
API CUresult cuCtxGetCurrent(void** context) {
  *context = current_context;
  return SUCCESS;
}
API CUresult cuCtxSetFlags(unsigned) { return SUCCESS; }
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}
API CUresult cuCtxSynchronize() {
  ENTER();
  synchronise_all();
  return sticky();
}

API CUresult cuGetErrorName(CUresult error, const char** name) {
  static const std::map<int, const char*> names = {{SUCCESS, "CUDA_SUCCESS"},
                                                   {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                                                   {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
                                                   {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
                                                   {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
                                                   {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
                                                   {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
                                                   {NOT_READY, "CUDA_ERROR_NOT_READY"},
                                                   {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
                                                   {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
                                                   {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                   {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                   {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
                                                   {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"}};
  const auto found = names.find(error);
  *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
  return SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

// Hooks for tests, beside the API: plant a failure, count calls, read what broke the context, make a new start.
API void fakecuda_plant(int fault, long nth) {
  std::lock_guard lock(planted_lock);
  planted[fault] = nth;
}
API size_t fakecuda_calls(const char* name) {
  std::lock_guard lock(planted_lock);
  return calls[name];
}
API size_t fakecuda_last_fault(char* text, size_t room) {
  std::lock_guard lock(planted_lock);
  if (room) snprintf(text, room, "%s", last_fault.c_str());
  return last_fault.size();
}
API void fakecuda_heal() {
  if (sticky()) {
    synchronise_all();
    release_everything();
  }
  std::lock_guard lock(planted_lock);
  planted = {};
  last_fault.clear();
  sticky_error = SUCCESS;
}
