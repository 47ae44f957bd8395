#pragma once

namespace shim {

// From now on a kernel that touches an address it must not ends with an error, as on a device, and the process goes on. To be
// called on every OS thread that runs kernels.
void catch_bad_addresses();

}  // namespace shim
