// What each binding file adds to the module. House rule: an array argument that is written to is noconvert().
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "tiercel/kernels.hpp"
#include "tiercel/verify.hpp"

namespace tiercel {
// "float16", "float32" or "int8"; ValueError otherwise.
KvType kv_type_named(const std::string& name);

// A name of ops/activations.py, and of a router's scores; ValueError otherwise.
Activation activation_named(const std::string& name);
Scores scores_named(const std::string& name);

// "matching", "standard" or "block"; ValueError otherwise.
Verification verification_named(const std::string& name);

void bind_linear(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_drafting(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_suffix_tree(nanobind::module_& m);
void bind_files(nanobind::module_& m);
void bind_draft_head(nanobind::module_& m);
} // namespace tiercel
