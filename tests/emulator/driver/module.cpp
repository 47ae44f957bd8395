// Modules and functions: a kernel is found by its name, in the image and in the host code.
#include "module.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "context.h"
#include "function.h"

namespace driver {
namespace {

Kernels& built_in() {
  static Kernels kernels;
  return kernels;
}

// Where kernels that register themselves belong: to the library that this thread is loading, or to the driver.
thread_local Kernels* loading = nullptr;

struct Module {
  Image image;
  const Kernels* kernels;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

std::atomic<int> most_shared{kMostSharedBytes};

}  // namespace

int most_shared_bytes() { return most_shared; }

const Kernels& built_in_kernels() { return built_in(); }

const Kernels* kernels_of(const std::string& path) {
  static std::mutex lock;
  static std::map<std::string, Kernels> libraries;
  std::lock_guard guard(lock);
  const auto [entry, is_new] = libraries.try_emplace(path);
  if (is_new) {
    loading = &entry->second;
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) log(dlerror());
    loading = nullptr;
  }
  return entry->second.empty() ? nullptr : &entry->second;
}

}  // namespace driver

void shim::register_kernel(const KernelInfo& info) {
  using namespace driver;
  const unsigned n = info.parameters;
  (loading ? *loading : built_in())[info.name] = {info.name, info.call, {info.sizes, info.sizes + n}, {info.is_pointer, info.is_pointer + n}};
}

using namespace driver;

API CUresult cuModuleLoadData(void** handle, const void* bytes) {
  ENTER();
  auto module = std::make_unique<Module>();
  if (!read_image(bytes, &module->image)) return INVALID_IMAGE;
  module->kernels = module->image.library.empty() ? &built_in_kernels() : kernels_of(module->image.library);
  if (!module->kernels) return INVALID_IMAGE;
  *handle = module.release();
  return SUCCESS;
}
API CUresult cuModuleLoadDataEx(void** handle, const void* bytes, unsigned, int*, void**) {
  return cuModuleLoadData(handle, bytes);
}
API CUresult cuModuleUnload(void* handle) {
  delete static_cast<Module*>(handle);
  return SUCCESS;
}

API CUresult cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
  ENTER();
  auto* module = static_cast<Module*>(module_handle);
  const auto code = module->kernels->find(name);
  if (code == module->kernels->end()) return NOT_FOUND;
  if (!module->image.opaque) {
    const auto compiled = module->image.kernels.find(name);
    if (compiled == module->image.kernels.end()) return NOT_FOUND;
    if (compiled->second != code->second.sizes) {
      log(std::string(name) + ": the image and the host code differ in the sizes of the parameters");
      return INVALID_IMAGE;
    }
  }
  auto& function = module->functions[name];
  if (!function) function.reset(new Function{&code->second});
  *handle = function.get();
  return SUCCESS;
}

API CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
  if (attribute != kMaxDynamicShared) return SUCCESS;
  if (value > most_shared_bytes()) return INVALID_VALUE;
  static_cast<Function*>(handle)->shared_limit = value;
  return SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, int attribute, void* handle) {
  *value = attribute == kMaxDynamicShared ? static_cast<Function*>(handle)->shared_limit : 0;
  return SUCCESS;
}
API CUresult cuFuncGetParamInfo(void* handle, size_t index, size_t* offset, size_t* size) {
  const auto& sizes = static_cast<Function*>(handle)->kernel->sizes;
  if (index >= sizes.size()) return INVALID_VALUE;
  *offset = 0;
  for (size_t i = 0; i < index; i++) *offset += sizes[i];
  *size = sizes[index];
  return SUCCESS;
}

// For tests: the shared memory that a block can ask for; 0 for what it was.
API void fakecuda_shared_memory(int bytes) { most_shared = bytes ? bytes : kMostSharedBytes; }

// For tests: the sizes of a kernel's parameters, up to `room` of them. Returns how many it has, 0 if there is no such kernel. The
// library is empty for what is built in.
API unsigned fakecuda_parameters(const char* library, const char* name, unsigned* sizes, unsigned room) {
  const Kernels* kernels = *library ? kernels_of(library) : &built_in_kernels();
  if (!kernels || !kernels->count(name)) return 0;
  const auto& known = kernels->at(name).sizes;
  for (unsigned i = 0; i < room && i < known.size(); i++) sizes[i] = known[i];
  return unsigned(known.size());
}
