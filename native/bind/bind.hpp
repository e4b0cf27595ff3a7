// What each binding file adds to the module. House rule: an array argument that is written to is noconvert().
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "tiercel/kernels.hpp"

namespace tiercel {
// "float16", "float32" or "int8"; ValueError otherwise.
KvType kv_type_named(const std::string& name);

void bind_linear(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
} // namespace tiercel
