// The optional C++ core, megatron_augtree._core: bit-for-bit twins of the planner's pure-Python integer
// functions. Every part has a header that declares how it binds itself, and is called below.
//
// Values cross as int64 tables that planning/native.py has checked: magnitudes below 2^62, and products and
// sums that a part needs bounded by its caller. No floating point crosses, and none decides anything here.

#include <pybind11/pybind11.h>

#include "joint.h"

namespace py = pybind11;

void bind_pricing(py::module_& module);   // pricing.cpp
void bind_timeline(py::module_& module);  // timeline.cpp

// planning/native.py holds the same number; a core with another number counts as absent. Raise both with every
// change of what the core takes, gives or computes.
constexpr int kVersion = 18;

PYBIND11_MODULE(_core, module) {
    module.doc() = "Twins of planning's integer functions; megatron_augtree/planning/native.py loads them.";
    module.attr("VERSION") = kVersion;
    bind_joint(module);
    bind_pricing(module);
    bind_timeline(module);
}
