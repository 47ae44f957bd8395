// What a module image says about its kernels, and where their code is.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "../simt/simt.h"

namespace driver {

using Kernels = std::map<std::string, shim::Kernel>;

// The kernels that were linked into the driver.
const Kernels& built_in_kernels();
// The kernels of a library; loads it the first time. nullptr if it cannot be loaded.
const Kernels* kernels_of(const std::string& path);

struct Image {
  // Per kernel the sizes of its parameters.
  std::map<std::string, std::vector<unsigned>> kernels;
  // The image does not say which kernels it holds.
  bool opaque = false;
  // Where the code is, if it is not built in.
  std::string library;
};

// False if the bytes are no image.
bool read_image(const void* bytes, Image* image);

}  // namespace driver
