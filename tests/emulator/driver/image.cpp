// Reads PTX, cubins and this driver's own images.
//
// The last is a line of text, "// host kernels" or "// host kernels in PATH": code is then what was linked into the driver or
// what is in a library of its own. PTX and cubins are only asked for the names of their kernels and the sizes of the
// parameters, so that a launch which has drifted from the compiled signature is found.
#include <cstdlib>
#include <cstring>

#include "module.h"

namespace driver {
namespace {

constexpr char kHostImage[] = "// host kernels";

template <class T> T read(const unsigned char* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

void read_host_image(const std::string& text, Image* image) {
  image->opaque = true;
  constexpr char kIn[] = " in ";
  const size_t at = sizeof kHostImage - 1;
  if (text.compare(at, sizeof kIn - 1, kIn) == 0) {
    const size_t from = at + sizeof kIn - 1;
    image->library = text.substr(from, text.find('\n', from) - from);
  }
}

// Size of one ".param .u64 name" or ".param .align 8 .b8 name[24]".
unsigned parameter_bytes(const std::string& line) {
  const size_t bytes = line.rfind(".b8 "), bracket = line.find('[');
  if (bytes != std::string::npos && bracket != std::string::npos) return unsigned(atoi(line.c_str() + bracket + 1));
  const size_t type = line.find_first_of("usfb", line.find('.') + 1);
  return type == std::string::npos ? 0 : unsigned(atoi(line.c_str() + type + 1)) / 8;
}

bool read_ptx(const std::string& text, Image* image) {
  constexpr char kEntry[] = ".entry ", kParameter[] = ".param ";
  if (text.find(".version") == std::string::npos) return false;
  for (size_t at = 0; (at = text.find(kEntry, at)) != std::string::npos;) {
    at += sizeof kEntry - 1;
    const std::string name = text.substr(at, text.find_first_of("( \n", at) - at);
    const size_t open = text.find('(', at), close = text.find(')', open);
    auto& sizes = image->kernels[name];
    for (size_t p = open; (p = text.find(kParameter, p)) < close;) {
      p += sizeof kParameter - 1;
      sizes.push_back(parameter_bytes(text.substr(p, text.find_first_of(",\n)", p) - p)));
    }
  }
  return true;
}

// Kernels are sections .text.NAME. Each has a section .nv.info.NAME of attributes, one of which, per parameter, holds the
// parameter's ordinal and size.
void read_cubin(const unsigned char* elf, Image* image) {
  constexpr unsigned kSectionTable = 40, kEntryBytes = 58, kEntries = 60, kNameSection = 62, kOffset = 24, kSize = 32;
  constexpr unsigned char kSizedFormat = 4, kParameterInfo = 0x17;
  const auto sections = elf + read<uint64_t>(elf + kSectionTable);
  const unsigned entry_bytes = read<uint16_t>(elf + kEntryBytes), entries = read<uint16_t>(elf + kEntries);
  const auto names = elf + read<uint64_t>(sections + read<uint16_t>(elf + kNameSection) * entry_bytes + kOffset);
  for (unsigned i = 0; i < entries; i++) {
    const unsigned char* section = sections + i * entry_bytes;
    const std::string name = reinterpret_cast<const char*>(names + read<uint32_t>(section));
    if (name.rfind(".text.", 0) == 0) image->kernels[name.substr(strlen(".text."))];
    if (name.rfind(".nv.info.", 0) != 0) continue;
    auto& sizes = image->kernels[name.substr(strlen(".nv.info."))];
    const unsigned char* at = elf + read<uint64_t>(section + kOffset);
    const unsigned char* end = at + read<uint64_t>(section + kSize);
    while (at + 4 <= end) {
      const unsigned format = at[0], attribute = at[1], length = read<uint16_t>(at + 2);
      at += 4;
      if (format != kSizedFormat) continue;
      if (attribute == kParameterInfo && length >= 12) {
        const unsigned ordinal = read<uint16_t>(at + 4);
        if (sizes.size() <= ordinal) sizes.resize(ordinal + 1);
        sizes[ordinal] = read<uint32_t>(at + 8) >> 18;
      }
      at += length;
    }
  }
}

}  // namespace

bool read_image(const void* bytes, Image* image) {
  constexpr unsigned kFatbin = 0xba55ed50;
  if (!memcmp(bytes, "\x7f" "ELF", 4)) {
    read_cubin(static_cast<const unsigned char*>(bytes), image);
    return true;
  }
  if (read<uint32_t>(static_cast<const unsigned char*>(bytes)) == kFatbin) {  // compressed
    image->opaque = true;
    return true;
  }
  const std::string text = static_cast<const char*>(bytes);
  if (text.rfind(kHostImage, 0) == 0) {
    read_host_image(text, image);
    return true;
  }
  return read_ptx(text, image);
}

}  // namespace driver
