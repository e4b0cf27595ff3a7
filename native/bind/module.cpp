// The one Python module of the native core.
#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() = "Tiercel's native core: packed weights, kernels, the thread team and the replay of recorded programs.";
  tiercel::bind_linear(m);
  tiercel::bind_rows(m);
  tiercel::bind_sampler(m);
  tiercel::bind_program(m);
  tiercel::bind_drafting(m);
  tiercel::bind_probe(m);
  tiercel::bind_experts(m);
  tiercel::bind_suffix_tree(m);
  tiercel::bind_files(m);
  tiercel::bind_draft_head(m);
}
