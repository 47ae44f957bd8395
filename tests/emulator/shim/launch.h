// How a kernel gets known to the driver: by name, with the size of each parameter, which the driver copies at the launch and
// compares with what the compiled image says.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

#include "runtime.h"

namespace shim {

struct KernelInfo {
  const char* name;
  void (*call)(void** parameters);
  const unsigned* sizes;
  const unsigned char* is_pointer;
  unsigned parameters;
};
SHIM_EXPORT void register_kernel(const KernelInfo& info);

template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> {
  static constexpr unsigned count = sizeof...(A);
  static constexpr unsigned sizes[] = {unsigned(sizeof(A))..., 0};
  static constexpr unsigned char is_pointer[] = {std::is_pointer_v<A>..., 0};

  template <void (*F)(A...), size_t... I> static void spread(void** parameters, std::index_sequence<I...>) {
    F(*static_cast<std::remove_cv_t<A>*>(parameters[I])...);
  }
  template <void (*F)(A...)> static void call(void** parameters) { spread<F>(parameters, std::index_sequence_for<A...>{}); }
};

template <auto F> struct Register {
  explicit Register(const char* name) {
    using S = Signature<decltype(F)>;
    register_kernel({name, &S::template call<F>, S::sizes, S::is_pointer, S::count});
  }
};

}  // namespace shim

#define SHIM_KERNEL(name) static ::shim::Register<&name> shim_registered_##name{#name};
